"""What every communicator refuses alike: ops that a dtype does not have, buffers that do not fit together.

Pure functions of names and counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from synk._pure.ops import REDUCE_OPS
from synk._pure.texts import short_repr
from synk.communicators import Buffer
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
    """Raise unless ``op`` is defined for ``dtype`` and ``weight`` belongs to it.

    Raises
    ------
    ValueError
        Unknown op; a weight without ``avg``, or outside 0 to 1.
    TypeError
        ``sum``, ``prod`` or ``avg`` of booleans, ``avg`` of integers, ``min`` or ``max`` of complex numbers.
    """
    if op not in REDUCE_OPS:
        raise ValueError(f"cannot reduce: got op {op!r}, expected one of {', '.join(REDUCE_OPS)}.")
    if weight is not None and (op != "avg" or not 0.0 <= weight <= 1.0):
        raise ValueError(
            f"cannot reduce by {op!r}: got weight={weight!r}, expected a share from 0 to 1, and only with op 'avg'."
        )
    is_bool = dtype == "bool"
    if is_bool and op in ("sum", "prod", "avg"):
        raise TypeError(f"cannot {op} booleans: got dtype bool, expected numbers. Use 'min' or 'max', or cast first.")
    if op == "avg" and dtype.startswith(("int", "uint")):
        raise TypeError(f"cannot average integers: got dtype {dtype}, expected floats. Use 'sum', or cast to a float.")
    if op in ("min", "max") and dtype.startswith("complex"):
        raise TypeError(f"cannot take the {op} of complex numbers: got dtype {dtype}. Reduce real and imaginary parts.")


def check_buffers(action: str, send: Buffer, recv: Buffer, *, send_count: int, recv_count: int) -> None:
    """Raise ValueError unless the dtypes are equal and the counts are those expected."""
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
    """Raise unless ``place`` is one of a call's ranks, as functions count them.

    Raises
    ------
    TypeError
        Where it is no int, as an array is.
    ValueError
        Where there is no such rank.
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
