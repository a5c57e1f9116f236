"""Functions that return memory which they use again: state changed in place, views, copies."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from synk._wire.messages import LARGE_NBYTES

SMALL, LARGE = 5, LARGE_NBYTES // 8 + 3
"""Elements of float64 in a small output and in one that the workers reduce."""

NUM_MANY = 6
"""Small outputs of half of ``LARGE`` that together exceed a slot."""


@dataclasses.dataclass
class Box:
    """An object that is no array and holds one."""

    value: np.ndarray

    def __add__(self, other: Box) -> Box:
        return Box(self.value + other.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and np.array_equal(self.value, other.value)


KINDS = ("buffer", "views", "many", "kept", "input", "dict", "box")
ARRAYS = KINDS[:4]
"""Those of which all outputs are arrays, and as long whatever the rows."""


def stepper(size: int, kind: str) -> Callable[[Any], Any]:
    """Return a function of rows that adds their sum to a buffer of its own, which it returns in some way."""
    buffer = np.zeros(size)

    def step(x: Any) -> Any:
        nonlocal buffer
        buffer += x.sum()
        if kind == "kept":  # a new array, of which a view is changed in the next call
            result = buffer * 1.0
            buffer = result[:]
            return result
        if kind == "buffer":
            return buffer
        if kind == "views":
            return buffer[: size // 2], buffer[::-1], buffer
        if kind == "input":
            return x, x[:, None], buffer[:2]
        if kind == "many":
            return tuple(buffer[k : k + LARGE // 2] for k in range(NUM_MANY))
        if kind == "box":
            return Box(buffer), buffer
        return {"a": buffer, "b": (buffer.sum(), str(len(x))), "c": buffer.copy()}

    return step
