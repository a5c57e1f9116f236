"""All exceptions of synk: one class per cause.

Mistakes of the caller (a wrong shape, an unknown name) are plain ``TypeError``, ``ValueError`` or ``IndexError``,
raised in the master before anything is sent. Everything here is about the runtime: it imports nothing and every class
survives pickling, because errors travel between processes.
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
    "RowShapedOutput",
    "SerializationError",
    "SharedMemoryError",
    "StaleCaptureError",
    "StaleCaptureWarning",
    "StartupError",
    "SynkError",
    "UnsupportedError",
    "WorkerDied",
]


class SynkError(RuntimeError):
    """Base class of the runtime's errors.

    Attributes
    ----------
    step_counted : bool or None
        Of an error that has ended a call which changes resident objects: whether all of them came through it on some
        rank, so that the call counts and must not be repeated. The user's own exceptions and ``KeyboardInterrupt``
        get this attribute too. None: unknown, or the call changes none.
    """

    __module__ = "synk.errors"
    step_counted: bool | None = None


class NotForkedError(SynkError):
    """There is no current runtime: call ``synk.fork()`` first."""


class ClosedError(SynkError):
    """The runtime was closed; ``__cause__`` holds the fault that closed it, where one did."""


class StartupError(SynkError):
    """A worker could not start. The message names the rank and ends with what it wrote to stderr."""


class WorkerDied(SynkError):
    """One or more worker processes ended.

    Attributes
    ----------
    ranks, pids : tuple of int
        Who died, in rank order.
    exits : tuple of str
        How each ended: ``"SIGKILL"``, ``"exit 3"`` or ``"exit code unknown"``.
    phase : str
        What the runtime was doing: ``"idle"``, ``"call"``, ``"distribute"`` ...
    """

    def __init__(
        self,
        message: str = "",
        *,
        ranks: tuple[int, ...] = (),
        pids: tuple[int, ...] = (),
        exits: tuple[str, ...] = (),
        phase: str = "",
    ) -> None:
        super().__init__(message)
        self.ranks = ranks
        self.pids = pids
        self.exits = exits
        self.phase = phase


class RemoteError(SynkError):
    """An exception in a worker: the cause of a user's exception, or its stand-in where it cannot be rebuilt.

    Attributes
    ----------
    rank : int
    device : str
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


class CallTimeout(SynkError, TimeoutError):
    """A call did not end within its ``timeout``."""


class CallCancelled(SynkError):
    """A call was ended because of something else: ``Runtime.interrupt()``, or, where it was submitted, another call.

    Submitted calls share the workers with those in flight beside them, so a time limit or Ctrl-C ends them together.
    """


class CollectiveMismatch(SynkError, ValueError):
    """Ranks disagree: on a collective's kind, op, dtype or size, or on the structure of a function's outputs."""


class SerializationError(SynkError):
    """A function, argument or result cannot be pickled, or cannot be loaded on the other side."""


class SharedMemoryError(SynkError, MemoryError):
    """A shared segment cannot be allocated or mapped. The message holds the size asked for and what is free."""


class StaleCaptureError(SynkError):
    """Something that a function captured was changed in place, and earlier calls have used its old contents.

    Raised before anything is sent; the next call uses the new contents. Only for what is too large to be compared at
    each call: pass it as an argument (for an array, as ``synk.data``), or call ``f.refresh()`` after each change.
    """


class ReentrancyError(SynkError):
    """synk was used where it cannot work: inside a worker, in a forked copy, in a signal handler during a call."""


class UnsupportedError(SynkError, NotImplementedError):
    """A backend or communicator lacks what was asked for; the message says which one and what to use instead."""


class StaleCaptureWarning(UserWarning):
    """An object that a function captured is pickled otherwise than when it was sent, which was found late.

    Perhaps the program has changed it, and calls have used its old state; perhaps it keeps a cache. Its new state is
    sent, unless the rank has changed its own meanwhile.
    """

    __module__ = "synk.errors"


class OpMismatch(UserWarning):
    """A function whose ``outputs`` were not named computes no average over rows, which is the default op.

    Told once per function, at the first call in which a rank has four rows. To name ``outputs=`` silences it, and so
    does ``warnings.simplefilter("ignore", synk.errors.OpMismatch)``.
    """

    __module__ = "synk.errors"


class RowShapedOutput(OpMismatch):
    """An output has one row for each row of its rank: it wants ``outputs="gather"``."""

    __module__ = "synk.errors"


def add_note(error: BaseException, note: str) -> None:
    """Attach a line to an exception, on Python 3.10 as well (where tracebacks do not print it)."""
    notes: Any = getattr(error, "__notes__", None)
    if notes is None:
        BaseException.__setattr__(error, "__notes__", [note])  # not by assignment: the class may be frozen
    else:
        notes.append(note)
