"""Which values become arrays without losing anything: lists by the set of their elements' types, objects by class.

NumPy alone would make texts of ``[1, "a"]`` and ones of ``[True, 5]``, round large integers beside floats, drop
trailing NUL characters, and take the numbers out of objects that have units, labels or masks.
"""

from __future__ import annotations

import datetime
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from synk._pure.read_only import ReadOnlyArray

_ARRAYS = (np.ndarray, np.memmap, np.recarray, ReadOnlyArray)
_PROTOCOLS = ("__array__", "__array_interface__", "__array_struct__")
_OF_LIBRARIES = (("torch", "Tensor"), ("jax", "Array"), ("h5py", "Dataset"), ("zarr", "Array"))
_SEQUENCES = frozenset(("builtins", "collections", "array", ReadOnlyArray.__module__))
"""The modules whose sequences are nothing but their elements."""

_KINDS = {bool: "b", int: "i", float: "f", complex: "c", str: "U", bytes: "S"}
_DATES = {datetime.date: "M8[D]", datetime.datetime: "M8[us]", datetime.timedelta: "m8[us]"}
_MAX_BESIDE_FLOATS = 1 << 53

RULE = (
    "elements of one kind: bools, integers of 64 bits, floats (also with integers up to 2**53), texts or bytes without "
    "a trailing NUL, dates, or tuples of these"
)


def has_own_meaning(value: Any) -> bool:
    """Whether an object is more than the array that NumPy would make of it: its labels, units, masks or methods count.

    Plain are ndarray, memmap, recarray, NumPy's scalars, tensors, and the arrays of JAX, h5py and zarr.

    Examples
    --------
    >>> has_own_meaning(np.ones(2)), has_own_meaning([1, 2]), has_own_meaning(np.ones((2, 2)).view(np.matrix))
    (False, False, True)
    """
    return _has_own_meaning(type(value))


def _has_own_meaning(cls: type) -> bool:
    if cls in _ARRAYS or issubclass(cls, np.generic) or cls.__module__.startswith("synk."):
        return False
    plain = [getattr(sys.modules.get(library), name, ()) for library, name in _OF_LIBRARIES]
    return not issubclass(cls, tuple(filter(None, plain))) and any(hasattr(cls, name) for name in _PROTOCOLS)


def is_masked(value: Any) -> bool:
    """Whether ``value`` is a masked array. Does not import ``numpy.ma``: before it is imported there are none."""
    module = sys.modules.get("numpy.ma")
    return module is not None and isinstance(value, module.MaskedArray)


def plain_form(value: Any) -> str:
    """Return how a program writes the plain array of an object that has a meaning of its own."""
    if is_masked(value):
        return "value.filled(...)"
    is_on_device = hasattr(type(value), "get") and hasattr(type(value), "ndim")
    return "value.get()" if is_on_device else "np.asarray(value)"


def as_recarray(array: Any) -> Any:
    """Return an array of records whose fields are attributes as a recarray; any other unchanged."""
    return array.view(np.recarray) if array.dtype.type is np.record and array.ndim else array


