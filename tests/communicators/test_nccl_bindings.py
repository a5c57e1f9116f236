"""The bindings to NCCL over the stub library: what arrives, what is chosen, what is refused."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
from nccl_fakes import Stub, build_stub, fake_cupy, fake_pynccl, forget_mapped_libraries, install

from synk.cuda import _nccl_library
from synk.cuda._nccl_bindings import Binding, PyncclBinding, load_binding
from synk.cuda._nccl_library import NcclError, find_library, nccl_environment, version_text
from synk.errors import SynkError, UnsupportedError

HAS_PYNCCL = importlib.util.find_spec("pynccl") is not None
REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    return Stub(build_stub(tmp_path_factory.mktemp("nccl")))


@pytest.fixture
def stub(library: Stub, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stub]:
    forget_mapped_libraries(monkeypatch)
    library.reset()
    yield library
    library.reset()


@pytest.fixture(params=["pynccl", "cupy"])
def binding(request: pytest.FixtureRequest, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Binding:
    install(fake_pynccl() | fake_cupy(stub.path), monkeypatch)
    return load_binding({"SYNK_NCCL_LIB": str(stub.path), "SYNK_NCCL_BINDING": request.param})


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
        lambda: binding.all_reduce(comm, 64, 128, count, 7, 0, 3),
        lambda: binding.reduce(comm, 64, 128, count, 7, 0, 1, 3),
        lambda: binding.broadcast(comm, 64, 128, count, 7, 1, 3),
        lambda: binding.all_gather(comm, 64, 128, count, 7, 3),
        lambda: binding.reduce_scatter(comm, 64, 128, count, 7, 0, 3),
        lambda: binding.send(comm, 64, count, 7, 1, 3),
        lambda: binding.recv(comm, 64, count, 7, 1, 3),
    ):
        assert call() == 0
    calls = [call for call in stub.calls() if call.name != "init"]
    assert len(calls) == 7
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
    assert binding.all_reduce(comms[2], 64, 64, 1, 7, 0, 0) == 6


@pytest.mark.parametrize("code", range(9))
def test_statuses_come_back_as_numbers(binding: Binding, stub: Stub, code: int) -> None:
    _, comm = binding.init(2, binding.new_unique_id(), 0)
    stub.set("fail_code", code)
    assert binding.async_error(comm) == code
    binding.group_start()
    assert binding.all_reduce(comm, 64, 64, 1, 7, 0, 0) == code
    binding.abort(comm)
    binding.group_end()


def test_other_threads_run_during_a_call(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    install(fake_pynccl(), monkeypatch)
    binding = load_binding({"SYNK_NCCL_LIB": str(stub.path)})
    _, comm = binding.init(2, binding.new_unique_id(), 0)
    stub.set("is_stuck", 1)
    statuses: list[int] = []

    def call() -> None:
        binding.group_start()
        statuses.append(binding.all_reduce(comm, 64, 64, 1, 7, 0, 0))
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


@pytest.mark.skipif(not HAS_PYNCCL, reason="pynccl is not installed")
def test_pynccls_own_methods_are_mended_too(stub: Stub) -> None:
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
    assert run_python(program, SYNK_NCCL_LIB=str(stub.path)) == f"pynccl {2**32 + 7}"


def test_texts_are_texts(stub: Stub) -> None:
    binding = PyncclBinding(ctypes.CDLL(str(stub.path)), str(stub.path))
    assert binding._dll.ncclGetErrorString(3) == b"an error of the stub"
    stub.set("fail_code", 3)
    with pytest.raises(NcclError, match="cannot make a group id: got ncclInternalError"):
        binding.new_unique_id()
    assert binding.last_error() == "the stub was told to fail"


def test_an_old_library_works_without_what_it_lacks(tmp_path: Path) -> None:
    old = Stub(build_stub(tmp_path, "-DOLD_NCCL"))
    binding = PyncclBinding(old.dll, str(old.path))
    assert not binding.has_weighted_sum
    assert binding.last_error() == ""
    status, comm = binding.init(1, binding.new_unique_id(), 0)
    assert status == 0 and comm
    assert binding.all_reduce(comm, 0, 0, 0, 7, 0, 0) == 0


def test_a_library_that_is_not_nccl_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="library without nccl"):
        PyncclBinding(ctypes.CDLL(None), "")


# ----- the choice


def test_pynccl_is_the_default(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    install(fake_pynccl() | fake_cupy(stub.path), monkeypatch)
    environ = {"SYNK_NCCL_LIB": str(stub.path)}
    before = dict(os.environ)
    assert load_binding(environ).name == "pynccl"
    assert load_binding(environ | {"SYNK_NCCL_BINDING": "cupy"}).name == "cupy"
    assert dict(os.environ) == before


def test_cupy_is_taken_where_pynccl_is_missing(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    install(fake_cupy(stub.path), monkeypatch)
    monkeypatch.setitem(sys.modules, "pynccl", None)
    monkeypatch.setitem(sys.modules, "pynccl.binding", None)
    assert load_binding({"SYNK_NCCL_LIB": str(stub.path)}).name == "cupy"
    with pytest.raises(UnsupportedError, match=r"pynccl: .* or set SYNK_NCCL_BINDING=cupy\."):
        load_binding({"SYNK_NCCL_LIB": str(stub.path), "SYNK_NCCL_BINDING": "pynccl"})


def test_both_missing_names_both(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pynccl", "pynccl.binding", "cupy", "cupy.cuda", "cupy.cuda.nccl"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UnsupportedError, match=r'pynccl: .*; cupy: .*pip install "synkhronos\[cuda12\]"'):
        load_binding({"SYNK_NCCL_LIB": str(stub.path)})


def test_cupy_without_its_nccl_is_missing(stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    modules = fake_cupy(stub.path)
    modules["cupy.cuda.nccl"].available = False  # type: ignore[attr-defined]
    install(modules, monkeypatch)
    with pytest.raises(UnsupportedError, match="could not load NCCL"):
        load_binding({"SYNK_NCCL_LIB": str(stub.path), "SYNK_NCCL_BINDING": "cupy"})


@pytest.mark.parametrize("value", ["torch", "PYNCCL", "nccl4py"])
def test_another_binding_is_refused(value: str) -> None:
    with pytest.raises(ValueError, match=f"got SYNK_NCCL_BINDING='{value}', expected one of pynccl, cupy"):
        load_binding({"SYNK_NCCL_BINDING": value})


def test_pynccls_deprecation_warning_is_silenced(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pynccl").mkdir()
    (tmp_path / "pynccl" / "__init__.py").write_text("")
    (tmp_path / "pynccl" / "binding.py").write_text(
        "import warnings\n"
        "warnings.warn('cudadrv.drvapi is deprecated', DeprecationWarning)\n"
        "from nccl_fakes import fake_pynccl\n"
        "libnccl = fake_pynccl()['pynccl.binding'].libnccl\n"
    )
    program = (
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from synk.cuda._nccl_bindings import load_binding\n"
        "print(load_binding().name)\n"
    )
    assert run_python(program, SYNK_NCCL_LIB=str(stub.path)) == "pynccl"


def test_pynccl_that_loads_another_file_is_refused(stub: Stub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(fake_pynccl(), monkeypatch)
    wanted = tmp_path / "libnccl.so.2"
    wanted.write_bytes(stub.path.read_bytes())
    (tmp_path / "libnccl.so.9").write_bytes(stub.path.read_bytes())
    with pytest.raises(UnsupportedError, match=r"it chose .*libnccl\.so\.9"):
        load_binding({"SYNK_NCCL_LIB": str(wanted)})
    odd = tmp_path / "odd"
    odd.mkdir()
    (odd / "nccl.so").write_bytes(stub.path.read_bytes())
    with pytest.raises(UnsupportedError, match=r"only takes files named libnccl\.so\.<version>"):
        load_binding({"SYNK_NCCL_LIB": str(odd / "nccl.so")})


def test_importing_the_communicator_loads_no_gpu_package() -> None:
    program = (
        "import sys\n"
        "import synk.cuda._nccl\n"
        "heavy = {'pynccl', 'numba', 'cupy', 'cuda', 'torch'}\n"
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
    install({"cuda": types.ModuleType("cuda"), "cuda.pathfinder": pathfinder}, monkeypatch)
    assert _nccl_library._library_of_wheel() == "/wheel/lib/libnccl.so.2"
    monkeypatch.setitem(sys.modules, "cuda.pathfinder", None)
    assert _nccl_library._library_of_wheel() == ""


def test_a_mapped_library_is_found(library: Stub, tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    for name in ("libnccl.so.2", "libnccl-net.so"):
        (folder / name).write_bytes(library.path.read_bytes())
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
    error = NcclError(6, "", "peer is gone", "all_reduce 3 float32 by 'sum'")
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
    assert after == {"PATH": "/bin", "NCCL_SOCKET_IFNAME": "lo", "NCCL_RAS_ENABLE": "0"}
    assert before["NCCL_COMM_ID"] == "10.0.0.1:5000"


def test_what_the_user_set_stays() -> None:
    chosen = {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_RAS_ENABLE": "1", "NCCL_COMM_BLOCKING": "1", "NCCL_DEBUG": "INFO"}
    assert nccl_environment(chosen) == chosen


def test_ranks_that_share_a_gpu() -> None:
    after = nccl_environment({"NCCL_NVLS_ENABLE": "1"}, ranks_per_device=4)
    assert after["NCCL_MULTI_RANK_GPU_ENABLE"] == "1"
    assert after["NCCL_MAX_CTAS"] == "2"
    assert after["NCCL_NVLS_ENABLE"] == "0"
    assert nccl_environment({"NCCL_MAX_CTAS": "1"}, ranks_per_device=2)["NCCL_MAX_CTAS"] == "1"
