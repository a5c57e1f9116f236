"""The NCCL communicator against NumPy, through every binding, over the stub library: no GPU, real sums.

The stub works on host memory with threads as ranks; ``test_nccl_gpu.py`` runs the same collectives on devices.
"""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from nccl_cases import COMPLEXES, FLOATS, NUMPY_REDUCTIONS, SUPPORTED, random_array
from nccl_fakes import Stub, as_buffer, run_ranks

from synk.communicators import Buffer, Communicator
from synk.cuda._nccl import NcclCommunicator, pack_scalar
from synk.cuda._nccl_bindings import Binding
from synk.cuda._nccl_library import NcclError
from synk.errors import ClosedError, UnsupportedError

# ----- results


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_reduce_equals_numpy(subtests: pytest.Subtests, binding: Binding, world_size: int) -> None:
    """Into another buffer and in place, weighted by rows and not."""
    weights = np.arange(1, world_size + 1) / (world_size * (world_size + 1) / 2)

    def body(communicator: NcclCommunicator) -> list[list[np.ndarray]]:
        rank, found = communicator.rank, []
        for op, dtype in SUPPORTED:
            mine = random_array((world_size, 5), dtype)[rank]
            received, same, weighted = np.empty_like(mine), mine.copy(), mine.copy()
            communicator.all_reduce(as_buffer(mine), as_buffer(received), op)
            communicator.all_reduce(as_buffer(same), as_buffer(same), op)
            if op == "avg":
                communicator.all_reduce(as_buffer(weighted), as_buffer(weighted), op, weight=weights[rank])
            found.append([received, same, weighted])
        data = np.ones(1)
        for _ in range(100):  # NCCL has room for few weighted sums at a time, the stub for 64
            communicator.all_reduce(as_buffer(data), as_buffer(data), "avg", weight=1 / world_size)
        return found

    for results in run_ranks(binding, world_size, body):
        for (op, dtype), (received, same, weighted) in zip(SUPPORTED, results, strict=True):
            with subtests.test(op=op, dtype=dtype):
                sent = random_array((world_size, 5), dtype)
                tolerance = 1e-3 if dtype == "float16" else 1e-6
                expected = NUMPY_REDUCTIONS[op](sent).astype(dtype)
                np.testing.assert_allclose(received, expected, rtol=tolerance)
                np.testing.assert_array_equal(same, received)
                if op == "avg":
                    whole = sent.astype("complex128" if dtype in COMPLEXES else "float64")
                    expected = np.average(whole, axis=0, weights=weights)
                    np.testing.assert_allclose(weighted, expected, rtol=tolerance, atol=2 * tolerance)


@pytest.mark.parametrize("max_count", [4, NcclCommunicator.max_count])
def test_collectives_equal_numpy_and_so_do_their_pieces(
    subtests: pytest.Subtests, binding: Binding, stub: Stub, monkeypatch: pytest.MonkeyPatch, max_count: int
) -> None:
    """Whether they go in one call or in pieces. Those that only move take any dtype."""
    monkeypatch.setattr(NcclCommunicator, "max_count", max_count)
    for count, dtype in [*itertools.product((1, 4, 5, 11), ("float64", "complex64")), (3, "int16"), (3, "bool")]:
        sent = random_array((3, 3 * count), dtype)

        def body(communicator: NcclCommunicator, count: int = count, sent: np.ndarray = sent) -> list[np.ndarray]:
            mine = sent[communicator.rank]
            gathered, copied = np.zeros(count * 9, sent.dtype), mine.copy()
            total, block, at_root = (np.zeros(length, sent.dtype) for length in (3 * count, count, 3 * count))
            communicator.all_gather(as_buffer(mine), as_buffer(gathered))
            communicator.broadcast(as_buffer(copied), root=2)
            if sent.dtype.kind in "fc":
                communicator.all_reduce(as_buffer(mine), as_buffer(total), "sum")
                communicator.reduce_scatter(as_buffer(mine), as_buffer(block), "sum")
                communicator.reduce(as_buffer(mine), as_buffer(at_root), "sum", root=1)
            return [gathered, copied, total, block, at_root]

        with subtests.test(count=count, dtype=dtype):
            expected = sent.sum(axis=0) if sent.dtype.kind in "fc" else np.zeros(3 * count, dtype)
            for rank, (gathered, copied, total, block, at_root) in enumerate(run_ranks(binding, 3, body)):
                np.testing.assert_array_equal(gathered, sent.ravel())
                np.testing.assert_array_equal(copied, sent[2])
                np.testing.assert_array_equal(total, expected)
                np.testing.assert_array_equal(block, expected[rank * count : (rank + 1) * count])
                np.testing.assert_array_equal(at_root, expected * (rank == 1))
    assert max(call.count for call in stub.calls() if call.name not in ("init", "destroy")) <= max_count


