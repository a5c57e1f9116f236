"""The process-wide random number generators: Python's, NumPy's and, if torch was imported, torch's on the CPU."""

from __future__ import annotations

import sys
from typing import Any

_ACCESS = (
    ("random", "getstate", "setstate", "random"),
    ("numpy.random", "get_state", "set_state", "random_sample"),
    ("torch", "get_rng_state", "set_rng_state", "seed"),
)


def generator_states() -> dict[str, Any]:
    """Return the states of the generators, by module."""
    return {name: getattr(sys.modules[name], getter)() for name, getter, *_ in _ACCESS if name in sys.modules}


def restore_generators(states: dict[str, Any]) -> None:
    """Put the generators back into the states that ``generator_states`` returned."""
    for name, _, setter, _ in _ACCESS:
        if name in states:
            getattr(sys.modules[name], setter)(states[name])


def move_generators(count: int) -> None:
    """Have the generators go on by so many draws; torch's gets another seed."""
    for name, *_, draw in _ACCESS:
        for _ in range(count if name in sys.modules else 0):
            getattr(sys.modules[name], draw)()
