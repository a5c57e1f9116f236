"""Copies and reductions between places in shared segments: the primitive moves of collectives on the CPU.

The master plans them; workers run them, each its own share, or the master itself where they are small.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synk._memory import Segment
from synk._ops import BLOCK_NBYTES, reduce_into

Place = tuple[int, int]
"""``(segment_id, byte offset)``."""


@dataclass(frozen=True)
class Copy:
    """Copy ``nbytes`` bytes from one place to several."""

    source: Place
    targets: tuple[Place, ...]
    nbytes: int


@dataclass(frozen=True)
class Reduce:
    """Reduce ``count`` elements of ``dtype`` at several places, in order, into several others."""

    op: str
    dtype: Any
    count: int
    sources: tuple[Place, ...]
    targets: tuple[Place, ...]


Step = Copy | Reduce


def run_steps(steps: Sequence[Step], segments: Mapping[int, Segment]) -> None:
    """Carry out ``steps`` in order."""
    for step in steps:
        if isinstance(step, Reduce):
            with np.errstate(all="ignore"):
                _reduce(step, segments)
        else:
            source = _bytes(segments, step.source, step.nbytes)
            for target in step.targets:
                np.copyto(_bytes(segments, target, step.nbytes), source)


def _reduce(step: Reduce, segments: Mapping[int, Segment]) -> None:
    """Reduce block by block: what was just computed is still in the cache when it is copied to the other targets."""
    shape = (step.count,)
    sources = [segments[segment_id].view(offset, shape, step.dtype) for segment_id, offset in step.sources]
    targets = [segments[segment_id].view(offset, shape, step.dtype) for segment_id, offset in step.targets]
    length = max(BLOCK_NBYTES // step.dtype.itemsize, 1)
    for start in range(0, step.count, length):
        stop = start + length
        out = targets[0][start:stop]
        reduce_into(step.op, [source[start:stop] for source in sources], None, out)
        for target in targets[1:]:
            np.copyto(target[start:stop], out)


def _bytes(segments: Mapping[int, Segment], place: Place, nbytes: int) -> np.ndarray:
    segment_id, offset = place
    return segments[segment_id].buffer[offset : offset + nbytes]
