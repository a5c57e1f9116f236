"""Dtypes that NumPy does not have, as records of one field that is called after them: ``torch.bfloat16`` and others.

Such an array goes wherever a plain one goes: through segments, slots and pickles. Arithmetic is there for bfloat16
alone, in float32. ml_dtypes is not needed; arrays of its bfloat16 are taken as well, where a program has it.
"""

from __future__ import annotations

import functools

import numpy as np

_PREFIX = "torch."
_STORAGE = {1: "u1", 2: "i2", 4: "i4", 8: "i8", 16: "c16"}


def storage(itemsize: int) -> np.dtype:
    """Return the dtype of NumPy in which elements of a foreign one lie that are as large."""
    return np.dtype(_STORAGE[itemsize])


def foreign(name: str, itemsize: int) -> np.dtype:
    """Return the dtype that stands for torch's dtype ``name``, as ``"bfloat16"``."""
    return np.dtype([(_PREFIX + name, storage(itemsize))])


BFLOAT16 = foreign("bfloat16", 2)


@functools.cache
def foreign_name(dtype: np.dtype) -> str:
    """Return the name in torch of a dtype that stands for one of its own; empty for all others.

    Examples
    --------
    >>> foreign_name(BFLOAT16), foreign_name(np.dtype("float32"))
    ('bfloat16', '')
    """
    names = dtype.names
    return names[0].removeprefix(_PREFIX) if names and len(names) == 1 and names[0].startswith(_PREFIX) else ""


@functools.cache  # NumPy composes the name of a dtype anew each time: 3 us
def dtype_name(dtype: np.dtype) -> str:
    """Return the name of a dtype among ranks: torch's for one that stands for it, else NumPy's."""
    return foreign_name(dtype) or dtype.name


def describe_dtype(dtype: np.dtype) -> str:
    """Return a dtype as errors name it."""
    return foreign_name(dtype) or str(dtype)


def is_bfloat16(dtype: np.dtype) -> bool:
    """Whether elements are bfloat16, of ours or of ml_dtypes."""
    return dtype_name(dtype) == "bfloat16"


def as_numbers(array: np.ndarray) -> np.ndarray:
    """Return an array that NumPy can compute with: bfloat16 of ours as float32, all others as they are."""
    if array.dtype != BFLOAT16:
        return array
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def assign(out: np.ndarray, values: np.ndarray) -> None:
    """Write ``values`` into ``out``, rounded to its dtype: half to even, as torch and ml_dtypes do."""
    if out.dtype != BFLOAT16 or values.dtype == BFLOAT16:
        out[...] = values
        return
    values = np.asarray(values, np.float32, order="C")
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    is_nan = np.isnan(values)
    if is_nan.any():  # the carry could make an infinity of it
        rounded = np.where(is_nan, (bits >> 16) | 0x40, rounded)
    out.view(np.uint16)[...] = rounded
