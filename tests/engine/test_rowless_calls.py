"""Calls without a scattered argument: rows are those of sharded variables that the function closes over, or there are
none, and then an op that would count the workers is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import synk

WHERE = (2, 3, 0)
Y = np.arange(6.0)


def add(a: Any, b: Any) -> Any:
    return a + b


# ----- no rows at all


@pytest.mark.parametrize("where", WHERE)
def test_without_rows_ops_that_would_count_the_workers_are_refused(
    subtests: Any, shared_runtimes: Any, where: Any
) -> None:
    """Unless each rank is to contribute its own."""
    rt = shared_runtimes[where]
    for op in ("sum", "prod", "gather", add):
        with subtests.test(op=op):
            f = rt.function(
                lambda y: {"total": y.sum(), "rows": (y, y)}, bcast_inputs="y", outputs={"total": op, "rows": "max"}
            )
            for call in (f, f.serial, f.submit, f.verify):
                with pytest.raises(
                    ValueError, match=r"cannot call '<lambda>': got op .* no rows.*'first'.*per_rank=True"
                ):
                    call(Y)
    for op in ("avg", "min", "max", "first"):
        with subtests.test(op=op):
            f = rt.function(lambda y: y.sum(), bcast_inputs="y", outputs=op)
            assert f(Y) == f.serial(Y) == f.submit(Y).result() == Y.sum()
    ops, num = ("sum", "gather", add, None), rt.world_size
    f = rt.function(lambda: (1, np.array([synk.comm.rank]), 1, synk.comm.rank), outputs=ops, per_rank=True)
    for count, ranks, folded, each in (f(), f(), f.submit().result()):
        assert (count, ranks.tolist(), folded, each) == (num, list(range(num)), num, list(range(num)))


# ----- rows of variables that the function closes over


@pytest.mark.parametrize("where", WHERE)
def test_closed_over_shards_are_rows_to_divide(subtests: Any, shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    s = rt.shared(np.zeros((1, 3)), sharded=True)

    def moments(w: np.ndarray) -> Any:
        x = s.value * w
        return x.mean(axis=0), x.sum(axis=0), x.min(axis=0), x, synk.comm.rows, synk.comm.all_reduce(x.mean(axis=0))

    f = rt.function(moments, bcast_inputs="w", outputs=("avg", "sum", "min", "gather", "sum", "first"))
    for rows in (1, 2, 5, 6, 7):
        s.value = value = np.random.default_rng(rows).normal(size=(rows, 3))
        x = value * 2
        expected = x.mean(axis=0), x.sum(axis=0), x.min(axis=0), x, rows, x.mean(axis=0)
        for number, got in enumerate((f(2.0), f(2.0), f.serial(2.0), f.submit(2.0).result())):
            with subtests.test(rows=rows, way=number):
                for a, b in zip(got, expected, strict=True):
                    np.testing.assert_allclose(a, b, rtol=1e-12)
        assert [output.verdict for output in f.verify(2.0).outputs] == ["equal"] * 6


def test_the_weights_follow_the_lengths_from_call_to_call(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    s = rt.shared(np.arange(4.0), sharded=True)
    mean = rt.function(lambda: s.value.mean())
    halve = rt.function(lambda x: setattr(s, "value", x[: 1 + synk.comm.rank]))
    for rows in (4, 5, 5, 1, 7):
        s.value = np.arange(float(rows))
        assert mean() == mean() == np.arange(float(rows)).mean()
    halved, averaged = halve.submit(Y), mean.submit()  # the lengths change on the workers: 0; 3 and 4
    assert averaged.result() == mean() == pytest.approx((0 + 3 + 4) / 3, rel=1e-15)
    halved.result()


def test_serial_calls_have_whole_variables_and_cannot_assign_shards(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]
    value = {"x": np.arange(14.0).reshape(7, 2), "y": (np.arange(7.0),)}
    nested, s = rt.shared(value, sharded=True), rt.shared(np.arange(5.0), sharded=True, name="s")
    f = rt.function(lambda: nested.value["x"].T @ nested.value["y"][0], outputs="sum")
    for call in (f, f.serial, f):  # afterwards each rank sees its own shard again
        np.testing.assert_array_equal(call(), value["x"].T @ value["y"][0])

    def double() -> float:
        s.value = 2 * s.value
        return float(s.value.mean())

    g = rt.function(double)
    with pytest.raises(ValueError, match="cannot assign variable 's' in a serial call of 'double': it is sharded"):
        g.serial()
    assert g() == 4.0


@pytest.mark.parametrize("where", [2, "1+1"])
def test_variables_that_are_divided_unlike_give_no_average(where: Any, shared_runtimes: Any) -> None:
    rt = shared_runtimes[where]
    s, t = rt.shared(np.arange(5.0), sharded=True, name="s"), rt.shared(np.arange(7.0), sharded=True, name="t")
    double = rt.shared(np.arange(10.0), sharded=True, name="double")
    double[0] = np.arange(6.0)
    double[1] = np.arange(6.0, 10.0)
    f = rt.function(lambda: s.value.mean() + t.value.mean())
    with pytest.raises(ValueError, match=r"cannot average.*'s' with \[3, 2\] rows.*'t' with \[4, 3\].*as an argument"):
        f()
    assert f.serial() == 2.0 + 3.0
    assert rt.function(lambda: s.value.sum() + t.value.sum(), outputs="sum")() == 10 + 21
    # 3 : 2 as well as 6 : 4
    assert rt.function(lambda: s.value.mean() + double.value.mean())() == pytest.approx(2.0 + 4.5, rel=1e-15)
    # An argument decides, and so does returning nothing.
    assert rt.function(lambda x: x.mean() + 0 * t.value[0])(s) == 2.0
    assert rt.function(lambda: setattr(t, "value", 2 * s.value))() is None
    np.testing.assert_array_equal(t.value, 2 * np.arange(5.0))


def test_variables_without_rows_and_such_that_come_later(reused: Callable[..., Any]) -> None:
    """Functions that are sent together are not mixed up; a global that becomes a variable later counts."""
    rt = reused(2)
    s = rt.shared(np.empty(0), sharded=True, name="s")

    def fill() -> None:
        s.value = np.full(2, float(synk.comm.rank))

    with pytest.raises(ValueError, match=r"with no rows.*per_rank=True if it fills sharded variables"):
        rt.function(fill)()
    rt.function(fill, per_rank=True)()
    np.testing.assert_array_equal(s.value, [0, 0, 1, 1])
    mean = rt.function(lambda: s.value.mean())
    total = rt.function(lambda y: y.sum(), bcast_inputs="y", outputs="sum")
    rt.distribute()
    assert mean() == 0.5
    with pytest.raises(ValueError, match="no rows to divide"):
        total(Y)
    scope: dict[str, Any] = {}
    exec("def total(): return later.value.sum()", scope)
    f = rt.function(scope["total"], outputs="sum")
    scope["later"] = rt.shared(np.arange(5.0), sharded=True)
    assert f() == 10.0
