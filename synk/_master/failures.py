"""What an exception that came from a worker becomes in the master."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

from synk._pure.interrupts import is_from_handler
from synk._wire.failures import Failure
from synk._wire.messages import Reply, Status
from synk.errors import RemoteError, add_note


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
    """Raise the error of the lowest failing rank that replied, if any."""
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
