"""Between raw buffers and NumPy arrays of host memory. No copy is made here, and no lifetime is kept."""

from __future__ import annotations

import ctypes
import functools

import numpy as np

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
    """Return the NumPy dtype called ``name``; ``"bfloat16"`` is one of synk's own.

    Raises
    ------
    UnsupportedError
        If the host cannot hold such values.
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

    The array does not keep the memory alive: whoever made the buffer does, until the operation on it has returned.
    """
    dtype = named_dtype(buffer.dtype)
    if buffer.count == 0:
        return np.empty(0, dtype)
    return np.frombuffer(_memory_at(buffer.ptr, buffer.count * dtype.itemsize, _PY_BUF_WRITE), dtype)


def as_buffer(array: np.ndarray) -> Buffer:
    """Describe the memory of a C-contiguous array, of any shape; the caller keeps the array alive.

    Raises
    ------
    ValueError
        If the elements do not lie next to each other.
    """
    if not array.flags.c_contiguous:
        raise ValueError(
            f"cannot describe an array of shape {array.shape} and strides {array.strides} as one buffer: expected "
            "C-contiguous memory. Pass numpy.ascontiguousarray(array)."
        )
    return Buffer(array.__array_interface__["data"][0], array.size, dtype_name(array.dtype))
