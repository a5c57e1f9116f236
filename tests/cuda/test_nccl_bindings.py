"""The bindings to NCCL over the stub library: what arrives, which is chosen, what workers are told of NCCL."""

from __future__ import annotations

import ast
import os
import pickle
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from nccl_fakes import NAMED, Stub, build_stub, forget_mapped_libraries, require

from synk.cuda._nccl_bindings import BINDINGS, Binding, load_binding
from synk.cuda._nccl_library import NcclError, find_library, nccl_environment, version_text
from synk.errors import SynkError, UnsupportedError

REPOSITORY = Path(__file__).resolve().parents[2]


def test_arguments_arrive_whole_and_statuses_come_back(binding: Binding, stub: Stub) -> None:
    """Counts beyond 32 bits, ids of 128 bytes with zeros among them, statuses as numbers and reasons as texts."""
    first, second = binding.new_unique_id(), binding.new_unique_id()
    assert (len(first), first[0], first[126], first != second) == (128, 0, 0, True)
    for count in (7, 2**31 + 5, 2**40):
        _, comm = binding.init(2, binding.new_unique_id(), 0)
        binding.group_start()  # queued, not run: there is no memory behind the pointers
        statuses = [
            binding.all_reduce(64, 128, count, 7, 0, comm, 3),
            binding.reduce(64, 128, count, 7, 0, 1, comm, 3),
            binding.broadcast(64, 128, count, 7, 1, comm, 3),
            binding.all_gather(64, 128, count, 7, comm, 3),
            binding.reduce_scatter(64, 128, count, 7, 0, comm, 3),
        ]
        calls = [call for call in stub.calls() if call.name != "init"]
        assert [(call.count, call.dtype, call.stream) for call in calls] == [(count, 7, 3)] * 5
        assert statuses == [0] * 5
        binding.abort(comm)
        assert binding.group_end() == 6
        stub.reset()
    _, comm = binding.init(2, binding.new_unique_id(), 0)
    stub.set("fail_code", 3)
    assert (binding.async_error(comm), binding.all_reduce(64, 64, 1, 7, 0, comm, 0)) == (3, 3)
    with pytest.raises(NcclError, match=r"cannot make a group id: got ncclInternalError .*: the stub was told to fail"):
        binding.new_unique_id()


def test_an_id_reaches_init_whole(binding: Binding) -> None:
    """Two ids that differ in the last byte alone name two groups: the stub joins ranks by comparing all bytes."""
    first = binding.new_unique_id()
    other = first[:127] + bytes([first[127] ^ 1])
    comms = [binding.init(2, identifier, rank)[1] for identifier, rank in ((first, 0), (other, 0), (first, 1))]
    # An abort breaks the group of its id: rank 1 of the first id, not rank 0 of the other.
    binding.abort(comms[1])
    binding.abort(comms[0])
    assert binding.all_reduce(64, 64, 1, 7, 0, comms[2], 0) == 6


def test_other_threads_run_during_a_call(binding: Binding, stub: Stub) -> None:
    _, comm = binding.init(2, binding.new_unique_id(), 0)
    stub.set("is_stuck", 1)
    statuses: list[int] = []

    def call() -> None:
        binding.group_start()
        statuses.append(binding.all_reduce(64, 64, 1, 7, 0, comm, 0))
        binding.abort(comm)
        statuses.append(binding.group_end())

    thread = threading.Thread(target=call)
    thread.start()
    while not stub.calls("all_reduce"):  # the call is in the library now, and stays there ...
        pass
    assert statuses == []
    stub.set("is_stuck", 0)  # ... until this thread lets it go, which it could not if the call held the GIL
    thread.join()
    assert statuses == [0, 6]


