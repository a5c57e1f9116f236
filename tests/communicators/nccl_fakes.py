"""What the NCCL tests share: the compiled stub library, stand-ins for pynccl and CuPy, ranks as threads."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from synk.communicators import Buffer
from synk.cuda import _nccl_bindings, _nccl_library
from synk.cuda._nccl import DeviceHooks, NcclCommunicator
from synk.cuda._nccl_bindings import Binding, UniqueId

STUB_SOURCE = Path(__file__).with_name("stub_nccl.c")


def build_stub(folder: Path, *flags: str) -> Path:
    """Compile the stub into ``folder`` and return the library's path."""
    library = folder / "libnccl.so.2"
    compiler = os.environ.get("CC", "cc")
    command = [compiler, *flags, "-shared", "-fPIC", "-O1", "-pthread", "-Wl,-soname,libnccl.so.2"]
    subprocess.run([*command, "-o", str(library), str(STUB_SOURCE), "-lm"], check=True)
    return library


class RecordedCall(NamedTuple):
    """One call as it arrived in the stub."""

    name: str
    count: int
    dtype: int
    op: int
    peer: int
    group_depth: int
    stream: int


class _Call(ctypes.Structure):
    _fields_ = (
        ("name", ctypes.c_char * 24),
        ("count", ctypes.c_size_t),
        ("dtype", ctypes.c_int),
        ("op", ctypes.c_int),
        ("peer", ctypes.c_int),
        ("group_depth", ctypes.c_int),
        ("stream", ctypes.c_void_p),
    )


class Stub:
    """The test's hand on the stub library, through a ``CDLL`` object of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dll = ctypes.CDLL(str(path))
        self.dll.stub_call.restype = ctypes.POINTER(_Call)
        self.dll.stub_num_custom_ops.argtypes = (ctypes.c_void_p,)

    def set(self, name: str, value: int) -> None:
        """Turn a knob: see the C file."""
        self.dll.stub_set(name.encode(), value)

    def reset(self) -> None:
        """Turn all knobs back, free what is stuck, forget the calls."""
        self.dll.stub_reset()

    def calls(self, *names: str) -> list[RecordedCall]:
        """Return the recorded calls, those of ``names`` if given."""
        found = []
        for index in range(self.dll.stub_num_calls()):
            call = self.dll.stub_call(index).contents
            values = (getattr(call, field) for field, *_ in _Call._fields_[1:])
            found.append(RecordedCall(call.name.decode(), *(value or 0 for value in values)))
        return [call for call in found if not names or call.name in names]


def fake_pynccl() -> dict[str, types.ModuleType]:
    """Return modules of pynccl 0.1.2's shape: the same search for the library, the same wrong types."""

    class NcclUniqueId(ctypes.Structure):
        _fields_ = (("internal", ctypes.c_char * 512),)

    class LibNccl:
        def __init__(self) -> None:
            folder = Path(os.environ["NUMBA_NCCLLIB"])
            found = [
                str(path) for path in folder.iterdir() if re.match(r"libnccl\.so\.[0-9]*([_\.][0-9]+)*$", path.name)
            ]
            if not found:
                raise Exception("Cannot open library for nccl:\nlibrary nccl not found")
            self.dll = ctypes.CDLL(max(found))
            p, i = ctypes.c_void_p, ctypes.c_int
            self.dll.ncclAllReduce.argtypes = (p, p, i, i, i, p, p)
            self.dll.ncclBroadcast.argtypes = (p, p, i, i, i, p, p)
            self.dll.ncclCommInitRank.argtypes = (ctypes.POINTER(p), i, NcclUniqueId, i)
            self.dll.ncclGetUniqueId.argtypes = (ctypes.POINTER(NcclUniqueId),)
            self.dll.ncclGetErrorString.restype = ctypes.POINTER(ctypes.c_char)

    package, binding = types.ModuleType("pynccl"), types.ModuleType("pynccl.binding")
    binding.libnccl = LibNccl  # type: ignore[attr-defined]
    package.binding = binding  # type: ignore[attr-defined]
    return {"pynccl": package, "pynccl.binding": binding}


