"""What there is to tell of a value, down to classes and dtypes, so that two values may be compared on any process."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from typing import Any

import numpy as np


def told(value: Any) -> Any:
    """Return plain tuples that are equal where two values are: class, dtype, shape and numbers of all their parts.

    The order of keys and the sign of a zero count, and NaN is like itself. A tensor's memory does not: two of one
    dtype and shape that hold the same numbers are told alike.
    """
    kind = type(value).__name__
    if isinstance(value, (np.ndarray, np.generic)):
        numbers = repr(value.tolist()) if value.size < 1000 or value.dtype.hasobject else value.tobytes()
        return kind, value.dtype.str, value.shape, numbers
    if hasattr(value, "resolve_conj"):
        return kind, str(value.dtype), tuple(value.shape), repr(value.detach().tolist())
    if isinstance(value, Mapping):
        return kind, *((told(key), told(part)) for key, part in value.items())
    if isinstance(value, (list, tuple, deque)):
        return kind, *map(told, value)
    if isinstance(value, (set, frozenset)):
        return kind, *sorted(map(repr, value))
    if dataclasses.is_dataclass(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return kind, *((name, told(part)) for name, part in {**fields, **getattr(value, "__dict__", {})}.items())
    return kind, repr(value)
