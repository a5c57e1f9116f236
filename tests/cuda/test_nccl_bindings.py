"""The bindings to NCCL over the stub library: what arrives, what is chosen, what is refused."""

from __future__ import annotations

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


@pytest.fixture(scope="session")
def named_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stub under NCCL's own name, as nccl4py looks for it; for processes that load nothing else."""
    return build_stub(tmp_path_factory.mktemp("named"), NAMED)


@pytest.fixture(autouse=True)
def nothing_is_mapped(monkeypatch: pytest.MonkeyPatch) -> None:
    forget_mapped_libraries(monkeypatch)


def run_python(program: str, **environ: str) -> str:
    """Run ``program`` in an interpreter of its own, warnings being errors, and return what it prints."""
    path = os.pathsep.join([str(REPOSITORY), str(Path(__file__).parent)])
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": path, **environ}
    command = [sys.executable, "-W", "error", "-c", program]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout.strip()


# ----- arguments


@pytest.mark.parametrize("count", [7, 2**31 + 5, 2**32 + 7, 2**40])
def test_a_count_arrives_whole_in_one_call(binding: Binding, stub: Stub, count: int) -> None:
    _, comm = binding.init(2, binding.new_unique_id(), 0)
    binding.group_start()  # queued, not run: there is no memory behind the pointers
    for call in (
        lambda: binding.all_reduce(64, 128, count, 7, 0, comm, 3),
        lambda: binding.reduce(64, 128, count, 7, 0, 1, comm, 3),
        lambda: binding.broadcast(64, 128, count, 7, 1, comm, 3),
        lambda: binding.all_gather(64, 128, count, 7, comm, 3),
        lambda: binding.reduce_scatter(64, 128, count, 7, 0, comm, 3),
    ):
        assert call() == 0
    calls = [call for call in stub.calls() if call.name != "init"]
    assert len(calls) == 5
    assert {call.count for call in calls} == {count}
    assert {call.stream for call in calls} == {3} and {call.dtype for call in calls} == {7}
    binding.abort(comm)
    assert binding.group_end() == 6


def test_an_id_is_128_bytes_with_its_zeros(binding: Binding) -> None:
    first, second = binding.new_unique_id(), binding.new_unique_id()
    assert isinstance(first, bytes) and len(first) == 128
    assert first[:3] == bytes([0, 1 + 7 * (first[127] - 1) & 255, 2 + 7 * (first[127] - 1) & 255])
    assert first[126] == 0 and first != second


def test_an_id_reaches_init_whole(binding: Binding) -> None:
    """Two ids that differ in the last byte alone name two groups: the stub joins ranks by comparing all bytes."""
    unique_id = binding.new_unique_id()
    other = unique_id[:127] + bytes([unique_id[127] ^ 1])
    comms = [binding.init(2, identifier, rank)[1] for identifier, rank in ((unique_id, 0), (other, 0), (unique_id, 1))]
    # An abort breaks the group of its id: rank 1 of the first id, not rank 0 of the other.
    binding.abort(comms[1])
    binding.abort(comms[0])
    assert binding.all_reduce(64, 64, 1, 7, 0, comms[2], 0) == 6


@pytest.mark.parametrize("code", range(9))
@pytest.mark.sampled(90)
def test_statuses_come_back_as_numbers(binding: Binding, stub: Stub, code: int) -> None:
    _, comm = binding.init(2, binding.new_unique_id(), 0)
    stub.set("fail_code", code)
    assert binding.async_error(comm) == code
    binding.group_start()
    status = binding.all_reduce(64, 64, 1, 7, 0, comm, 0)
    assert status == code or (binding.name, status, code) == ("nccl4py", 0, 7)  # to which 7 is a success
    binding.abort(comm)
    binding.group_end()


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


