"""The bindings to NCCL over the stub library: what arrives, what is chosen, what is refused."""

from __future__ import annotations

import ast
import ctypes
import os
import pickle
import subprocess
import sys
import threading
import types
from importlib import metadata
from pathlib import Path

import pytest
from nccl_fakes import NAMED, Stub, build_stub, forget_mapped_libraries, make_binding, require

from synk.cuda import _nccl_library
from synk.cuda._nccl_bindings import BINDINGS, Binding, InitConfig, PyncclBinding, load_binding
from synk.cuda._nccl_library import NcclError, find_library, nccl_environment, version_text
from synk.errors import SynkError, UnsupportedError

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def nothing_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_mapped_libraries(monkeypatch)


# ----- arguments


def test_counts_pointers_and_streams_arrive_whole(binding: Binding, stub: Stub) -> None:
    for count in (7, 2**31 + 5, 2**32 + 7, 2**40):
        _, comm = binding.init(2, binding.new_unique_id(), 0)
        binding.group_start()  # queued, not run: there is no memory behind the pointers
        for call in (
            lambda count=count, comm=comm: binding.all_reduce(64, 128, count, 7, 0, comm, 3),
            lambda count=count, comm=comm: binding.reduce(64, 128, count, 7, 0, 1, comm, 3),
            lambda count=count, comm=comm: binding.broadcast(64, 128, count, 7, 1, comm, 3),
            lambda count=count, comm=comm: binding.all_gather(64, 128, count, 7, comm, 3),
            lambda count=count, comm=comm: binding.reduce_scatter(64, 128, count, 7, 0, comm, 3),
        ):
            assert call() == 0
        calls = [call for call in stub.calls() if call.name != "init"]
        assert [(call.count, call.dtype, call.stream) for call in calls] == [(count, 7, 3)] * 5
        binding.abort(comm)
        assert binding.group_end() == 6
        stub.reset()


def test_an_id_is_128_bytes_with_its_zeros_and_reaches_init_whole(binding: Binding) -> None:
    """Two ids that differ in the last byte alone name two groups: the stub joins ranks by comparing all bytes."""
    first, second = binding.new_unique_id(), binding.new_unique_id()
    assert isinstance(first, bytes) and len(first) == 128
    assert first[:3] == bytes([0, 1 + 7 * (first[127] - 1) & 255, 2 + 7 * (first[127] - 1) & 255])
    assert first[126] == 0 and first != second
    other = first[:127] + bytes([first[127] ^ 1])
    comms = [binding.init(2, identifier, rank)[1] for identifier, rank in ((first, 0), (other, 0), (first, 1))]
    # An abort breaks the group of its id: rank 1 of the first id, not rank 0 of the other.
    binding.abort(comms[1])
    binding.abort(comms[0])
    assert binding.all_reduce(64, 64, 1, 7, 0, comms[2], 0) == 6


def test_statuses_come_back_as_numbers_and_texts_as_texts(binding: Binding, stub: Stub) -> None:
    for code in range(9):
        _, comm = binding.init(2, binding.new_unique_id(), 0)
        stub.set("fail_code", code)
        assert binding.async_error(comm) == code
        binding.group_start()
        status = binding.all_reduce(64, 64, 1, 7, 0, comm, 0)
        assert status == code or (binding.name, status, code) == ("nccl4py", 0, 7)  # to which 7 is a success
        binding.abort(comm)
        binding.group_end()
        stub.reset()
    stub.set("fail_code", 3)
    with pytest.raises(NcclError, match=r"cannot make a group id: got ncclInternalError .*: the stub was told to fail"):
        binding.new_unique_id()
    assert binding.last_error() == "the stub was told to fail"
    assert PyncclBinding(ctypes.CDLL(str(stub.path)))._dll.ncclGetErrorString(3) == b"an error of the stub"


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


def test_the_configuration_is_that_of_the_header() -> None:
    """nccl4py's was generated from NCCL's header; pynccl has none, and synk brings the first fields of it."""
    require("nccl4py")
    from nccl.bindings.nccl import Config, config_dtype

    ours = [(name, getattr(InitConfig, name).offset, getattr(InitConfig, name).size) for name, _ in InitConfig._fields_]
    names = [name.rstrip("_") for name in config_dtype.names[: len(ours)]]
    theirs = [(name, offset, kind.itemsize) for name, (kind, offset) in zip(names, config_dtype.fields.values())]
    assert ours == theirs
    mine, default = InitConfig.non_blocking(), Config()
    assert mine.magic == default.magic
    assert [mine.cga_cluster_size, mine.min_ctas, mine.max_ctas] == [default.blocking] * 3
    assert ctypes.sizeof(InitConfig) == 40  # bytes of ncclConfig_t in nccl.h of 2.17


