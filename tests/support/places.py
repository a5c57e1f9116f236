"""The places where ranks can talk by ``synk.comm``: each communicator that a function may have, by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import synk
from support.seccomp import forbid_reading_memory

ON_ONE_MACHINE = (0, 1, 2, 3, "little memory", "blind")
OVER_NODES = ("1+1", "1+2", "2+2")
PLACES = (*ON_ONE_MACHINE, *OVER_NODES)
"""The numbers of ranks; ``0`` is the program itself, ``"1+2"`` a node with one rank and one with two."""

SEVERAL_RANKS = tuple(place for place in PLACES if place not in (0, 1))


def made(place: str) -> synk.Runtime:
    """Return a runtime of three ranks that are as on a large machine, in small.

    With ``"little memory"`` a few kilobytes are several pieces of what a rank can show at once, more than a ring, and
    read where they lie. Of those that are ``"blind"`` one may not read the memory of the others, which then cannot.
    """
    with pytest.MonkeyPatch.context() as patch:
        if place == "little memory":
            patch.setattr("synk._engine.lanes._COLLECTIVE_RANK_NBYTES", 1 << 14)
        runtime = synk.Runtime(3, backend="numpy", max_restarts=10**9)
        runtime.function(_prepare, bcast_inputs="is_blind", outputs=None)(np.arange(3.0), place == "blind")
    return runtime


def _prepare(x: np.ndarray, is_blind: bool) -> None:
    if is_blind and x[0] == 1:
        forbid_reading_memory()
    synk.comm.barrier()


def on_each(runtime: Any, body: Callable[[Any], Any], **options: Any) -> list[Any]:
    """Return ``body(synk.comm)`` of every rank, with one row for each."""
    call = runtime.function(lambda x: body(synk.comm), outputs=None)
    found: list[Any] = call(np.zeros(runtime.world_size), **options)
    return found
