"""``on_oom="slices"``: a call that runs out of memory is made again with twice the slices."""

from __future__ import annotations

import logging
import resource
from typing import Any

import numpy as np
import pytest

import synk

ROOM_NBYTES = 100_000_000


def limit_memory() -> None:
    """Let this process have little more memory than it has now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        nbytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (nbytes + ROOM_NBYTES,) * 2)


def outer_sums(x: np.ndarray, w: np.ndarray) -> tuple[Any, Any, Any]:
    """Return an average, a sum and rows, by way of 8 KB for each row."""
    table = np.multiply.outer(x, w)
    return table.mean(), table.sum(), table[:, 0]


def test_a_call_that_does_not_fit_is_run_in_slices(runtime: Any, caplog: pytest.LogCaptureFixture) -> None:
    rt = runtime(2)
    rt.function(limit_memory, outputs=None, per_rank=True)()
    x, w = np.linspace(-1, 2, 30_001), np.linspace(0, 1, 1000)
    options: dict[str, Any] = {"bcast_inputs": "w", "outputs": ("avg", "sum", "gather")}
    with pytest.raises(MemoryError):
        rt.function(outer_sums, **options)(x, w)
    f = rt.function(outer_sums, **options, on_oom="slices")
    with caplog.at_level(logging.WARNING, "synk"):
        results = [f(x, w), f(x, w=w)]
    assert [text.partition(" (")[0] for text in caplog.messages] == ["'outer_sums' ran out of memory on a rank"]
    for mean, total, column in results:
        np.testing.assert_allclose(mean, x.mean() * w.mean(), rtol=1e-12)
        np.testing.assert_allclose(total, x.sum() * w.sum(), rtol=1e-12)
        np.testing.assert_allclose(column, x * w[0], rtol=1e-12)
    with pytest.raises(MemoryError) as caught:
        rt.function(lambda x: np.ones((len(x), ROOM_NBYTES)).sum(), outputs="sum", on_oom="slices")(x[:4])
    assert any("a single row in each" in note for note in caught.value.__notes__)


def fits(x: Any) -> np.ndarray:
    """Return for each row how many rows the slice has that it is in; there is room for three."""
    while isinstance(x, (dict, tuple)):
        x = x["x"] if isinstance(x, dict) else x[0]
    if len(x) > 3:
        raise MemoryError("too much")
    return np.full(len(x), len(x))


def test_the_slices_are_doubled_until_they_fit(reused: Any, subtests: pytest.Subtests) -> None:
    rt, x = reused(2), np.arange(16.0)
    nested = {"dict": {"x": x, "scale": 3}, "tuple": (x, [x[0]] * 16), "list": x.tolist(), "array": x}
    for kind, arg in nested.items():
        with subtests.test(kind):
            f = rt.function(fits, outputs="gather", on_oom="slices")
            assert f(arg).tolist() == [2] * 16
            calls = rt.counters["calls"]
            assert f(arg).tolist() == [2] * 16
            assert rt.counters["calls"] == calls + 1, "what was found out is not remembered"
            assert f(arg, num_slices=8).tolist() == [1] * 16
    assert f(x[:6]).tolist() == [3] * 6, "a small call was cut"


def test_what_does_not_fit_in_slices_either_is_not_remembered(reused: Any) -> None:
    """The next call, for which there is memory again, is one of whole shards; both errors are told."""
    rt, x = reused(2), np.arange(12.0)
    room, is_short = rt.shared(3), rt.shared(True)

    def centred(x: np.ndarray) -> np.ndarray:
        if is_short.value and len(x) > room.value:
            raise MemoryError("too much")
        return x - synk.comm.all_reduce(x.mean())

    f = rt.function(centred, outputs="gather", on_oom="slices")
    for rows, error, note in ((3, ValueError, "after 'too much'"), (0, MemoryError, "a single row in each")):
        room.value = rows
        with pytest.raises(error) as caught:
            f(x)
        assert note in caught.value.__notes__[-1]
    is_short.value = False
    assert f(x).tolist() == (x - x.mean()).tolist()


def test_only_the_rows_that_batch_picks_count(reused: Any) -> None:
    """Both for where to stop and for what is remembered."""
    rt, x = reused(2), np.arange(1000.0)

    def never_fits(x: np.ndarray) -> None:
        raise MemoryError("too much")

    calls = rt.counters["calls"]
    with pytest.raises(MemoryError):
        rt.function(never_fits, outputs="gather", on_oom="slices")(x, batch=[5, 3, 800])
    assert rt.counters["calls"] == calls + 3, "there are no more than 3 rows to divide"
    f = rt.function(fits, outputs="gather", on_oom="slices")
    assert f(x, batch=slice(0, 1000, 63)).tolist() == [2] * 16
    assert f(x, batch=6).tolist() == [3] * 6, "a small call was cut"
    with pytest.raises(IndexError, match="cannot select rows of 'fits': got batch=1001"):
        f(x, batch=1001)


def test_other_errors_are_no_reason(reused: Any) -> None:
    rt = reused(1)
    runs = rt.shared(0)

    def divide(x: np.ndarray) -> float:
        runs.value = len(x)
        return 1 / int(x.sum())

    with pytest.raises(ZeroDivisionError):
        rt.function(divide, outputs="sum", on_oom="slices")(np.zeros(3))
    assert int(runs.value) == 0
    with pytest.raises(ValueError, match=r"cannot submit 'sum'.*on_oom='slices'"):
        rt.function(np.sum, outputs="sum", on_oom="slices").submit(np.zeros(3))
