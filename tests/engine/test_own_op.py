"""Ops of a user's own: what they get of the ranks, and what becomes of what they return, refuse and raise.

The oracle is NumPy on all rows.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.rank_arrays import Median
from support.tables import named

import synk
from synk.errors import CollectiveMismatch

WHERE = (2, 3, 0)
WIDE = (1 << 18) // 8
"""Columns of float64 from which on an output is large."""


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


class Last(synk.Op):
    """What a function of the user's own makes of all rows."""

    concatenates = True

    def __init__(self, finish: Callable[[Any], Any]) -> None:
        self.finish = finish  # type: ignore[method-assign]


class Broken(synk.Op):
    def combine(self, values: list[Any], rows: list[int]) -> Any:
        raise ZeroDivisionError(len(values))


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


# ----- what it gets


def test_all_rows_and_all_values_reach_it(subtests: Any, shared_runtimes: Any) -> None:
    """Small outputs and large ones."""
    for where in WHERE:
        f = shared_runtimes[where].function(
            named("f", lambda x: (x, moments(x), x.max(axis=0))), outputs=(Median(), Variance(), "max")
        )
        for rows, columns in ((1, 4), (2, 4), (9, 4), (7, WIDE)):
            x = np.random.default_rng(rows).normal(size=(rows, columns))
            for how, call in calls_of(f):
                with subtests.test(where=where, rows=rows, columns=columns, how=how):
                    median, variance, largest = call(x)
                    np.testing.assert_array_equal(median, np.median(x, axis=0))
                    np.testing.assert_allclose(variance, x.var(axis=0), rtol=1e-12, atol=1e-15)
                    np.testing.assert_array_equal(largest, x.max(axis=0))
        assert f.verify(np.arange(9.0).reshape(3, 3))
    in_blocks = shared_runtimes[2].function(lambda x: x, outputs=Median(), reproducible=2)
    assert in_blocks(np.arange(5.0) ** 2) == 4.0


def test_values_of_any_kind_reach_it(subtests: Any, shared_runtimes: Any) -> None:
    """With their rows, and as its own, which it may change.

    Python's numbers stay what they are, and objects, tables and arrays of other shapes are no mismatch.
    """
    pandas = pytest.importorskip("pandas")
    returned: dict[str, Callable[[np.ndarray], Any]] = {
        "an int": len,
        "a number": lambda x: Counter(x.tolist()).most_common(1)[0][0],
        "a set": lambda x: frozenset(x.tolist()),
        "rows": lambda x: x * 1.0,
        "a table": lambda x: pandas.Series(x),
        "an array of objects": lambda x: np.array([frozenset(x.tolist())]),
    }
    x = np.array([1, 2, 2, 3, 3])
    for (name, fn), num_slices in itertools.product(returned.items(), (1, 2)):
        with subtests.test(name, num_slices=num_slices):
            parts = [piece for part in np.array_split(x, 2) for piece in np.array_split(part, num_slices)]
            f = shared_runtimes[2].function(fn, outputs=Seen())
            for _ in range(3):
                values, rows = f(x, num_slices=num_slices)
                assert rows == [len(part) for part in parts]
                for value, part in zip(values, parts, strict=True):
                    assert type(value) is type(fn(part)) and np.array_equal(np.asarray(value), np.asarray(fn(part)))
                    if name == "rows":
                        value += 100


def test_lists_tables_and_rows_of_variables_are_joined_for_it(subtests: Any, rt: Any) -> None:
    pandas = pytest.importorskip("pandas")
    ops = (Last(sorted), Last(lambda value: value.sort_index(ascending=False)))
    f = rt.function(lambda t: ([f"{each:02}" for each in t["a"]], t), outputs=ops)
    table = pandas.DataFrame({"a": [5, 3, 8, 1, 4, 4, 7]})
    for how, call in calls_of(f):
        with subtests.test(how):
            texts, found = call(table)
            assert texts == ["01", "03", "04", "04", "05", "07", "08"]
            pandas.testing.assert_frame_equal(found, table[::-1])
    w = rt.shared(np.arange(10.0), sharded=True)
    g = rt.function(lambda w: w * 1, outputs=Last(lambda value: value[-1]))
    assert [g(w, batch=[7, 9, 0, 4]), g(w, batch=[4, 0, 9, 7])] == [4.0, 7.0]  # in the order that was asked for


def test_tensors_come_back_as_such(subtests: Any, shared_runtimes: Any) -> None:
    torch = pytest.importorskip("torch")

    class Product(synk.Op):
        def combine(self, values: list[Any], rows: list[int]) -> Any:
            return torch.linalg.multi_dot([values[0], *values])

    ops = (Median(), Last(lambda value: torch.quantile(value, 0.25, dim=0)), Product())
    f = shared_runtimes[2].function(lambda x: (x * 2, x * 2, x.T @ x), outputs=ops, framework="torch")
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for how, call in calls_of(f):
        with subtests.test(how):
            median, quantile, product = call(x)
            assert all(isinstance(each, torch.Tensor) for each in (median, quantile, product))
            np.testing.assert_array_equal(median, np.median(2 * x.numpy(), axis=0))
            torch.testing.assert_close(quantile, torch.quantile(2 * x, 0.25, dim=0))
            if "slices" not in how:
                own = [part.T @ part for part in ([x] if how == "serial" else x.tensor_split(2))]
                torch.testing.assert_close(product, torch.linalg.multi_dot([own[0], *own]))


def test_a_state_that_the_program_changes_is_that_of_the_next_call(shared_runtimes: Any) -> None:
    op, x = Quantile(0.5), np.arange(9.0)
    f = shared_runtimes[2].function(lambda x: x * 1, outputs=op)
    assert [float(f(x)) for _ in range(3)] == [4.0] * 3
    op.q = 0.25
    assert float(f(x)) == 2.0
    assert f.outputs is op and "outputs=Quantile(0.25)" in repr(f)