def test_pynccls_own_methods_are_mended_too(named_library: Path) -> None:
    require("pynccl")
    program = (
        "import os, sys\n"
        "from nccl_fakes import Stub\n"
        "from pathlib import Path\n"
        "from synk.cuda._nccl_bindings import load_binding\n"
        "binding = load_binding()\n"
        "_, comm = binding.init(2, binding.new_unique_id(), 0)\n"
        "from pynccl.binding import libnccl\n"
        "library = libnccl()\n"
        "library.ncclGroupStart()\n"
        "library.ncclAllReduce(64, 64, 2**32 + 7, 7, 0, comm, 0)\n"
        "print(binding.name, Stub(Path(os.environ['SYNK_NCCL_LIB'])).calls('all_reduce')[0].count)\n"
    )
    environ = {"SYNK_NCCL_LIB": str(named_library), "SYNK_NCCL_BINDING": "pynccl"}
    assert run_python(program, **environ) == f"pynccl {2**32 + 7}"


def test_texts_are_texts(binding: Binding, stub: Stub) -> None:
    stub.set("fail_code", 3)
    with pytest.raises(NcclError, match=r"cannot make a group id: got ncclInternalError .*: the stub was told to fail"):
        binding.new_unique_id()
    assert binding.last_error() == "the stub was told to fail"


def test_pynccls_error_string_is_a_text(stub: Stub) -> None:
    binding = PyncclBinding(ctypes.CDLL(str(stub.path)))
    assert binding._dll.ncclGetErrorString(3) == b"an error of the stub"


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


@pytest.mark.parametrize("name", BINDINGS)
def test_an_old_library_works_without_what_it_lacks(tmp_path: Path, name: str) -> None:
    require(name)
    library = build_stub(tmp_path, NAMED, "-DOLD_NCCL")
    program = (
        "from synk.cuda._nccl_bindings import load_binding\n"
        "binding = load_binding()\n"
        "status, comm = binding.init(1, binding.new_unique_id(), 0)\n"
        "print(binding.name, binding.version, binding.has_weighted_sum, repr(binding.last_error()))\n"
        "print(status, bool(comm))\n"
        "print(binding.all_reduce(0, 0, 0, 7, 0, comm, 0))\n"
    )
    answer = run_python(program, SYNK_NCCL_LIB=str(library), SYNK_NCCL_BINDING=name)
    assert answer == f"{name} 2708 False ''\n0 True\n0"


def test_a_library_that_is_not_nccl_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="library without nccl"):
        PyncclBinding(ctypes.CDLL(None))


# ----- the choice


SAY_WHICH = (
    "import os\n"
    "from synk.cuda._nccl_bindings import load_binding\n"
    "before = dict(os.environ)\n"
    "binding = load_binding()\n"
    "assert dict(os.environ) == before\n"
    "print(binding.name, binding.library_path)\n"
)


@pytest.mark.parametrize("choice", ["", *BINDINGS])
def test_nccl4py_is_the_default_and_takes_the_library_that_is_named(named_library: Path, choice: str) -> None:
    for name in BINDINGS:
        require(name)
    answer = run_python(SAY_WHICH, SYNK_NCCL_LIB=str(named_library), SYNK_NCCL_BINDING=choice)
    assert answer == f"{choice or 'nccl4py'} {named_library}"


def test_the_library_that_is_mapped_is_taken(named_library: Path) -> None:
    """As torch's, which comes first where a program's function has imported it."""
    require("nccl4py")
    assert run_python(f"import ctypes; ctypes.CDLL({str(named_library)!r})\n" + SAY_WHICH) == f"nccl4py {named_library}"


def test_a_library_that_nccl4py_does_not_find_goes_through_pynccl(stub: Stub) -> None:
    for name in BINDINGS:
        require(name)
    assert run_python(SAY_WHICH, SYNK_NCCL_LIB=str(stub.path)) == f"pynccl {stub.path}"


