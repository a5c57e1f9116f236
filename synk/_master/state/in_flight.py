"""Protocols of submitted calls and of items of a map, for the parts of a session that stand below them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Protocol

from synk._wire.memory import Segment


class ChunksInFlight(Protocol):
    """Items of a map that are in flight. Other operations wait for them."""

    def settle(self, verb: str, deadline: float | None) -> None:
        """Wait for all of them."""

    def cancel(self, error: Exception) -> None:
        """End the items that were not answered, with ``error``. No thread waits for one now."""


class SubmittedCalls(Protocol):
    """The submitted calls. Other operations wait for them."""

    chunks: ChunksInFlight | None

    @property
    def calls(self) -> Collection[Any]:
        """The calls in flight, oldest first."""

    def submit(self, function: Any, args: Any, kwargs: Any, options: Any, deadline: float | None) -> Any:
        """Submit a call."""

    def check_step(self, function: Any) -> None:
        """Raise if an earlier step of ``function`` has failed."""

    def submit_again(self, function: Any, args: Any, kwargs: Any, batch: Any) -> Any:
        """Submit a call that is like the last one of its function. Return None if it is not."""

    def drain(self, verb: str, deadline: float | None) -> None:
        """Wait for all calls."""

    def wait(self, pending: Any, timeout: float | None) -> None:
        """Wait until a call has an outcome."""

    def poll(self) -> None:
        """Take in what has ended, without waiting."""

    def note_failed(self, pending: Any) -> None:
        """Remember a failed call if later calls must not be taken for the next step."""

    def descriptors(self) -> list[int]:
        """Return the descriptors that report answers and deaths of workers."""

    def reads(self, segment: Segment) -> bool:
        """Whether a call in flight reads a segment."""

    def release(self, segment: Segment) -> None:
        """Wait for the calls that read a segment."""

    def cancel(self, error: Exception) -> None:
        """End the calls that were not answered, with ``error``. No thread waits for one now."""

    def close(self) -> None:
        """End all calls: the runtime is closed."""
