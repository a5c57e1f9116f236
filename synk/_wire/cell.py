"""The one process-wide cell, which says what this process is; and how a worker's program is recognised."""

from __future__ import annotations

import contextlib
import sys
import threading
from typing import Any

from synk.errors import ClosedError, NotForkedError, ReentrancyError

WORKER_ARGUMENT = "--synk-worker"


class _Cell:
    """The objects that module-level verbs work on.

    Attributes
    ----------
    runtime : Runtime or None
        The runtime that ``synk.fork()`` made, while it is open.
    session : Session or None
        The session of ``runtime``.
    last_session : Session or None
        The last such session, open or closed. Errors use it to say why it ended.
    forked_at : NotebookCell or None
        The notebook cell that called ``synk.fork()``.
    forked_with : tuple or None
        The arguments of that call.
    worker : Worker or None
        The rank whose message this process is handling. None between messages, and in a program without
        ``num_workers=0``.
    unfinished : dict of str to object
        For each stream of the program ("stdout", "stderr"), the writer of a line that has no end yet.
    broken_streams : set of str
        Streams of this process (``"stdout"``, ``"stderr"``) whose failure was already reported.
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
    _is_made_by_import = True  # a module that names it has each process's own: its contents never travel

    def __init__(self) -> None:
        self.unfinished: dict[str, Any] = {}
        self.broken_streams: set[str] = set()

    def uninterrupted(self) -> contextlib.AbstractContextManager[None]:
        """On a worker, hold back an interrupt of the running call while the body runs."""
        return contextlib.nullcontext() if self.worker is None else self.worker.uninterrupted()


cell = _Cell()


def is_inside_worker() -> bool:
    """Whether this thread runs a function: each thread of a worker, and of the program the one that plays the rank."""
    worker = cell.worker
    return worker is not None and worker.thread in (None, threading.get_ident())


def refuse_inside_worker(verb: str) -> None:
    """Raise ReentrancyError if this thread runs a function: synk's verbs cannot be used there."""
    if is_inside_worker():
        raise ReentrancyError(
            f"cannot {verb} inside worker rank {cell.worker.rank}: a function runs on one device and cannot use the "
            "runtime. Call it in the program; synk.comm has collectives for functions that all ranks run together."
        )


class Elsewhere:
    """Stands for a :class:`synk.Function` in the copies that workers get of what holds it.

    The function itself stays in the program, because it is a call of all workers. The copies may hold what stands for
    it, and pass it on.
    """

    def __init__(self, name: str) -> None:
        self.__name__ = name

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Raise ReentrancyError, also if this has come back to the program."""
        raise ReentrancyError(
            f"cannot call {self.__name__!r} inside a function: got a synk function, which only the program can call, "
            "expected a plain one. Call the plain function; if it has no name, give it one: plain = f.__wrapped__."
        )

    serial = submit = stream = repeat = verify = __call__

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"cannot read {name!r} of {vars(self).get('__name__')!r} inside a function: got a synk function, which "
            "stays in the program, expected a plain one. Read it in the program, and use what you get: "
            f"value = f.{name}."
        )

    def __reduce__(self) -> Any:
        return Elsewhere, (self.__name__,)  # as the function itself is pickled, so that both have one digest

    def __repr__(self) -> str:
        return f"<synk.Function {self.__name__!r} of the program>"


def is_frozen() -> bool:
    """Whether this is a frozen program, which has no interpreter of its own."""
    return bool(getattr(sys, "frozen", False))


def is_worker() -> bool:
    """Whether this process was started as a worker. Ask early: later the arguments are the program's."""
    arguments = getattr(sys, "argv", [])
    return arguments[1:2] == [WORKER_ARGUMENT] and (is_frozen() or arguments[0] == "-c")


def current_session() -> Any:
    """Return the session of the current runtime.

    Raises
    ------
    NotForkedError
        If there is none.
    ClosedError
        If it was closed.
    """
    refuse_inside_worker("use the runtime")
    if cell.session is None:
        if cell.last_session is not None:
            raise ClosedError("the runtime is closed. Call synk.fork() again.") from cell.last_session.cause
        raise NotForkedError("there is no runtime yet. Call synk.fork() first.")
    return cell.session
