"""Streams of batches, blocks of rows, calls that are awaited, and verbs that take lists."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import sys
import threading
import types
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import assert_right, replaced_workers, wait_for

import synk
from synk.errors import CallCancelled, WorkerDied

BATCHES = [np.arange(n, n + 5.0) for n in range(9)]


def totals(rt: synk.Runtime) -> Any:
    return rt.function(lambda x: x.sum(), outputs="sum", name="total")


# -- streams ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_workers", [1, 2, "inline"])
def test_a_stream_gives_the_results_of_the_calls(shared_runtimes: Any, num_workers: Any) -> None:
    total = totals(shared_runtimes[num_workers])
    assert list(total.stream(BATCHES)) == [x.sum() for x in BATCHES]
    assert list(total.stream(iter(BATCHES[:2]))) == [x.sum() for x in BATCHES[:2]]
    assert list(total.stream([])) == []


def test_batches_of_a_data_loader(shared_runtimes: Any) -> None:
    torch = pytest.importorskip("torch")
    rt = shared_runtimes[2]
    x, y = np.arange(12.0).reshape(6, 2), np.arange(6.0)
    dot = rt.function(lambda x, y: x.T @ y, outputs="sum")
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.tensor(x), torch.tensor(y)), batch_size=2)
    for k, result in enumerate(dot.stream(loader)):
        np.testing.assert_array_equal(result, x[2 * k : 2 * k + 2].T @ y[2 * k : 2 * k + 2])
    assert [float(v) for v in rt.function(lambda d: d["y"].sum(), outputs="sum").stream([{"y": y}])] == [15.0]
    pair = namedtuple("pair", "x y")
    f = rt.function(lambda p: (p.x * p.y).sum(), outputs="sum")
    assert [float(v) for v in f.stream([pair(y, y)])] == [float(y @ y)]


def test_a_stream_is_bounded_and_its_buffer_may_be_filled_again(shared_runtimes: Any) -> None:
    total = totals(shared_runtimes[2])
    buffer, pulled = np.zeros(4), itertools.count()

    def batches() -> Iterator[np.ndarray]:
        for n in pulled:
            buffer[:] = n
            yield buffer

    results = total.stream(batches())
    assert [float(v) for v in itertools.islice(results, 20)] == [4.0 * n for n in range(20)]
    assert next(pulled) <= 23
    results.close()
    assert_right(shared_runtimes[2])


def test_what_a_batch_or_the_iterable_raises(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def check(x: Any) -> Any:
        if x[0] == 4:
            raise LookupError("four")
        return x.sum()

    f, got = rt.function(check, outputs="sum"), []
    with pytest.raises(LookupError, match="four") as raised:
        for value in f.stream(np.full(5, float(n)) for n in range(9)):
            got.append(float(value))
    assert got == [0.0, 5.0, 10.0, 15.0]
    assert "for batch 4 of the stream of 'check'" in raised.value.__notes__

    def broken() -> Iterator[Any]:
        yield from BATCHES[:2]
        raise OSError("no more")

    got = []
    with pytest.raises(OSError, match="no more") as broke:
        for value in totals(rt).stream(broken()):
            got.append(float(value))
    assert got == [x.sum() for x in BATCHES[:2]]
    assert "for batch 2 of the stream of 'total'" in broke.value.__notes__
    with pytest.raises(TypeError, match="cannot stream 'total': got int, expected an iterable of batches"):
        totals(rt).stream(3)
    got = []
    with pytest.raises(ValueError, match="equal axis-0 lengths"):
        for value in rt.function(lambda x, y: x.sum(), outputs="sum").stream([(BATCHES[0],) * 2, (BATCHES[0], [1.0])]):
            got.append(value)
    assert got == [BATCHES[0].sum()]
    assert_right(rt)


def test_streams_maps_and_calls_between_one_another(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    total = totals(rt)
    for k, (a, b) in enumerate(zip(total.stream(BATCHES), rt.map(lambda n: n + 1, range(9)))):
        assert a == BATCHES[k].sum() and b == k + 1 and total(np.ones(3)) == 3.0


def test_progress_of_a_stream(shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def tqdm(results: Any, desc: str, total: Any) -> Iterator[Any]:
        seen.append((desc, total))
        return iter(results)

    module = types.ModuleType("tqdm.auto")
    module.tqdm = tqdm  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tqdm", types.ModuleType("tqdm"))
    monkeypatch.setitem(sys.modules, "tqdm.auto", module)
    total = totals(shared_runtimes[2])
    assert len(list(total.stream(BATCHES, progress=True))) == 9
    assert seen == [("total", 9)]


# -- calls that are awaited -------------------------------------------------------------------------------------------


def test_calls_are_awaited_while_other_tasks_run(shared_runtimes: Any, tmp_path: Path) -> None:
    rt = shared_runtimes[2]
    gate = tmp_path / "open"

    def wait(x: Any) -> Any:
        import time

        while not gate.exists():
            time.sleep(0.005)
        return x.sum()

    slow, total = rt.function(wait, outputs="sum"), totals(rt)
    gate.touch()
    slow(np.ones(2)), total(np.ones(2))  # to send a function waits for the calls before
    gate.unlink()

    async def opener() -> str:
        await asyncio.sleep(0.01)
        gate.touch()
        return "opened"

    async def main() -> list[Any]:
        calls = [slow.submit(np.full(4, 2.0)), total.submit(np.ones(3)), total.submit(np.ones(1 << 17))]
        return await asyncio.gather(*calls, opener(), *(asyncio.ensure_future(call) for call in calls))

    assert asyncio.run(main()) == [8.0, 3.0, float(1 << 17), "opened", 8.0, 3.0, float(1 << 17)]
    assert_right(rt)


def test_awaiting_gives_what_the_call_raises(reused: Any, tmp_path: Path) -> None:
    rt = reused(2)
    gate = tmp_path / "at"

    def stay(x: Any) -> Any:
        import time

        gate.touch()
        time.sleep(60)

    async def fail() -> Any:
        return await rt.function(lambda x: 1 / 0, outputs="sum").submit(np.ones(4))

    with pytest.raises(ZeroDivisionError):
        asyncio.run(fail())

    async def cancelled() -> None:
        call = rt.function(stay, outputs="sum").submit(np.ones(4))
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(call, 0.05)
        rt.interrupt()
        with pytest.raises(CallCancelled):
            await call

    asyncio.run(cancelled())
    gate.unlink(missing_ok=True)

    async def killed(victim: int) -> None:
        call = rt.function(stay, outputs="sum").submit(np.ones(4))
        while not gate.exists():
            await asyncio.sleep(0.005)
        os.kill(victim, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="rank 1 of 2"):
            await call

    with replaced_workers(rt, [1]) as before:
        asyncio.run(killed(before[1]))
        assert_right(rt)


def test_an_await_beside_a_thread_that_holds_the_runtime(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    total = totals(rt)
    is_over = threading.Event()

    def work() -> None:
        while not is_over.is_set():
            total(np.ones(3))

    thread = threading.Thread(target=work)

    async def main() -> list[Any]:
        return [await total.submit(np.full(3, float(n))) for n in range(5)]

    thread.start()
    try:
        assert asyncio.run(main()) == [3.0 * n for n in range(5)]
    finally:
        is_over.set()
        thread.join()


def test_done_callbacks(shared_runtimes: Any, caplog: pytest.LogCaptureFixture) -> None:
    rt = shared_runtimes[2]
    total, ended = totals(rt), []
    calls = [total.submit(np.full(3, float(n))) for n in range(3)]
    for call in calls:
        call.add_done_callback(lambda call: ended.append(float(call.result())))
    calls[0].add_done_callback(lambda call: 1 / 0)
    assert float(calls[2].result()) == 6.0 and ended == [0.0, 3.0, 6.0]
    assert "a callback of the call of 'total' failed" in caplog.text
    calls[1].add_done_callback(lambda call: ended.append("late"))
    assert ended[-1] == "late"
    call = total.submit(np.ones(3))
    call.add_done_callback(ended.append)
    assert wait_for(call.done) and ended[-1] is call
    call = total.submit(np.ones(3))
    call.add_done_callback(ended.append)
    assert_right(rt)  # any operation learns of the end
    assert ended[-1] is call


# -- verbs that take lists --------------------------------------------------------------------------------------------


def test_values_of_several_variables(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    a, b = rt.shared(np.zeros(3), name="a"), rt.shared(np.zeros((2, 2)), name="b")
    rt.set_value([a, b], [np.ones(3), np.full((2, 2), 2.0)])
    for got, expected in zip(rt.get_value([a, b], rank=1), (np.ones(3), np.full((2, 2), 2.0))):
        np.testing.assert_array_equal(got, expected)
    rt.set_value((a, b), (np.zeros(3), np.zeros((2, 2))), rank=1)
    assert [float(v.sum()) for v in rt.get_value((a, b), 0)] == [3.0, 8.0]
    assert [float(v.sum()) for v in rt.get_value((a, b), 1)] == [0.0, 0.0]
    rt.set_value([a, b], [np.arange(9.0).reshape(9)[:6], np.arange(8.0).reshape(4, 2)], batch=[0, 2])
    np.testing.assert_array_equal(rt.get_value(a), [0.0, 2.0])
    np.testing.assert_array_equal(rt.get_value([b])[0], [[0.0, 1.0], [4.0, 5.0]])
    with pytest.raises(ValueError, match="variable 'b'"):  # none of them, then
        rt.set_value([a, b], [np.zeros(2), np.zeros((2, 3))])
    np.testing.assert_array_equal(rt.get_value(a), [0.0, 2.0])
    with pytest.raises(ValueError, match="cannot set 2 variables: got 1 values, expected one value for each"):
        rt.set_value([a, b], [np.zeros(2)])
    assert rt.get_value([]) == []