def test_groups_streams_nan_and_empty_buffers(binding: Binding, stub: Stub) -> None:
    """A group is launched at its end, an empty buffer makes no call, NaN is dropped by max as the capabilities say."""
    sent = np.array([[np.nan, 1.0], [2.0, 3.0]])

    def body(communicator: NcclCommunicator) -> list[list[float]]:
        assert all(callable(getattr(communicator, name)) for name in vars(Communicator) if not name.startswith("_"))
        capabilities, rank = communicator.capabilities(), communicator.rank
        assert (capabilities.version, capabilities.nan_propagates) == ("2.32.3", False)
        assert set(capabilities.ops) == set(NUMPY_REDUCTIONS)
        empty = Buffer(0, 0, "float32")
        communicator.all_reduce(empty, empty, "sum")
        communicator.reduce_scatter(empty, empty, "max")
        communicator.all_gather(empty, empty)
        communicator.broadcast(empty, 0)
        x, y, largest = np.full(2, rank + 1.0), np.full(3, rank + 1, "int64"), sent[rank].copy()
        with communicator.group():
            communicator.all_reduce(as_buffer(x), as_buffer(x), "avg", stream=2**40 + 5)
            communicator.all_reduce(as_buffer(y), as_buffer(y), "prod", stream=2**40 + 5)
            communicator.all_reduce(as_buffer(largest), as_buffer(largest), "max", stream=2**40 + 5)
            assert x[0] == rank + 1.0
        return [x.tolist(), y.tolist(), largest.tolist()]

    assert run_ranks(binding, 2, body) == [[[1.5, 1.5], [2, 2, 2], [2.0, 3.0]]] * 2
    calls = stub.calls("all_reduce", "reduce_scatter", "all_gather", "broadcast")
    assert [(call.group_depth, call.stream) for call in calls] == [(1, 2**40 + 5)] * 6


def test_weights_are_rounded_as_numpy_and_torch_do() -> None:
    for value, dtype in itertools.product((0.0, 1.0, 1 / 3, 0.1, 2**-14, 0.999999), FLOATS):
        assert pack_scalar(value, dtype) == np.array(value, dtype).tobytes()
    torch = pytest.importorskip("torch")
    for value in (0.5 + 2**-9, 0.5 + 3 * 2**-9, 1 / 3):  # the first two to the even neighbour: one down, one up
        expected = torch.tensor(value, dtype=torch.float32).to(torch.bfloat16).view(torch.int16).numpy()
        assert pack_scalar(float(np.float32(value)), "bfloat16") == expected.tobytes()


# ----- refusals, before anything is launched


REFUSED = [
    ("avg", "int32", TypeError),
    ("max", "complex64", TypeError),
    ("prod", "complex64", UnsupportedError),
    ("sum", "int16", UnsupportedError),
    ("median", "float32", ValueError),
]


