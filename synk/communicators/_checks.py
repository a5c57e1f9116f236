"""What every communicator refuses: ops that a dtype does not have, buffers that do not fit together.

Pure functions of names and counts.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from synk._pure.ops import REDUCE_OPS, REDUCTIONS
from synk._pure.texts import short_repr
from synk.communicators import Buffer
from synk.communicators._buffers import DTYPE_NAMES
from synk.errors import UnsupportedError


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


def check_reduction(op: str, dtype: str, weight: float | None = None) -> None:
    """Check that ``op`` is defined for ``dtype``, and that a weight comes only with ``avg``.

    Raises
    ------
    ValueError
        If the op is unknown, or a weight comes with another op than ``avg`` or lies outside 0 to 1.
    TypeError
        A dtype for which the op has no meaning: see ``Reduction.check``.
    """
    if op not in REDUCE_OPS:
        raise ValueError(f"cannot reduce: got op {op!r}, expected one of {', '.join(REDUCE_OPS)}.")
    if weight is not None and (op != "avg" or not 0.0 <= weight <= 1.0):
        raise ValueError(
            f"cannot reduce by {op!r}: got weight={weight!r}, expected a share from 0 to 1, and only with op 'avg'."
        )
    _check_dtype(op, dtype)


@functools.cache  # what raises is not kept
def _check_dtype(op: str, dtype: str) -> None:
    if dtype in DTYPE_NAMES:  # others are the communicator's to refuse
        REDUCTIONS[op].check(np.dtype("float32" if dtype == "bfloat16" else dtype), "the array of a collective")


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


def check_place(action: str, name: str, place: Any, num_ranks: int) -> None:
    """Check that ``place`` is one of a call's ranks, as functions count them.

    Raises
    ------
    TypeError
        If it is not an int, for instance an array.
    ValueError
        If the call has no such rank.
    """
    is_int = isinstance(place, (int, np.integer)) and not isinstance(place, bool)
    if is_int and 0 <= place < num_ranks:
        return
    got = place if is_int else f"{type(place).__name__} {short_repr(place)}"
    hint = ""
    if action == "recv":
        hint = " Write recv(peer, tag), with out=array where the message is to fill an array."
    raise (ValueError if is_int else TypeError)(
        f"cannot {action}: got {name}={got}, expected a rank of this call, an int from 0 to {num_ranks - 1}.{hint}"
    )
