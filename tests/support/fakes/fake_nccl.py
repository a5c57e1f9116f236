"""A stand-in for an NCCL binding between processes: ranks meet in a file of the temporary folder.

Operations run when they are launched, or beside the function's stream when somebody waits for them, and block until
the others come, as a blocking NCCL does; ``abort`` from another thread frees them. Like NCCL it drops NaN in min and
max and compares nothing between the ranks.

``SYNK_FAKE_NCCL`` says what is broken: ``1`` nothing, ``refuse`` joining fails, ``fail`` collectives are refused,
``hang`` collectives are accepted and do not end before an abort, ``stick`` not even then, ``wrong`` sums are off by
one. With a number, as in ``hang 2``, only the reduction of that number in each process is so; the first is the proof of
the group. ``SYNK_FAKE_MEETING_S`` is how long ranks take to meet, which they do once to join and twice to reduce.
"""

from __future__ import annotations

import mmap
import os
import struct
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from synk.communicators._buffers import _memory_at

MAX_RANKS = 8
AREA_NBYTES = 1 << 26
DTYPES = ("i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8")
SYSTEM_ERROR, REMOTE_ERROR = 2, 6


_num_reductions = 0


class Comm:
    """One rank's end: a counter, and an area to show its data in, for each rank."""

    def __init__(self, path: Path, rank: int, size: int) -> None:
        self.rank, self.size, self.path = rank, size, path
        with open(os.open(path, os.O_RDWR | os.O_CREAT, 0o600), "r+b") as file:
            file.truncate(4096 + MAX_RANKS * AREA_NBYTES)
            self.memory = mmap.mmap(file.fileno(), 0)
        self.ticks = np.frombuffer(self.memory, np.int64, MAX_RANKS)
        self.tick = 0
        self.is_aborted = False
        self.factors: dict[int, float] = {}

    def faulty(self) -> str:
        """Count a reduction, and return what is broken about it."""
        global _num_reductions
        _num_reductions += 1
        fault, _, number = os.environ["SYNK_FAKE_NCCL"].partition(" ")
        return fault if not number or int(number) == _num_reductions else ""

    def area(self, rank: int, nbytes: int) -> np.ndarray:
        assert nbytes <= AREA_NBYTES
        return np.frombuffer(self.memory, np.uint8, nbytes, 4096 + rank * AREA_NBYTES)

    def meet(self) -> bool:
        time.sleep(float(os.environ.get("SYNK_FAKE_MEETING_S", 0)))
        self.tick += 1
        self.ticks[self.rank] = self.tick
        while (self.ticks[: self.size] < self.tick).any():
            if self.is_aborted:
                return False
            time.sleep(0.0002)
        return True

    def share(self, data: np.ndarray) -> list[np.ndarray] | None:
        """Return what all ranks bring, or None after an abort."""
        flat = data.view(np.uint8)
        self.area(self.rank, flat.size)[:] = flat
        if not self.meet():
            return None
        everything = [self.area(rank, flat.size).view(data.dtype).copy() for rank in range(self.size)]
        return everything if self.meet() else None


def view(pointer: int, count: int, dtype: int) -> np.ndarray:
    kind = np.dtype(DTYPES[dtype])
    return np.frombuffer(_memory_at(pointer, count * kind.itemsize, 0x200), kind) if count else np.empty(0, kind)