FORKS = """
import ctypes, os, sys, traceback
import numpy
import synk.cuda._nccl
from synk.cuda._nccl_bindings import load_binding
heavy = {'nccl', 'pynccl', 'numba', 'cupy', 'cuda', 'torch'}
assert not heavy & {name.partition('.')[0] for name in sys.modules}, "importing the communicator loads no GPU package"

for name, (mapped, environ) in CASES.items():
    if (pid := os.fork()) == 0:
        os.environ.update(environ)
        if mapped:
            ctypes.CDLL(mapped)
        try:
            binding = load_binding()
            status, comm = binding.init(1, binding.new_unique_id(), 0)
            answer = binding.name, binding.library_path, binding.version, status, binding.has_weighted_sum
        except BaseException:
            answer = traceback.format_exc()
        print((name, answer), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_which_binding_and_library_are_taken(subtests: pytest.Subtests, stub: Stub, tmp_path: Path) -> None:
    """In processes of their own, for a process loads one library."""
    for name in BINDINGS:
        require(name)
    (tmp_path / "old").mkdir()
    named, old = str(build_stub(tmp_path, NAMED)), str(build_stub(tmp_path / "old", NAMED, "-DOLD_NCCL"))
    new = 23203, 0, True
    cases: dict[str, tuple[str, str, str, tuple[object, ...]]] = {
        "nccl4py is the default": ("", named, "", ("nccl4py", named, *new)),
        "by nccl4py": ("", named, "nccl4py", ("nccl4py", named, *new)),
        "by pynccl": ("", named, "pynccl", ("pynccl", named, *new)),
        "old, by nccl4py": ("", old, "nccl4py", ("nccl4py", old, 2708, 0, False)),
        "old, by pynccl": ("", old, "pynccl", ("pynccl", old, 2708, 0, False)),
        "one that nccl4py does not find": ("", str(stub.path), "", ("pynccl", str(stub.path), *new)),
        "one that is mapped, as torch's": (named, "", "", ("nccl4py", named, *new)),
    }
    given = {
        name: (mapped, {"SYNK_NCCL_LIB": library, "SYNK_NCCL_BINDING": binding})
        for name, (mapped, library, binding, _) in cases.items()
    }
    command = [sys.executable, "-W", "error", "-c", FORKS.replace("CASES", repr(given))]
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    found = dict(ast.literal_eval(line) for line in ended.stdout.splitlines())
    assert not ended.stderr
    for name, (*_, expected) in cases.items():
        with subtests.test(name=name):
            assert found[name] == expected


def test_what_cannot_be_loaded_is_named(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget_mapped_libraries(monkeypatch)
    assert find_library({"SYNK_NCCL_LIB": str(stub.path.parent)}) == str(stub.path)
    with pytest.raises(ValueError, match=f"got SYNK_NCCL_LIB='{tmp_path}', expected the path of"):
        find_library({"SYNK_NCCL_LIB": str(tmp_path)})
    with pytest.raises(ValueError, match="got SYNK_NCCL_BINDING='torch', expected one of nccl4py, pynccl"):
        load_binding({"SYNK_NCCL_BINDING": "torch"})
    monkeypatch.setitem(sys.modules, "nccl.bindings.nccl", None)
    monkeypatch.setitem(sys.modules, "pynccl.binding", None)
    with pytest.raises(UnsupportedError, match=r'nccl4py: .*; pynccl: .*pip install "synkhronos\[cuda12\]"'):
        load_binding({"SYNK_NCCL_LIB": str(stub.path)})


def test_errors_have_names_and_survive_pickling() -> None:
    error = NcclError(6, "peer is gone", "all_reduce 3 float32 by 'sum'")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, SynkError) and type(copy) is NcclError
    assert vars(copy) == vars(error)
    assert str(copy) == "cannot all_reduce 3 float32 by 'sum': got ncclRemoteError (6): peer is gone."
    assert str(NcclError(42)).startswith("cannot run an NCCL operation: got ncclResult 42 (42). Set NCCL_DEBUG=WARN")
    assert [version_text(number) for number in (2804, 21005, 22809, 23203)] == ["2.8.4", "2.10.5", "2.28.9", "2.32.3"]


def test_the_environment_of_workers() -> None:
    """NCCL is kept on loopback; what the user set stays; ranks that share a GPU may."""
    before = {"PATH": "/bin", "NCCL_COMM_ID": "10.0.0.1:5000", "NCCL_COMM_BLOCKING": "0"}
    ours = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_RAS_ENABLE": "0", "NCCL_NET_PLUGIN": "none", "NCCL_IB_DISABLE": "1"}
    assert nccl_environment(before) == {"PATH": "/bin", **ours}
    assert before["NCCL_COMM_ID"] == "10.0.0.1:5000"
    chosen = {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_RAS_ENABLE": "1", "NCCL_COMM_BLOCKING": "1", "NCCL_DEBUG": "INFO"}
    chosen |= {"NCCL_NET_PLUGIN": "aws-ofi", "NCCL_IB_DISABLE": "0"}
    assert nccl_environment(chosen) == chosen
    shared = {"NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_MAX_CTAS": "2", "NCCL_NVLS_ENABLE": "0"}
    assert nccl_environment({"NCCL_NVLS_ENABLE": "1"}, ranks_per_device=4) == {**ours, **shared}
    assert nccl_environment({"NCCL_MAX_CTAS": "1"}, ranks_per_device=2)["NCCL_MAX_CTAS"] == "1"
