"""One log of what all workers must know, and how far each rank has read it.

Any change that ranks must learn of is one entry. The next message to a rank carries the entries behind the position up
to which the rank has read. An entry states what *is*, not what to do, so reading it twice does no harm: a lost message
needs no undo, and a signal between two lines leaves nothing torn. Plans, segments and parcels are needed by some ranks
only, and travel with the message that uses them. They get an entry only when they are dropped.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from synk._wire.memory import Segment
from synk._wire.messages import Body
from synk._wire.parcels import dumps

_numbers = itertools.count(1)

_FEW = 64

Sources = dict[str, Callable[[int, int], "tuple[Any, list[Segment]] | None"]]
"""The source of each kind of thing in the log.

``source(rank, number)`` returns what to tell a rank about a thing and the segments that the rank needs for it, or None
if the thing no longer exists.
"""


class PickledSettings:
    """Settings in the form in which they travel, pickled once for all ranks.

    A rank loads the message without importing anything for them.
    """

    def __init__(self, names: Sequence[str], values: list[Any]) -> None:
        self.values = values
        self._data = dumps(dict(zip(names, values)))

    def __reduce__(self) -> Any:
        return bytes, (self._data,)


class Entry(NamedTuple):
    """One entry of the log.

    Attributes
    ----------
    kind, number : str, int
        Which thing the entry is about. The last entry about a thing counts.
    is_drop : bool
        Whether ranks must forget the thing.
    value : object
        For a drop: what else to forget with the thing.
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
        None if the message needs no body.
    segments : list of Segment
        The segments that the message brings. Their descriptors, if they have any, travel with it.
    read : int
        How far the rank has read the log once it has this message.
    """

    body: Body | None
    segments: list[Segment]
    read: int


class Log:
    """The log of one runtime.

    Attributes
    ----------
    state : int
        A number that changes whenever an entry is written, and whenever something happens that could make a compiled
        call wrong: a worker died, memory was replaced, this process forked. It also changes in doubtful cases, which
        only cost a new call. A value never returns. All values come from one counter, so if one thread overtakes
        another, a value may be skipped but no change can be missed.
    ranks : list of Known
    settings : PickledSettings or None
        The program's settings that were last written to the log.
    """

    def __init__(self) -> None:
        self.state = next(_numbers)
        self.ranks: list[Known] = []
        self.settings: PickledSettings | None = None
        self._entries: list[Entry] = []
        self._first = 0  # the position of the first entry; a new process reads from there, too
        self._limit = _FEW

    def note(self) -> None:
        """Change the state: something happened that ranks need not know but that could make a compiled call wrong."""
        self.state = next(_numbers)

    def tell(self, kind: str, number: int = 0) -> None:
        """Have all ranks learn, with their next message, what a thing is now. Any thread may call it."""
        # The entry comes before the new state: whoever has seen the state finds the entry when it packs a message. In
        # the other order, a call of another thread could be compiled for a rank that was never told.
        self._entries.append(Entry(kind, number, False, None))
        self.note()

    def drop(self, kind: str, number: int, value: Any = None) -> None:
        """Have all ranks forget a thing."""
        self._entries.append(Entry(kind, number, True, value))
        self.note()

    def drop_held(self, kind: str, number: int) -> None:
        """Have the ranks that got a thing with a message forget it. No entry is written if no rank has it."""
        if any(number in known.held[kind] for known in self.ranks):
            self.drop(kind, number)
            for known in self.ranks:
                known.held[kind].discard(number)
        self.note()

    def set_settings(self, names: Sequence[str], values: list[Any]) -> None:
        """Write the program's settings to the log if they have changed."""
        if self.settings is None or self.settings.values != values:
            self.settings = PickledSettings(names, values)
            self.tell("settings")

    def after(self, place: int) -> tuple[list[Entry], int]:
        """Return the last entry about each thing behind a position, and the position of the end."""
        place = max(place, self._first)
        entries = self._entries[place - self._first :]  # a copy, since other threads may append
        return list({entry[:2]: entry for entry in entries}.values()), place + len(entries)

    def fold(self) -> None:
        """Shorten the part that all ranks have read to what a new process must know."""
        if len(self._entries) < self._limit:
            return
        # A rank that could not take a message in goes back to where it stood before. Only entries that no rank can need
        # again may be folded.
        count = max(min(known.oldest for known in self.ranks) - self._first, 0)
        last = {entry[:2]: entry for entry in self._entries[:count]}
        living = [entry for entry in last.values() if not entry.is_drop]
        first = self._first + count - len(living)
        # Neither a signal handler nor another thread runs between these two stores. Positions behind them stay.
        self._entries[:count] = living
        self._first = first
        self._limit = 2 * len(self._entries) + _FEW


