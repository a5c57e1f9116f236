"""``Resident``: a Python object on every rank, kept between calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from synk._master.code.handles import Handle
from synk._master.session import Session
from synk._master.state.resident import ResidentObject
from synk._wire.cell import refuse_inside_worker
from synk._wire.residents import resolve_resident


class Resident(Handle):
    """A Python object of which every rank has one of its own between calls. Made by :func:`synk.resident`.

    Functions refer to it by closing over it: inside a function ``r.value`` is this rank's object. Or they get it as an
    argument that ``bcast_inputs`` names: ``f(x, r)`` hands this rank's object over, itself and not a copy. All
    functions mean the same one. A function that changes it says so with ``changes=[r]``; ranks stay alike as long as
    they change it alike, as an optimizer does with averaged gradients.

    After a call that failed, a worker that died, Ctrl-C, or a call in which a rank had no rows, the ranks that lag
    behind get the state of the one that is furthest, before anything else is done. An exception that ends a call
    which changes resident objects tells in a note what has become of them, and in its attribute ``step_counted``
    whether all of them came through the call on some rank, so that it must not be repeated. An object that was being
    changed on every rank that is left counts as changed in part: all ranks get what the lowest of them has. Where no
    rank has the state any more, calls raise ``WorkerDied`` until :meth:`set`.

    Attributes
    ----------
    name : str
    """

    __slots__ = ("__weakref__", "_session")

    def __init__(self, session: Session, resident: ResidentObject) -> None:
        self._session = session
        self._referent = resident
        self._reference = (resolve_resident, (resident.id,))

    @property
    def name(self) -> str:
        return self._referent.name

    @property
    def value(self) -> Any:
        raise AttributeError(
            f"cannot read {self.name!r} in the master: a resident object lives on the workers. Use its get(rank) for a "
            "copy."
        )

    def get(self, rank: int = 0) -> Any:
        """Return a copy of the object of one rank.

        Raises
        ------
        IndexError
            If there is no such rank.
        SerializationError
            If it cannot be pickled there, or loaded here.
        WorkerDied
            If its state was lost.
        """
        session, resident = self._session, self._referent
        verb = f"get resident object {self.name!r}"
        if not 0 <= rank < session.world_size:
            raise IndexError(f"cannot {verb}: got rank {rank}, expected 0 to {session.world_size - 1}.")
        with session.entered(verb):
            session.begin(verb)
            resident.check(verb)
            return session.residents.copy_of(resident, rank, session.deadline(None))

    def set(self, value: Any) -> None:
        """Make a copy of ``value`` the object of every rank; functions that refer to this mean the new one.

        Raises
        ------
        SerializationError
            If it cannot be pickled, or cannot be loaded on the workers.
        """
        session = self._session
        verb = f"set resident object {self.name!r}"
        with session.entered(verb):
            session.begin(verb)
            self._referent.replace(value, next(session.numbers))
            session.residents.settle(session.deadline(None))

    def __reduce__(self) -> Any:
        raise TypeError(
            f"cannot pickle resident object {self.name!r}: it lives on the workers. Close over it, or pass it as "
            "an argument of its own that bcast_inputs names."
        )

    def __repr__(self) -> str:
        return f"<synk.Resident {self.name!r}>"


def make_resident(
    session: Session,
    value: Any,
    name: str | None,
    dump: Callable[[Any], Any] | None,
    load: Callable[[Any, Any], None] | None,
) -> Resident:
    """Make a :class:`Resident` of a runtime that is open, on all of its workers."""
    refuse_inside_worker("make a resident object")
    if (dump is None) != (load is None):
        raise TypeError("cannot make a resident object: got only one of dump and load, expected both or none.")
    verb = "make a resident object"
    with session.entered(verb):
        session.begin(verb)
        resident = ResidentObject(session.residents, value, name, dump, load)
        session.residents.settle(session.deadline(None))
    return Resident(session, resident)
