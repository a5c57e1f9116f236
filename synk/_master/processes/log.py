"""One log of what all workers have to know, and how far each rank has read it.

Whoever changes what ranks must know writes one entry. The next message to a rank brings what stands behind the place
up to which it has read. An entry says what *is*, not what has to be done, so it does no harm to read one twice: nothing
is undone where a message is lost, and nothing is torn where a signal comes between two lines. What only some ranks
need, and get with the message that uses it (plans, segments, parcels), stands in no entry until it is dropped.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import cloudpickle

from synk._pure.interrupts import deferred
from synk._wire.memory import Segment
from synk._wire.messages import Body

_numbers = itertools.count(1)

_FEW = 64

Sources = dict[str, Callable[[int, int], "tuple[Any, list[Segment]] | None"]]
"""By kind, ``source(rank, number)`` returns what a rank is told of a thing, and the segments that it needs for that, or
None if there is no such thing any more."""


class Told:
    """Settings as they are sent, pickled once for all ranks. A rank gets the pickle, and imports nothing for it."""

    def __init__(self, names: Sequence[str], values: list[Any]) -> None:
        self.values = values
        self._data = cloudpickle.dumps(dict(zip(names, values)), protocol=5)

    def __reduce__(self) -> Any:
        return bytes, (self._data,)


class Entry(NamedTuple):
    """One line of the log.

    Attributes
    ----------
    kind, number : str, int
        Of what it tells. The last entry on one thing counts.
    is_drop : bool
        Whether ranks have to forget it.
    value : object
        Of a drop, what else is to be forgotten with it.
    """

    kind: str
    number: int
    is_drop: bool
    value: Any


class Packed(NamedTuple):
    """A message for one rank.

    Attributes
    ----------
    body : Body or None
        None if it needs none.
    segments : list of Segment
        Those that it brings: their descriptors ride along, if they have one.
    read : int
        How far the rank has read the log with it.
    """

    body: Body | None
    segments: list[Segment]
    read: int


class Log:
    """The log of one runtime.

    Attributes
    ----------
    state : int
        Never the same again once something was told, or has happened by which a call that is remembered could be
        wrong: a worker has died, memory was replaced, this process has forked. Where it is not certain that it
        matters, the number changes too: the next call is a new one, and that is all. All numbers come from one counter,
        so a thread that overtakes another can hide a number, but no change.
    ranks : list of Known
    settings : Told or None
        Those of the program that were told last.
    """

    def __init__(self) -> None:
        self.state = next(_numbers)
        self.ranks: list[Known] = []
        self.settings: Told | None = None
        self._entries: list[Entry] = []
        self._limit = _FEW

    def note(self) -> None:
        """Something has happened that ranks need not know, but by which a call that is remembered could be wrong."""
        self.state = next(_numbers)

    def tell(self, kind: str, number: int = 0) -> None:
        """Have all ranks learn with their next message what a thing is now; from any thread."""
        self._entries.append(Entry(kind, number, False, None))
        self.note()

    def drop(self, kind: str, number: int, value: Any = None) -> None:
        """Have all ranks forget a thing."""
        self._entries.append(Entry(kind, number, True, value))
        self.note()

    def drop_held(self, kind: str, number: int) -> None:
        """Likewise a thing that some ranks have got with a message; nobody is told where none has."""
        if any(number in known.held[kind] for known in self.ranks):
            self.drop(kind, number)
            for known in self.ranks:
                known.held[kind].pop(number, None)
        self.note()

    def set_settings(self, names: Sequence[str], values: list[Any]) -> None:
        """Tell of the program's settings, if they are others than before."""
        if self.settings is None or self.settings.values != values:
            self.settings = Told(names, values)
            self.tell("settings")

    def after(self, place: int) -> tuple[list[Entry], int]:
        """Return the last entry of each thing behind a place, and the end."""
        entries = self._entries[place:]  # a copy: other threads may write on
        return list({entry[:2]: entry for entry in entries}.values()), place + len(entries)

    def fold(self) -> None:
        """Keep, of what all ranks have read, what a process that starts has to know."""
        if len(self._entries) < self._limit:
            return
        with deferred():
            count = min(known.oldest for known in self.ranks)
            last = {entry[:2]: entry for entry in self._entries[:count]}
            living = [entry for entry in last.values() if not entry.is_drop]
            self._entries[:count] = living
            for known in self.ranks:
                known.move(len(living) - count)
            self._limit = 2 * len(self._entries) + _FEW


