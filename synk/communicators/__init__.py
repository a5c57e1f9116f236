"""What a collective needs of a group of workers: a protocol of raw pointers, without any array library's types.

Implementations: ``_shm`` (shared memory of the host; arrays on devices go through it as copies) and ``_nccl`` (GPUs, by
NCCL through nccl4py or pynccl). What one of them lacks it says by ``UnsupportedError``.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Buffer:
    """A contiguous piece of memory that the communicator may read or write.

    Attributes
    ----------
    ptr : int
        Address of the first element, on the device of the communicator.
    count : int
        Number of elements.
    dtype : str
        The name as in ``numpy.dtype(...).name``, or ``"bfloat16"``.
    """

    ptr: int
    count: int
    dtype: str


@dataclass(frozen=True)
class Capabilities:
    """What a communicator can do: names of ops and dtypes, the library behind it and its version.

    The last two attributes are the differences from NumPy for which its user must make up.

    Attributes
    ----------
    nan_propagates : bool
        Whether ``min`` and ``max`` keep NaN. NCCL's drop it (``fminf`` in ``src/device/reduce_kernel.h``). Reduce a
        flag for NaN (uint8, ``max``) in the same group, and write NaN where the flag is set.
    has_weighted_avg : bool
        Whether ``avg`` takes a weight, as NCCL's does since 2.11. If it does not, multiply the buffer by the weight and
        reduce by ``sum``.
    """

    name: str
    ops: tuple[str, ...]
    dtypes: tuple[str, ...]
    version: str = ""
    library_path: str = ""
    nan_propagates: bool = True
    has_weighted_avg: bool = True


class Communicator(Protocol):
    """Collectives between the ranks of one runtime. Every rank calls the same ones in the same order.

    Ops are the words of ``REDUCE_OPS``. ``avg`` takes ``weight``, this rank's share of the rows (the shares of all
    ranks sum to 1); ``None`` weights all ranks equally. ``min`` and ``max`` propagate NaN as NumPy does. The ``send``
    and ``recv`` buffers may be the same memory. If one of them holds a block for each rank, the other may be this
    rank's block of it. Counts may be 0. ``stream`` is the raw handle of the device stream to work on. On the CPU it is
    ignored: there a method returns when the result is complete. If only some of the ranks take part in a call
    (``_shm``), blocks, shares and averages are over those ranks, and every rank keeps its number.
    """

    rank: int
    world_size: int

    def all_reduce(self, send: Buffer, recv: Buffer, op: str, *, weight: float | None = None, stream: int = 0) -> None:
        """Reduce ``send`` of all ranks into ``recv`` of every rank. Counts and dtypes must be equal everywhere."""

    def reduce(
        self, send: Buffer, recv: Buffer, op: str, root: int, *, weight: float | None = None, stream: int = 0
    ) -> None:
        """Reduce ``send`` of all ranks into ``recv`` of rank ``root``. Other ranks may pass ``send`` as ``recv``."""

    def broadcast(self, buffer: Buffer, root: int, *, stream: int = 0) -> None:
        """Copy ``buffer`` of rank ``root`` into ``buffer`` of every rank."""

    def all_gather(self, send: Buffer, recv: Buffer, *, stream: int = 0) -> None:
        """Concatenate ``send`` of all ranks, in rank order, into ``recv`` (``world_size * send.count``)."""

    def reduce_scatter(
        self, send: Buffer, recv: Buffer, op: str, *, weight: float | None = None, stream: int = 0
    ) -> None:
        """Reduce ``send`` (``world_size * recv.count``) and leave this rank's block in ``recv``."""

    def group(self) -> contextlib.AbstractContextManager[None]:
        """Launch the operations of the ``with`` body as one (NCCL). The other communicators run them one by one."""

    def capabilities(self) -> Capabilities:
        """Return what this communicator can do."""
