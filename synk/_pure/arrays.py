"""Arrays on their way to shared memory: checks of values and dtypes, large copies. Pure NumPy."""

from __future__ import annotations

import sys
import threading
from typing import Any

import numpy as np

from synk._pure.dtypes import foreign_name
from synk._pure.interrupts import deferred, safe_point
from synk._pure.read_only import ReadOnlyArray
from synk._pure.tables import is_column, is_table, kind_of
from synk._pure.tensors import check_tensor, is_tensor

PARALLEL_NBYTES = 1 << 24

_OPERATORS = (
    "__array_ufunc__", "__array_function__", "__add__", "__sub__", "__mul__", "__truediv__", "__pow__", "__matmul__",
    "__eq__", "__lt__",
)  # fmt: skip


def check_shareable(dtype: np.dtype, what: str) -> np.dtype:
    """Return ``dtype`` in native byte order, or raise TypeError if its values are pointers."""
    if dtype.hasobject:
        raise TypeError(
            f"cannot share {what}: got dtype {dtype}, which holds Python objects. "
            "Convert it to a number or text dtype, or pass it as a broadcast input."
        )
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def address_of(array: np.ndarray) -> int:
    """Return the address of the array's first element."""
    return int(array.__array_interface__["data"][0])


def is_masked(value: Any) -> bool:
    """Whether ``value`` is a masked array. Does not import ``numpy.ma``: before it is imported there are none."""
    module = sys.modules.get("numpy.ma")
    return module is not None and isinstance(value, module.MaskedArray)


def computes_otherwise(cls: type) -> bool:
    """Whether a subclass of ndarray gives operators another meaning, as matrices and arrays with units do."""
    if not issubclass(cls, np.ndarray) or issubclass(cls, ReadOnlyArray):
        return False
    return any(getattr(cls, name) is not getattr(np.ndarray, name) for name in _OPERATORS)


def as_plain_array(value: Any, what: str) -> np.ndarray:
    """Return ``value`` as an ndarray without a copy where possible; refuse values that would lose information.

    Raises
    ------
    TypeError
        For masked arrays (the mask would be lost), tables (the labels would be), other arrays that compute in a way of
        their own, generators, ragged lists and arrays of objects.
    """
    if type(value) is np.ndarray:
        array = value
    elif is_masked(value):
        raise TypeError(f"cannot share {what}: got a masked array, and its mask would be lost. Pass value.filled(...).")
    elif is_table(value):
        raise TypeError(
            f"cannot share {what}: got a {kind_of(value)}, whose labels an array does not have. Pass value.to_numpy(). "
            "Only a scattered argument of a call is divided as a table, and a broadcast one arrives as it is."
        )
    elif is_column(value):
        raise TypeError(
            f"cannot share {what}: got {type(value).__name__} of pandas, which computes in a way of its own, expected "
            "an array. Pass value.to_numpy() or, as a scattered argument of a call, pd.Series(value)."
        )
    elif computes_otherwise(type(value)):
        raise TypeError(
            f"cannot share {what}: got {type(value).__name__}, which computes in a way of its own, expected an array. "
            "Pass np.asarray(value) where the function means plain arrays."
        )
    elif is_tensor(value):
        array = check_tensor(value, what)
        if foreign_name(array.dtype):
            raise TypeError(
                f"cannot share {what}: got a tensor of dtype {foreign_name(array.dtype)}, which NumPy does not have. "
                'Pass it to a function that is built with framework="torch", or cast it, as in tensor.float().'
            )
    else:
        try:
            array = safe_point(np.asarray, value)
        except Exception as error:
            if isinstance(value, list) and "inhomogeneous" in str(error):
                got = "a list whose entries differ in length or shape, expected rows of one shape"
            else:
                got = f"{type(value).__name__}, which NumPy cannot turn into an array ({error})"
            raise TypeError(f"cannot share {what}: got {got}.") from error
        if type(array) is not np.ndarray:
            array = array.view(np.ndarray)
    if array.dtype.hasobject:
        raise TypeError(f"cannot share {what}: {_why_not(value, array)}")
    return array


def _why_not(value: Any, array: np.ndarray) -> str:
    """Return why a value that became an array of objects cannot be shared, and what to do."""
    kind = "" if isinstance(value, np.ndarray) else f" (from {type(value).__name__})"
    if hasattr(value, "tocsr"):
        return (
            f"got a sparse matrix{kind}, expected an array, or the CSR format as a scattered argument of a call. Pass "
            "its tocsr() there, or its toarray()."
        )
    if hasattr(value, "collect"):
        return f"got a table that is still to be computed{kind}, expected one with rows. Pass its collect()."
    if hasattr(value, "columns"):
        return (
            f"got a table with columns of several kinds{kind}, expected numbers, text or records. Pass its columns, as "
            "in dict(frame.items()), or those of numbers as one array."
        )
    if isinstance(value, dict):
        return (
            "got a dict, expected an array. Pass the dict itself to calls, or keep it on the workers by "
            "synk.shared(...): that is passed in its place, and not copied again."
        )
    if array.size and all(isinstance(each, str) for each in array.flat):
        return f"got text as Python objects{kind}, expected an array of text. Pass np.asarray(value, dtype=str)."
    if array.size and all(hasattr(each, "generate_state") for each in array.flat):
        return (
            f"got seeds as Python objects{kind}, expected numbers. Pass SeedSequence(...).generate_state(n) in place "
            "of its spawn(n), or go over the children by synk.map."
        )
    return (
        f"got dtype object{kind}, expected numbers, text or records of equal shape. Ragged lists and generators have "
        "no rows: make it an array to divide it, or pass it whole to every rank, as a broadcast input (bcast_inputs)."
    )


def copy_into(target: np.ndarray, source: np.ndarray) -> None:
    """Copy ``source`` into ``target`` of the same shape. Two threads copy large arrays: NumPy frees the GIL."""
    if target.nbytes < PARALLEL_NBYTES or target.ndim == 0 or len(target) < 2:
        np.copyto(target, source, casting="unsafe")  # the byte order is all that a cast can change here
        return
    half = len(target) // 2
    thread = threading.Thread(target=np.copyto, args=(target[half:], source[half:]), kwargs={"casting": "unsafe"})
    with deferred():  # The thread must not outlive the operation: it would overwrite what is copied next.
        try:
            thread.start()
        except RuntimeError:  # the system refuses another thread
            np.copyto(target, source, casting="unsafe")
            return
        try:
            np.copyto(target[:half], source[:half], casting="unsafe")
        finally:
            thread.join()
