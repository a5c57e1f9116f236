"""Calls that were submitted, and items of a map, as far as the rest of a session is concerned."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from synk._wire.memory import Segment


class ChunksUnderWay(Protocol):
    """Items of a map that workers are at: other operations wait for them."""

    def settle(self, verb: str, deadline: float | None) -> None:
        """Wait for all of them."""

    def cancel(self, error: Exception) -> None:
        """End those that have not been answered, with ``error``; nobody waits for one now."""


class UnderWay(Protocol):
    """The calls that were submitted, as far as other operations are concerned: they wait for them."""

    chunks: ChunksUnderWay | None

    @property
    def calls(self) -> Collection[Any]:
        """Oldest first."""

    def submit(self, function: Any, args: Any, kwargs: Any, options: Any, deadline: float | None) -> Any:
        """Send one more."""

    def check_step(self, function: Any) -> None:
        """Raise where a step before one of ``function`` has failed."""

    def submit_again(self, function: Any, args: Any, kwargs: Any, batch: Any, shard_batch: Any) -> Any:
        """Send one that is like the last one of its function; None where it is not."""

    def drain(self, verb: str, deadline: float | None) -> None:
        """Wait for all of them."""

    def descriptors(self) -> list[int]:
        """Return what tells of workers that have answered, or died."""

    def reads(self, segment: Segment) -> bool:
        """Whether one reads a segment."""

    def release(self, segment: Segment) -> None:
        """Wait for those that read it."""

    def cancel(self, error: Exception) -> None:
        """End those that have not been answered, with ``error``; nobody waits for one now."""

    def close(self) -> None:
        """End all of them: the runtime is closed."""
