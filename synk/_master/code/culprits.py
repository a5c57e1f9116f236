"""Which part of an object it is that cannot be pickled, for the texts of errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from synk._pure.interrupts import safe_point

_MAX_DEPTH = 6


def culprit_in(place: str, value: Any, pickle: Callable[[Any], Any], depth: int = _MAX_DEPTH) -> tuple[str, Any]:
    """Return the innermost part of an object that cannot be pickled, with its place as one would write it.

    Parameters
    ----------
    place : str
        Of ``value``, which ``pickle`` has refused.
    """
    for step, part in _parts(value) if depth else ():
        if not _can(pickle, part):
            return culprit_in(place + step, part, pickle, depth - 1)
    return place, value


def _can(pickle: Callable[[Any], Any], value: Any) -> bool:
    try:
        safe_point(pickle, value)
    except Exception:
        return False
    return True


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """Return what is pickled with an object: items, or what it keeps in its attributes."""
    if isinstance(value, dict):
        yield from ((f"[{key!r}]", part) for key, part in list(value.items()))
        return
    if isinstance(value, (list, tuple)):
        yield from ((f"[{position}]", part) for position, part in enumerate(value))
        return
    try:
        state = safe_point(value.__reduce_ex__, 4)[2]
    except Exception:  # it has no state that could be looked at
        return
    if isinstance(state, dict):
        yield from ((f".{name}", part) for name, part in state.items())
