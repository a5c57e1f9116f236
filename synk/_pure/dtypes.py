"""Dtypes that NumPy does not have, as records with one field of that name: ``torch.bfloat16`` and others.

Such an array goes wherever a plain one goes: through segments, slots and pickles. Only bfloat16 has arithmetic, in
float32. It does not need ml_dtypes, but arrays of the bfloat16 of ml_dtypes are accepted as well.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

_PREFIX = "torch."
_STORAGE = {1: "u1", 2: "i2", 4: "i4", 8: "i8", 16: "c16"}


def storage(itemsize: int) -> np.dtype:
    """Return the NumPy dtype that stores elements of a foreign dtype of this size."""
    return np.dtype(_STORAGE[itemsize])


def foreign(name: str, itemsize: int) -> np.dtype:
    """Return the dtype that stands for torch's dtype ``name``, for instance ``"bfloat16"``."""
    return np.dtype([(_PREFIX + name, storage(itemsize))])


BFLOAT16 = foreign("bfloat16", 2)


@functools.cache
def foreign_name(dtype: np.dtype) -> str:
    """Return torch's name for a dtype that stands for one of torch's; empty for all others.

    Examples
    --------
    >>> foreign_name(BFLOAT16), foreign_name(np.dtype("float32"))
    ('bfloat16', '')
    """
    names = dtype.names
    return names[0].removeprefix(_PREFIX) if names and len(names) == 1 and names[0].startswith(_PREFIX) else ""


@functools.cache  # NumPy composes the name of a dtype each time: 3 us
def dtype_name(dtype: np.dtype) -> str:
    """Return the name by which ranks compare a dtype: torch's for a foreign dtype, else NumPy's."""
    return foreign_name(dtype) or dtype.name


def describe_dtype(dtype: np.dtype) -> str:
    """Return a dtype in the words of errors."""
    return foreign_name(dtype) or str(dtype)


def is_bfloat16(dtype: np.dtype) -> bool:
    """Whether a dtype is bfloat16, synk's or that of ml_dtypes."""
    return dtype_name(dtype) == "bfloat16"


def as_numbers(array: Any) -> Any:
    """Return an array that NumPy can compute with: NumPy's of synk's bfloat16 as float32, any other unchanged."""
    if array.dtype != BFLOAT16 or not isinstance(array, np.ndarray):
        return array
    return (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def assign(out: Any, values: Any) -> None:
    """Write ``values`` into ``out``, rounded to its dtype: half to even, as torch and ml_dtypes do."""
    if out.dtype != BFLOAT16 or values.dtype == BFLOAT16 or not isinstance(out, np.ndarray):
        out[...] = values
        return
    values = np.asarray(values, np.float32, order="C")
    bits = values.view(np.uint32)
    rounded = (bits + (0x7FFF + ((bits >> 16) & 1))) >> 16
    is_nan = np.isnan(values)
    if is_nan.any():  # the carry could turn a NaN into an infinity
        rounded = np.where(is_nan, (bits >> 16) | 0x40, rounded)
    out.view(np.uint16)[...] = rounded
