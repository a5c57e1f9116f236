"""All exceptions of synk: one class for each cause.

Mistakes of the caller (a wrong shape, an unknown name) are plain ``TypeError``, ``ValueError`` or ``IndexError``,
raised in the program before anything is sent. The classes here are about the runtime. This file imports nothing, and
every class can be pickled, because errors travel between processes.
"""

from __future__ import annotations

from typing import Any

__all__ = [
    "CallCancelled",
    "CallTimeout",
    "ClosedError",
    "CollectiveMismatch",
    "NotForkedError",
    "OpMismatch",
    "ReentrancyError",
    "RemoteError",
    "SerializationError",
    "SharedMemoryError",
    "StartupError",
    "SynkError",
    "UnsupportedError",
    "WorkerDied",
]


def __dir__() -> list[str]:
    return __all__


class SynkError(RuntimeError):
    """The base class of the runtime's errors.

    Attributes
    ----------
    step_counted : bool or None
        On an error that ended a call which changes resident objects: whether every object came through the call on some
        rank, so that the call counts and must not be repeated. The user's own exceptions and ``KeyboardInterrupt`` get
        this attribute too. None: unknown, or the call changes no objects.
    """

    step_counted: bool | None = None


class NotForkedError(SynkError):
    """There is no current runtime: call ``synk.fork()`` first."""


class ClosedError(SynkError):
    """The runtime was closed. ``__cause__`` is the fault that closed it, if there was one."""


class StartupError(SynkError):
    """A worker could not start. The message names the rank and ends with its output to stderr."""


class WorkerDied(SynkError):
    """One or more worker processes ended.

    Attributes
    ----------
    ranks, pids : tuple of int
        The workers that died, in rank order.
    exits : tuple of str
        How each ended: ``"SIGKILL"``, ``"exit 3"`` or ``"exit code unknown"``.
    phase : str
        What the runtime was doing: ``"idle"``, ``"call"``, ``"distribute"`` ...
    nodes : tuple of int
        The nodes that ended as a whole, with all of their ranks; empty where single workers died.
    """

    def __init__(
        self,
        message: str = "",
        *,
        ranks: tuple[int, ...] = (),
        pids: tuple[int, ...] = (),
        exits: tuple[str, ...] = (),
        phase: str = "",
        nodes: tuple[int, ...] = (),
    ) -> None:
        super().__init__(message)
        self.nodes = nodes
        self.ranks = ranks
        self.pids = pids
        self.exits = exits
        self.phase = phase


class RemoteError(SynkError):
    """An exception in a worker: the cause of a user's exception, or its stand-in if that cannot be rebuilt.

    Attributes
    ----------
    rank : int
    device : str
        On one of several nodes with the node: ``"node1:cpu:0"``.
    type_name : str
        Qualified name of the exception's class in the worker.
    traceback_text : str
        The worker's formatted traceback.
    """

    def __init__(
        self, message: str = "", *, rank: int = -1, device: str = "", type_name: str = "", traceback_text: str = ""
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.device = device
        self.type_name = type_name
        self.traceback_text = traceback_text


class ItemError(SynkError):
    """What :func:`synk.map` gives in place of a result for an item that failed, with ``on_error="return"``.

    It is an exception, so that a program can raise it; ``exception`` is then its cause.

    Attributes
    ----------
    exception : Exception
        What the function raised, ``WorkerDied`` or ``CallTimeout``.
    item : int
        The number of the item, counted from 0.
    traceback : str
        The worker's traceback as text; empty where the function raised nothing.
    """

    def __init__(
        self, message: str = "", *, exception: Exception | None = None, item: int = -1, traceback: str = ""
    ) -> None:
        super().__init__(message)
        self.exception = self.__cause__ = exception
        self.item = item
        self.traceback = traceback


class CallTimeout(SynkError, TimeoutError):
    """A call did not end within its ``timeout``."""


class CallCancelled(SynkError):
    """Something else ended a call: ``Runtime.interrupt()`` or, for a submitted call, another call.

    Submitted calls share the workers with the other calls in flight, so a time limit or Ctrl-C ends them together.
    """


class CollectiveMismatch(SynkError, ValueError):
    """Ranks disagree: on a collective's kind, op, dtype or size, or on the structure of a function's outputs."""


class SerializationError(SynkError):
    """A function, argument or result cannot be pickled, or not be loaded on the other side."""


class SharedMemoryError(SynkError, MemoryError):
    """A shared segment cannot be allocated or mapped. The message says how much was asked for and how much is free."""


class ReentrancyError(SynkError):
    """synk was used where it cannot work: inside a worker, in a forked copy, in a signal handler during a call."""


class UnsupportedError(SynkError, NotImplementedError):
    """A backend or communicator lacks what was asked for. The message says which one, and what to use instead."""


class OpMismatch(SynkError):
    """The default op, the average, does not fit what a function returns, and the function names no op.

    The message shows the value of the call and that of one worker, and names the op that fits. Naming any op with
    ``outputs=``, also ``"avg"``, ends the check.
    """


def add_note(error: BaseException, note: str) -> None:
    """Add a line to an exception, on Python 3.10 as well (where tracebacks do not show it)."""
    notes: Any = getattr(error, "__notes__", None)
    if notes is None:
        BaseException.__setattr__(error, "__notes__", [note])  # not by assignment, since the class may be frozen
    else:
        notes.append(note)
