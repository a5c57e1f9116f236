"""Files of plain values: nested collections of numbers, texts, arrays and tensors, which load without running code.

A file is an ``npz`` of NumPy: a zip of arrays. One of them says, as JSON, how the others are nested.
"""

from __future__ import annotations

import functools
import importlib
import json
import os
from typing import Any, BinaryIO

import numpy as np

from synk._pure.tensors import array_of, is_ordinary, is_tensor, tensor_of

FORMAT = 1
_NATIVE = (int, float, str, bool, type(None))
_COLLECTIONS = {"list": list, "tuple": tuple, "set": set}
_NOT_OF_NUMPY = 2
"""What ``isbuiltin`` is for dtypes that another library has registered, such as ml_dtypes."""


def write(value: Any, file: BinaryIO) -> None:
    """Write a value that :func:`read` can read; see :func:`check` for what it may hold."""
    arrays: dict[str, np.ndarray] = {}
    nested = {"format": FORMAT, "value": _taken_apart(value, "", arrays)}
    arrays["values"] = np.frombuffer(json.dumps(nested).encode(), np.uint8)
    np.savez(file, allow_pickle=False, **arrays)


def check(value: Any, what: str) -> None:
    """Raise if a value holds anything but plain values.

    Raises
    ------
    TypeError
        With the place of the other value.
    """
    try:
        _taken_apart(value, "", {})
    except _NotPlain as error:
        raise TypeError(
            f"cannot save {what}: got {error}, expected numbers, texts, arrays, tensors, and lists, tuples, sets and "
            "dicts of them, which load without running code. Have its dump return these."
        ) from None


class _NotPlain(Exception):
    """A value is not one that a file can hold."""


def _taken_apart(value: Any, where: str, arrays: dict[str, np.ndarray]) -> Any:
    """Return a value in the form that JSON can write, and put its arrays into ``arrays``."""
    kind = type(value)
    nested = functools.partial(_taken_apart, arrays=arrays)
    if kind in _NATIVE:
        return value
    if kind in (list, tuple, set):
        return {kind.__name__: [nested(item, f"{where}[{k}]") for k, item in enumerate(value)]}
    if isinstance(value, dict):  # also torch's kinds of dicts, and others
        return {
            "dict": [[nested(key, f"{where} key"), nested(item, f"{where}[{key!r}]")] for key, item in value.items()]
        }
    if kind is complex:
        return {"complex": [value.real, value.imag]}
    if kind is bytes:
        return {"bytes": _put(np.frombuffer(value, np.uint8), arrays)}
    if is_tensor(value) and is_ordinary(value):
        return {"tensor": _put(array_of(value), arrays)}
    if isinstance(value, np.generic) or kind is np.ndarray:
        array = np.asarray(value)
        if not array.dtype.hasobject:
            own = array.dtype.name if array.dtype.isbuiltin == _NOT_OF_NUMPY else None
            plain = array if own is None else array.view(f"u{array.dtype.itemsize}")
            return {"scalar" if isinstance(value, np.generic) else "array": _put(plain, arrays), "dtype": own}
    raise _NotPlain(f"{kind.__name__}{where and ' at ' + where}")


def _put(array: np.ndarray, arrays: dict[str, np.ndarray]) -> str:
    name = str(len(arrays))
    arrays[name] = array
    return name


def read(path: str | os.PathLike[str]) -> Any:
    """Return the value in a file.

    Raises
    ------
    ValueError
        If it is not a file of plain values, or is damaged.
    """
    from zipfile import BadZipFile

    with open(path, "rb") as opened:  # NumPy does not close the file of a damaged zip
        try:
            with np.load(opened, allow_pickle=False) as arrays:
                nested = json.loads(arrays["values"].tobytes())
                if nested["format"] == FORMAT:
                    return _put_together(nested["value"], arrays)
                problem = f"format {nested['format']!r}, expected {FORMAT}"
        except (BadZipFile, ValueError, LookupError, EOFError, TypeError, AttributeError) as error:
            problem = f"{type(error).__name__}: {str(error).rstrip('.')}, expected a file that save() has written"
    raise ValueError(f"cannot load {os.fspath(path)!r}: got {problem}. It may be damaged, or of another program.")


def _put_together(nested: Any, arrays: Any) -> Any:
    if not isinstance(nested, dict):
        return nested
    kind, inside = next(iter(nested.items()))
    if kind in _COLLECTIONS:
        return _COLLECTIONS[kind](_put_together(item, arrays) for item in inside)
    if kind == "dict":
        return {_put_together(key, arrays): _put_together(item, arrays) for key, item in inside}
    if kind == "complex":
        return complex(*inside)
    array = arrays[inside]
    if kind == "bytes":
        return array.tobytes()
    if kind == "tensor":
        return tensor_of(array)
    if nested["dtype"] is not None:
        array = array.view(getattr(importlib.import_module("ml_dtypes"), nested["dtype"]))
    return array[()] if kind == "scalar" else array
