"""Streams of batches, blocks of rows, calls that are awaited, verbs that take lists, and ``on_oom="slices"``."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections import namedtuple
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
from support.gates import Gate, beside
from support.harness import assert_right, replaced_workers, wait_for
from support.tables import named

import synk
from synk.errors import CallCancelled, WorkerDied

BATCHES = [np.arange(n, n + 5.0) for n in range(9)]


def totals(rt: synk.Runtime) -> Any:
    return rt.function(named("total", lambda x: x.sum()), outputs="sum")


# -- streams ----------------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


def test_a_stream_gives_the_results_of_the_calls(rt: Any, shared_runtimes: Any) -> None:
    """A batch is one argument, a tuple or list of all arguments, as a data loader gives them, or one that is nested."""
    torch = pytest.importorskip("torch")
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6.0)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y)), batch_size=2)
    for where in (1, 2, 0):
        total = totals(shared_runtimes[where])
        assert list(total.stream(BATCHES)) == [x.sum() for x in BATCHES]
        assert list(total.stream([])) == []
    dots = rt.function(lambda x, y: x.T @ y, outputs="sum").stream(loader)
    np.testing.assert_array_equal(list(dots), [x[k : k + 2].T @ y[k : k + 2] for k in (0, 2, 4)])
    assert list(rt.function(lambda d: d["y"].sum(), outputs="sum").stream([{"y": y}])) == [y.sum()]
    assert list(rt.function(lambda p: (p.x * p.y).sum(), outputs="sum").stream([Pair(y, y)])) == [y @ y]


def test_a_stream_is_bounded_and_its_buffer_may_be_filled_again(shared_runtimes: Any) -> None:
    buffer, pulled = np.zeros(4), itertools.count()

    def batches() -> Iterator[np.ndarray]:
        for n in pulled:
            buffer[:] = n
            yield buffer

    results = totals(shared_runtimes[2]).stream(batches())
    assert [float(v) for v in itertools.islice(results, 20)] == [4.0 * n for n in range(20)]
    assert next(pulled) <= 23
    results.close()
    assert_right(shared_runtimes[2])


def check(x: Any) -> Any:
    if x[0] == 4:
        raise LookupError("four")
    return x.sum()


def broken() -> Iterator[Any]:
    yield from BATCHES[:2]
    raise OSError("no more")


def test_what_a_batch_or_the_iterable_raises_comes_after_the_results_before(rt: Any) -> None:
    wrong: tuple[tuple[Any, Iterable[Any], type[Exception], str, int], ...] = (
        (check, [np.full(5, float(n)) for n in range(9)], LookupError, "for batch 4 of the stream of 'check'", 4),
        (lambda x: x.sum(), broken(), OSError, "for batch 2 of the stream of '<lambda>'", 2),
        (lambda x, y: x.sum(), [(BATCHES[0],) * 2, (BATCHES[0], [1.0])], ValueError, "equal axis-0 lengths", 1),
    )
    for fn, batches, error, words, num_before in wrong:
        got: list[float] = []
        with pytest.raises(error) as raised:
            got.extend(rt.function(fn, outputs="sum").stream(batches))
        assert any(words in text for text in (str(raised.value), *raised.value.__notes__)), words
        assert len(got) == num_before
    with pytest.raises(TypeError, match="cannot stream 'total': got int, expected an iterable of batches"):
        totals(rt).stream(3)
    assert_right(rt)


# -- calls that are awaited -------------------------------------------------------------------------------------------


def test_calls_are_awaited_while_other_tasks_run(rt: Any, gate: Gate) -> None:
    slow, total = rt.function(lambda x: (gate.wait(synk.comm.rank), x.sum())[1], outputs="sum"), totals(rt)
    gate.open()
    slow(np.ones(2)), total(np.ones(2))  # to send a function waits for the calls before
    gate.close()

    async def opener() -> str:
        gate.open()
        return "opened"

    async def main() -> list[Any]:
        calls = [slow.submit(np.full(4, 2.0)), total.submit(np.ones(3)), total.submit(np.ones(1 << 17))]
        return await asyncio.gather(*calls, opener(), *(asyncio.ensure_future(call) for call in calls))

    assert asyncio.run(main()) == [8.0, 3.0, float(1 << 17), "opened", 8.0, 3.0, float(1 << 17)]
    assert_right(rt)


def test_awaiting_gives_what_the_call_raises(rt: Any, gate: Gate) -> None:
    stay = rt.function(lambda x: gate.wait((float(x[0]), synk.comm.rank)), outputs=None)

    async def begun(first: float) -> Any:
        call = stay.submit(np.full(2, first))
        while not gate.has((first, 0), (first, 1)):
            await asyncio.sleep(0.005)
        return call

    async def main(victim: int) -> None:
        with pytest.raises(ZeroDivisionError):
            await rt.function(lambda x: 1 / 0, outputs="sum").submit(np.ones(4))
        call = await begun(1.0)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(call, 0.05)
        rt.interrupt()
        with pytest.raises(CallCancelled):
            await call
        call = await begun(2.0)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="rank 1 of 2"):
            await call

    with replaced_workers(rt, [1]) as before:
        asyncio.run(main(before[1]))


def test_an_await_beside_a_thread_that_holds_the_runtime(shared_runtimes: Any) -> None:
    total = totals(shared_runtimes[2])

    async def main() -> list[Any]:
        return [await total.submit(np.full(3, float(n))) for n in range(5)]

    with beside(lambda: total(np.ones(3))):
        assert asyncio.run(main()) == [3.0 * n for n in range(5)]


def test_done_callbacks(rt: Any, caplog: pytest.LogCaptureFixture) -> None:
    total, ended = totals(rt), []
    calls = [total.submit(np.full(3, float(n))) for n in range(3)]
    for call in calls:
        call.add_done_callback(lambda call: ended.append(float(call.result())))
    calls[0].add_done_callback(lambda call: 1 / 0)
    calls[0].add_done_callback(lambda call: total(np.ones(1)))
    assert float(calls[2].result()) == 6.0 and ended == [0.0, 3.0, 6.0]
    assert "a callback of the call of 'total' failed" in caplog.text
    assert "a callback, an op or a method like __reduce__. Note there what is to be done, and do it" in caplog.text
    calls[1].add_done_callback(lambda call: ended.append("late"))
    assert ended[-1] == "late"
    for learn in (lambda call: wait_for(call.done), lambda call: assert_right(rt)):  # any operation learns of the end
        call = total.submit(np.ones(3))
        call.add_done_callback(ended.append)
        learn(call)
        assert ended[-1] is call


def fits(x: Any) -> np.ndarray:
    """Return for each row how many rows the slice has that it is in; there is room for three."""
    while isinstance(x, (dict, tuple)):
        x = x["x"] if isinstance(x, dict) else x[0]
    if len(x) > 3:
        np.empty(2**50)  # which NumPy refuses
    return np.full(len(x), len(x))


def test_the_slices_are_doubled_until_they_fit(
    rt: Any, subtests: pytest.Subtests, caplog: pytest.LogCaptureFixture
) -> None:
    x = np.arange(16.0)
    nested = {"dict": {"x": x, "scale": 3}, "tuple": (x, [x[0]] * 16), "list": x.tolist(), "array": x}
    for kind, arg in nested.items():
        with subtests.test(kind):
            f = rt.function(fits, outputs="gather", on_oom="slices")
            assert f(arg).tolist() == [2] * 16
            calls = rt.counters["calls"]
            assert f(arg).tolist() == [2] * 16
            assert rt.counters["calls"] == calls + 1, "what was found out is not remembered"
            assert f(arg, num_slices=8).tolist() == [1] * 16
    assert [text.partition(" (")[0] for text in caplog.messages] == ["'fits' ran out of memory on a rank"] * 4
    assert f(x[:6]).tolist() == [3] * 6, "a small call was cut"


def test_what_does_not_fit_in_slices_either_is_not_remembered(rt: Any) -> None:
    """The next call, for which there is memory again, is one of whole shards; both errors are told."""
    x = np.arange(12.0)
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


def test_only_the_rows_that_batch_picks_count(rt: Any) -> None:
    """Both for where to stop and for what is remembered."""
    x = np.arange(1000.0)

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