def test_a_package_that_is_missing_is_named(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    pynccl = make_binding("pynccl", stub, monkeypatch)
    environ = {"SYNK_NCCL_LIB": str(stub.path)}
    monkeypatch.setitem(sys.modules, "nccl.bindings.nccl", None)
    assert load_binding(environ).name == pynccl.name
    with pytest.raises(UnsupportedError, match=r"nccl4py: .* or set SYNK_NCCL_BINDING=pynccl\."):
        load_binding(environ | {"SYNK_NCCL_BINDING": "nccl4py"})
    monkeypatch.setitem(sys.modules, "pynccl.binding", None)
    with pytest.raises(UnsupportedError, match=r'nccl4py: .*; pynccl: .*pip install "synkhronos\[cuda12\]"'):
        load_binding(environ)


def test_another_release_of_nccl4py_is_left_alone(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "version", lambda name: "0.7.1")
    with pytest.raises(UnsupportedError, match=r"nccl4py: ImportError: got release 0\.7\.1, expected 0\.6\.\*"):
        load_binding({"SYNK_NCCL_LIB": str(stub.path), "SYNK_NCCL_BINDING": "nccl4py"})


@pytest.mark.parametrize("value", ["torch", "PYNCCL", "cupy"])
def test_another_binding_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=f"got SYNK_NCCL_BINDING='{value}', expected one of nccl4py, pynccl"):
        load_binding({"SYNK_NCCL_BINDING": value})


def test_pynccls_deprecation_warning_is_silenced(named_library: Path, tmp_path: Path) -> None:
    (tmp_path / "pynccl").mkdir()
    (tmp_path / "pynccl" / "__init__.py").write_text("")
    (tmp_path / "pynccl" / "binding.py").write_text(
        "import ctypes, os, warnings\n"
        "warnings.warn('cudadrv.drvapi is deprecated', DeprecationWarning)\n"
        "class libnccl:\n"
        "    dll = ctypes.CDLL(os.environ['SYNK_NCCL_LIB'])\n"
    )
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n" + SAY_WHICH
    answer = run_python(program, SYNK_NCCL_LIB=str(named_library), SYNK_NCCL_BINDING="pynccl")
    assert answer == f"pynccl {named_library}"


def test_a_binding_that_keeps_to_another_file_is_refused(binding: Binding, stub: Stub, tmp_path: Path) -> None:
    wanted = tmp_path / "libnccl.so.2"
    wanted.write_bytes(stub.path.read_bytes())
    with pytest.raises(UnsupportedError, match=f"cannot load {wanted} .*{binding.name}: .*: it chose {stub.path}"):
        load_binding({"SYNK_NCCL_LIB": str(wanted), "SYNK_NCCL_BINDING": binding.name})


def test_importing_the_communicator_loads_no_gpu_package() -> None:
    program = (
        "import sys\n"
        "import synk.cuda._nccl\n"
        "heavy = {'nccl', 'pynccl', 'numba', 'cupy', 'cuda', 'torch'}\n"
        "print(sorted(heavy & {name.partition('.')[0] for name in sys.modules}))\n"
    )
    assert run_python(program) == "[]"


# ----- the library


def test_the_variable_names_a_file_or_its_folder(stub: Stub) -> None:
    assert find_library({"SYNK_NCCL_LIB": str(stub.path)}) == str(stub.path)
    assert find_library({"SYNK_NCCL_LIB": str(stub.path.parent)}) == str(stub.path)


@pytest.mark.parametrize("value", ["/nowhere/libnccl.so.2", "{tmp_path}"])
def test_a_variable_that_names_no_library_is_refused(stub: Stub, tmp_path: Path, value: str) -> None:
    value = value.format(tmp_path=tmp_path)
    with pytest.raises(ValueError, match=f"got SYNK_NCCL_LIB='{value}', expected the path of"):
        find_library({"SYNK_NCCL_LIB": value})


