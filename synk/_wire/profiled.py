"""A function that is run under cProfile, and returns the statistics instead of its result."""

from __future__ import annotations

import marshal
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


class _Figures:
    """A finished profile, in the form that :class:`pstats.Stats` accepts."""

    def __init__(self, stats: dict[Any, Any]) -> None:
        self.stats = stats

    def create_stats(self) -> None:
        """Do nothing: the statistics were made on the rank."""


def stats_of(raw: bytes) -> pstats.Stats:
    """Return the statistics that a rank sent."""
    figures: Any = _Figures(marshal.loads(raw))
    stats: pstats.Stats = imported_late("pstats").Stats(figures)
    return stats
