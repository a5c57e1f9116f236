"""What the NCCL tests share: the compiled stub library, the bindings over it, ranks as threads."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import subprocess
import threading
import types
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from synk.communicators import Buffer
from synk.cuda import _nccl_library
from synk.cuda._nccl import NcclCommunicator
from synk.cuda._nccl_bindings import Binding, load_binding

STUB_SOURCE = Path(__file__).with_name("stub_nccl.c")


def build_stub(folder: Path) -> Path:
    """Compile the stub into ``folder`` and return the library's path.

    It lacks NCCL's name for the dynamic linker, so that a torch that is imported into the same process later is not
    linked to it.
    """
    library = folder / "libnccl.so.2"
    command = [os.environ.get("CC", "cc"), "-shared", "-fPIC", "-O1", "-pthread"]
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


@functools.cache
def give_nccl4py(stub: Stub) -> None:
    """Have nccl4py load the stub, for all tests of this process: it loads one library, the first time it is called.

    By itself it takes a library of NCCL's name, which another package of this process may have loaded before.
    """
    found = types.SimpleNamespace(_handle_uint=stub.dll._handle, abs_path=str(stub.path))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("cuda.pathfinder"), "load_nvidia_dynamic_lib", lambda name: found)
        importlib.import_module("nccl.bindings.nccl").get_version()


def require(binding: str) -> None:
    """Skip the test where the package is not installed, which ``make test`` does."""
    try:
        metadata.version(binding)
    except metadata.PackageNotFoundError:
        pytest.skip(f"{binding} is not installed; `make test` installs it")


def make_binding(name: str, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Binding:
    """Load the binding called ``name`` over the stub, the way a worker does."""
    require(name)
    if name == "nccl4py":
        give_nccl4py(stub)
    forget_mapped_libraries(monkeypatch)
    return load_binding({"SYNK_NCCL_LIB": str(stub.path), "SYNK_NCCL_BINDING": name})


def forget_mapped_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the libraries that this process has mapped: torch's, and stubs of other tests."""
    monkeypatch.setattr(_nccl_library, "mapped_library", lambda: "")


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
            communicator = NcclCommunicator(binding, unique_id, rank, world_size, **options)
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
