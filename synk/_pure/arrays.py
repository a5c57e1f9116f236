"""Arrays on their way to shared memory: checks of values and dtypes, large copies. Pure NumPy."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from synk._pure.dtypes import foreign_name, is_bfloat16
from synk._pure.exact import RULE, exact_array, has_own_meaning, plain_form
from synk._pure.interrupts import deferred
from synk._pure.tables import is_table, kind_of
from synk._pure.tensors import check_tensor, is_tensor

PARALLEL_NBYTES = 1 << 24


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


def as_plain_array(value: Any, what: str) -> np.ndarray:
    """Return ``value`` as an ndarray without a copy where possible; refuse values that would lose information.

    Raises
    ------
    TypeError
        For tables (the labels would be lost), other objects that are more than an array (``synk._pure.exact``),
        generators, ragged lists, lists whose elements are of several kinds, and arrays of objects.
    """
    if is_table(value):
        raise TypeError(
            f"cannot share {what}: got a {kind_of(value)}, whose labels an array does not have. Pass value.to_numpy(). "
            "Only a scattered argument of a call is divided as a table, and a broadcast one arrives as it is."
        )
    if has_own_meaning(value):
        raise TypeError(
            f"cannot share {what}: got {type(value).__name__}, which is more than its numbers, expected an array. Pass "
            f"{plain_form(value)} for its plain numbers. Only a broadcast argument arrives as the object that it is."
        )
    array = _converted(value, what)
    if array.dtype.hasobject:
        raise TypeError(f"cannot share {what}: {_why_not(value, array)}")
    return array


def as_held(value: Any, dtype: np.dtype, what: str) -> Any:
    """Return a list or a number as an array of ``dtype`` if that holds its values, and as NumPy's array if not.

    Nobody has chosen a width for Python's numbers and texts. In a dtype of the same kind integers, texts and dates are
    as they were, or they are not held; floats are rounded. What has a dtype is returned unchanged.

    Examples
    --------
    >>> as_held([1, 2], np.dtype("i1"), "x"), as_held([1, 300], np.dtype("i1"), "x")
    (array([1, 2], dtype=int8), array([  1, 300]))
    """
    if hasattr(value, "dtype"):
        return value
    array = as_plain_array(value, what)
    if array.size and not np.can_cast(array.dtype, dtype, "same_kind") and {array.dtype.kind, dtype.kind} != {"i", "u"}:
        return array
    with np.errstate(all="ignore"):
        found = array.astype(dtype)
    return found if _holds(found, array) else array


def keeps(found: np.ndarray, value: Any) -> bool:
    """Whether NumPy has made an array of a list without cutting its numbers and texts.

    Examples
    --------
    >>> keeps(np.array([1.5, 2], "i8"), [1.5, 2]), keeps(np.array(["1", "2"], "i8"), ["1", "2"])
    (False, True)
    """
    is_text = found.dtype.kind in "US"
    plain = np.array(value, dtype=found.dtype.kind if is_text else None)
    return plain.dtype.kind not in ("US" if is_text else "biufc") or _holds(found, plain)


def _holds(found: np.ndarray, array: np.ndarray) -> bool:
    if found.dtype.names:
        return all(_holds(found[own], array[name]) for own, name in zip(found.dtype.names, array.dtype.names or ()))
    if found.dtype.kind in "fc" or is_bfloat16(found.dtype):
        return bool(np.all(np.isfinite(found) | ~np.isfinite(array)))
    return bool(np.all((found == array) | (found != found)))  # NaT equals nothing


def _converted(value: Any, what: str) -> np.ndarray:
    """Return a value that is no more than an array as one, which may hold objects."""
    if is_tensor(value):
        array = check_tensor(value, what)
        if foreign_name(array.dtype):
            raise TypeError(
                f"cannot share {what}: got a tensor of dtype {foreign_name(array.dtype)}, which NumPy does not have. "
                'Pass it to a function that is built with framework="torch", or cast it, as in tensor.float().'
            )
        return array
    try:
        array = np.asarray(value)
        is_array = hasattr(value, "dtype") and not isinstance(value, (str, bytes))
        found = array if is_array else exact_array(value, array)
    except Exception as error:
        if isinstance(value, list) and "inhomogeneous" in str(error):
            got = "a list whose entries differ in length or shape, expected rows of one shape"
        else:
            got = f"{type(value).__name__}, which NumPy cannot turn into an array ({error})"
        raise TypeError(f"cannot share {what}: got {got}.") from error
    if isinstance(found, str):
        raise TypeError(
            f"cannot share {what}: got a {type(value).__name__} with {found}, expected {RULE}. Pass "
            "np.asarray(value) where the function means what NumPy makes of it, or pd.Series(value), which keeps each "
            "element as it is."
        )
    return found if type(found) is np.ndarray else found.view(np.ndarray)


def _why_not(value: Any, array: np.ndarray) -> str:
    """Return why a value that became an array of objects cannot be shared, and what to do."""
    kind = "" if isinstance(value, np.ndarray) else f" (from {type(value).__name__})"
    if hasattr(value, "tocsr"):
        if value.ndim == 1:
            return (
                f"got a sparse array with one axis{kind}, expected a matrix with rows, or an array. Pass its "
                "reshape(-1, 1).tocsr() as a scattered argument of a call, or its toarray()."
            )
        return (
            f"got a sparse matrix{kind}, expected an array, or the CSR format as a scattered argument of a call. Pass "
            "its tocsr() there, or its toarray()."
        )
    if hasattr(value, "collect"):
        return f"got a table that is still to be computed{kind}, expected one with rows. Pass its collect()."
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
    half, is_over = len(target) // 2, False

    def copy_rest() -> None:
        if not is_over:
            np.copyto(target[half:], source[half:], casting="unsafe")

    thread = threading.Thread(target=copy_rest)
    with deferred():  # The thread must not outlive the operation: it would overwrite what is copied next.
        try:
            try:
                thread.start()
            except RuntimeError:  # the system refuses another thread
                half = len(target)
            np.copyto(target[:half], source[:half], casting="unsafe")
            if half < len(target):
                thread.join()
        finally:  # a signal handler may have raised, in the start of the thread, too
            is_over = True
            if thread.is_alive():
                thread.join()