class Dropped(deque[Any]):
    """What finalizers drop, in any thread, for the next operation to free."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def append(self, dropped: Any) -> None:
        super().append(dropped)
        self._log.note()


class Known:
    """What one rank knows: how far it has read the log, and what it has got with messages.

    Parameters
    ----------
    rank : int
    log : Log

    Attributes
    ----------
    read : int
        The place in the log.
    held : dict of str to dict
        By kind and number: ``"segment"`` and ``"parcel"`` (True), ``"plan"`` (the number of the assembly in which the
        rank knows its part, 0 before there is one), ``"resident"`` (``first_version`` of what it has).
    """

    def __init__(self, rank: int, log: Log) -> None:
        self.rank = rank
        self._log = log
        self.clear()

    def clear(self) -> None:
        """Begin anew: the process that holds it is another one, which knows nothing."""
        self._log.note()
        self.read = 0
        self.held: dict[str, dict[int, Any]] = {"segment": {}, "plan": {}, "parcel": {}, "resident": {}}
        self._unanswered: dict[int, tuple[int, Body]] = {}  # by message: where the rank stood, and what it got

    @property
    def oldest(self) -> int:
        """The place to which the rank may have to go back."""
        return min([self.read, *(place for place, _ in self._unanswered.values())])

    def move(self, distance: int) -> None:
        """The entries before ``oldest`` have become fewer."""
        self.read += distance
        self._unanswered = {key: (place + distance, body) for key, (place, body) in self._unanswered.items()}

    @staticmethod
    def describe(segments: Sequence[Segment]) -> list[tuple[int, int, bool, bool, bool, bool]]:
        """Describe the segments whose descriptors ride along."""
        return [
            (each.id, each.nbytes, each.is_worker_writable, each.is_staging, each.is_arena, each.is_file)
            for each in segments
        ]

    def pack(self, content: Any, needed: Sequence[Segment], sources: Sources) -> Packed:
        """Return a message with ``content`` that refers to the segments ``needed``, and with all that is new."""
        entries, read = self._log.after(self.read)
        news: list[tuple[str, int, Any]] = []
        dropped: dict[str, dict[int, Any]] = {}
        wanted = list(needed)
        for kind, number, is_drop, value in entries:
            if is_drop:
                dropped.setdefault(kind, {})[number] = value
            elif (told := sources[kind](self.rank, number)) is not None:
                news.append((kind, number, told[0]))
                wanted += told[1]
        missing = self._missing(wanted)
        if content is None and not (missing or news or dropped):
            return Packed(None, missing, read)
        own = [each for each in missing if each.arena is None]
        parts = [(each.id, each.arena.id, each.offset, each.nbytes) for each in missing if each.arena is not None]
        return Packed(Body(self.describe(own), parts, dropped, news, content), missing, read)

    def _missing(self, wanted: Sequence[Segment]) -> list[Segment]:
        """Return the segments that the rank does not hold, each once, and the arenas that some lie in before them."""
        held = self.held["segment"]
        missing = [segment for segment in wanted if segment.id not in held]
        if not missing:
            return missing
        arenas = [segment.arena for segment in missing if segment.arena is not None]
        return list({each.id: each for each in (*arenas, *missing) if each.id not in held}.values())

    def note_sent(self, sequence: int, body: Body, read: int) -> None:
        """Remember what the rank knows now. Called after sending: a message lost to an interrupt is sent again."""
        self._log.note()  # a call that is prepared must not be sent to a rank that knows other things now
        self._unanswered[sequence] = self.read, body
        self.read = max(self.read, read)
        self.held["segment"].update(dict.fromkeys(_brought_by(body), True))

    def note_answered(self, sequence: int, *, is_received: bool) -> None:
        """The rank has answered a message; where it could not take that in, it holds nothing of what came with it."""
        place, body = self._unanswered.pop(sequence, (0, None))
        if body is not None and not is_received:
            self._log.note()
            self.read = min(self.read, place)
            for number in _brought_by(body):
                self.held["segment"].pop(number, None)


def _brought_by(body: Body) -> list[int]:
    """Return the segments that come with a message."""
    return [place[0] for place in (*body.segments, *body.parts)]
