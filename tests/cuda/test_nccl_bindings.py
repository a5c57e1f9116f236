"""The bindings to NCCL over the stub library: which is chosen, what arrives; what workers are told of NCCL."""

from __future__ import annotations

import pickle
import sys
import threading

import pytest
from nccl_fakes import Stub, forget_mapped_libraries, make_binding

from synk.cuda._nccl_bindings import BINDINGS, Binding, load_binding
from synk.cuda._nccl_library import NcclError, find_library, nccl_environment
from synk.errors import SynkError, UnsupportedError


def test_arguments_arrive_whole_and_statuses_come_back(binding: Binding, stub: Stub) -> None:
    """Ids of 128 bytes with zeros among them, counts beyond 32 bits. Other threads run while a call is in NCCL."""
    first, second = binding.new_unique_id(), binding.new_unique_id()
    assert (len(first), first[0], first[126], first != second) == (128, 0, 0, True)
    _, comm = binding.init(2, first, 0)
    stub.set("is_stuck", 1)
    statuses: list[int] = []

    def launch() -> None:
        binding.group_start()  # queued, not run: there is no memory behind the pointers
        statuses.append(binding.all_reduce(64, 128, 2**40 + 5, 7, 0, comm, 3))
        binding.abort(comm)
        statuses.append(binding.group_end())

    thread = threading.Thread(target=launch)
    thread.start()
    while not stub.calls("all_reduce"):  # the call is in the library now, and stays there ...
        pass
    stub.set("is_stuck", 0)  # ... until this thread lets it go, which it could not if the call held the GIL
    thread.join()
    assert statuses == [0, 6]
    (call,) = stub.calls("all_reduce")
    assert (call.count, call.dtype, call.stream) == (2**40 + 5, 7, 3)


def test_the_library_and_the_binding_that_are_named(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_mapped_libraries(monkeypatch)
    assert find_library({"SYNK_NCCL_LIB": str(stub.path.parent)}) == str(stub.path)
    with pytest.raises(ValueError, match="got SYNK_NCCL_BINDING='torch', expected one of nccl4py, pynccl"):
        load_binding({"SYNK_NCCL_BINDING": "torch"})
    for name in BINDINGS:
        assert make_binding(name, stub, monkeypatch).name == name
        monkeypatch.setitem(sys.modules, {"nccl4py": "nccl.bindings.nccl", "pynccl": "pynccl.binding"}[name], None)
    with pytest.raises(UnsupportedError, match=r'nccl4py: .*; pynccl: .*pip install "synkhronos\[cuda12\]"'):
        load_binding({"SYNK_NCCL_LIB": str(stub.path)})


def test_errors_survive_pickling() -> None:
    error = NcclError(6, "peer is gone", "all_reduce 3 float32 by 'sum'")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, SynkError) and vars(copy) == vars(error)
    assert str(copy) == "cannot all_reduce 3 float32 by 'sum': got ncclRemoteError (6): peer is gone."


def test_the_environment_of_workers() -> None:
    """NCCL is kept on loopback; what the user set stays; ranks that share a GPU may."""
    before = {"PATH": "/bin", "NCCL_COMM_ID": "10.0.0.1:5000", "NCCL_COMM_BLOCKING": "0"}
    ours = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_RAS_ENABLE": "0", "NCCL_NET_PLUGIN": "none", "NCCL_IB_DISABLE": "1"}
    assert nccl_environment(before) == {"PATH": "/bin", **ours}
    chosen = {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_RAS_ENABLE": "1", "NCCL_COMM_BLOCKING": "1", "NCCL_DEBUG": "INFO"}
    chosen |= {"NCCL_NET_PLUGIN": "aws-ofi", "NCCL_IB_DISABLE": "0"}
    assert nccl_environment(chosen) == chosen
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
    assert nccl_environment({"NCCL_NVLS_ENABLE": "1"}, ranks_per_device=4) == {**ours, **shared}
