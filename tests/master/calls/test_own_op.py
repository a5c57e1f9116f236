"""Ops of a user's own: what they get of the ranks, and what becomes of what they return, refuse and raise.

The oracle is NumPy on all rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.harness import script

import synk
from synk.errors import CollectiveMismatch

WHERE = (2, 3, "inline")
WIDE = (1 << 18) // 8
"""Columns of float64 from which on an output is large."""


class Median(synk.Op):
    """Of all rows: it needs them."""

    concatenates = True

    def check(self, dtype: np.dtype, what: str) -> None:
        if dtype.kind not in "iuf":
            raise TypeError(f"cannot take the median of {what}: got dtype {dtype}, expected a real number.")

    def finish(self, value: Any) -> Any:
        return np.median(value, axis=0)


class Quantile(synk.Op):
    """With a state, that of no rows, and a name of its own."""

    concatenates = has_empty = True

    def __init__(self, q: float) -> None:
        self.q = q

    def finish(self, value: Any) -> Any:
        return np.quantile(value, self.q, axis=0) if len(value) else np.nan

    def __repr__(self) -> str:
        return f"Quantile({self.q})"


class Variance(synk.Op):
    """Of pairs ``[mean, variance]``, by the rows that each stands for (Chan, Golub and LeVeque, 1979)."""

    def combine(self, values: list[Any], rows: list[int]) -> Any:
        means, variances = np.moveaxis(np.stack(values), 1, 0)
        mean = np.average(means, axis=0, weights=rows)
        return np.stack([mean, np.average(variances + (means - mean) ** 2, axis=0, weights=rows)])

    def finish(self, value: Any) -> Any:
        return value[1]


class Seen(synk.Op):
    """Returns what it gets."""

    def combine(self, values: list[Any], rows: list[int]) -> Any:
        return values, rows


class Broken(synk.Op):
    def combine(self, values: list[Any], rows: list[int]) -> Any:
        raise ZeroDivisionError(len(values))


class BrokenAtTheEnd(synk.Op):
    concatenates = True

    def finish(self, value: Any) -> Any:
        raise LookupError(len(value))


def moments(x: np.ndarray) -> np.ndarray:
    return np.stack([x.mean(axis=0), x.var(axis=0)])


def calls_of(f: Any) -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield every way to call a function: the second and third calls are compiled ones."""
    for number in range(3):
        yield f"call {number}", f
    for num_slices in (2, 3, 7):
        yield f"{num_slices} slices", lambda *args, n=num_slices: f(*args, num_slices=n)
    for number in range(3):
        yield f"submit {number}", lambda *args: f.submit(*args).result()
    yield "serial", f.serial


# ----- in a user's program


def test_a_median_in_a_users_program() -> None:
    """Defined in the program itself, and in a class below it: the workers get both with the function."""
    script("""
        class Median(synk.Op):
            concatenates = True

            def finish(self, value):
                return np.median(value, axis=0)

        class Spread(Median):
            def finish(self, value):
                return np.median(np.abs(value - super().finish(value)), axis=0)

        @synk.function(outputs={"middle": Median(), "spread": Spread(), "rows": "gather"})
        def describe(x):
            return {"middle": x, "spread": x, "rows": x[:, 0]}

        x = np.random.default_rng(0).normal(size=(12, 3)).round(3)
        with synk.fork(3):
            for rows in (12, 2, 12):
                for num_slices in (1, 5):
                    found = describe(x[:rows], num_slices=num_slices)
                    middle = np.median(x[:rows], axis=0)
                    assert np.array_equal(found["middle"], middle)
                    assert np.array_equal(found["spread"], np.median(abs(x[:rows] - middle), axis=0))
                    assert np.array_equal(found["rows"], x[:rows, 0])
            assert np.array_equal(describe(x, output_subset=["middle"])["middle"], np.median(x, axis=0))
            assert describe.verify(x)
    """).check("")


# ----- what it gets


@pytest.mark.parametrize("where", WHERE)
def test_all_rows_and_all_values_reach_it(subtests: Any, shared_runtimes: Any, where: Any) -> None:
    """Small outputs and large ones."""
    rt = shared_runtimes[where]
    f = rt.function(lambda x: (x, moments(x), x.max(axis=0)), outputs=(Median(), Variance(), "max"), name="f")
    for columns, some_rows in ((4, (1, 2, 3, 4, 9)), (WIDE, (7,))):
        for rows in some_rows:
            x = np.random.default_rng(rows).normal(size=(rows, columns))
            for how, call in calls_of(f):
                with subtests.test(rows=rows, columns=columns, how=how):
                    median, variance, largest = call(x)
                    np.testing.assert_array_equal(median, np.median(x, axis=0))
                    np.testing.assert_allclose(variance, x.var(axis=0), rtol=1e-12, atol=1e-15)
                    np.testing.assert_array_equal(largest, x.max(axis=0))
        assert f.verify(x)


