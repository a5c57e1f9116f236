"""Descriptors whose owner is gone without having closed them: the next operation does.

A finalizer closes what its object owned, but Python runs it only once, and a signal handler that raises can break it
off at its first step.
"""

from __future__ import annotations

import os
import weakref
from collections import deque
from typing import Any

from synk._pure.interrupts import deferred


class Orphans:
    """Knows the owner of each descriptor, and which are without one.

    Attributes
    ----------
    ended : deque of weakref.ref
        Of owners that are gone, with a descriptor still open. Filled by the references themselves, at any time and in
        any thread, in C: nothing can come between.
    """

    def __init__(self) -> None:
        self.ended: deque[weakref.ref[Any]] = deque()
        self._owners: dict[int, weakref.ref[Any]] = {}

    def watch(self, fd: int, owner: object) -> None:
        """Note that ``owner`` closes ``fd``, with :meth:`close`."""
        self._owners[fd] = weakref.ref(owner, self.ended.append)

    def close(self, fd: int) -> None:
        """Close a descriptor on behalf of its owner. A signal handler runs before or after it, not in between."""
        del self._owners[fd]
        os.close(fd)

    def close_all(self) -> None:
        """Close what owners that are gone have left open."""
        with deferred():
            while self.ended:
                owner = self.ended.popleft()
                for fd in [fd for fd, reference in list(self._owners.items()) if reference is owner]:
                    self.close(fd)


orphans = Orphans()
