"""What the NCCL tests share: the compiled stub library, ranks as threads over it."""

from __future__ import annotations

import ctypes
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from synk.cuda._nccl import Buffer, NcclCommunicator

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


class RecordedCall(ctypes.Structure):
    """One call as it arrived in the stub."""

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
        self.dll.stub_call.restype = ctypes.POINTER(RecordedCall)

    def set(self, name: str, value: int) -> None:
        """Turn a knob: see the C file."""
        self.dll.stub_set(name.encode(), value)

    def reset(self) -> None:
        """Turn all knobs back, free what is stuck, wait for what it leaves behind, forget the calls."""
        self.dll.stub_reset()
        for thread in threading.enumerate():
            if thread.name == "synk-nccl":
                thread.join()
        self.dll.stub_reset()

    def calls(self, *names: str) -> list[RecordedCall]:
        """Return the recorded calls, those of ``names`` if given."""
        pointers = map(self.dll.stub_call, range(self.dll.stub_num_calls()))
        found = [RecordedCall.from_buffer_copy(pointer.contents) for pointer in pointers]
        return [call for call in found if not names or call.name.decode() in names]


def as_buffer(array: np.ndarray, dtype: str = "") -> Buffer:
    """Describe ``array``; ``dtype`` where NumPy has no name for it."""
    return Buffer(array.ctypes.data, array.size, dtype or array.dtype.name)


def run_ranks(nccl: Any, world_size: int, body: Callable[[NcclCommunicator], Any], **options: Any) -> list[Any]:
    """Run ``body(communicator)`` on ``world_size`` threads as ranks; return the results, or raise the first error."""
    unique_id = nccl.get_unique_id()
    results: list[Any] = [None] * world_size
    errors: list[BaseException] = []

    def run(rank: int) -> None:
        communicator = None
        try:
            communicator = NcclCommunicator(nccl, unique_id, rank, world_size, **options)
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