def test_the_values_are_its_own_and_come_with_their_rows(shared_runtimes: Any) -> None:
    f = shared_runtimes[3].function(lambda x: x[:1] * 1.0, outputs=Seen())
    kept = []
    for offset in (0, 10, 20):
        values, rows = f(np.arange(4) + offset)
        assert rows == [2, 1, 1]
        values[0] += 100
        kept.append(values)
    assert [[float(value[0]) for value in values] for values in kept] == [
        [100, 2, 3], [110, 12, 13], [120, 22, 23],
    ]  # fmt: skip
    values, rows = f(np.arange(5), num_slices=2)
    assert rows == [1, 1, 1, 1, 1] and np.array_equal(np.concatenate(values), np.arange(5))
    values, rows = f(np.arange(7), num_slices=2)
    assert rows == [2, 1, 1, 1, 1, 1] and np.array_equal(np.concatenate(values), [0, 2, 3, 4, 5, 6])


def test_values_of_any_kind_reach_it(shared_runtimes: Any) -> None:
    """Python's numbers stay what they are, and objects, tables and arrays of other shapes are no mismatch."""
    pandas = pytest.importorskip("pandas")
    returned: list[Callable[[np.ndarray], Any]] = [
        len,
        lambda x: Counter(x.tolist()).most_common(1)[0][0],
        lambda x: frozenset(x.tolist()),
        lambda x: x,
        lambda x: pandas.Series(x),
        lambda x: np.array([frozenset(x.tolist())]),
    ]
    x = np.array([1, 2, 2, 3, 3])
    for fn in returned:
        f = shared_runtimes[2].function(fn, outputs=Seen())
        for num_slices, parts in ((1, (x[:3], x[3:])), (2, (x[:2], x[2:3], x[3:4], x[4:]))):
            values, rows = f(x, num_slices=num_slices)
            assert rows == [len(part) for part in parts]
            for value, part in zip(values, parts, strict=True):
                assert type(value) is type(fn(part)) and np.array_equal(np.asarray(value), np.asarray(fn(part)))


def test_lists_and_tables_are_joined_for_it(shared_runtimes: Any) -> None:
    pandas = pytest.importorskip("pandas")

    class Sorted(synk.Op):
        concatenates = True

        def finish(self, value: Any) -> Any:
            return sorted(value) if isinstance(value, list) else value.sort_index(ascending=False)

    f = shared_runtimes[3].function(lambda t: ([f"{each:02}" for each in t["a"]], t), outputs=Sorted(), name="f")
    table = pandas.DataFrame({"a": [5, 3, 8, 1, 4, 4, 7]})
    for how, call in calls_of(f):
        texts, found = call(table)
        assert texts == ["01", "03", "04", "04", "05", "07", "08"], how
        pandas.testing.assert_frame_equal(found, table[::-1])


def test_tensors_come_back_as_such(subtests: Any, shared_runtimes: Any) -> None:
    torch = pytest.importorskip("torch")

    class Quartile(synk.Op):
        concatenates = True

        def finish(self, value: Any) -> Any:
            return torch.quantile(value, 0.25, dim=0)

    class Product(synk.Op):
        def combine(self, values: list[Any], rows: list[int]) -> Any:
            return torch.linalg.multi_dot([values[0], *values])

    f = shared_runtimes[2].function(
        lambda x: (x * 2, x * 2, x.T @ x), outputs=(Median(), Quartile(), Product()), framework="torch"
    )
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for how, call in calls_of(f):
        with subtests.test(how=how):
            median, quantile, product = call(x)
            assert all(isinstance(each, torch.Tensor) for each in (median, quantile, product))
            np.testing.assert_array_equal(median, np.median(2 * x.numpy(), axis=0))
            torch.testing.assert_close(quantile, torch.quantile(2 * x, 0.25, dim=0))
            if "slices" not in how:
                own = [part.T @ part for part in ([x] if how == "serial" else x.tensor_split(2))]
                torch.testing.assert_close(product, torch.linalg.multi_dot([own[0], *own]))


