"""Functions with a name: that of a lambda says nothing in errors and profiles."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

F = TypeVar("F", bound=Callable[..., object])


def named(name: str, fn: F) -> F:
    """Return ``fn``, which now has this name."""
    fn.__name__ = name
    return fn
