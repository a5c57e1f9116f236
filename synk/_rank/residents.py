"""Resident objects on a rank: what a call changes in them, and how that is taken back if the call does not count."""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence
from typing import Any

from synk._wire import parcels
from synk._wire.messages import COUNTED, TORN


class RankResident:
    """A resident object on one rank: what a ``Resident`` is inside a function.

    Attributes
    ----------
    name : str
    value : object
        This rank's own.
    version : int
        How often the program had set it when this rank got it.
    """

    def __init__(self, name: str, made: tuple[Any, Any, Any], version: int) -> None:
        self.name, self.version = name, version
        self.value, self._dump, self._load = made

    def kept(self) -> Any:
        """Return what its state is: what ``dump`` returns, or the object."""
        return self.value if self._dump is None else self._dump(self.value)

    def state(self) -> bytes:
        """Return a pickle that brings a rank's object into this state. What lies on the device comes back there."""
        return parcels.dumps(self.kept(), has_word=True)

    def restore(self, state: bytes) -> None:
        """Take over a state."""
        loaded = pickle.loads(state)
        if self._load is None:
            self.value = loaded
        else:
            self._load(self.value, loaded)

    def mark(self) -> Callable[[], bytes | None]:
        """Return what puts the object back as it is now.

        That returns bytes which tell apart what could not be put back, or None, if it was not put back at all.
        """
        keep = getattr(type(self.value), "__synk_keep__", None)
        if keep is not None:
            put_back: Callable[[], bytes | None] = keep(self.value)
            return put_back
        state = self.state()

        def restore() -> bytes:
            self.restore(state)
            return b""

        return restore


class RankResidents(dict[int, RankResident]):
    """All resident objects of one rank, by number."""

    def told(self, number: int, payload: Any) -> None:
        """Take in an object, or the state of one. Functions may hold the object already, so it stays the same."""
        name, version, data, state = payload
        found = self.get(number)
        if found is None:
            found = self[number] = RankResident(name, pickle.loads(data), version)
        elif found.version != version or state is None:
            found.__init__(name, pickle.loads(data), version)  # type: ignore[misc]
        if state is not None:
            found.restore(state)


class Changes:
    """What the last call that was to change resident objects has done to them, until the program says if it counts.

    Attributes
    ----------
    undo : dict of int to callable
        By object, what puts it back; empty if the program has said whether the call counts.
    has_finished : bool
        Whether the function of the call has come to its end.
    """

    def __init__(self) -> None:
        self._number = 0
        self.has_finished = False
        self.undo: dict[int, Callable[[], bytes | None]] = {}
        self._outcomes: dict[int, int] = {}

    def begin(self, number: int, residents: RankResidents, changed: Sequence[int]) -> None:
        """Mark the objects that a call is about to change."""
        self._number, self.has_finished, self._outcomes = number, False, {}
        self.undo = {each: residents[each].mark() for each in changed}

    def settle(self, committed: int, ended: int) -> None:
        """Take the changes back if their call has ended and does not count."""
        if self._number <= ended:
            if self._number > committed:
                self.take_back(self._number)
            self.undo = {}

    def take_back(self, number: int) -> None:
        """Put the objects back as they were before call ``number``, as far as that can be."""
        if number != self._number:
            return  # what an earlier one did, whose end is not known here yet, stays
        undo, self.undo = self.undo, {}
        for each in reversed(undo):
            self._outcomes[each] = TORN
            try:
                left = undo[each]()
            except Exception:
                continue  # the program says that the object may be torn
            if left is not None:
                self._outcomes[each] = zlib.crc32(left)
            elif self.has_finished:
                self._outcomes[each] = COUNTED

    def outcomes(self, number: int) -> dict[int, int]:
        """Return what has become of the objects that call ``number`` was to change; nothing for those as before."""
        return self._outcomes if number == self._number else {}