def test_rows_of_a_sharded_variable_come_in_the_order_that_was_asked_for(shared_runtimes: Any) -> None:
    class Last(synk.Op):
        concatenates = True

        def finish(self, value: Any) -> Any:
            return value[-1]

    rt = shared_runtimes[3]
    w = rt.shared(np.arange(10.0), sharded=True)
    f = rt.function(lambda w: w * 1, outputs=Last())
    assert f(w, batch=[7, 9, 0, 4]) == 4.0 and f(w, batch=[4, 0, 9, 7]) == 7.0


# ----- the op's state


def test_a_state_that_the_program_changes_is_that_of_the_next_call(shared_runtimes: Any) -> None:
    class Limited(Quantile):
        def check(self, dtype: np.dtype, what: str) -> None:
            if self.q > 1:
                raise TypeError(f"cannot check {what}: got {self.q}, expected less.")

    op = Limited(0.5)
    f = shared_runtimes[2].function(lambda x: x * 1, outputs=op)
    x = np.arange(9.0)
    assert [float(f(x)) for _ in range(3)] == [4.0] * 3
    op.q = 0.25
    assert float(f(x)) == 2.0
    assert repr(f) == "<synk.Function '<lambda>' outputs=Quantile(0.25)>"
    assert f.outputs is op
    op.q = 2.0
    with pytest.raises(TypeError, match=r"got 2\.0"):  # the workers have it as well
        f(np.arange(9))


# ----- without rows


