"""Submitted calls on GPU workers: the inputs of a call come to the device while the one before it computes.

On the stand-in for CuPy a copy on a second stream arrives only when somebody waits for it, so an array that is used too
early holds rubbish. What a GPU does with it is in ``test_gpu_calls.py``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from support.fake_gpus import Gpus
from support.harness import assert_right, same_workers
from test_gpu_path import LARGE

import synk
from synk.errors import CallCancelled, CallTimeout


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, reuse: Any) -> Iterator[Gpus]:
    made = Gpus(monkeypatch, True, reuse)
    yield made
    while made.opened:
        made.opened.pop().close()


def num_ahead() -> int:
    """Inside a function: how many inputs of this call were brought before it began."""
    from synk._wire.cell import cell

    return cell.worker.executor.inputs.num_ahead


def reader(rt: synk.Runtime) -> synk.Function:
    """A function that takes some time and says how many of its inputs were there when it began."""

    def read(x: Any, w: Any) -> Any:
        count = num_ahead()
        time.sleep(0.01)
        return x.sum(axis=0) * w, float(count)

    return rt.function(read, bcast_inputs="w", outputs=("sum", "max"), name="read")


@pytest.mark.parametrize("num_workers", [1, 3])
@pytest.mark.parametrize(
    "batch",
    [None, 17, slice(3, 90, 7), slice(None, None, -1), [5, 3, 3, 99, 0]],
    ids=["all", "first", "step", "back", "list"],
)
@pytest.mark.sampled(90)
def test_inputs_are_brought_ahead_and_are_right(gpu: Any, num_workers: int, batch: Any) -> None:
    rt = gpu.reused(num_workers)
    f = reader(rt)
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((101, 5))
    data = rt.data(rows)
    index = slice(batch) if isinstance(batch, int) else slice(None) if batch is None else batch
    sources = [data if k % 2 else rows + k for k in range(12)]
    expected = [(rows if k % 2 else rows + k)[index].sum(axis=0) * k for k in range(12)]
    for _ in range(2):
        pending = [f.submit(source, np.float64(k), batch=batch) for k, source in enumerate(sources)]
        results = [call.result() for call in pending]
    for (got, _), right in zip(results, expected):
        np.testing.assert_allclose(got, right, rtol=1e-12, atol=1e-12)
    assert sum(count > 0 for _, count in results) >= 6, "the first has none before it"


@pytest.mark.parametrize("refuse", ["", "1"])
def test_it_does_not_matter_whether_memory_can_be_registered(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, refuse: str
) -> None:
    monkeypatch.setenv("SYNK_FAKE_REFUSE", refuse)
    rt = gpu(2)
    f = reader(rt)
    for _ in range(3):
        pending = [f.submit(np.full((1000, 4), float(k)), np.float64(2.0)) for k in range(6)]
        for k, call in enumerate(pending):
            assert (call.result()[0] == 2000.0 * k).all()


def test_no_room_for_the_inputs_of_two_calls(gpu: Any) -> None:
    """Then each call brings its own when it runs."""
    rt = gpu(2)

    def spoil(x: Any) -> None:
        import cupy

        def alloc(size: int) -> Any:
            raise cupy.cuda.memory.OutOfMemoryError(1, 1)

        cupy.cuda.alloc = alloc  # of memory beside the stream

    f = reader(rt)
    rt.function(spoil, outputs=None)(np.ones(2))
    pending = [f.submit(np.full((10, 4), float(k)), np.float64(2.0)) for k in range(8)]
    for k, call in enumerate(pending):
        got, count = call.result()
        assert (got == 20.0 * k).all() and count == 0


def test_memory_of_inputs_comes_back_when_the_device_is_done(gpu: Any) -> None:
    """It goes to the inputs of the next call, which arrive beside the work in flight; also that of inputs which a
    function has kept from one call and dropped in another.
    """
    rt = gpu(2)

    def watch(x: Any) -> None:
        import cupy

        cupy.num_waiting = []
        cupy.kept = None
        original = cupy.cuda.Stream.synchronize

        def synchronize(self: Any) -> None:
            from synk._wire.cell import cell

            backend: Any = cell.worker.backend  # type: ignore[union-attr]
            if self is backend.stream:
                cupy.num_waiting.append(len(backend._returned))
            original(self)

        cupy.cuda.Stream.synchronize = synchronize

    def keep(x: Any) -> Any:
        import cupy

        previous, cupy.kept = cupy.kept, x
        total = 0.0 if previous is None else float(previous.sum())
        time.sleep(0.01)
        return total, float(num_ahead())

    def counts(x: Any) -> Any:
        import cupy

        cupy.kept = None
        return cupy.num_waiting

    f = rt.function(keep, outputs=("sum", "max"))
    rt.function(watch, outputs=None)(np.ones(2))
    results = [call.result() for call in [f.submit(np.full(10, float(k))) for k in range(12)]]
    assert [total for total, _ in results] == [0.0, *(10.0 * k for k in range(11))]
    num_ahead_in_all = sum(count > 0 for _, count in results)
    assert num_ahead_in_all >= 6
    for waiting in rt.function(counts, outputs=None)(np.ones(2)):
        # Each block waits for the end of the call in which its array was dropped, the one after that it came for.
        assert 5 <= sum(waiting) <= num_ahead_in_all and max(waiting) <= 2


@pytest.mark.parametrize("num_workers", [1, 2])
def test_large_outputs_that_a_function_changes_in_place(gpu: Any, num_workers: int) -> None:
    """On the device and on the host: each call returns what it computed, not what a later one made of it."""
    rt = gpu.reused(num_workers)
    state: dict[str, Any] = {}

    def step(x: Any) -> Any:
        import cupy

        device = state.setdefault("device", cupy.ones(LARGE))
        host = state.setdefault("host", np.ones(LARGE))
        device += 1.0
        host += 1.0
        return device, host, device[1:], device * 1.0

    for op in ("sum", "gather", "first", None):
        f = rt.function(step, outputs=op)
        for k, call in enumerate([f.submit(np.ones(2)) for _ in range(7)]):
            for got in call.result():
                expected = (k + 2) * (num_workers if op == "sum" else 1)
                assert (np.concatenate(got) == expected).all() if op is None else (got == expected).all()
        assert f(np.ones(2))[0][0] is not None


def test_an_array_on_its_way_to_the_device_is_not_the_users(gpu: Any) -> None:
    """The copy may still be running when the function changes its array."""
    rt = gpu.reused(1)
    w = rt.shared(np.zeros(LARGE))

    def assign(x: Any) -> Any:
        from synk._wire.cell import cell

        host = np.full(LARGE, 3.0)
        w.value = host
        sources = cell.worker.backend._sources  # type: ignore[union-attr]
        return any(np.shares_memory(host, source) for source in sources), len(sources) > 0

    assert rt.function(assign, outputs="first")(np.ones(1)) == (False, True)
    assert (w.value == 3.0).all()


def test_torch_and_slices_and_large_outputs(gpu: Any) -> None:
    rt = gpu.reused(2)
    f = rt.function(lambda x: (x * 2, x.sum()), outputs=("gather", "sum"))
    large = rt.function(lambda x: (x.sum() + 0 * x[0]).repeat(LARGE), outputs="sum")
    pending = []
    for k in range(10):
        pending.append((f.submit(np.full(20, float(k)), num_slices=1 + k % 3), k))
        pending.append((large.submit(np.full(4, float(k))), k))
    for position, (call, k) in enumerate(pending):
        if position % 2:
            got = call.result()
            assert got.shape == (LARGE,) and (got == 4.0 * k).all()
        else:
            gathered, total = call.result()
            assert (gathered == 2 * k).all() and gathered.shape == (20,) and total == 20 * k


def test_a_time_limit_with_inputs_on_their_way(gpu: Any) -> None:
    rt = gpu.reused(2)
    f = reader(rt)
    for call in [f.submit(np.full((10, 4), float(k)), np.float64(1.0)) for k in range(4)]:
        call.result()
    g = rt.function(lambda x: (time.sleep(float(x[0])), x.sum())[1], outputs="sum", name="sleep")
    for call in [g.submit(np.zeros(2)) for _ in range(3)]:
        call.result()
    with same_workers(rt):
        slow = g.submit(np.full(2, 30.0), timeout=0.3)
        behind = [f.submit(np.full((10, 4), 1.0), np.float64(1.0)) for _ in range(2)]
        with pytest.raises(CallTimeout):
            slow.result()
        for call in behind:
            with pytest.raises(CallCancelled):
                call.result()
        assert_right(rt)
        pending = [f.submit(np.full((10, 4), float(k)), np.float64(1.0)) for k in range(6)]
        assert [call.result()[0][0] for call in pending] == [10.0 * k for k in range(6)]


def test_inputs_of_calls_on_variables_are_brought_ahead_too(gpu: Any) -> None:
    """They are sent when the call before them is committed, but their inputs come while it runs."""
    rt = gpu.reused(2)
    w = rt.shared(np.zeros(3))

    def step(x: Any) -> Any:
        count = num_ahead()
        time.sleep(0.01)
        w.value = w.value * 2 + x.mean(axis=0)
        return w.value, float(count)

    f = rt.function(step, outputs=("avg", "max"))
    data = rt.data(np.ones((8, 3)))
    expected = np.zeros(3)
    for _ in range(2):
        pending = []
        for k in range(8):
            source, value = (data, 1.0) if k % 2 else (np.full((8, 3), float(k)), float(k))
            expected = expected * 2 + value
            pending.append((f.submit(source), expected))
        counts = []
        for call, right in pending:
            got, count = call.result()
            np.testing.assert_allclose(got, right)
            counts.append(count)
    assert sum(count > 0 for count in counts) >= 5
    np.testing.assert_allclose(w.value, expected)


def test_variables_on_devices_between_submitted_calls(gpu: Any) -> None:
    rt = gpu.reused(3)
    w = rt.shared(np.zeros(4))

    def step(x: Any) -> Any:
        w.value = w.value + x.sum()
        return w.value

    f = rt.function(step, outputs="avg")
    plain = reader(rt)
    expected, pending = np.zeros(4), []
    for k in range(6):
        pending.append((plain.submit(np.full((6, 2), float(k)), np.float64(1.0)), np.full(2, 6.0 * k)))
        expected = expected + 2.0 * k
        pending.append((f.submit(np.full(6, float(k))), expected))
    for call, right in pending:
        got = call.result()
        np.testing.assert_allclose(got[0] if isinstance(got, tuple) else got, right)
    np.testing.assert_allclose(w.value, expected)


def test_what_a_copy_may_still_read_is_kept(gpu: Any) -> None:
    """Where devices read pageable memory themselves, a copy from it is still running when its call returns."""
    rt = gpu.reused(1)

    def body(x: Any) -> Any:
        import weakref

        from synk._wire.cell import cell

        backend: Any = cell.worker.backend  # type: ignore[union-attr]
        host = np.arange(1000.0)
        seen = weakref.ref(host)
        array = backend.from_host(host)
        del host
        is_kept = seen() is not None
        backend.synchronize()
        return is_kept, seen() is None, float(array.sum())

    assert rt.function(body, outputs="first")(np.ones(1)) == (True, True, 499500.0)