def test_the_order_of_the_search(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ: dict[str, str] = {}
    monkeypatch.setattr(_nccl_library, "SONAME", "libnccl-that-nobody-has.so.2")
    monkeypatch.setattr(_nccl_library, "_library_of_wheel", lambda: "")
    with pytest.raises(UnsupportedError, match=r'pip install "synkhronos\[cuda12\]" or "synkhronos\[cuda13\]"'):
        find_library(environ)
    monkeypatch.setattr(_nccl_library, "SONAME", str(stub.path))
    assert find_library(environ) == str(stub.path)
    monkeypatch.setattr(_nccl_library, "_library_of_wheel", lambda: "/wheel/libnccl.so.2")
    assert find_library(environ) == "/wheel/libnccl.so.2"
    mapped = tmp_path / "libnccl.so.2"
    mapped.touch()
    monkeypatch.setattr(_nccl_library, "mapped_library", lambda: str(mapped))
    assert find_library(environ) == str(mapped)
    with pytest.raises(ValueError, match=f"but the process has {mapped} loaded already"):
        find_library({"SYNK_NCCL_LIB": str(stub.path)})
    assert find_library({"SYNK_NCCL_LIB": str(mapped)}) == str(mapped)


def test_the_wheel_is_asked_for_by_pathfinder(monkeypatch: pytest.MonkeyPatch) -> None:
    pathfinder = types.ModuleType("cuda.pathfinder")
    found = types.SimpleNamespace(abs_path="/wheel/lib/libnccl.so.2")
    pathfinder.load_nvidia_dynamic_lib = {"nccl": found}.get  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "cuda", types.ModuleType("cuda"))
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", pathfinder)
    assert _nccl_library._library_of_wheel() == "/wheel/lib/libnccl.so.2"
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    assert _nccl_library._library_of_wheel() == ""


def test_a_mapped_library_is_found(stub: Stub, tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    for name in ("libnccl.so.2", "libnccl-net.so"):
        (folder / name).write_bytes(stub.path.read_bytes())
    program = (
        "import ctypes\n"
        "from synk.cuda._nccl_library import find_library, mapped_library\n"
        f"ctypes.CDLL({str(folder / 'libnccl-net.so')!r})\n"
        "print(repr(mapped_library()))\n"
        f"ctypes.CDLL({str(folder / 'libnccl.so.2')!r})\n"
        "print(mapped_library() == find_library(), mapped_library())\n"
    )
    assert run_python(program) == f"''\nTrue {folder / 'libnccl.so.2'}"


# ----- errors, versions, environment


def test_errors_survive_pickling() -> None:
    error = NcclError(6, "peer is gone", "all_reduce 3 float32 by 'sum'")
    copy = pickle.loads(pickle.dumps(error))
    assert isinstance(copy, SynkError) and type(copy) is NcclError
    assert vars(copy) == vars(error)
    assert str(copy) == "cannot all_reduce 3 float32 by 'sum': got ncclRemoteError (6): peer is gone."


def test_an_unknown_status_has_a_name() -> None:
    assert str(NcclError(42)).startswith("cannot run an NCCL operation: got ncclResult 42 (42). Set NCCL_DEBUG=WARN")


def test_version_texts() -> None:
    assert [version_text(number) for number in (2804, 21005, 22809, 23203)] == ["2.8.4", "2.10.5", "2.28.9", "2.32.3"]


def test_nccl_is_kept_on_loopback() -> None:
    before = {"PATH": "/bin", "NCCL_COMM_ID": "10.0.0.1:5000", "NCCL_COMM_BLOCKING": "0"}
    after = nccl_environment(before)
    assert after == {
        "PATH": "/bin",
        "NCCL_SOCKET_IFNAME": "lo",
        "NCCL_RAS_ENABLE": "0",
        "NCCL_NET_PLUGIN": "none",
        "NCCL_IB_DISABLE": "1",
    }
    assert before["NCCL_COMM_ID"] == "10.0.0.1:5000"


def test_what_the_user_set_stays() -> None:
    chosen = {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_RAS_ENABLE": "1", "NCCL_COMM_BLOCKING": "1", "NCCL_DEBUG": "INFO"}
    chosen |= {"NCCL_NET_PLUGIN": "aws-ofi", "NCCL_IB_DISABLE": "0"}
    assert nccl_environment(chosen) == chosen


def test_ranks_that_share_a_gpu() -> None:
    after = nccl_environment({"NCCL_NVLS_ENABLE": "1"}, ranks_per_device=4)
    assert after["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert after["NCCL_MAX_CTAS"] == "2"
    assert after["NCCL_NVLS_ENABLE"] == "0"
    assert nccl_environment({"NCCL_MAX_CTAS": "1"}, ranks_per_device=2)["NCCL_MAX_CTAS"] == "1"
