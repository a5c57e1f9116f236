"""Functions that return memory which they use again, for workers to import: state changed in place, views, copies."""

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


class Model:
    """State that is changed in place and returned: whole, as a view, several times, beside other things."""

    def __init__(self, size: int) -> None:
        self.w = np.ones(size)
        self.view = self.w[:]

    def __reduce__(self) -> Any:
        return Model, (len(self.w),)  # a view of an array is no view any more when both have been pickled

    def step(self, x: Any) -> Any:
        self.w += 1.0
        return self.w

    def part(self, x: Any) -> Any:
        self.w += 1.0
        return self.view[1:]

    def twice(self, x: Any) -> Any:
        self.w += 1.0
        return self.w, self.w[::-1], float(self.w[0]), self.view.reshape(-1, 1)

    def many(self, x: Any) -> Any:
        self.w += 1.0
        return tuple(self.w[k : k + LARGE // 2] for k in range(NUM_MANY))

    def kept(self, x: Any) -> Any:
        """A new array each time, and a view of it is changed in the next call."""
        self.view += 1.0
        result = self.w = self.view * 1.0
        self.view = result[:]
        return result

    def fresh(self, x: Any) -> Any:
        self.w += 1.0
        return self.w * 1.0


METHODS = ("step", "part", "twice", "many", "kept", "fresh")


@dataclasses.dataclass
class Box:
    """An object that is no array and holds one."""

    value: np.ndarray

    def __add__(self, other: Box) -> Box:
        return Box(self.value + other.value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Box) and np.array_equal(self.value, other.value)


KINDS = ("buffer", "views", "input", "many", "dict", "box")


def stepper(size: int, kind: str) -> Callable[[Any], Any]:
    """Return a function of rows that adds their sum to a buffer of its own, which it returns in some way."""
    buffer = np.zeros(size)

    def step(x: Any) -> Any:
        buffer[:] += x.sum()
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
