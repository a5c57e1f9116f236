"""Messages about resident objects: Python objects of which each rank holds its own copy between calls."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

from synk._wire.cell import cell

NEVER = -1
"""The version of an object in a process that was started in the place of another: it has only what it began with."""


class Adopt(NamedTuple):
    """Make an object from its pickle, in place of the one of this number where there is one."""

    resident_id: int
    name: str
    pickle: bytes
    version: int
    sys_path: list[str]


class Report(NamedTuple):
    """Tell of objects ``(version, is_torn, mark)``."""

    resident_ids: tuple[int, ...]


class Dump(NamedTuple):
    """Tell the state of an object, as bytes; with ``is_whole`` the object itself, pickled."""

    resident_id: int
    is_whole: bool = False


class Restore(NamedTuple):
    """Bring an object into a state: that of another rank after call ``version``."""

    resident_id: int
    state: bytes
    version: int


def methods_of(value: Any) -> tuple[Any, Any]:
    """Return ``(dump, load)`` for an object that has such methods by torch's names, or for several of them; else None.

    A pickle of the object is its state then, and loading it makes a new object.
    """
    if hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
        return _state_of_one, _load_into_one
    if type(value) in (tuple, list) and value and all(methods_of(item)[0] is _state_of_one for item in value):
        return _states_of_all, _load_into_all
    return None, None


def _state_of_one(value: Any) -> Any:
    return value.state_dict()


def _load_into_one(value: Any, state: Any) -> None:
    value.load_state_dict(state)


def _states_of_all(values: Any) -> Any:
    return [value.state_dict() for value in values]


def _load_into_all(values: Any, states: Any) -> None:
    for value, state in zip(values, states):
        value.load_state_dict(state)


def resolve_resident(resident_id: int) -> Any:
    """Return this rank's object; what a pickled ``Resident`` becomes."""
    if cell.worker is None:
        raise pickle.UnpicklingError(
            "cannot load a resident object here: it has a meaning only on the workers of its runtime."
        )
    return cell.worker.residents.get(resident_id)
