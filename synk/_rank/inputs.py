"""The inputs of a call on its rank: its rows as arrays of the backend, which may be brought before the call begins."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synk._pure.nested import build
from synk._pure.trees import flatten, unflatten


def in_framework(value: Any, convert: Callable[[Any], Any], xp: Any) -> Any:
    """Return a broadcast object in which arrays, nested in tuples, lists and dicts, are the framework's."""
    if not isinstance(value, (tuple, list, dict)):
        return value
    leaves, structure = flatten(value)
    return unflatten(structure, [convert(leaf) if type(leaf) in (np.ndarray, xp.ndarray) else leaf for leaf in leaves])


def nested(values: list[Any], nests: Sequence[tuple[int, int, Any]]) -> list[Any]:
    """Return the arguments of a call whose leaves are ``values``."""
    arguments: list[Any] = []
    done = 0
    for first, num_leaves, structure in nests:
        arguments += values[done:first]
        done = first + num_leaves
        arguments.append(build(structure, iter(values[first:done])))
    return arguments + values[done:]