class FakeBinding:
    name = "fake"
    has_weighted_sum = True
    version = 23203
    library_path = "nowhere"

    def new_unique_id(self) -> bytes:
        return os.urandom(128)

    def init(self, world_size: int, unique_id: bytes, rank: int) -> tuple[int, Any]:
        if os.environ["SYNK_FAKE_NCCL"] == "refuse":
            return SYSTEM_ERROR, None
        comm = Comm(Path(tempfile.gettempdir()) / f"synk-fake-nccl-{unique_id[:8].hex()}", rank, world_size)
        comm.meet()
        if rank == 0:
            comm.path.unlink()
        return 0, comm

    def async_error(self, comm: Comm) -> int:
        return 0

    def last_error(self) -> str:
        return "fake"

    def abort(self, comm: Comm) -> int:
        comm.is_aborted = True
        return 0

    destroy = abort

    def group_start(self) -> int:
        return 0

    group_end = group_start

    def create_weighted_sum(self, weight: bytes, dtype: int, comm: Comm) -> tuple[int, int]:
        op = 100 + len(comm.factors)
        (comm.factors[op],) = struct.unpack({6: "e", 7: "f", 8: "d"}[dtype], weight)
        return 0, op

    def destroy_op(self, op: int, comm: Comm) -> int:
        return 0

    def _reduced(self, comm: Comm, data: np.ndarray, op: int) -> np.ndarray | None:
        if op in comm.factors:
            data = (data * data.dtype.type(comm.factors[op])).astype(data.dtype)
        parts = comm.share(data)
        if parts is None:
            return None
        ufunc = {1: np.multiply, 2: np.fmax, 3: np.fmin}.get(op, np.add)
        with np.errstate(all="ignore"):
            total = ufunc.reduce(parts, dtype=data.dtype)
        return (total / comm.size).astype(data.dtype) if op == 4 else total

    def all_reduce(self, send: int, recv: int, count: int, dtype: int, op: int, comm: Comm, stream: int) -> int:
        """Beside the function's stream it runs when somebody waits for it, with what the array holds by then."""
        fault = comm.faulty()
        if fault in ("fail", "hang", "stick"):
            return self._broken(fault, comm, stream)
        act = partial(self._all_reduce, comm, send, recv, count, dtype, op, fault)
        return 0 if sys.modules["cupy"].cuda.runtime.queue(stream, act) else act()

    def _all_reduce(self, comm: Comm, send: int, recv: int, count: int, dtype: int, op: int, fault: str) -> int:
        total = self._reduced(comm, view(send, count, dtype), op)
        if total is None:
            return REMOTE_ERROR
        view(recv, count, dtype)[:] = total + (fault == "wrong")
        return 0

    def _broken(self, fault: str, comm: Comm, stream: int) -> int:
        if fault == "fail":
            return SYSTEM_ERROR
        sys.modules["cupy"].cuda.runtime.stall(stream, lambda: comm.is_aborted and fault == "hang")
        return 0

    def reduce(self, send: int, recv: int, count: int, dtype: int, op: int, root: int, comm: Comm, stream: int) -> int:
        total = self._reduced(comm, view(send, count, dtype), op)
        if total is None:
            return REMOTE_ERROR
        if comm.rank == root:
            view(recv, count, dtype)[:] = total
        return 0

    def reduce_scatter(self, send: int, recv: int, count: int, dtype: int, op: int, comm: Comm, stream: int) -> int:
        fault = comm.faulty()
        if fault in ("fail", "hang", "stick"):
            return self._broken(fault, comm, stream)
        total = self._reduced(comm, view(send, count * comm.size, dtype), op)
        if total is None:
            return REMOTE_ERROR
        view(recv, count, dtype)[:] = total[comm.rank * count : (comm.rank + 1) * count]
        return 0

    def broadcast(self, send: int, recv: int, count: int, dtype: int, root: int, comm: Comm, stream: int) -> int:
        parts = comm.share(view(send, count, dtype))
        if parts is None:
            return REMOTE_ERROR
        view(recv, count, dtype)[:] = parts[root]
        return 0

    def all_gather(self, send: int, recv: int, count: int, dtype: int, comm: Comm, stream: int) -> int:
        parts = comm.share(view(send, count, dtype))
        if parts is None:
            return REMOTE_ERROR
        view(recv, count * comm.size, dtype)[:] = np.concatenate(parts)
        return 0


def install() -> None:
    """Have workers of this process load the stand-in."""
    from synk._worker.comm import nccl_group as _group

    _group.load_binding = FakeBinding  # type: ignore[assignment, misc]
    _group.PROOF_TIMEOUT_S = float(os.environ.get("SYNK_FAKE_PROOF_S", 30.0))
