"""Collectives between GPUs by NCCL: ops, dtypes, weights, splitting.

A collective is checked here and split into calls of at most ``max_count`` elements. The base class (``_nccl_handle``)
launches them through a binding (``_nccl_bindings``) and waits until NCCL has accepted them. The result is there when
the stream has passed the operation. ``wait`` watches the stream, NCCL's errors, and the runtime's message that a peer
is gone. No array library is imported.

One thread of a process launches collectives. ``abort`` and ``poll`` may be called from another thread.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

from synk._pure.ops import REDUCE_OPS
from synk.communicators import Buffer, Capabilities
from synk.communicators._checks import check_buffers, check_rank, check_reduction, dtype_nbytes
from synk.cuda._nccl_bindings import UNIQUE_ID_NBYTES, Binding
from synk.cuda._nccl_handle import NcclHandle
from synk.cuda._nccl_library import version_text
from synk.errors import UnsupportedError

_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
_BYTE = 1
_DTYPES = {
    "int8": 0,
    "uint8": _BYTE,
    "int32": 2,
    "uint32": 3,
    "int64": 4,
    "uint64": 5,
    "float16": 6,
    "float32": 7,
    "float64": 8,
    "bfloat16": 9,
}
# Dtypes that NCCL lacks, as a number of elements of a dtype that it has.
_STORED_AS = {"bool": ("uint8", 1), "complex64": ("float32", 2), "complex128": ("float64", 2)}
_BFLOAT16_VERSION = 21000
_SCALAR_FORMATS = {"float16": "=e", "float32": "=f", "float64": "=d"}

_Call = Callable[[Any], int]


def pack_scalar(value: float, dtype: str) -> bytes:
    """Return ``value`` as one element of a float ``dtype``, rounded to nearest, ties to even.

    Examples
    --------
    >>> pack_scalar(1.0, "bfloat16").hex(), pack_scalar(0.5, "float64").hex()
    ('803f', '000000000000e03f')
    """
    if dtype == "bfloat16":  # the upper half of a float32
        (bits,) = struct.unpack("=I", struct.pack("=f", value))
        return struct.pack("=H", (bits + 0x7FFF + (bits >> 16 & 1)) >> 16)
    return struct.pack(_SCALAR_FORMATS[dtype], value)


def split_count(count: int, max_count: int) -> list[tuple[int, int]]:
    """Return ``(offset, length)`` of the pieces of ``count`` elements, each of at most ``max_count``.

    Examples
    --------
    >>> split_count(7, 3)
    [(0, 3), (3, 3), (6, 1)]
    """
    return [(offset, min(max_count, count - offset)) for offset in range(0, count, max_count)]


class _ReduceArguments(NamedTuple):
    """A reduction in NCCL's terms.

    Attributes
    ----------
    op, dtype : int
        NCCL's numbers.
    width : int
        The bytes of an element of NCCL's dtype.
    factor : int
        The number of such elements in an element of the array: 2 for complex dtypes, else 1.
    """

    op: int
    dtype: int
    width: int
    factor: int


def _bind(method: Callable[..., int], *arguments: int) -> _Call:
    """Return ``method`` with all arguments except the communicator, which comes before the last one, the stream."""
    *others, stream = arguments
    return lambda comm: method(*others, comm, stream)


class NcclCommunicator(NcclHandle):
    """A rank's end of a group of two or more GPUs.

    Buffers are device memory of this rank. Every method that takes a ``stream`` returns when NCCL has accepted the
    operation. The memory must stay allocated until the stream has passed it. ``all_gather`` in place means that
    ``send`` is the rank's own block of ``recv``; ``reduce_scatter`` in place means that ``recv`` is the rank's own
    block of ``send``. NCCL does not compare counts and dtypes between ranks, so the caller must have done so. A rank
    with weight 0 must still contribute finite numbers.

    Parameters
    ----------
    binding : Binding
        From ``load_binding``.
    unique_id : bytes
        128 bytes from one rank's ``binding.new_unique_id()``, the same on every rank.
    rank, world_size : int
        This rank and the number of ranks, at least 2.
    is_broken : callable
        Tells whether the runtime has given the group up. It is called in every wait, so it must be cheap.
    timeout_s : float
        Time limit for joining the group and for each launch. A collective that NCCL has accepted may run longer: see
        ``wait``.
    abort_timeout_s : float
        Time limit for ``abort`` and ``close``. If NCCL is not done by then, its thread is left to the end of the
        process.

    Raises
    ------
    ValueError
        If an argument is out of range.
    NcclError
        If the group cannot be joined: code 8 after ``timeout_s``, 6 if the runtime gave the group up.

    Notes
    -----
    From NCCL 2.27.3 on the communicator is non-blocking: NCCL launches each group in a thread of its own, and a peer
    that never comes cannot hold this process. Launch several outputs in one ``group``.
    """

    max_count: ClassVar[int] = 1 << 30

    def __init__(
        self,
        binding: Binding,
        unique_id: bytes,
        rank: int,
        world_size: int,
        *,
        is_broken: Callable[[], bool] = lambda: False,
        timeout_s: float = 60.0,
        abort_timeout_s: float = 5.0,
    ) -> None:
        if world_size < 2:
            raise ValueError(f"cannot join an NCCL group: got world_size={world_size}, expected at least 2 ranks.")
        if len(unique_id) != UNIQUE_ID_NBYTES:
            raise ValueError(f"cannot join an NCCL group: got an id of {len(unique_id)} bytes, expected 128.")
        check_rank("join an NCCL group", "rank", rank, world_size)
        super().__init__(binding, is_broken, timeout_s=timeout_s, abort_timeout_s=abort_timeout_s)
        self.rank = rank
        self.world_size = world_size
        has_bfloat16 = binding.version >= _BFLOAT16_VERSION
        self._capabilities = Capabilities(
            name=f"nccl by {binding.name}",
            ops=tuple(op for op in REDUCE_OPS if op in _OPS),
            dtypes=tuple(name for name in (*_DTYPES, *_STORED_AS) if name != "bfloat16" or has_bfloat16),
            version=version_text(binding.version),
            library_path=binding.library_path,
            nan_propagates=False,
            has_weighted_avg=binding.has_weighted_sum,
        )
        self._join(unique_id, rank, world_size)

    def _pieces(
        self, method: Callable[..., int], send: int, recv: int, count: int, width: int, *others: int
    ) -> list[_Call]:
        """Return the calls of a method for ``count`` elements of ``width`` bytes, ``max_count`` at most in each."""
        return [
            _bind(method, send + at * width, recv + at * width, length, *others)
            for at, length in split_count(count, self.max_count)
        ]

    # Reductions

    @contextlib.contextmanager
    def _reduction(self, action: str, op: str, dtype: str, weight: float | None) -> Iterator[_ReduceArguments]:
        """Yield the reduction in NCCL's terms, with the weighted sum it may need."""
        stored_as, factor = _STORED_AS.get(dtype, (dtype, 1))
        is_known = op in self._capabilities.ops and dtype in self._capabilities.dtypes
        if not is_known or (factor > 1 and op == "prod"):
            raise UnsupportedError(
                f"cannot {action}: NCCL {version_text(self._binding.version)} does not have it. Cast the array, or "
                "reduce it on the host."
            )
        code, width = _DTYPES[stored_as], dtype_nbytes(stored_as)
        if weight is None:
            yield _ReduceArguments(_OPS[op], code, width, factor)
            return
        if not self._binding.has_weighted_sum:
            raise UnsupportedError(
                f"cannot {action} with a weight: NCCL {version_text(self._binding.version)} has no weighted sum. "
                "Multiply the buffer by its weight and reduce by 'sum', or install NCCL 2.11 or later."
            )
        with self._weighted_sum(pack_scalar(weight, stored_as), code, action) as weighted_op:
            yield _ReduceArguments(weighted_op, code, width, factor)

    def all_reduce(self, send: Buffer, recv: Buffer, op: str, *, weight: float | None = None, stream: int = 0) -> None:
        action = f"all_reduce {send.count} {send.dtype} by {op!r}"
        check_reduction(op, send.dtype, weight)
        check_buffers(action, send, recv, send_count=send.count, recv_count=send.count)
        with self._reduction(action, op, send.dtype, weight) as (nccl_op, dtype, width, factor):
            calls = self._pieces(
                self._binding.all_reduce, send.ptr, recv.ptr, send.count * factor, width, dtype, nccl_op, stream
            )
            self._launch(calls, action)

    def reduce(
        self, send: Buffer, recv: Buffer, op: str, root: int, *, weight: float | None = None, stream: int = 0
    ) -> None:
        action = f"reduce {send.count} {send.dtype} by {op!r}"
        check_reduction(op, send.dtype, weight)
        check_rank(action, "root", root, self.world_size)
        check_buffers(action, send, recv, send_count=send.count, recv_count=send.count)
        with self._reduction(action, op, send.dtype, weight) as (nccl_op, dtype, width, factor):
            count = send.count * factor
            calls = self._pieces(self._binding.reduce, send.ptr, recv.ptr, count, width, dtype, nccl_op, root, stream)
            self._launch(calls, action)

    def reduce_scatter(
        self, send: Buffer, recv: Buffer, op: str, *, weight: float | None = None, stream: int = 0
    ) -> None:
        action = f"reduce_scatter {send.count} {send.dtype} by {op!r}"
        check_reduction(op, send.dtype, weight)
        check_buffers(action, send, recv, send_count=self.world_size * recv.count, recv_count=recv.count)
        with self._reduction(action, op, send.dtype, weight) as (nccl_op, dtype, width, factor):
            count = recv.count * factor
            if count <= self.max_count:
                run = _bind(self._binding.reduce_scatter, send.ptr, recv.ptr, count, dtype, nccl_op, stream)
                calls = [run] if count else []
            # The pieces of all ranks' blocks are not contiguous in ``send``, so each block gets a reduction of its own.
            else:
                calls = []
                for root in range(self.world_size):
                    block = send.ptr + root * count * width
                    calls += self._pieces(
                        self._binding.reduce, block, recv.ptr, count, width, dtype, nccl_op, root, stream
                    )
            self._launch(calls, action)

    # For copies NCCL's dtype does not matter, so every dtype travels as uint8.

    def broadcast(self, buffer: Buffer, root: int, *, stream: int = 0) -> None:
        action = f"broadcast {buffer.count} {buffer.dtype}"
        check_rank(action, "root", root, self.world_size)
        nbytes = buffer.count * dtype_nbytes(buffer.dtype)
        calls = self._pieces(self._binding.broadcast, buffer.ptr, buffer.ptr, nbytes, 1, _BYTE, root, stream)
        self._launch(calls, action)

    def all_gather(self, send: Buffer, recv: Buffer, *, stream: int = 0) -> None:
        action = f"all_gather {send.count} {send.dtype}"
        check_buffers(action, send, recv, send_count=send.count, recv_count=self.world_size * send.count)
        nbytes = send.count * dtype_nbytes(send.dtype)
        if nbytes <= self.max_count:
            run = _bind(self._binding.all_gather, send.ptr, recv.ptr, nbytes, _BYTE, stream)
            calls = [run] if nbytes else []
        else:  # one broadcast for each rank, for the same reason as in reduce_scatter
            calls = []
            for root in range(self.world_size):
                block = recv.ptr + root * nbytes
                source = send.ptr if root == self.rank else block
                calls += self._pieces(self._binding.broadcast, source, block, nbytes, 1, _BYTE, root, stream)
        self._launch(calls, action)

    def capabilities(self) -> Capabilities:
        return self._capabilities