@pytest.mark.parametrize("where", WHERE)
def test_without_rows_it_is_refused_unless_it_says_otherwise(shared_runtimes: Any, where: Any) -> None:
    rt, y = shared_runtimes[where], np.arange(5.0)
    f = rt.function(named("f", lambda y: y), bcast_inputs="y", outputs=Median())
    for call in (f, f.serial, f.submit, f.verify):
        with pytest.raises(ValueError, match=r"cannot call 'f': got op Median and no rows to divide.*per_rank=True"):
            call(y)
    with pytest.raises(ValueError, match=r"cannot call 'f' with no rows: op Median has no value there"):
        rt.function(named("f", lambda x: x), outputs=Median())(np.empty(0))

    class Alike(Seen):
        needs_rows = False
        has_empty = True

    alike = rt.function(lambda y: y.sum(), bcast_inputs="y", outputs=Alike())
    for _, call in calls_of(alike):
        values, rows = call(y)
        assert set(values) == {10.0} and set(rows) == {1}
    each = rt.function(lambda y: y + synk.comm.rank, bcast_inputs="y", outputs=Median(), per_rank=True)
    np.testing.assert_array_equal(each(y), np.median(np.concatenate([y + k for k in range(rt.world_size)])))
    empty = rt.function(lambda x: (x, len(x)), outputs=(Quantile(0.5), Alike()))
    for call in (empty, empty.serial):
        quantile, counted = call(np.empty(0))
        assert np.isnan(quantile) and counted == ([0], [0])


# ----- what it refuses, and what it raises


def logarithm(value: Any) -> Any:
    return np.log(value)


def counting(w: Any) -> Callable[[np.ndarray], Any]:
    """Return a function that counts its calls in a variable."""

    def count(x: np.ndarray) -> Any:
        w.value = w.value + 1
        return x, x.sum()

    return count


def test_what_it_raises_names_the_op_and_the_function_and_breaks_nothing(subtests: Any, shared_runtimes: Any) -> None:
    """Also what it refuses by its dtype, and under the program's settings of NumPy."""

    def fail(value: Any) -> Any:
        raise LookupError(len(value))

    raised: dict[str, tuple[Any, type[Exception], str, Any]] = {
        "combine": ((Median(), Broken()), ZeroDivisionError, "op Broken, which combines output 1", np.arange(5.0)),
        "finish": ((Last(fail), "sum"), LookupError, "op Last, which combines output 0", np.arange(5.0)),
        "settings": ((Last(logarithm), "sum"), FloatingPointError, "op Last, which combines output 0", np.zeros(4)),
        "check": ((Median(), "sum"), TypeError, "", np.ones(5, np.complex64)),
    }
    for where, (name, (outputs, error, place, x)) in itertools.product(WHERE, raised.items()):
        rt = shared_runtimes[where]
        w = rt.shared(np.zeros(()))
        fine = rt.function(lambda x: (x, x.sum()), outputs=(Median(), "sum"))
        f = rt.function(named("count", counting(w)), outputs=outputs)
        for how, call in (each for each in calls_of(f) if "slices" not in each[0]):  # where nothing can be assigned so
            with subtests.test(name, where=where, how=how):
                words = None if place else "cannot take the median of output 0 of 'count': got dtype complex64"
                with np.errstate(divide="raise"), pytest.raises(error, match=words) as caught:
                    call(x)
                assert not place or caught.value.__notes__ == [f"Raised by {place} of 'count'."]
                assert fine(np.arange(5.0)) == (2.0, 10.0)
                assert w.value == 0.0, "a call that failed has assigned nothing"


def test_values_and_rows_that_do_not_fit(rt: Any) -> None:
    with pytest.raises(
        CollectiveMismatch, match=r"cannot gather the output of 'f': got rank 0: float64 \(2, 2\); rank"
    ):
        rt.function(named("f", lambda x: np.ones((len(x), len(x)))), outputs=Median())(np.arange(3))
    with pytest.raises(ValueError, match="cannot gather the output of 'g': got a single number"):
        rt.function(named("g", lambda x: x.sum()), outputs=Median())(np.arange(3))
    a, b = rt.shared(np.arange(5.0), sharded=True), rt.shared(np.arange(7.0), sharded=True)
    with pytest.raises(ValueError, match="expected one division of rows, which gives the weights"):
        rt.function(lambda: a.value.sum() + b.value.sum(), outputs=Seen())()
    np.testing.assert_array_equal(rt.function(lambda: b.value + len(a.value), outputs=Quantile(1))(), 8.0)


def test_what_is_no_op_is_refused_when_the_function_is_built(subtests: Any, shared_runtimes: Any) -> None:
    class Mean(synk.Op):
        def combine(self, values: list[Any], rows: list[int]) -> Any:
            return self.accumulate(values)

        def accumulate(self, values: list[Any]) -> Any:  # type: ignore[override]
            return sum(values) / len(values)

    named = Seen()
    named.is_weighted = False
    refused: list[tuple[Any, str]] = [
        (Median, r"got the class Median as an op, expected an instance of it. Write Median\(...\)."),
        (synk.Op(), "got op Op without a combine, expected a method"),
        (Mean(), "got op Mean, which defines accumulate, expected another name"),
        (named, "got op Seen, which defines is_weighted, expected another name"),
    ]
    for op, text in refused:
        for outputs in (op, ("sum", {"a": op})):
            with subtests.test(text), pytest.raises(TypeError, match=f"cannot build 'len': {text}"):
                shared_runtimes[2].function(len, outputs=outputs)
