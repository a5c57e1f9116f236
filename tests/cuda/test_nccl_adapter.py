"""The NCCL communicator against NumPy, over the stub library: no GPU, real sums.

It works on host memory with threads as ranks. Over the stand-in for CuPy's module, and on devices, the communicator is
that of calls: ``backends/test_conformance.py``.
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from nccl_fakes import Stub, as_buffer, run_ranks
from support.rank_arrays import REDUCIBLE, numbers, reduced

from synk.cuda._nccl import Buffer, NcclCommunicator, NcclError, load_nccl, nccl_environment
from synk.errors import SynkError

# ----- results

SUPPORTED = [(op, dtype) for op, dtype in REDUCIBLE if (op, dtype[:7]) != ("prod", "complex")]


@pytest.mark.parametrize("world_size", [2, 3])
def test_all_reduce_equals_numpy(subtests: pytest.Subtests, over_stub: Any, world_size: int) -> None:
    """Into another buffer and in place."""

    def body(communicator: NcclCommunicator) -> list[list[np.ndarray]]:
        rank, found = communicator.rank, []
        for op, dtype in SUPPORTED:
            mine = numbers(dtype, (world_size, 5), 0)[rank]
            received, same = np.empty_like(mine), mine.copy()
            communicator.all_reduce(as_buffer(mine), as_buffer(received), op)
            communicator.all_reduce(as_buffer(same), as_buffer(same), op)
            found.append([received, same])
        return found

    for results in run_ranks(over_stub, world_size, body):
        for (op, dtype), (received, same) in zip(SUPPORTED, results, strict=True):
            with subtests.test(op=op, dtype=dtype):
                tolerance = 1e-3 if dtype == "float16" else 1e-6
                expected = reduced(op, numbers(dtype, (world_size, 5), 0))
                np.testing.assert_allclose(received, expected, rtol=tolerance)
                np.testing.assert_array_equal(same, received)


def test_collectives_equal_numpy(subtests: pytest.Subtests, over_stub: Any) -> None:
    """Those that only move take any dtype."""
    for count, dtype in [*itertools.product((1, 4, 11), ("float64", "complex64")), (3, "int16"), (3, "bool")]:
        sent = numbers(dtype, (3, 3 * count), 0)

        def body(communicator: NcclCommunicator, count: int = count, sent: np.ndarray = sent) -> list[np.ndarray]:
            mine = sent[communicator.rank]
            gathered, copied = np.zeros(count * 9, sent.dtype), mine.copy()
            block, at_root = np.zeros(count, sent.dtype), np.zeros(3 * count, sent.dtype)
            communicator.all_gather(as_buffer(mine), as_buffer(gathered))
            communicator.broadcast(as_buffer(copied), root=2)
            if sent.dtype.kind in "fc":
                communicator.reduce_scatter(as_buffer(mine), as_buffer(block), "sum")
                communicator.reduce(as_buffer(mine), as_buffer(at_root), "sum", root=1)
            return [gathered, copied, block, at_root]

        with subtests.test(count=count, dtype=dtype):
            expected = sent.sum(axis=0) if sent.dtype.kind in "fc" else np.zeros(3 * count, dtype)
            for rank, (gathered, copied, block, at_root) in enumerate(run_ranks(over_stub, 3, body)):
                np.testing.assert_array_equal(gathered, sent.ravel())
                np.testing.assert_array_equal(copied, sent[2])
                np.testing.assert_array_equal(block, expected[rank * count : (rank + 1) * count])
                np.testing.assert_array_equal(at_root, expected * (rank == 1))


def test_groups_streams_nan_and_empty_buffers(over_stub: Any, stub: Stub) -> None:
    """A group is launched at its end, an empty buffer makes no call, NaN is dropped by max."""
    sent = np.array([[np.nan, 1.0], [2.0, 3.0]])

    def body(communicator: NcclCommunicator) -> list[list[float]]:
        rank, empty = communicator.rank, Buffer(0, 0, "float32")
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

    assert run_ranks(over_stub, 2, body) == [[[1.5, 1.5], [2, 2, 2], [2.0, 3.0]]] * 2
    calls = stub.calls("all_reduce", "reduce_scatter", "all_gather", "broadcast")
    assert [(call.group_depth, call.stream) for call in calls] == [(1, 2**40 + 5)] * 6


# ----- pynccl


def test_pynccl_is_chosen_by_the_environment(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds the library by a variable of its own. It all-reduces; ids and counts arrive whole."""
    pytest.importorskip("pynccl.binding", reason="pynccl is not installed; `make test` installs it")
    monkeypatch.setattr("pynccl.binding.libnccl", lambda: types.SimpleNamespace(dll=ctypes.CDLL(str(stub.path))))
    nccl = load_nccl({"SYNK_NCCL_BINDING": "pynccl"})
    first, second = nccl.get_unique_id(), nccl.get_unique_id()
    assert (len(first), first[0], first[126], first != second, nccl.get_version()) == (128, 0, 0, True, 23203)

    def body(communicator: NcclCommunicator) -> list[float]:
        data = np.full(3, communicator.rank + 1.0)
        communicator.all_reduce(as_buffer(data), as_buffer(data), "sum")
        return data.tolist()

    assert run_ranks(nccl, 2, body) == [[3.0] * 3] * 2
    comm = nccl.NcclCommunicator(2, first, 0)
    nccl.groupStart()  # queued, not run: there is no memory behind the pointers
    comm.allReduce(64, 128, 2**40 + 5, 7, 0, 3)
    comm.abort()
    with pytest.raises(nccl.NcclError):
        nccl.groupEnd()
    call = stub.calls("all_reduce")[-1]
    assert (call.count, call.dtype, call.stream) == (2**40 + 5, 7, 3)
    with pytest.raises(ValueError, match="got SYNK_NCCL_BINDING='torch', expected cupy or pynccl"):
        load_nccl({"SYNK_NCCL_BINDING": "torch"})


