"""How an exception travels from a worker to the master, and what it becomes there."""

from __future__ import annotations

import io
import pickle
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from synk._master.known import Reply
from synk._pure.interrupts import is_from_handler
from synk._wire.messages import Status
from synk.errors import RemoteError, add_note

TEXT_CAP = 20_000
PICKLE_CAP = 1 << 20
_READ_ONLY = "is read-only"


@dataclass(frozen=True)
class Failure:
    """An exception of one rank in transferable form.

    Attributes
    ----------
    pickled : bytes or None
        The exception itself where it can be pickled, loaded again and is an ordinary ``Exception``.
    unfit : str
        Why it could not be, where it is one.
    is_collateral : bool
        The rank failed only because another one did.
    """

    rank: int
    device: str
    type_name: str
    message: str
    traceback_text: str
    pickled: bytes | None
    unfit: str = ""
    is_collateral: bool = False


class _CappedFile(io.RawIOBase):
    """A file that refuses to grow beyond ``PICKLE_CAP``, so that a huge payload is never copied."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.nbytes = 0

    def write(self, data: Any) -> int:
        nbytes = memoryview(data).nbytes
        self.nbytes += nbytes
        if self.nbytes > PICKLE_CAP:
            raise ValueError(f"more than {PICKLE_CAP} bytes")
        self.parts.append(bytes(data))
        return nbytes


def _message(error: BaseException) -> str:
    """Return ``str(error)``, cut; never the text of a huge argument and never an exception."""
    try:
        nbytes = sum(len(argument) for argument in error.args if isinstance(argument, (bytes, bytearray, str)))
        if nbytes > PICKLE_CAP:
            return f"<arguments of {nbytes} bytes>"
        text = str(error)
    except BaseException as inner:
        return f"<its text could not be made: {type(inner).__name__}>"
    return text if len(text) <= TEXT_CAP else f"{text[:TEXT_CAP]}... ({len(text)} characters)"


def _format(error: BaseException, depth: int = 0) -> str:
    """Format an exception and its chain like the interpreter does, without calling anything of it but ``str``."""
    text = ""
    cause = error.__cause__
    context = None if error.__suppress_context__ else error.__context__
    if cause is not None and depth < 5:
        text = _format(cause, depth + 1) + "\nThe above exception was the direct cause of the following exception:\n\n"
    elif context is not None and depth < 5:
        text = _format(context, depth + 1) + "\nDuring handling of the above exception, another exception occurred:\n\n"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.endswith(("synk/_worker.py", "synk/_execute.py"))]
    lines = traceback.StackSummary.from_list(own or frames).format()
    if len(lines) > 60:
        lines = [*lines[:30], f"  ... {len(lines) - 60} more frames ...\n", *lines[-30:]]
    return f"{text}Traceback (most recent call last):\n{''.join(lines)}{type(error).__qualname__}: {_message(error)}\n"


def _pickle(error: BaseException) -> tuple[bytes | None, str]:
    """Return the exception pickled, or None where it is not fit to be raised in the master, and why."""
    if not isinstance(error, Exception) or isinstance(error, (StopIteration, StopAsyncIteration)):
        return None, ""
    from synk._worker.pickling import HostPickler

    file = _CappedFile()
    try:
        HostPickler(file, protocol=5).dump(error)
        data = b"".join(file.parts)
        # What cannot be loaded again must fail here, not in the user's session.
        loaded = pickle.loads(data)
        return (data, "") if type(loaded) is type(error) else (None, f"it is loaded as {type(loaded).__name__}")
    except KeyboardInterrupt:
        raise
    except BaseException as inner:  # __reduce__ is the user's code and may raise anything, SystemExit included
        return None, f"{type(inner).__name__}: {_message(inner)[:500]}"


def pack_failure(error: BaseException, rank: int, device: str, *, is_collateral: bool = False) -> Failure:
    """Return ``error`` in transferable form."""
    message = _message(error)
    if isinstance(error, ValueError) and _READ_ONLY in message:
        add_note(error, "Inputs and shared variables are read-only inside a function: copy (x = x.copy()) or assign.")
    text = _format(error)[-TEXT_CAP:]
    return Failure(rank, device, type(error).__qualname__, message, text, *_pickle(error), is_collateral)


def rebuild(failures: list[Failure], world_size: int, name: str) -> Exception:
    """Return the exception to raise for the failures of a call, lowest rank first.

    A user's exception is raised as its own type with a ``RemoteError`` as cause; what is not fit for that becomes the
    ``RemoteError``. Ranks that failed only because of another one are counted, not raised.
    """
    failures = sorted(failures, key=lambda failure: (failure.is_collateral, failure.rank))
    first = failures[0]
    remote = RemoteError(
        f"rank {first.rank} of {world_size} ({first.device}) raised {first.type_name} in {name!r}: {first.message}\n"
        f"{first.traceback_text}",
        rank=first.rank,
        device=first.device,
        type_name=first.type_name,
        traceback_text=first.traceback_text,
    )
    if first.unfit:
        add_note(remote, f"It comes as a RemoteError because it cannot be pickled and loaded again: {first.unfit}")
    notes = [f"raised in {name!r} on rank {first.rank} of {world_size} ({first.device})"]
    others = [failure for failure in failures[1:] if not failure.is_collateral]
    notes += [f"rank {failure.rank} raised {failure.type_name}: {failure.message[:200]}" for failure in others[:8]]
    if len(others) > 8:
        notes.append(f"and {len(others) - 8} more ranks")
    error: Exception = remote
    if first.pickled is not None:
        try:
            loaded = pickle.loads(first.pickled)
            if isinstance(loaded, Exception):
                BaseException.__setattr__(loaded, "__cause__", remote)  # not by assignment: the class may be frozen
                for note in notes:
                    add_note(loaded, note)
                return loaded
        except BaseException as inner:  # code of the user's class runs here: whatever it does, a RemoteError remains
            if is_from_handler(inner):
                raise
            error = remote
    for note in notes:
        add_note(error, note)
    return error


def raise_failures(replies: Mapping[int, Reply], world_size: int, name: str) -> None:
    """Raise the error of the lowest failing rank of an exchange, if any."""
    failures = []
    interrupted = []
    for rank in sorted(replies):
        reply = replies[rank]
        if reply.status == Status.ERROR:
            failures.append(pickle.loads(reply.body))
        elif reply.status == Status.INTERRUPTED:
            interrupted.append(rank)
    if failures:
        raise rebuild(failures, world_size, name)
    if interrupted:
        raise RemoteError(f"rank {interrupted[0]} was interrupted in {name!r}.", rank=interrupted[0])