# ----- the choice, in processes of their own


FORKS = """
import ctypes, io, os, sys, traceback
from pathlib import Path
import numpy
import synk.cuda._nccl
from synk.cuda._nccl_bindings import load_binding
from synk.cuda._nccl_library import find_library, mapped_library
heavy = {'nccl', 'pynccl', 'numba', 'cupy', 'cuda', 'torch'}
assert not heavy & {name.partition('.')[0] for name in sys.modules}, "importing the communicator loads no GPU package"

def which():
    before = dict(os.environ)
    binding = load_binding()
    assert dict(os.environ) == before
    print(binding.name, binding.library_path)
    return binding

for name, (program, environ) in CASES.items():
    if (pid := os.fork()) == 0:
        os.environ.update(environ)
        sys.stdout, real = io.StringIO(), sys.stdout
        try:
            exec(program)
        except BaseException:
            traceback.print_exc(file=sys.stdout)
        print(repr((name, sys.stdout.getvalue())), file=real, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
"""
MENDED = """
binding = load_binding()
_, comm = binding.init(2, binding.new_unique_id(), 0)
from pynccl.binding import libnccl
from nccl_fakes import Stub
library = libnccl()
library.ncclGroupStart()
library.ncclAllReduce(64, 64, 2**32 + 7, 7, 0, comm, 0)
print(binding.name, Stub(Path(os.environ['SYNK_NCCL_LIB'])).calls('all_reduce')[0].count)
"""
OLD = """
binding = which()
status, comm = binding.init(1, binding.new_unique_id(), 0)
print(binding.version, binding.has_weighted_sum, repr(binding.last_error()), status, bool(comm))
print(binding.all_reduce(0, 0, 0, 7, 0, comm, 0))
"""
WARNS = """
import ctypes, os, warnings
warnings.warn('cudadrv.drvapi is deprecated', DeprecationWarning)
class libnccl:
    dll = ctypes.CDLL(os.environ['SYNK_NCCL_LIB'])
"""


def test_which_binding_and_library_are_taken(subtests: pytest.Subtests, stub: Stub, tmp_path: Path) -> None:
    for name in BINDINGS:
        require(name)
    for folder in ("named", "old", "pynccl", "with space"):
        (tmp_path / folder).mkdir()
    named, old = build_stub(tmp_path / "named", NAMED), build_stub(tmp_path / "old", NAMED, "-DOLD_NCCL")
    (tmp_path / "pynccl" / "__init__.py").touch()
    (tmp_path / "pynccl" / "binding.py").write_text(WARNS)
    mapped, net = tmp_path / "with space" / "libnccl.so.2", tmp_path / "with space" / "libnccl-net.so"
    for path in (mapped, net):
        path.write_bytes(stub.path.read_bytes())
    loads = "ctypes.CDLL({!r}); print(repr(mapped_library()))\n".format
    at, by = {"SYNK_NCCL_LIB": str(named)}, "SYNK_NCCL_BINDING"
    cases: dict[str, tuple[str, dict[str, str], str]] = {
        "nccl4py is the default": ("which()", at, f"nccl4py {named}\n"),
        "nccl4py": ("which()", {**at, by: "nccl4py"}, f"nccl4py {named}\n"),
        "pynccl": ("which()", {**at, by: "pynccl"}, f"pynccl {named}\n"),
        "pynccl's own methods are mended": (MENDED, {**at, by: "pynccl"}, f"pynccl {2**32 + 7}\n"),
        "pynccl's warning is silenced": (
            f"sys.path.insert(0, {str(tmp_path)!r}); which()",
            {**at, by: "pynccl"},
            f"pynccl {named}\n",
        ),
        "an old library, nccl4py": (OLD, {"SYNK_NCCL_LIB": str(old)}, f"nccl4py {old}\n2708 False '' 0 True\n0\n"),
        "an old library, pynccl": (
            OLD,
            {"SYNK_NCCL_LIB": str(old), by: "pynccl"},
            f"pynccl {old}\n2708 False '' 0 True\n0\n",
        ),
        "nccl4py does not find it": ("which()", {"SYNK_NCCL_LIB": str(stub.path)}, f"pynccl {stub.path}\n"),
        "it is mapped, as torch's": (loads(str(named)) + "which()", {}, f"{str(named)!r}\nnccl4py {named}\n"),
        "a mapped one is found": (
            f"{loads(str(net))}{loads(str(mapped))}print(find_library())",
            {},
            f"''\n{str(mapped)!r}\n{mapped}\n",
        ),
    }
    given = {name: (program, environ) for name, (program, environ, _) in cases.items()}
    path = os.pathsep.join([str(REPOSITORY), str(Path(__file__).parent)])
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": path}
    command = [sys.executable, "-W", "error", "-c", FORKS.replace("CASES", repr(given))]
    ended = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert not ended.stderr
    found = dict(ast.literal_eval(line) for line in ended.stdout.splitlines())
    for name, (_, _, expected) in cases.items():
        with subtests.test(name=name):
            assert found[name] == expected


