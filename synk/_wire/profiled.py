"""A function that is run under cProfile, and returns the statistics instead of its result."""

from __future__ import annotations

import marshal
import types
from typing import TYPE_CHECKING, Any

from synk._pure.environment import imported_late
from synk._wire.apart import Around

if TYPE_CHECKING:
    import pstats


class Profiled(Around):
    """Calls a function under cProfile. The statistics come as bytes, so that they are one output."""

    def __call__(self, *args: Any, **kwargs: Any) -> bytes:
        profile = imported_late("cProfile").Profile()
        profile.runcall(self._fn, *args, **kwargs)
        profile.create_stats()
        return marshal.dumps(profile.stats)


def stats_of(raw: bytes) -> pstats.Stats:
    """Return the statistics that a rank sent."""
    figures = types.SimpleNamespace(stats=marshal.loads(raw), create_stats=lambda: None)
    stats: pstats.Stats = imported_late("pstats").Stats(figures)
    return stats
