"""What happens to open sessions when the program ends or forks."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading

from synk._master.session import open_sessions
from synk._master.state.results import before_fork
from synk._pure.interrupts import deferred
from synk.errors import SynkError


def _close_all() -> None:
    for session in list(open_sessions):
        session.workers.waiting.is_exiting = True
        with contextlib.suppress(SynkError):
            session.close()


_fork_lock = threading.RLock()  # held from before a fork to after it, so that threads fork one at a time


def _before_fork() -> None:
    with deferred():
        _fork_lock.acquire()
        for session in list(open_sessions):  # the child must not use what the parent remembers
            session.workers.log.note()
        before_fork()


def _after_fork() -> None:
    with deferred(), contextlib.suppress(RuntimeError):  # a signal handler may have raised before the lock was held
        _fork_lock.release()


def _in_forked_child() -> None:
    """Close the descriptors that tell workers whether the master lives, and memory that the child cannot use."""
    _after_fork()
    for session in list(open_sessions):
        session.workers.processes.abandon()
        session.abandon_memory()
    open_sessions.clear()


def watch_over() -> None:
    """Close sessions when the program ends, and keep forked copies of it away from them."""
    atexit.register(_close_all)
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_forked_child)
