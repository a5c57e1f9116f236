"""The one process-wide cell: the current runtime of a master, and the worker that a process is."""

from __future__ import annotations

import contextlib
from typing import Any

from synk.errors import ReentrancyError


class _Cell:
    """What module-level verbs work on.

    Attributes
    ----------
    runtime : Runtime or None
        The one that ``synk.fork()`` made, while it is open.
    session : Session or None
        That of ``runtime``.
    last_session : Session or None
        Likewise, also when it is closed: to tell why.
    forked_at : NotebookCell or None
        Where in a notebook that was.
    forked_with : tuple or None
        With which arguments.
    worker : Worker or None
        What this process is; inline, what it plays while a call runs. None in a master.
    unfinished : dict of str to object
        By stream of the master ("stdout", "stderr"): what has written the line there that has no end yet.
    broken_streams : set of str
        Streams of this process (``"stdout"``, ``"stderr"``) of which it was said that they take no text.
    has_freeze_support : bool
        Whether a frozen program called ``synk.freeze_support()``.
    """

    runtime: Any = None
    session: Any = None
    last_session: Any = None
    forked_at: Any = None
    forked_with: Any = None
    worker: Any = None
    has_freeze_support = False

    def __init__(self) -> None:
        self.unfinished: dict[str, Any] = {}
        self.broken_streams: set[str] = set()

    def uninterrupted(self) -> contextlib.AbstractContextManager[None]:
        """Hold back an interrupt of the call under way, on a worker, while the body runs."""
        return contextlib.nullcontext() if self.worker is None else self.worker.uninterrupted()


cell = _Cell()


def refuse_inside_worker(verb: str) -> None:
    """Raise ReentrancyError where synk's verbs are used inside a function."""
    if cell.worker is not None:
        raise ReentrancyError(
            f"cannot {verb} inside worker rank {cell.worker.rank}: a function runs on one device and cannot use the "
            "runtime. Use synk.comm for collectives inside a function."
        )
