"""``Resident``: a Python object that every rank keeps between calls."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from synk._code.parcels import Handle
from synk._engine.residents import ResidentObject
from synk._pure import files, plain_values
from synk._pure.tracebacks import verb
from synk._wire.cell import refuse_inside_worker
from synk._wire.messages import resolve_resident


class Resident(Handle):
    """A Python object of which every rank keeps its own copy between calls. Made by :func:`synk.resident`.

    A function refers to it by closing over it: inside the function ``r.value`` is this rank's object. Or the function
    gets it as an argument that ``bcast_inputs`` names: ``f(x, r)`` passes this rank's object itself, not a copy. All
    functions see the same object. A function that changes it must say so with ``updates=[r]``. Ranks stay alike as long
    as functions change them in the same way, as an optimizer does with averaged gradients.

    After a failed call, a death, Ctrl-C, or a call in which a rank had no rows, some ranks may lag behind. Before
    anything else is done they get the state of the rank that is furthest. If an exception ends a call that changes
    resident objects, a note on it says what has become of them. Its attribute ``step_counted`` says whether every
    object came through the call on some rank; if so, the call must not be repeated. It is None if the ranks could not
    be asked. If all ranks that are left were changing an object, it counts as changed in part, and all ranks get the
    object of the lowest of them. If no rank has the state any more, calls raise ``WorkerDied`` until :meth:`set`.

    Attributes
    ----------
    name : str
    """

    __slots__ = ("__weakref__", "_session")

    def __init__(self, session: Any, resident: ResidentObject) -> None:
        self._session = session
        self._referent = resident
        self._reference = (resolve_resident, (resident.number,))

    @property
    def name(self) -> str:
        return self._referent.name

    @property
    def value(self) -> Any:
        raise AttributeError(
            f"cannot read {self.name!r} in the program: a resident object is on the workers. Use its get(rank) for a "
            "copy."
        )

    @verb
    def get(self, rank: int = 0) -> Any:
        """Return a copy of one rank's object.

        Raises
        ------
        IndexError
            If there is no such rank.
        SerializationError
            If the object cannot be pickled on the worker or loaded in the program.
        WorkerDied
            If its state is lost.
        """
        session, resident = self._session, self._referent
        verb = f"get resident object {self.name!r}"
        if not 0 <= rank < session.world_size:
            raise IndexError(f"cannot {verb}: got rank {rank}, expected 0 to {session.world_size - 1}.")
        return session.run(verb, session.residents.copy_of, resident, rank, verb, "whole")

    @verb
    def set(self, value: Any) -> None:
        """Give every rank a copy of ``value``. Functions that refer to this object get the new one.

        Raises
        ------
        SerializationError
            If ``value`` cannot be pickled, or not be loaded on the workers.
        """
        session = self._session
        verb = f"set resident object {self.name!r}"
        with session.entered(verb):
            session.begin(verb)
            self._referent.replace(value)
            session.residents.settle()

    def save(self, path: files.Path, *, wait: bool = True) -> Future[None] | None:
        """Write the state of rank 0's object, as its ``dump`` returns it, to a file: as a whole or not at all.

        Parameters
        ----------
        path : path
            A program that is killed at any instruction leaves the old file or the new one.
        wait : bool
            True: return when the file is on the disk. False: return a future as soon as the state was copied; its
            ``result()`` waits for the file.

        Raises
        ------
        TypeError
            If the object has no ``dump`` and ``load``, or its state holds anything but numbers, texts, arrays and
            tensors, and lists, tuples, sets and dicts of them. These load without running code.
        OSError
            If the file cannot be written. An older one is not changed.
        WorkerDied
            If the state is lost.
        """
        return files.save(path, self._plain_state, plain_values.write, wait=wait)

    def _plain_state(self) -> Any:
        session, resident = self._session, self._referent
        verb = f"save resident object {self.name!r}"
        resident.check_has_dump(verb)
        state = session.run(verb, session.residents.copy_of, resident, 0, verb, "kept")
        plain_values.check(state, f"resident object {self.name!r}")
        return state

    def load(self, path: files.Path) -> None:
        """Bring the object of every rank, by its ``load``, into the state that :meth:`save` wrote.

        Raises
        ------
        TypeError
            If the object has no ``dump`` and ``load``.
        ValueError
            If the file is not one of these, or is damaged.
        Exception
            Whatever the object's ``load`` raises.
        """
        verb = f"load resident object {self.name!r}"
        self._referent.check_has_dump(verb)
        state = pickle.dumps(plain_values.read(path), protocol=5)
        self._session.run(verb, self._session.residents.restore, self._referent, state)

    def __reduce__(self) -> Any:
        raise TypeError(
            f"cannot pickle resident object {self.name!r}: it is on the workers. Close over it, or pass it as "
            "an argument that bcast_inputs names; synk.Program keeps it together with functions that use it."
        )

    def __repr__(self) -> str:
        return f"<synk.Resident {self.name!r}>"


def make_resident(
    session: Any,
    value: Any,
    name: str | None,
    dump: Callable[[Any], Any] | None,
    load: Callable[[Any, Any], None] | None,
) -> Resident:
    """Make a :class:`Resident` of an open runtime, on all of its workers."""
    refuse_inside_worker("make a resident object")
    if (dump is None) != (load is None):
        raise TypeError("cannot make a resident object: got only one of dump and load, expected both or none.")
    verb = "make a resident object"
    with session.entered(verb):
        session.begin(verb)
        resident = ResidentObject(session.residents, value, name, dump, load)
        session.residents.settle()
    return Resident(session, resident)