@pytest.mark.parametrize("where", WHERE)
def test_without_rows_to_divide_it_is_refused_unless_it_says_otherwise(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    y = np.arange(5.0)
    f = rt.function(lambda y: y, bcast_inputs="y", outputs=Median(), name="f")
    for call in (f, f.serial, f.submit, f.verify):
        with pytest.raises(ValueError, match=r"cannot call 'f': got op Median and no rows to divide.*per_rank=True"):
            call(y)

    class Alike(Seen):
        needs_rows = False

        def finish(self, value: Any) -> Any:
            values, rows = value
            assert len(set(values)) == 1 and set(rows) == {1}
            return values[0]

    f = rt.function(lambda y: y.sum(), bcast_inputs="y", outputs=Alike())
    for _, call in calls_of(f):
        assert call(y) == 10.0
    g = rt.function(lambda y: y + synk.comm.rank, bcast_inputs="y", outputs=Median(), per_rank=True)
    np.testing.assert_array_equal(g(y), np.median(np.concatenate([y + k for k in range(rt.world_size)])))


@pytest.mark.parametrize("where", WHERE)
def test_a_call_for_no_rows_has_the_value_that_it_says(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    with pytest.raises(ValueError, match=r"cannot call 'f' with no rows: op Median has no value there"):
        rt.function(lambda x: x, outputs=Median(), name="f")(np.empty(0))

    class Counted(Seen):
        has_empty = True

    f = rt.function(lambda x: (x, len(x)), outputs=(Quantile(0.5), Counted()))
    for call in (f, f.serial):
        quantile, counted = call(np.empty(0))
        assert np.isnan(quantile) and counted == ([0], [0])


# ----- what it refuses, and what it raises


@pytest.mark.parametrize("where", WHERE)
def test_dtypes_that_it_refuses(shared_runtimes: Any, where: Any) -> None:
    f = shared_runtimes[where].function(lambda x: (x.sum(), x), outputs=("sum", Median()), name="f")
    for _, call in calls_of(f):
        with pytest.raises(TypeError, match=r"cannot take the median of output 1 of 'f': got dtype complex64"):
            call(np.ones(5, np.complex64))
    assert f(np.ones(5))[1] == 1.0

    class Whole(Seen):
        def check(self, dtype: np.dtype, what: str) -> None:
            if dtype.kind != "i":
                raise TypeError(f"cannot count {what}: got dtype {dtype}, expected an integer.")

    g = shared_runtimes[where].function(lambda x: float(x.sum()), outputs=Whole(), name="g")
    with pytest.raises(TypeError, match="cannot count the output of 'g': got dtype float64"):
        g(np.ones(3))


@pytest.mark.parametrize("where", WHERE)
def test_what_it_raises_names_the_op_and_the_function_and_breaks_nothing(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    w = rt.shared(np.zeros(()))

    def count(x: np.ndarray) -> Any:
        w.value = w.value + 1
        return x, x.sum()

    peek = rt.function(lambda: float(w.value), outputs=None)
    fine = rt.function(lambda x: (x, x.sum()), outputs=(Median(), "sum"))
    for outputs, error, place in (
        ((Median(), Broken()), ZeroDivisionError, "op Broken, which combines output 1"),
        ((BrokenAtTheEnd(), "sum"), LookupError, "op BrokenAtTheEnd, which combines output 0"),
    ):
        f = rt.function(count, outputs=outputs, name="count")
        for how, call in calls_of(f):
            if "slices" in how:  # where nothing can be assigned so
                continue
            with pytest.raises(error) as caught:
                call(np.arange(5.0))
            assert caught.value.__notes__ == [f"Raised by {place} of 'count'."]
            assert fine(np.arange(5.0)) == (2.0, 10.0)
            assert peek() == [0.0] * rt.world_size  # a call that failed has assigned nothing


@pytest.mark.parametrize("where", [1, 2, "inline"])
def test_it_computes_under_the_settings_of_the_program(shared_runtimes: Any, where: Any) -> None:
    class Log(synk.Op):
        concatenates = True

        def finish(self, value: Any) -> Any:
            return np.log(value)

    f = shared_runtimes[where].function(lambda x: (x, x.sum()), outputs=(Log(), "sum"))
    for _, call in calls_of(f):
        with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
            call(np.zeros(4))
        with np.errstate(divide="ignore"):
            assert np.isneginf(call(np.zeros(4))[0]).all()


def test_rows_that_differ_between_ranks_are_a_mismatch(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x: np.ones((len(x), len(x))), outputs=Median(), name="f")
    with pytest.raises(
        CollectiveMismatch, match=r"cannot gather the output of 'f': got rank 0: float64 \(2, 2\); rank"
    ):
        f(np.arange(3))
    with pytest.raises(ValueError, match="cannot gather the output of 'g': got a single number"):
        shared_runtimes[2].function(lambda x: x.sum(), outputs=Median(), name="g")(np.arange(3))


def test_rows_that_are_no_weights_are_refused_where_it_may_use_them(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    a, b = rt.shared(np.arange(5.0), sharded=True), rt.shared(np.arange(7.0), sharded=True)
    with pytest.raises(ValueError, match="expected one division of rows, which gives the weights"):
        rt.function(lambda: a.value.sum() + b.value.sum(), outputs=Seen())()
    np.testing.assert_array_equal(rt.function(lambda: b.value + len(a.value), outputs=Quantile(1))(), 8.0)


def test_what_is_no_op_is_refused_when_the_function_is_built(shared_runtimes: Any) -> None:
    class Mean(synk.Op):
        def combine(self, values: list[Any], rows: list[int]) -> Any:
            return self.accumulate(values)

        def accumulate(self, values: list[Any]) -> Any:  # type: ignore[override]
            return sum(values) / len(values)

    named = Seen()
    named.is_weighted = False
    for op, text in (
        (Median, r"got the class Median as an op, expected an instance of it. Write Median\(...\)."),
        (synk.Op(), "got op Op without a combine, expected a method"),
        (Mean(), "got op Mean, which defines accumulate, expected another name"),
        (named, "got op Seen, which defines is_weighted, expected another name"),
    ):
        for outputs in (op, ("sum", {"a": op})):
            with pytest.raises(TypeError, match=f"cannot build 'f': {text}"):
                shared_runtimes[2].function(len, outputs=outputs, name="f")


def test_verify_compares_what_it_makes_of_all_rows(shared_runtimes: Any) -> None:
    """A median of medians is found out, and so is an op that does not fit."""

    class OfRanks(synk.Op):
        def combine(self, values: list[Any], rows: list[int]) -> Any:
            return np.median(values)

    x = np.array([1.0, 2.0, 9.0, 4.0, 5.0])
    rt = shared_runtimes[2]
    report = rt.function(lambda x: (x, np.median(x)), outputs=(Median(), OfRanks()), name="f").verify(x)
    assert [(each.verdict, each.plain_verdict) for each in report.outputs] == [
        ("equal", "equal"),
        ("different", "equal"),
    ]
    assert repr(report).splitlines()[2].split()[:2] == ["[0]", "Median"]
    wrong = rt.function(lambda x: x.sum(), outputs=OfRanks()).verify(x)
    assert not wrong and wrong.outputs[0].matching == ("sum",)
    broken = rt.function(lambda x: x.sum(), outputs=Broken(), name="f")
    with pytest.raises(ZeroDivisionError):
        broken.verify(x)
