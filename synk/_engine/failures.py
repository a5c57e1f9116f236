"""Turns an exception that came from a worker into one that the program raises."""

from __future__ import annotations

import importlib.util
import pickle

from synk._pure.tracebacks import frames_of
from synk._wire.messages import Failure
from synk.errors import RemoteError, add_note


def rebuild(failures: list[Failure], world_size: int, name: str, item: str = "") -> Exception:
    """Return the exception to raise for the failures of a call, lowest rank first.

    A user's exception is raised as its own type, with a ``RemoteError`` as its cause. If it cannot travel, the
    ``RemoteError`` itself is raised. Ranks that failed only because another one did are counted in the notes. ``item``
    names an item of a map in the texts.
    """
    failures = sorted(failures, key=lambda failure: (failure.is_collateral, failure.rank))
    first = failures[0]
    where = f"rank {first.rank} of {world_size} ({first.device})"
    frames = frames_of(first.traceback_text, first.type_name, first.message)
    what = f"{name!r} for {item}" if item else repr(name)
    others = [failure for failure in failures[1:] if not failure.is_collateral]
    alike = [each.rank for each in others if (each.type_name, each.message) == (first.type_name, first.message)]
    notes = [
        f"rank {each.rank} raised {each.type_name}: {each.message[:200]}" for each in others if each.rank not in alike
    ]
    if notes or item:
        notes = [f"raised in {what} on {where}", *notes[:8]] + [f"and {len(notes) - 8} more ranks"] * (len(notes) > 8)
    if first.pickled is not None:
        try:
            loaded = pickle.loads(first.pickled)
            if isinstance(loaded, Exception):
                also = f", and likewise on {len(alike)} more" if alike else ""
                cause = _remote(first, f"on {where} in {what}{also}:\n{frames}")
                # not by assignment, since the class may be frozen
                BaseException.__setattr__(loaded, "__cause__", cause)
                for note in [*notes, *_import_hint(loaded)]:
                    add_note(loaded, note)
                getattr(loaded, "__notes__", None)  # code that prints the exception will ask for the notes
                return loaded
        except BaseException:  # The user's class runs code here. Whatever it raises, the RemoteError is left.
            pass
    error = _remote(first, f"{where} raised {first.type_name} in {what}: {first.message}\n{frames}")
    if first.unfit:
        notes.insert(0, f"It comes as a RemoteError because it cannot be pickled and loaded again: {first.unfit}")
    for note in notes:
        add_note(error, note)
    return error


def _import_hint(error: Exception) -> list[str]:
    """Return what to do about a module that a worker did not find although this process finds it."""
    name = (error.name or "").partition(".")[0] if isinstance(error, ModuleNotFoundError) else ""
    try:
        spec = importlib.util.find_spec(name) if name else None
    # the name belongs to something that cannot be searched for a module
    except (ImportError, ValueError, AttributeError):
        return []
    if spec is None or name != error.name:  # type: ignore[attr-defined]
        return []
    return [
        f"the program itself finds {name!r} ({spec.origin or 'a folder'}): the workers have the sys.path of the time "
        "when the function was sent. Define the function again, or call synk.current().restart()."
    ]


def _remote(failure: Failure, text: str) -> RemoteError:
    return RemoteError(
        text,
        rank=failure.rank,
        device=failure.device,
        type_name=failure.type_name,
        traceback_text=failure.traceback_text,
    )
