"""A stand-in for ``cupy.cuda.nccl`` between processes: ranks meet in a file of the temporary folder.

It computes what the stand-in library does (``tests/cuda/stub_nccl.c``). Operations run when they are launched, or
beside the function's stream when somebody waits for them, and block until the others come; ``abort`` from another
thread frees them. Like NCCL it drops NaN in min and max and compares nothing between the ranks. It refuses buffers that
overlap and are not in place, with which NCCL gives wrong numbers.

``SYNK_FAKE_NCCL`` says what is broken: empty, there is no library; ``1`` nothing; ``refuse`` joining fails, ``fail``
collectives are refused, ``hang`` collectives are accepted and do not end before an abort, ``stick`` not even then,
``wrong`` sums are off by one, ``peers`` they are unless NCCL may not copy between peers. With a number, as in
``hang 2``, only the reduction of that number in each process is so; the first is the proof of the group.
``SYNK_FAKE_MEETING_S`` is how long ranks take to meet, which they do once to join and twice to reduce.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from synk.cuda import _group

from . import runtime

available = bool(os.environ.get("SYNK_FAKE_NCCL"))
_group.PROOF_TIMEOUT_S = float(os.environ.get("SYNK_FAKE_PROOF_S", 30.0))

MAX_RANKS = 8
AREA_NBYTES = 1 << 26
DTYPES = ("i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8")
UFUNCS = {1: np.multiply, 2: np.fmax, 3: np.fmin}
SYSTEM_ERROR, REMOTE_ERROR = 2, 6
NAMES = {SYSTEM_ERROR: "NCCL_ERROR_SYSTEM_ERROR", REMOTE_ERROR: "NCCL_ERROR_REMOTE_ERROR"}

_num_reductions = 0


class NcclError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"{NAMES[status]}: fake")
        self.status = status


def get_version() -> int:
    return 23203


def get_unique_id() -> bytes:
    return os.urandom(128)


def groupStart() -> None:
    pass


groupEnd = groupStart


def fault_of_next() -> str:
    """Count a reduction, and return what is broken about it."""
    global _num_reductions
    _num_reductions += 1
    fault, _, number = os.environ["SYNK_FAKE_NCCL"].partition(" ")
    if fault == "peers":
        return "" if os.environ.get("NCCL_P2P_DISABLE") == "1" else "wrong"
    return fault if not number or int(number) == _num_reductions else ""


def view(pointer: int, count: int, dtype: int) -> np.ndarray:
    kind = np.dtype(DTYPES[dtype])
    return np.frombuffer((ctypes.c_char * (count * kind.itemsize)).from_address(pointer), kind)


def check_apart(send: int, send_nbytes: int, recv: int, recv_nbytes: int, in_place: int) -> None:
    overlaps = max(send, recv) < min(send + send_nbytes, recv + recv_nbytes)
    assert not overlaps or recv - send == in_place, "the buffers overlap"


class NcclCommunicator:
    """One rank's end: a counter, and an area to show its data in, for each rank."""

    def __init__(self, ndev: int, commId: bytes, rank: int) -> None:
        if os.environ["SYNK_FAKE_NCCL"] == "refuse":
            raise NcclError(SYSTEM_ERROR)
        self.rank, self.size = rank, ndev
        path = Path(tempfile.gettempdir()) / f"synk-fake-nccl-{commId[:8].hex()}"
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            file.truncate(4096 + MAX_RANKS * AREA_NBYTES)
            self.memory = mmap.mmap(file.fileno(), 0)
        self.ticks = np.frombuffer(self.memory, np.int64, MAX_RANKS)
        self.tick = 0
        self.is_aborted = False
        self.meet()
        if rank == 0:
            path.unlink()

    def abort(self) -> None:
        self.is_aborted = True

    destroy = abort

    def check_async_error(self) -> None:
        pass

    def area(self, rank: int, nbytes: int) -> np.ndarray:
        assert nbytes <= AREA_NBYTES
        return np.frombuffer(self.memory, np.uint8, nbytes, 4096 + rank * AREA_NBYTES)

    def meet(self) -> None:
        time.sleep(float(os.environ.get("SYNK_FAKE_MEETING_S", 0)))
        self.tick += 1
        self.ticks[self.rank] = self.tick
        while (self.ticks[: self.size] < self.tick).any():
            if self.is_aborted:
                raise NcclError(REMOTE_ERROR)
            time.sleep(0.0002)

    def share(self, data: np.ndarray) -> list[np.ndarray]:
        """Return what all ranks bring."""
        flat = data.view(np.uint8)
        self.area(self.rank, flat.size)[:] = flat
        self.meet()
        everything = [self.area(rank, flat.size).view(data.dtype).copy() for rank in range(self.size)]
        self.meet()
        return everything

    def reduced(self, sendbuf: int, count: int, dtype: int, op: int) -> np.ndarray:
        parts = self.share(view(sendbuf, count, dtype))
        with np.errstate(all="ignore"):
            total = UFUNCS.get(op, np.add).reduce(parts, dtype=parts[0].dtype)
        return (total / self.size).astype(total.dtype) if op == 4 else total

    def breaks(self, fault: str, stream: int) -> bool:
        """Do what a broken reduction does instead of its work; return whether this one is broken."""
        if fault == "fail":
            raise NcclError(SYSTEM_ERROR)
        if fault in ("hang", "stick"):
            runtime.stall(stream, lambda: self.is_aborted and fault == "hang")
        return fault in ("hang", "stick")

    def allReduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, stream: int) -> None:
        """Beside the function's stream it runs when somebody waits for it, with what the array holds by then."""
        nbytes = count * np.dtype(DTYPES[datatype]).itemsize
        check_apart(sendbuf, nbytes, recvbuf, nbytes, 0)
        fault = fault_of_next()
        if self.breaks(fault, stream):
            return
        act = partial(self._all_reduce, sendbuf, recvbuf, count, datatype, op, fault)

        def later() -> None:
            with contextlib.suppress(NcclError):  # a kernel that was aborted ends, and says nothing
                act()

        if not runtime.queue(stream, later):
            act()

    def _all_reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, fault: str) -> None:
        total = self.reduced(sendbuf, count, datatype, op)
        view(recvbuf, count, datatype)[:] = total + (fault == "wrong")

    def reduce(self, sendbuf: int, recvbuf: int, count: int, datatype: int, op: int, root: int, stream: int) -> None:
        total = self.reduced(sendbuf, count, datatype, op)
        if self.rank == root:
            view(recvbuf, count, datatype)[:] = total

    def reduceScatter(self, sendbuf: int, recvbuf: int, recvcount: int, datatype: int, op: int, stream: int) -> None:
        if self.breaks(fault_of_next(), stream):
            return
        nbytes = recvcount * np.dtype(DTYPES[datatype]).itemsize
        check_apart(sendbuf, nbytes * self.size, recvbuf, nbytes, nbytes * self.rank)
        total = self.reduced(sendbuf, recvcount * self.size, datatype, op)
        view(recvbuf, recvcount, datatype)[:] = total[self.rank * recvcount : (self.rank + 1) * recvcount]

    def broadcast(self, sendbuff: int, recvbuff: int, count: int, datatype: int, root: int, stream: int) -> None:
        parts = self.share(view(sendbuff, count, datatype))
        view(recvbuff, count, datatype)[:] = parts[root]

    def allGather(self, sendbuf: int, recvbuf: int, count: int, datatype: int, stream: int) -> None:
        nbytes = count * np.dtype(DTYPES[datatype]).itemsize
        check_apart(sendbuf, nbytes, recvbuf, nbytes * self.size, -nbytes * self.rank)
        parts: list[Any] = self.share(view(sendbuf, count, datatype))
        view(recvbuf, count * self.size, datatype)[:] = np.concatenate(parts)