def fake_cupy(path: Path) -> dict[str, types.ModuleType]:  # noqa: C901
    """Return modules of ``cupy.cuda.nccl``'s shape over the library at ``path``: CuPy 14's names, errors and gaps."""
    dll = ctypes.CDLL(str(path))
    size_t, p, i = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int
    dll.ncclCommInitRank.argtypes = (p, i, UniqueId, i)
    dll.ncclCommGetAsyncError.argtypes = (p, p)
    names = {0: "SUCCESS", 1: "CUDA", 2: "SYSTEM", 3: "INTERNAL", 4: "ARGUMENT", 5: "USAGE", 6: "REMOTE"}
    collectives = {
        "allReduce": (dll.ncclAllReduce, (p, p, size_t, i, i)),
        "reduce": (dll.ncclReduce, (p, p, size_t, i, i, i)),
        "broadcast": (dll.ncclBroadcast, (p, p, size_t, i, i)),
        "allGather": (dll.ncclAllGather, (p, p, size_t, i)),
        "reduceScatter": (dll.ncclReduceScatter, (p, p, size_t, i, i)),
        "send": (dll.ncclSend, (p, size_t, i, i)),
        "recv": (dll.ncclRecv, (p, size_t, i, i)),
    }
    for function, argtypes in collectives.values():
        function.argtypes = (*argtypes, p, p)

    class NcclError(RuntimeError):
        def __init__(self, status: int) -> None:
            self.status = status
            super().__init__(names[status])  # KeyError for 7 and 8, as in CuPy

    def check(status: int) -> None:
        if status:
            raise NcclError(status)

    class NcclCommunicator:
        def __init__(self, ndev: int, comm_id: bytes, rank: int) -> None:
            self._comm = p()
            unique_id = UniqueId.from_buffer_copy(comm_id)
            check(dll.ncclCommInitRank(ctypes.byref(self._comm), ndev, unique_id, rank))

        @property
        def comm(self) -> int | None:
            return self._comm.value

        def __getattr__(self, name: str) -> Callable[..., None]:
            function = collectives[name][0]
            return lambda *arguments: check(function(*arguments[:-1], self._comm, arguments[-1]))

        def check_async_error(self) -> None:
            state = i()
            check(dll.ncclCommGetAsyncError(self._comm, ctypes.byref(state)))
            check(state.value)

        def destroy(self) -> None:
            dll.ncclCommDestroy(self._comm)

        def abort(self) -> None:
            dll.ncclCommAbort(self._comm)

    def get_version() -> int:
        version = i()
        check(dll.ncclGetVersion(ctypes.byref(version)))
        return version.value

    def get_unique_id() -> bytes:
        unique_id = UniqueId()
        check(dll.ncclGetUniqueId(ctypes.byref(unique_id)))
        return bytes(unique_id)

    cupy, cuda, nccl = (types.ModuleType(name) for name in ("cupy", "cupy.cuda", "cupy.cuda.nccl"))
    contents: dict[str, Any] = {
        "available": True,
        "NcclError": NcclError,
        "NcclCommunicator": NcclCommunicator,
        "get_version": get_version,
        "get_unique_id": get_unique_id,
        "groupStart": lambda: check(dll.ncclGroupStart()),
        "groupEnd": lambda: check(dll.ncclGroupEnd()),
    }
    vars(nccl).update(contents)
    return {"cupy": cupy, "cupy.cuda": cuda, "cupy.cuda.nccl": nccl}


def install(modules: dict[str, types.ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``modules`` importable for one test."""
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)


def forget_mapped_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the stubs that this process has mapped: other tests have stubs of their own."""
    for module in (_nccl_library, _nccl_bindings):
        monkeypatch.setattr(module, "mapped_library", lambda: "")


def host_hooks(scratch: np.ndarray) -> DeviceHooks:
    """Return hooks for host memory, where every stream is always done."""
    return DeviceHooks(is_done=lambda stream: True, scratch=scratch.ctypes.data, stream=0)


def as_buffer(array: np.ndarray, dtype: str = "") -> Buffer:
    """Describe ``array``; ``dtype`` where NumPy has no name for it."""
    return Buffer(array.ctypes.data, array.size, dtype or array.dtype.name)


def run_ranks(binding: Binding, world_size: int, body: Callable[[NcclCommunicator], Any], **options: Any) -> list[Any]:
    """Run ``body(communicator)`` on ``world_size`` threads as ranks; return the results, or raise the first error."""
    unique_id = binding.new_unique_id()
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        communicator = None
        try:
            hooks = host_hooks(np.zeros(1, np.uint8))
            communicator = NcclCommunicator(binding, unique_id, rank, world_size, hooks, **options)
            results[rank] = body(communicator)
            communicator.close()
        except BaseException as error:
            errors.append(error)
            if communicator is not None:
                communicator.abort()  # frees the ranks that wait for this one

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