class Dropped(deque[Any]):
    """Collects what finalizers drop, in any thread. The next operation frees it."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def append(self, dropped: Any) -> None:
        super().append(dropped)  # before the state changes, as in ``Log.tell``
        self._log.note()


class Known:
    """The knowledge of one rank: how far it has read the log, and what it has got with messages.

    Parameters
    ----------
    rank : int
    log : Log

    Attributes
    ----------
    read : int
        The position in the log up to which the rank has read.
    held : dict of str to set of int
        The numbers of the ``"segment"``, ``"plan"`` and ``"parcel"`` that the rank has got with messages.
    """

    def __init__(self, rank: int, log: Log) -> None:
        self.rank = rank
        self._log = log
        self.clear()

    def clear(self) -> None:
        """Start from nothing: a new process plays the rank, and it knows nothing."""
        self._log.note()
        self.read = 0
        self.held: dict[str, set[int]] = {"segment": set(), "plan": set(), "parcel": set()}
        # by message: how far the rank had read before it, and what it brought
        self._unanswered: dict[int, tuple[int, Body]] = {}

    @property
    def oldest(self) -> int:
        """The position to which the rank may have to go back."""
        return min([self.read, *(place for place, _ in self._unanswered.values())])

    @staticmethod
    def describe(segments: Sequence[Segment]) -> list[tuple[int, int, bool, bool, bool]]:
        """Describe the segments whose descriptors travel with a message."""
        return [(each.id, each.nbytes, each.is_worker_writable, each.is_staging, each.is_arena) for each in segments]

    def pack(self, content: Any, needed: Sequence[Segment], sources: Sources) -> Packed:
        """Return a message with ``content``, the ``needed`` segments that the rank lacks, and all news for the rank."""
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
        """Return the segments that the rank lacks, each once. Arenas come before the segments that lie in them."""
        held = self.held["segment"]
        missing = [segment for segment in wanted if segment.id not in held]
        if not missing:
            return missing
        arenas = [segment.arena for segment in missing if segment.arena is not None]
        return list({each.id: each for each in (*arenas, *missing) if each.id not in held}.values())

    def note_sent(self, sequence: int, body: Body, read: int) -> None:
        """Note what the rank knows now. Called after sending, so that a message lost to an interrupt is sent again."""
        self._log.note()  # A compiled call was made for what the rank knew before, so it must not fit any more.
        self._unanswered[sequence] = self.read, body
        # A worker handles its messages in order. So the rank counts as having read this far before it answers, and the
        # next message need not repeat the entries.
        self.read = max(self.read, read)
        self.held["segment"].update(_brought_by(body))

    def note_answered(self, sequence: int, *, is_received: bool) -> None:
        """Note that a message was answered. If the rank could not take it in, it holds nothing that it brought."""
        # A message without a body was never noted. A rank that has died keeps its entries until ``clear``.
        place, body = self._unanswered.pop(sequence, (0, None))
        if body is not None and not is_received:
            self._log.note()
            self.read = min(self.read, place)
            self.held["segment"].difference_update(_brought_by(body))


def _brought_by(body: Body) -> list[int]:
    """Return the numbers of the segments that a message brings."""
    return [place[0] for place in (*body.segments, *body.parts)]
