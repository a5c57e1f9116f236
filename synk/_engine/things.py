"""Things: what ranks can know, by number. A thing says how a rank is told of it, and what must be known before.

A thing lives as long as the program refers to it: by a handle, a plan or a function. When it goes, the next operation
has the ranks forget its number.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

from synk._wire.memory import Segment
from synk.errors import ClosedError


class Thing:
    """The base of things. Subclasses have a ``kind``, which says what a rank makes of them, and ``told``.

    Parameters
    ----------
    registry : Engine
        What gives things their numbers, and sees them go.
    needs : sequence of Thing or Segment

    Attributes
    ----------
    number : int
    needs : tuple of Thing or Segment
        What a rank must know before. Memory counts as a thing: its number is that of the segment.
    is_once : bool
        Whether a rank forgets it by itself once it has answered.
    is_current : bool
        Whether what ``told`` returns is as the thing is now. If not, a rank that is told counts as not knowing it.
    """

    kind = ""
    is_once = False
    is_current = True

    def __init__(self, registry: Any, needs: Sequence[Thing | Segment] = ()) -> None:
        self.number = next(registry.numbers)
        self.needs = tuple(needs)
        registry.watch(self)

    def told(self, rank: int) -> tuple[Any, Sequence[Segment]]:
        """Return what a rank is told, and the segments whose descriptors come with it."""
        raise NotImplementedError

    def numbers(self) -> set[int]:
        """Return its number, and those of all that it needs."""
        found = {self.number}
        for needed in self.needs:
            found |= needed.numbers() if isinstance(needed, Thing) else {needed.id}
        return found


class Told(Thing):
    """What one rank is told as it is here."""

    def __init__(self, registry: Any, kind: str, payload: Any, needs: Sequence[Thing | Segment] = ()) -> None:
        self.kind, self.payload = kind, payload
        super().__init__(registry, needs)

    def told(self, rank: int) -> tuple[Any, Sequence[Segment]]:
        return self.payload, ()


class Once(Told):
    """News for one message, which its rank forgets with its reply."""

    is_once = True


T = TypeVar("T", bound=Thing)


class Living(Generic[T]):
    """The things of one kind of a runtime that the program still refers to, in the order in which they were made.

    Attributes
    ----------
    engine : Engine
    is_closed : bool
    """

    def __init__(self, engine: Any) -> None:
        self.engine = weakref.proxy(engine)
        self.is_closed = False
        self._by_number: weakref.WeakValueDictionary[int, T] = weakref.WeakValueDictionary()

    def add(self, thing: T) -> None:
        self._by_number[thing.number] = thing

    def get(self, number: int) -> T | None:
        return self._by_number.get(number)

    def __iter__(self) -> Iterator[T]:
        return iter(sorted(self._by_number.values(), key=lambda thing: thing.number))


def check_owner(owner: Any, wanted: Any, label: str, what: str) -> None:
    """Raise if something, whose name is ``label``, belongs to another runtime than that of ``what``.

    ``owner`` and ``wanted`` are the sessions, or what they have of a kind.

    Raises
    ------
    ClosedError, ValueError
    """
    if owner is not wanted:
        if owner.is_closed:
            raise ClosedError(f"cannot use {what}: the runtime of {label} was closed. Make it again.")
        raise ValueError(f"cannot use {what}: {label} belongs to another runtime. Make it with this one.")


def described(segment: Segment) -> tuple[int, bool, bool, bool, int, int]:
    """Return what a rank must know of a segment, besides its descriptor."""
    arena = 0 if segment.arena is None else segment.arena.id
    offset = segment.offset if arena else 0
    return segment.nbytes, segment.is_worker_writable, segment.is_staging, segment.is_arena, arena, offset
