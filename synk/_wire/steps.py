"""Copies and reductions between places in shared segments: the primitive steps of collectives on the CPU.

The master plans them. The workers run them, each its own share; if they are small, the master runs them itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synk._pure.ops import REDUCTIONS
from synk._wire.memory import Segment

Place = tuple[int, int]
"""``(segment_id, byte offset)``."""


@dataclass(frozen=True)
class Copy:
    """Copy ``nbytes`` bytes from one place to another."""

    source: Place
    target: Place
    nbytes: int


@dataclass(frozen=True)
class Reduce:
    """Reduce ``count`` elements of ``dtype`` from several places, in order, into another place."""

    op: str
    dtype: Any
    count: int
    sources: tuple[Place, ...]
    target: Place


Step = Copy | Reduce


def run_steps(steps: Sequence[Step], segments: Mapping[int, Segment]) -> None:
    """Carry out ``steps`` in order."""
    # Sources are first buffers, to which nobody writes. Of a target each byte has one writer, and nobody reads it
    # before all ranks have replied. So the ranks need not wait for each other.
    for step in steps:
        if isinstance(step, Reduce):
            with np.errstate(all="ignore"):
                _reduce(step, segments)
        else:
            np.copyto(_bytes(segments, step.target, step.nbytes), _bytes(segments, step.source, step.nbytes))


def _reduce(step: Reduce, segments: Mapping[int, Segment]) -> None:
    places = (*step.sources, step.target)
    *values, out = [segments[segment_id].view(at, (step.count,), step.dtype) for segment_id, at in places]
    REDUCTIONS[step.op].reduce_into(values, None, out)


def _bytes(segments: Mapping[int, Segment], place: Place, nbytes: int) -> np.ndarray:
    segment_id, offset = place
    return segments[segment_id].buffer[offset : offset + nbytes]