def test_what_nccl_does_not_have_is_refused(binding: Binding, stub: Stub) -> None:
    def body(communicator: NcclCommunicator) -> None:
        for op, dtype, error in REFUSED:
            data = as_buffer(np.zeros(2, dtype))
            for reduce in (communicator.all_reduce, functools.partial(communicator.reduce, root=0)):
                with pytest.raises(error, match="cannot"):
                    reduce(data, data, op)
        x, y = Buffer(64, 4, "float32"), Buffer(64, 5, "float32")
        for call in (
            lambda: communicator.all_reduce(x, y, "sum"),
            lambda: communicator.all_gather(x, x),
            lambda: communicator.reduce_scatter(y, y, "sum"),
            lambda: communicator.broadcast(x, 2),
            lambda: communicator.all_reduce(x, x, "sum", weight=0.5),
        ):
            with pytest.raises(ValueError, match=r"cannot .*: got"):
                call()

    run_ranks(binding, 2, body)
    assert not stub.calls("all_reduce", "reduce", "abort")
    for unique_id, rank, world_size in ((b"x" * 128, 0, 1), (b"x" * 127, 0, 2), (b"x" * 128, 2, 2)):
        with pytest.raises(ValueError, match="cannot join an NCCL group"):
            NcclCommunicator(binding, unique_id, rank, world_size)


# ----- joining, failing, ending


def join(binding: Binding, **options: Any) -> NcclCommunicator:
    """Return rank 0 of a group of two whose other rank never comes."""
    return NcclCommunicator(binding, binding.new_unique_id(), 0, 2, **options)


def reduce_alone(communicator: NcclCommunicator) -> None:
    data = np.ones(3)
    communicator.all_reduce(as_buffer(data), as_buffer(data), "sum")


def test_every_wait_ends(subtests: pytest.Subtests, binding: Binding, stub: Stub) -> None:
    """Joining and waiting end at their limit, when the runtime gives the group up, and on NCCL's own errors."""

    def ends(name: str, act: Callable[[], object], code: int, text: str) -> None:
        with subtests.test(name=name):
            with pytest.raises(NcclError, match=text) as info:
                act()
            assert info.value.code == code
            assert len(stub.calls("abort")) <= 1 and not stub.calls("destroy")
        stub.reset()

    stub.set("init_polls", -1)
    refused = r"cannot join an NCCL group as rank 0 of 2: .*not done after 0\.05 s"
    ends("joining, at its limit", lambda: join(binding, timeout_s=0.05), 8, refused)
    stub.set("init_polls", -1)
    stub.set("is_stuck", 1)
    ends("joining, given up", lambda: join(binding, is_broken=lambda: True), 6, "another worker died or failed")
    given_up: list[bool] = []
    reducing, waiting, left = (join(binding, is_broken=lambda: bool(given_up)) for _ in range(3))
    stub.set("fail_code", 3)
    text = r"cannot all_reduce 3 float64 by 'sum': got ncclInternalError \(3\).*the stub was told to fail"
    ends("a collective, refused", lambda: reduce_alone(reducing), 3, text)
    ends("a wait, at its limit", lambda: waiting.wait(lambda: False, timeout_s=0.02), 8, r"not done after 0\.02")
    given_up.append(True)
    ends("a wait, given up", lambda: left.wait(lambda: False), 6, "another worker died or failed")


def test_an_abort_frees_a_rank_that_waits(binding: Binding, stub: Stub) -> None:
    """From another thread, once. An error inside of a group aborts what was issued."""
    communicator = join(binding)

    def abort() -> None:
        while not stub.calls("all_reduce"):
            pass
        communicator.abort()

    watchdog = threading.Thread(target=abort)
    watchdog.start()
    with pytest.raises(NcclError) as info:  # rank 1 never comes: without the abort this waits for ever
        reduce_alone(communicator)
    watchdog.join()
    assert info.value.code == 6
    with pytest.raises(NcclError, match="was aborted"):
        reduce_alone(communicator)
    communicator.abort()
    communicator.close()
    assert (communicator.poll(), len(stub.calls("abort"))) == ("error", 1)
    stub.reset()
    stub.set("is_computing", 0)

    def body(communicator: NcclCommunicator) -> None:
        with pytest.raises(ZeroDivisionError), communicator.group():
            reduce_alone(communicator)
            raise ZeroDivisionError
        communicator.close()
        with pytest.raises(ClosedError, match="cannot broadcast 1 int8: the communicator is closed"):
            communicator.broadcast(Buffer(64, 1, "int8"), 0)

    run_ranks(binding, 2, body)
    assert len(stub.calls("abort")) == 2 and not stub.calls("destroy")