# ----- joining, failing, ending


def join(nccl: Any, **options: Any) -> NcclCommunicator:
    """Return rank 0 of a group of two whose other rank never comes; in the stub joining does not wait for it."""
    return NcclCommunicator(nccl, nccl.get_unique_id(), 0, 2, **options)


def reduce_alone(communicator: NcclCommunicator) -> None:
    data = np.ones(3)
    communicator.all_reduce(as_buffer(data), as_buffer(data), "sum")


ENDS: dict[str, tuple[dict[str, int], Callable[[Any], object], int, str]] = {
    "joining, at its limit": (
        {"is_stuck": 1},
        lambda nccl: join(nccl, timeout_s=0.05),
        8,
        r"cannot join an NCCL group as rank 0 of 2: got .*not done after 0\.05 s",
    ),
    "joining, given up": ({"is_stuck": 1}, lambda nccl: join(nccl, is_broken=lambda: True), 6, "another worker died"),
    "joining, refused": ({"fail_code": 2}, join, 2, "cannot join .* got NCCL's status 2"),
    "a wait, at its limit": ({}, lambda nccl: join(nccl).wait(lambda: False, timeout_s=0.02), 8, r"after 0\.02 s"),
    "a wait, on NCCL's error": ({"async_code": 6}, lambda nccl: join(nccl).wait(lambda: False), 6, "NCCL's status 6"),
}


def test_every_wait_ends(subtests: pytest.Subtests, over_stub: Any, stub: Stub) -> None:
    """Joining and waiting end at their limit, when the runtime gives the group up, and on NCCL's own errors."""
    for name, (knobs, act, code, text) in ENDS.items():
        for knob, value in knobs.items():
            stub.set(knob, value)
        if name == "joining, refused":
            over_stub.get_unique_id = lambda: b"x" * 128  # which would be refused as well
        with subtests.test(name=name):
            with pytest.raises(NcclError, match=text) as info:
                act(over_stub)
            assert info.value.code == code
            assert len(stub.calls("abort")) == name.startswith("a wait") and not stub.calls("destroy")
        stub.reset()
    given_up: list[bool] = []
    communicator = join(over_stub, is_broken=lambda: bool(given_up))
    stub.set("fail_code", 3)
    with pytest.raises(NcclError, match=r"cannot all_reduce 3 float64 by 'sum': got NCCL's status 3"):
        reduce_alone(communicator)
    given_up.append(True)
    with pytest.raises(NcclError, match="another worker died or failed"):
        communicator.wait(lambda: False)


def test_a_dead_peer_frees_a_rank_that_is_stuck_in_a_launch(over_stub: Any, stub: Stub) -> None:
    """The thread aborts once the master has told the group; all know of it before."""
    dead, told = threading.Event(), threading.Event()
    communicator = join(over_stub, is_broken=dead.is_set, give_up=told.set)

    def die() -> None:
        while not stub.calls("all_reduce"):
            pass
        dead.set()

    threading.Thread(target=die).start()
    with pytest.raises(NcclError, match="another worker died") as info:  # without the abort this waits for ever
        reduce_alone(communicator)
    assert (info.value.code, told.is_set(), communicator.has_failed) == (6, True, True)
    with pytest.raises(NcclError, match="another worker died"):
        reduce_alone(communicator)
    communicator.abort()
    communicator.close()
    assert len(stub.calls("abort")) == 1 and not stub.calls("destroy")


def test_an_error_inside_of_a_group_gives_it_up(over_stub: Any, stub: Stub) -> None:
    stub.set("is_computing", 0)

    def body(communicator: NcclCommunicator) -> None:
        with pytest.raises(ZeroDivisionError), communicator.group():
            reduce_alone(communicator)
            raise ZeroDivisionError
        communicator.close()
        with pytest.raises(NcclError, match="cannot broadcast 1 int8: got a group of operations that was broken off"):
            communicator.broadcast(Buffer(64, 1, "int8"), 0)

    run_ranks(over_stub, 2, body)
    assert len(stub.calls("abort")) == 2 and not stub.calls("destroy")


def test_errors_survive_pickling() -> None:
    error = NcclError(6, "a peer that is gone", "all_reduce 3 float32 by 'sum'")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, SynkError) and vars(copy) == vars(error)
    assert str(copy) == "cannot all_reduce 3 float32 by 'sum': got a peer that is gone."


def test_the_environment_of_workers() -> None:
    """NCCL is kept on loopback; what the user set stays; ranks that share a GPU may."""
    before = {"PATH": "/bin", "NCCL_COMM_ID": "10.0.0.1:5000", "NCCL_COMM_BLOCKING": "0"}
    ours = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_RAS_ENABLE": "0", "NCCL_NET_PLUGIN": "none", "NCCL_IB_DISABLE": "1"}
    ours |= {"NCCL_COMM_BLOCKING": "1"}
    assert nccl_environment(before) == {"PATH": "/bin", **ours}
    chosen = {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_RAS_ENABLE": "1", "NCCL_COMM_BLOCKING": "1", "NCCL_DEBUG": "INFO"}
    chosen |= {"NCCL_NET_PLUGIN": "aws-ofi", "NCCL_IB_DISABLE": "0"}
    assert nccl_environment(chosen) == chosen
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
    assert nccl_environment({"NCCL_NVLS_ENABLE": "1"}, ranks_per_device=4) == {**ours, **shared}
