"""Conversions between raw buffers and NumPy arrays of host memory. They copy nothing and keep nothing alive."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from synk._pure.arrays import address_of
from synk._pure.dtypes import BFLOAT16, dtype_name
from synk.communicators import Buffer
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

_PY_BUF_WRITE = 0x200
_memory_at = ctypes.pythonapi.PyMemoryView_FromMemory
_memory_at.restype = ctypes.py_object
_memory_at.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)


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


def as_array(buffer: Buffer) -> np.ndarray:
    """View a buffer of host memory as a writable array of shape ``(count,)``.

    The array does not keep the memory alive. The caller who made the buffer must, until the operation has returned.
    """
    dtype = named_dtype(buffer.dtype)
    if buffer.count == 0:
        return np.empty(0, dtype)
    return np.frombuffer(_memory_at(buffer.ptr, buffer.count * dtype.itemsize, _PY_BUF_WRITE), dtype)


def check_out(out: Any, shape: tuple[int, ...], dtype: Any, array_type: Any = np.ndarray) -> Any:
    """Return ``out`` if a result of this shape and dtype can be written to it.

    Raises
    ------
    ValueError
        If its type, shape, dtype or layout do not fit, or if it is read-only.
    """
    if not isinstance(out, array_type) or out.shape != shape or out.dtype != dtype:
        got = f"{getattr(out, 'dtype', type(out).__name__)} of shape {getattr(out, 'shape', ())}"
        raise ValueError(f"cannot write to out: got {got}, expected {dtype} of shape {shape}.")
    if not out.flags.c_contiguous or not getattr(out.flags, "writeable", True):
        raise ValueError("cannot write to out: got an array that is read-only or not contiguous.")
    return out


def as_buffer(array: np.ndarray) -> Buffer:
    """Return the memory of a C-contiguous array of any shape as a buffer. The caller keeps the array alive.

    Raises
    ------
    ValueError
        If the array is not C-contiguous.
    """
    if not array.flags.c_contiguous:
        raise ValueError(
            f"cannot describe an array of shape {array.shape} and strides {array.strides} as one buffer: expected "
            "C-contiguous memory. Pass numpy.ascontiguousarray(array)."
        )
    return Buffer(address_of(array), array.size, dtype_name(array.dtype))
