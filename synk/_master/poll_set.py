"""What the master waits for: one poll set over the descriptors of all workers, and one by which it can be woken."""

from __future__ import annotations

import contextlib
import os
import select
from typing import NamedTuple

from synk._wire.descriptors import NONE, Descriptor


class Events(NamedTuple):
    """What has happened, by kind, so that whoever handles it chooses the order.

    Attributes
    ----------
    doorbells, deaths : list of int
        Ranks that have answered, and ranks whose process has ended.
    printed : list of (rank, descriptor)
        Whose lines wait to be read, and where.
    is_woken : bool
        Whether another thread wants this one to look around; see :meth:`PollSet.wake`.
    """

    doorbells: list[int]
    deaths: list[int]
    printed: list[tuple[int, int]]
    is_woken: bool


class PollSet:
    """The descriptors that the master watches, each with its kind and rank.

    Attributes
    ----------
    poll : select.poll
    """

    def __init__(self) -> None:
        self.poll = select.poll()
        self._fds: dict[int, tuple[str, int]] = {}
        self._wake_fd: int = NONE

    def open(self) -> None:
        """Make the descriptor by which another thread wakes whoever waits."""
        self._wake_fd = eventfd()
        self.watch(self._wake_fd, "wake", -1)

    def watch(self, fd: int, kind: str, rank: int) -> None:
        self._fds[int(fd)] = (kind, rank)
        self.poll.register(fd, select.POLLIN)

    def unwatch(self, fd: int) -> None:
        if self._fds.pop(fd, None) is not None:
            self.poll.unregister(fd)

    def unwatch_rank(self, rank: int) -> None:
        for fd in [fd for fd, (_, owner) in self._fds.items() if owner == rank]:
            self.unwatch(fd)

    def wait(self, timeout_ms: int | None) -> Events:
        """Return what has happened within a time limit (None: none)."""
        events = Events([], [], [], False)
        for fd, _ in self.poll.poll(timeout_ms):
            kind, rank = self._fds.get(fd, ("", -1))
            if kind == "up":
                events.doorbells.append(rank)
            elif kind == "death":
                events.deaths.append(rank)
            elif kind == "output":
                events.printed.append((rank, fd))
            elif kind == "wake":
                events = events._replace(is_woken=True)
        return events

    def wake(self) -> None:
        """Have the wait of another thread end; it stays so until somebody calls :meth:`drain_wake`."""
        fd = self._wake_fd  # held: another thread may close the runtime meanwhile
        if fd >= 0:
            os.eventfd_write(fd, 1)

    def drain_wake(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake_fd)

    def close(self) -> None:
        """Forget the descriptor to wake by; safe to repeat, in several threads."""
        self.unwatch(self._wake_fd)
        self._wake_fd = NONE


def eventfd() -> Descriptor:
    """Return a new event descriptor, close-on-exec and not blocking."""
    return Descriptor(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK))
