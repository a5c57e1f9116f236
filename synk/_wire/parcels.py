"""What a parcel is pickled with in the master and loaded with in a worker."""

from __future__ import annotations

import importlib
import types
from typing import Any, NamedTuple


class Found(NamedTuple):
    """An object of a module that workers import themselves: the module's name, and steps of a kind and a key."""

    module: str
    steps: tuple[tuple[str, Any], ...]

    def find(self) -> Any:
        found: Any = importlib.import_module(self.module)
        for kind, key in self.steps:
            if kind == "attribute":
                found = getattr(found, key)
            elif kind == "closure":
                found = found.__closure__[key]
            else:
                found = found.cell_contents if kind == "cell" else found[key]
        return found


class Absent:
    """In a parcel: the value of a name that does not exist any more."""


def make_cell() -> types.CellType:
    """Return an empty cell."""
    return types.CellType()


def fill_function(function: types.FunctionType, state: tuple[Any, Any, Any]) -> None:
    """Set the cells that came with a function, and the rest of it by cloudpickle's own ``setter``."""
    filled, setter, rest = state
    for cell, value in filled:
        cell.cell_contents = value
    setter(function, rest)
