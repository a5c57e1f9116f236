"""The communicator of one rank: every result is the input.

Makes no call of a collective library: NCCL before 2.29.7 drops the tail of an average on a group of one
(``src/device/onerank.cu``, NVIDIA/nccl#1950), and there is nothing to gain by asking.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from synk.communicators import REDUCE_OPS, Buffer, Capabilities
from synk.communicators._checks import check_buffers, check_rank, check_reduction, dtype_nbytes
from synk.errors import ClosedError, UnsupportedError

COPIED_DTYPES = (
    "bool",
    *(f"{kind}{bits}" for kind in ("int", "uint") for bits in (8, 16, 32, 64)),
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "complex64",
    "complex128",
)


class SoloCommunicator:
    """A group of one rank.

    Parameters
    ----------
    copy : callable
        ``copy(destination, source, nbytes, stream)``: copy within this rank's device, ordered on the stream.
    """

    rank = 0
    world_size = 1

    def __init__(self, copy: Callable[[int, int, int, int], None]) -> None:
        self._copy = copy
        self._is_closed = False

    def _move(self, action: str, send: Buffer, recv: Buffer, stream: int) -> None:
        if self._is_closed:
            raise ClosedError(f"cannot {action}: the communicator is closed.")
        check_buffers(action, send, recv, send_count=send.count, recv_count=send.count)
        if send.count and send.ptr != recv.ptr:
            self._copy(recv.ptr, send.ptr, send.count * dtype_nbytes(send.dtype), stream)

    def _reduce(self, action: str, send: Buffer, recv: Buffer, op: str, weight: float | None, stream: int) -> None:
        check_reduction(op, send.dtype, weight)
        if weight not in (None, 1.0):
            raise ValueError(f"cannot {action}: got weight={weight!r}, expected 1.0, the share of the only rank.")
        self._move(action, send, recv, stream)

    def all_reduce(self, send: Buffer, recv: Buffer, op: str, *, weight: float | None = None, stream: int = 0) -> None:
        self._reduce("all_reduce", send, recv, op, weight, stream)

    def reduce(
        self, send: Buffer, recv: Buffer, op: str, root: int, *, weight: float | None = None, stream: int = 0
    ) -> None:
        check_rank("reduce", "root", root, 1)
        self._reduce("reduce", send, recv, op, weight, stream)

    def reduce_scatter(
        self, send: Buffer, recv: Buffer, op: str, *, weight: float | None = None, stream: int = 0
    ) -> None:
        self._reduce("reduce_scatter", send, recv, op, weight, stream)

    def broadcast(self, buffer: Buffer, root: int, *, stream: int = 0) -> None:
        check_rank("broadcast", "root", root, 1)
        self._move("broadcast", buffer, buffer, stream)

    def all_gather(self, send: Buffer, recv: Buffer, *, stream: int = 0) -> None:
        self._move("all_gather", send, recv, stream)

    def send(self, buffer: Buffer, peer: int, tag: int = 0, *, stream: int = 0) -> None:
        raise UnsupportedError(f"cannot send to rank {peer}: the only rank has no peer. Use fork() with more workers.")

    def recv(self, buffer: Buffer, peer: int, tag: int = 0, *, stream: int = 0) -> None:
        raise UnsupportedError(
            f"cannot receive from rank {peer}: the only rank has no peer. Use fork() with more workers."
        )

    def barrier(self) -> None:
        """Return at once."""

    def group(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def poll(self) -> str:
        return "error" if self._is_closed else "ok"

    def abort(self) -> None:
        self._is_closed = True

    def close(self) -> None:
        self._is_closed = True

    def capabilities(self) -> Capabilities:
        return Capabilities("solo", REDUCE_OPS, COPIED_DTYPES)
