"""Collectives and messages between the workers in host memory, over raw pointers, without any array library's types.

``_shm`` is for the ranks of a machine, ``_two_level`` for those of several nodes. Between GPUs, see ``synk.cuda``.
"""

from __future__ import annotations

from dataclasses import dataclass


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