def exact_array(value: Any, array: np.ndarray) -> np.ndarray | str:
    """Return the array that holds what ``value`` holds, or in words what no array can hold.

    Parameters
    ----------
    value : list, tuple or other sequence, nested or not, or a single value
    array : ndarray
        What NumPy makes of ``value``. If it holds objects, it is returned as it is, unless these are dates or records.

    Examples
    --------
    >>> exact_array([1, 2.5], np.asarray([1, 2.5]))
    array([1. , 2.5])
    >>> exact_array([True, 5], np.asarray([True, 5]))
    'elements of types bool and int'
    >>> exact_array([("a", 1)], np.asarray([("a", 1)]))
    array([('a', 1)], dtype=[('f0', '<U1'), ('f1', '<i8')])
    """
    elements, opened = [value], set[type]()
    for _ in range(array.ndim):
        opened.update(map(type, elements))
        elements = [each for part in elements for each in part]
    types = set(map(type, elements))
    others = [each for each in opened if not _is_plain_sequence(each)]
    if others:
        return _of_types(others)
    is_of_tuples = array.ndim == 2 and all(type(row) is tuple for row in value)
    if array.dtype.hasobject:
        if types <= {int, float}:
            return "integers that need more than 64 bits"
        if is_of_tuples and len(types) > 1:
            return _records(value)
        return _dates(value, array, elements, types)
    kinds = {_kind_of(each) for each in elements} if types - _KINDS.keys() else {_KINDS[each] for each in types}
    if "" in kinds or (len(kinds) > 1 and not kinds <= {"i", "f", "c"}):
        if is_of_tuples and "" not in kinds:
            return _records(value)
        return _of_types(types)
    if kinds == {"i"} and array.dtype.kind == "f":  # NumPy knows no type for 2**63 beside a smaller integer
        return np.array(value, np.uint64) if min(elements) >= 0 else "integers that need more than 64 bits"
    return _lost(elements, kinds, array) or array


def _is_plain_sequence(cls: type) -> bool:
    return cls.__module__ in _SEQUENCES or (hasattr(cls, "dtype") and not _has_own_meaning(cls))


def _of_types(types: Iterable[type]) -> str:
    return f"elements of types {' and '.join(sorted(each.__name__ for each in types))}"


def _kind_of(element: Any) -> str:
    """Return the kind of an element, as in ``numpy.dtype.kind``, with one kind for all integers; empty if it has none.

    An element of a subclass of int, str and so on has none: the array would not keep its class.
    """
    kind = _KINDS.get(type(element), "")
    if not kind and hasattr(element, "dtype") and not has_own_meaning(element):
        kind = np.asarray(element).dtype.kind
    return "i" if kind == "u" else kind


def _lost(elements: Sequence[Any], kinds: set[str], array: np.ndarray) -> str:
    """Return in words what the array has lost of elements of one kind, or of numbers; an empty text if nothing."""
    if kinds > {"i"} and any(_kind_of(each) == "i" and abs(int(each)) > _MAX_BESIDE_FLOATS for each in elements):
        return "integers above 2**53 beside floats"
    if kinds <= {"U", "S"} and any(each[-1:] in ("\0", b"\0") for each in elements if isinstance(each, (str, bytes))):
        return f"{'texts' if kinds == {'U'} else 'bytes'} that end in a NUL"
    if kinds <= {"M", "m", "V"} and len({each.dtype for each in elements}) > 1:
        if kinds == {"V"}:
            return "records of several dtypes"
        rounded = [each for each, own in zip(elements, array.reshape(-1)) if own.astype(each.dtype) != each]
        return "" if all(map(np.isnat, rounded)) else "dates whose units differ too much"
    return ""


def _dates(value: Any, array: np.ndarray, elements: Sequence[Any], types: set[type]) -> np.ndarray:
    """Return dates or durations of Python as an array of them; an array of other objects unchanged."""
    if not array.ndim or len(types) != 1 or not types <= _DATES.keys():
        return array
    if any(getattr(each, "tzinfo", None) is not None for each in elements):
        return array
    return np.array(value, _DATES[types.pop()])


def _records(rows: Sequence[tuple[Any, ...]]) -> np.ndarray | str:
    """Return tuples with columns of several kinds as records."""
    columns = [exact_array(column, np.asarray(column)) for column in zip(*rows)]
    for place, column in enumerate(columns):
        if isinstance(column, str) or column.dtype.hasobject:
            return f"{column if isinstance(column, str) else 'objects'} in place {place} of its tuples"
    records = np.empty(len(rows), [(f"f{place}", column.dtype) for place, column in enumerate(columns)])  # type: ignore[union-attr]
    for name, column in zip(records.dtype.names or (), columns):
        records[name] = column
    return records
