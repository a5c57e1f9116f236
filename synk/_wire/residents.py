"""Messages about resident objects: Python objects of which each rank keeps its own copy between calls."""

from __future__ import annotations

import pickle
from typing import Any

from synk._wire.cell import cell

COUNTED, TORN = -2, -1
"""What has become of an object after a call that failed: it is as after the call, or in between. Other numbers say that
it was put back: 0 that it is as before the call, any other that it differs from that in what could not be put back, and
is equal on ranks with equal numbers.
"""


def methods_of(value: Any) -> tuple[Any, Any]:
    """Return ``(dump, load)`` for an object with torch's state methods, or for a list or tuple of such objects.

    Both are None for any other object.

    Without these methods the state is a pickle of the object, and loading it makes a new object.
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
    """Return this rank's object. This loads a pickled ``Resident``."""
    if cell.worker is None:
        raise pickle.UnpicklingError(
            "cannot load a resident object here: it can only be used on the workers of its runtime."
        )
    return cell.worker.residents.get(resident_id)