def test_what_cannot_be_loaded_is_named(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    environ, by = {"SYNK_NCCL_LIB": str(stub.path)}, "SYNK_NCCL_BINDING"
    for value in ("torch", "PYNCCL"):
        with pytest.raises(ValueError, match=f"got SYNK_NCCL_BINDING='{value}', expected one of nccl4py, pynccl"):
            load_binding({by: value})
    with pytest.raises(UnsupportedError, match="library without nccl"):
        PyncclBinding(ctypes.CDLL(None))
    with monkeypatch.context() as patch:
        patch.setattr(metadata, "version", lambda name: "0.7.1")
        with pytest.raises(UnsupportedError, match=r"nccl4py: ImportError: got release 0\.7\.1, expected 0\.6\.\*"):
            load_binding(environ | {by: "nccl4py"})
    pynccl = make_binding("pynccl", stub, monkeypatch)
    monkeypatch.setitem(sys.modules, "nccl.bindings.nccl", None)
    assert load_binding(environ).name == pynccl.name
    with pytest.raises(UnsupportedError, match=r"nccl4py: .* or set SYNK_NCCL_BINDING=pynccl\."):
        load_binding(environ | {by: "nccl4py"})
    monkeypatch.setitem(sys.modules, "pynccl.binding", None)
    with pytest.raises(UnsupportedError, match=r'nccl4py: .*; pynccl: .*pip install "synkhronos\[cuda12\]"'):
        load_binding(environ)


def test_a_binding_that_keeps_to_another_file_is_refused(binding: Binding, stub: Stub, tmp_path: Path) -> None:
    wanted = tmp_path / "libnccl.so.2"
    wanted.write_bytes(stub.path.read_bytes())
    with pytest.raises(UnsupportedError, match=f"cannot load {wanted} .*{binding.name}: .*: it chose {stub.path}"):
        load_binding({"SYNK_NCCL_LIB": str(wanted), "SYNK_NCCL_BINDING": binding.name})


def test_the_order_of_the_search(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The variable names a file or its folder; then what is mapped, the wheel's, and the system's."""
    for named in (stub.path, stub.path.parent):
        assert find_library({"SYNK_NCCL_LIB": str(named)}) == str(stub.path)
    for value in ("/nowhere/libnccl.so.2", str(tmp_path)):
        with pytest.raises(ValueError, match=f"got SYNK_NCCL_LIB='{value}', expected the path of"):
            find_library({"SYNK_NCCL_LIB": value})
    found = types.SimpleNamespace(abs_path="/wheel/libnccl.so.2")
    pathfinder = types.SimpleNamespace(load_nvidia_dynamic_lib={"nccl": found}.get)
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    monkeypatch.setattr(_nccl_library, "SONAME", "libnccl-that-nobody-has.so.2")
    with pytest.raises(UnsupportedError, match=r'pip install "synkhronos\[cuda12\]" or "synkhronos\[cuda13\]"'):
        find_library({})
    monkeypatch.setattr(_nccl_library, "SONAME", str(stub.path))
    assert find_library({}) == str(stub.path)
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder)
    assert find_library({}) == "/wheel/libnccl.so.2"
    mapped = tmp_path / "libnccl.so.2"
    mapped.touch()
    monkeypatch.setattr(_nccl_library, "mapped_library", lambda: str(mapped))
    assert find_library({}) == find_library({"SYNK_NCCL_LIB": str(mapped)}) == str(mapped)
    with pytest.raises(ValueError, match=f"but the process has {mapped} loaded already"):
        find_library({"SYNK_NCCL_LIB": str(stub.path)})


# ----- errors, versions, environment


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
