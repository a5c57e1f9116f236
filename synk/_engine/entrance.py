"""How operations enter a runtime: one at a time, in the process that owns it, and not inside a worker."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

from synk._processes.output import warn_at_users_line
from synk._pure.interrupts import holding, waiting
from synk._pure.limits import lock_s
from synk._wire.cell import refuse_inside_worker
from synk.backends import unused_gpus
from synk.errors import ReentrancyError


class Entrance:
    """The lock of a runtime, and what is checked before it is taken. A subclass sets the attributes.

    Attributes
    ----------
    pid : int
        The process that owns the workers.
    timeout : float or None
        The time limit of operations that have none of their own.
    counters : dict of str to int
    is_inline : bool
        Whether the program itself plays the only rank.
    """

    pid: int
    timeout: float | None
    counters: dict[str, int]
    is_inline: bool
    _lock: threading.RLock
    _may_miss_gpus: bool

    def check_open(self, verb: str) -> None:
        """Raise ClosedError or ReentrancyError if ``verb`` can no longer work."""
        raise NotImplementedError

    def counted(self) -> dict[str, int]:
        """Return the counters as a user sees them: their bytes include those of the messages that have no body."""
        found = dict(self.counters)
        for way in ("down", "up"):
            found[f"bytes_{way}"] += 8 * found[f"messages_{way}"]
        return found

    @property
    def is_own_process(self) -> bool:
        """Whether this process owns the workers, and is not a forked copy of their program."""
        return os.getpid() == self.pid

    def check_process(self, verb: str) -> None:
        """Raise ReentrancyError in a forked copy of the program."""
        if os.getpid() != self.pid:
            raise ReentrancyError(
                f"cannot {verb}: this process is a forked copy of the program, and the workers belong to the original."
            )

    def entered(self, verb: str) -> threading.RLock:
        """Return the lock to hold for one operation of a verb (which holds Ctrl-C back). Inside, :meth:`begin` first.

        Raises
        ------
        ReentrancyError
            Inside a worker, in a forked copy, or from a signal handler, finalizer or callback during another operation.
        ClosedError
        """
        refuse_inside_worker(verb)
        self.check_open(verb)
        if self.is_mine():
            raise ReentrancyError(
                f"cannot {verb} while this thread is in another call: got here from a signal handler, a finalizer or a "
                "callback of a call. Note there what is to be done, and do it after that call."
            )
        return self._lock

    def if_free(self, action: Callable[[], None], timeout: float = 0.0) -> bool:
        """Run ``action`` under the lock if the lock is free within ``timeout`` seconds. Return whether it ran."""
        if self.is_mine():
            return False
        lock = self._lock
        with holding():
            try:
                try:
                    is_free: bool = lock.acquire(blocking=False) or waiting(lock.acquire, timeout=lock_s(timeout))
                    if is_free:
                        action()
                    return is_free
                finally:
                    if self.is_mine():
                        lock.release()
            finally:  # a signal handler may have raised in the lines above
                if self.is_mine():
                    lock.release()

    def is_mine(self) -> bool:
        """Whether this thread is in an operation."""
        return self._lock._is_owned()  # type: ignore[attr-defined]

    def deadline(self, timeout: float | None) -> float | None:
        """Return the monotonic time by which an operation that begins now must end."""
        if self.is_inline:
            refuse_limit(timeout)
        timeout = self.timeout if timeout is None else timeout
        return None if timeout is None else time.monotonic() + timeout

    def tell_of_unused_gpus(self, name: str) -> None:
        """Warn, once, that a function that computes with torch runs on the CPU beside GPUs that are not used."""
        if self._may_miss_gpus:
            self._may_miss_gpus = False
            if reason := unused_gpus():
                warn_at_users_line(f"{name!r} computes with torch on CPU workers: {reason}", RuntimeWarning)


def refuse_limit(timeout: float | None) -> None:
    """Raise ValueError for a time limit where the program itself is the rank: nobody could end it."""
    if timeout is not None:
        raise ValueError(
            f"cannot limit the time of calls: got timeout={timeout!r} with num_workers=0, expected none, as the "
            "function runs in the program itself. Leave it out, and press Ctrl-C, or fork workers."
        )
