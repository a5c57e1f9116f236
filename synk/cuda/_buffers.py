"""What NCCL gets of an array: an address, a count and the name of a dtype; and what it refuses. Pure functions."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from synk.errors import UnsupportedError


@dataclass(frozen=True)
class Buffer:
    """A contiguous piece of device memory that NCCL may read or write.

    Attributes
    ----------
    ptr : int
        Address of the first element.
    count : int
        Number of elements.
    dtype : str
        The name as in ``numpy.dtype(...).name``, or ``"bfloat16"``.
    """

    ptr: int
    count: int
    dtype: str


def dtype_nbytes(dtype: str) -> int:
    """Return the size of one element of the dtype named ``dtype``."""
    if dtype == "bfloat16":  # known to NumPy only while ml_dtypes is imported
        return 2
    try:
        return np.dtype(dtype).itemsize
    except TypeError as error:
        raise UnsupportedError(
            f"cannot move an array of dtype {dtype!r}: expected a plain dtype of fixed size. Send its bytes as uint8."
        ) from error


def check_buffers(action: str, send: Buffer, recv: Buffer, *, send_count: int, recv_count: int) -> None:
    """Raise ValueError unless the dtypes are equal and the counts are as expected."""
    if send.dtype != recv.dtype or (send.count, recv.count) != (send_count, recv_count):
        raise ValueError(
            f"cannot {action}: got {send.count} {send.dtype} to send and {recv.count} {recv.dtype} to receive, "
            f"expected {send_count} and {recv_count} elements of one dtype."
        )


def check_rank(action: str, name: str, rank: int, world_size: int) -> None:
    """Raise ValueError unless ``rank`` lies in ``[0, world_size)``."""
    if not 0 <= rank < world_size:
        raise ValueError(f"cannot {action}: got {name}={rank}, expected a rank from 0 to {world_size - 1}.")
