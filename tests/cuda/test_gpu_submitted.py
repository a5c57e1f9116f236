"""Submitted calls on GPU workers: the inputs of a call come to the device while the one before it computes.

On the stand-in for CuPy a copy on a second stream arrives only when somebody waits for it, so an array that is used too
early holds rubbish. What a GPU does with it is in ``test_gpu_calls.py``.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import same_workers
from test_gpu_path import LARGE

import synk
from synk.errors import CallCancelled, CallTimeout


class Gate:
    """Where calls wait until those behind them have been submitted.

    ``submit`` itself may have to wait for the calls in flight, so none of them waits for ever.
    """

    NUM_AT_ONCE = 3
    """So many calls are sent before the first has ended, where nothing else is to be sent."""
    PATIENCE_S = 2.0

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def submit(self, calls: Iterable[tuple[synk.Function, tuple[Any, ...], dict[str, Any]]]) -> list[Any]:
        """Submit calls. Return their results: the first does not end before the third is sent, if that can be."""
        Path(self.path).unlink(missing_ok=True)
        pending = []
        for f, args, options in calls:
            pending.append(f.submit(*args, **options))
            if len(pending) == self.NUM_AT_ONCE:
                Path(self.path).touch()
        return [call.result() for call in pending]

    def wait(self) -> float:
        """Inside a function: once the gate is open return how many inputs were brought before the call began."""
        from synk._wire.cell import cell

        worker: Any = cell.worker
        count: int = worker.num_ahead
        deadline = time.monotonic() + self.PATIENCE_S
        while not os.path.exists(self.path) and time.monotonic() < deadline:
            time.sleep(0.001)
        return float(count)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "open")


def reader(rt: synk.Runtime, gate: Gate) -> synk.Function:
    """A function that says how many of its inputs were there when it began."""
    return rt.function(lambda x, w: (x.sum(axis=0) * w, gate.wait()), bcast_inputs="w", outputs=("sum", "max"))


BATCHES = [None, 17, slice(None, None, -1), [5, 3, 3, 99, 0]]


@pytest.mark.parametrize("num_workers", [1, 3])
def test_inputs_are_brought_ahead_and_are_right(
    subtests: pytest.Subtests, gpu: Any, gate: Gate, num_workers: int
) -> None:
    rt = gpu(num_workers)
    rows = np.random.default_rng(0).standard_normal((101, 5))
    f, data, num_ahead = reader(rt, gate), rt.data(rows), 0.0
    for batch in BATCHES:
        with subtests.test(batch=batch):
            index = slice(batch) if isinstance(batch, int) else slice(None) if batch is None else batch
            calls = [(f, (data if k % 2 else rows + k, np.float64(k)), {"batch": batch}) for k in range(8)]
            for _ in range(2):  # the second time all lanes know the calls
                results = gate.submit(calls)
                for k, (got, _) in enumerate(results):
                    right = (rows if k % 2 else rows + k)[index].sum(axis=0) * k
                    np.testing.assert_allclose(got, right, rtol=1e-12, atol=1e-12)
                num_ahead += results[1][1]
    assert num_ahead > 0, "the inputs of a second call were there when the first had ended"


def test_without_room_for_the_inputs_of_two_calls_each_brings_its_own(gpu: Any, gate: Gate) -> None:
    rt = gpu(2)

    def spoil(x: Any) -> None:
        import cupy

        def alloc(size: int) -> Any:
            raise cupy.cuda.memory.OutOfMemoryError(1, 1)

        cupy.cuda.alloc = alloc  # of memory beside the stream

    f = reader(rt, gate)
    rt.function(spoil, outputs=None)(np.ones(2))
    for _ in range(2):
        results = gate.submit((f, (np.full((1000, 4), float(k)), np.float64(2.0)), {}) for k in range(6))
        for k, (got, num_ahead) in enumerate(results):
            assert (got == 2000.0 * k).all() and num_ahead == 0


def test_inputs_that_a_function_keeps_for_the_next_call(rt: Any, gate: Gate) -> None:
    """Their memory goes to other inputs when they are dropped, and not before."""
    kept: list[Any] = []

    def keep(x: Any) -> Any:
        gate.wait()
        kept.append(x)
        return kept.pop(0).sum() if len(kept) > 1 else 0.0 * x.sum()

    f = rt.function(keep, outputs="sum")
    results = gate.submit((f, (np.full(10, float(k)),), {}) for k in range(12))
    assert results == [0.0, *(10.0 * k for k in range(11))]


def test_inputs_that_are_brought_ahead_after_a_function_kept_some(rt: Any, gate: Gate) -> None:
    """What it keeps of its objects stays as it is; the calls behind it read other memory."""
    kept = []
    f = reader(rt, gate)
    keep = rt.function(lambda x, held: kept.append(held["names"]), bcast_inputs="held", outputs=None)
    names = np.array(["a", "b"])
    for _ in range(3):
        results = gate.submit((f, (np.full((10, 4), float(k)), np.float64(1.0)), {}) for k in range(6))
        assert [got[0] for got, _ in results] == [10.0 * k for k in range(6)]
        for call in [keep.submit(np.ones(2), {"names": names}) for _ in range(3)]:
            call.result()
    assert (
        rt.function(lambda: [each.tolist() for each in kept], outputs=None, per_rank=True)() == [[["a", "b"]] * 9] * 2
    )


def test_large_outputs_that_a_function_changes_in_place(rt: Any) -> None:
    """On the device and on the host: each call returns what it computed, not what a later one made of it."""
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
                expected = (k + 2) * (2 if op == "sum" else 1)
                assert (np.concatenate(got) == expected).all() if op is None else (got == expected).all()


def test_large_outputs_of_a_call_before_one_that_fails(rt: Any) -> None:
    large = rt.function(lambda x: (x.repeat(LARGE), x.sum().repeat(LARGE)), outputs=("gather", "sum"))

    def fail(x: Any) -> None:
        if synk.comm.rank:
            raise KeyError("mine")

    fails = rt.function(fail, outputs=None)
    for _ in range(2):
        pending = [f.submit(np.arange(2.0)) for f in (large, fails, large, fails, large)]
        for call in pending[::2]:
            rows, total = call.result()
            assert (rows == np.arange(2.0).repeat(LARGE)).all() and (total == 1.0).all()
        for call in pending[1::2]:
            with pytest.raises(KeyError):
                call.result()


def test_an_array_on_its_way_to_the_device_is_not_the_users(gpu: Any) -> None:
    """The copy may still be running when the function changes its array, and when nobody holds it any more."""
    rt = gpu.reused(1)
    variables = [rt.shared(np.zeros(LARGE)) for _ in range(3)]

    def assign(x: Any) -> float:
        for k, variable in enumerate(variables):
            host = np.full(LARGE, float(k))
            variable.value = host
            host[:] = 9.0
        return 0.0

    rt.function(assign, outputs="first")(np.ones(1))
    for k, variable in enumerate(variables):
        assert (variable.value == float(k)).all()


def test_torch_and_slices_and_large_outputs(rt: Any) -> None:
    f = rt.function(lambda x: (x * 2, x.sum()), outputs=("gather", "sum"))
    large = rt.function(lambda x: (x.sum() + 0 * x[0]).repeat(LARGE), outputs="sum")
    pending = [
        (f.submit(np.full(20, float(k)), num_slices=1 + k % 3), large.submit(np.full(4, float(k)))) for k in range(10)
    ]
    for k, (call, large_call) in enumerate(pending):
        gathered, total = call.result()
        assert (gathered == 2 * k).all() and gathered.shape == (20,) and total == 20 * k
        got = large_call.result()
        assert got.shape == (LARGE,) and (got == 4.0 * k).all()


def test_a_time_limit_with_inputs_on_their_way(rt: Any, gate: Gate) -> None:
    f, rows = reader(rt, gate), np.ones((10, 4))
    hangs = rt.function(lambda x: (signal.pause() if x[0] else None, x.sum())[1], outputs="sum")
    gate.submit([(f, (rows, np.float64(1.0)), {})] * 3 + [(hangs, (np.zeros(2),), {})] * 3)
    with same_workers(rt):
        slow, behind = hangs.submit(np.ones(2), timeout=0.3), f.submit(rows, np.float64(1.0))
        for call, error in ((slow, CallTimeout), (behind, CallCancelled)):
            with pytest.raises(error):
                call.result()
        results = gate.submit((f, (rows, np.float64(k)), {}) for k in range(6))
        assert [got[0] for got, _ in results] == [10.0 * k for k in range(6)]


def test_variables_on_devices_between_submitted_calls(gpu: Any) -> None:
    rt = gpu.reused(3)
    w, data = rt.shared(np.zeros(4)), rt.data(np.ones(6))

    def step(x: Any) -> Any:
        w.value = w.value * 2 + x.mean()
        return w.value

    f, plain = rt.function(step, outputs="avg"), rt.function(lambda x: x.sum(axis=0), outputs="sum")
    expected, pending = np.zeros(4), []
    for k in range(8):
        source, value = (data, 1.0) if k % 2 else (np.full(6, float(k)), float(k))
        expected = expected * 2 + value
        pending.append((f.submit(source), expected))
        if k % 3 == 2:
            pending.append((plain.submit(np.full((6, 2), float(k))), np.full(2, 6.0 * k)))
    for call, right in pending:
        np.testing.assert_allclose(call.result(), right)
    np.testing.assert_allclose(w.value, expected)
