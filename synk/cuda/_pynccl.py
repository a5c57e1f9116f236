"""The package pynccl in the place of ``cupy.cuda.nccl``: the same names, so that its library can be another one.

pynccl looks for ``libnccl.so`` in the folder ``NUMBA_NCCLLIB``. Of pynccl only the library object is used: it declares
counts as C ``int`` (2**32 + 7 elements arrive as 7), an id of 512 bytes, and needs numba's device.
"""

from __future__ import annotations

import ctypes
import importlib
import warnings
from ctypes import byref, c_char_p, c_int, c_size_t, c_void_p
from typing import Any


class NcclError(RuntimeError):
    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)  # bytes: reading characters stops at the first zero


class Nccl:
    """What ``_nccl`` uses of CuPy's module, over a library that ctypes has loaded. ctypes releases the GIL."""

    __name__ = "pynccl"
    NcclError = NcclError

    def __init__(self, dll: ctypes.CDLL) -> None:
        self._dll = dll

    def call(self, name: str, *arguments: Any) -> None:
        # Linux passes each number in 64 bits, and C takes the lower ones of those that it declares as an int.
        wide = [c_size_t(each) if isinstance(each, int) else each for each in arguments]
        if status := self._dll[name](*wide):  # a function object of its own, without pynccl's declarations
            describe = self._dll["ncclGetErrorString"]
            describe.restype = c_char_p
            text = describe(status).decode(errors="replace")
            raise NcclError(status, f"NCCL's status {status}: {text}")

    def get_version(self) -> int:
        self.call("ncclGetVersion", byref(version := c_int()))
        return version.value

    def get_unique_id(self) -> bytes:
        self.call("ncclGetUniqueId", byref(unique_id := _UniqueId()))
        return bytes(unique_id)

    def groupStart(self) -> None:
        self.call("ncclGroupStart")

    def groupEnd(self) -> None:
        self.call("ncclGroupEnd")

    def NcclCommunicator(self, world_size: int, unique_id: bytes, rank: int) -> _Communicator:
        comm = c_void_p()
        self.call("ncclCommInitRank", byref(comm), world_size, _UniqueId.from_buffer_copy(unique_id), rank)
        return _Communicator(self, comm)


class _Communicator:
    """A communicator with the methods of CuPy's that ``_nccl`` uses."""

    def __init__(self, nccl: Nccl, comm: c_void_p) -> None:
        self._nccl, self._comm = nccl, comm

    def __getattr__(self, name: str) -> Any:
        function = f"ncclComm{name.title()}" if name in ("abort", "destroy") else f"nccl{name[0].upper()}{name[1:]}"
        # NCCL has the communicator before the last argument, the stream; abort and destroy have only that.
        return lambda *args: self._nccl.call(function, *args[:-1], self._comm, *args[-1:])

    def check_async_error(self) -> None:
        self._nccl.call("ncclCommGetAsyncError", self._comm, byref(state := c_int()))
        if state.value:
            raise NcclError(state.value, f"NCCL's status {state.value}")


def load() -> Nccl:
    """Load the library that pynccl finds."""
    with warnings.catch_warnings():  # numba-cuda has deprecated what pynccl imports
        warnings.simplefilter("ignore")
        return Nccl(importlib.import_module("pynccl.binding").libnccl().dll)
