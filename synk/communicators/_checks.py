"""What every communicator refuses: dtypes that it cannot carry, ops that a dtype does not have, wrong arrays."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from synk._pure.dtypes import BFLOAT16, is_bfloat16
from synk._pure.ops import REDUCE_OPS, REDUCTIONS
from synk._pure.words import short_repr
from synk.errors import UnsupportedError

# The order is the dtype's number in shared memory: all processes of a runtime run the same version of this file.
DTYPE_NAMES = tuple(
    dict.fromkeys(
        (
            "bool",
            *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
            *("float16", "float32", "float64", np.dtype(np.longdouble).name),
            *("complex64", "complex128", np.dtype(np.clongdouble).name),
            "bfloat16",
        )
    )
)


@functools.cache
def named_dtype(name: str) -> np.dtype:
    """Return the NumPy dtype called ``name``. ``"bfloat16"`` is a dtype of synk's own.

    Raises
    ------
    UnsupportedError
        If values of that dtype cannot be communicated.
    """
    if name == "bfloat16":
        return BFLOAT16
    if name not in DTYPE_NAMES:
        raise UnsupportedError(
            f"cannot communicate values of dtype {name!r}: expected one of {', '.join(DTYPE_NAMES)}. "
            "Cast the array first."
        )
    return np.dtype(name)


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


def check_out(out: Any, shape: tuple[int, ...], dtype: Any, array_type: Any = np.ndarray) -> Any:
    """Return ``out`` if a result of this shape and dtype can be written to it.

    Raises
    ------
    ValueError
        If its type, shape, dtype or layout do not fit, or if it is read-only.
    """
    is_alike = isinstance(out, array_type) and out.shape == shape
    if not is_alike or not (out.dtype == dtype or (is_bfloat16(out.dtype) and is_bfloat16(np.dtype(dtype)))):
        got = f"{getattr(out, 'dtype', type(out).__name__)} of shape {getattr(out, 'shape', ())}"
        raise ValueError(f"cannot write to out: got {got}, expected {dtype} of shape {shape}.")
    if not out.flags.c_contiguous or not getattr(out.flags, "writeable", True):
        raise ValueError(
            "cannot write to out: got an array that is read-only or not contiguous. Pass numpy.empty(shape, dtype)."
        )
    return out


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
