"""Chunks: items that one rank runs in turn, and what has become of them. Nothing here sends."""

from __future__ import annotations

import itertools
import pickle
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from synk._engine.item_pickles import ArrayCopy
from synk._engine.workers import Owed
from synk._pure.ranges import round_up
from synk._wire import orders as wire
from synk._wire.mapping import Descriptor
from synk._wire.memory import PAGE_NBYTES, Segment
from synk._wire.messages import ItemsOrder
from synk.errors import CallCancelled, SynkError

AIM_NS = 20_000_000
"""Chunks take so long: shorter ones cost messages, longer ones leave ranks idle at the end."""

_NUM_SLOWEST = 3


class Rules(NamedTuple):
    """What the user of a map wants of it.

    Attributes
    ----------
    batch_size : int or None
        Items in a chunk; None: as many as suit the time that items take.
    is_ordered : bool
        Whether results come in the order of the items.
    returns_errors : bool
        Whether a failed item gives an ``ItemError`` in its place; otherwise it ends the map.
    item_s : float or None
        Seconds after which an item is given up.
    max_tasks, max_memory : int or None
        A worker is replaced after so many items, or when it holds so many bytes.
    """

    batch_size: int | None = None
    is_ordered: bool = True
    returns_errors: bool = False
    item_s: float | None = None
    max_tasks: int | None = None
    max_memory: int | None = None


class PoolStats:
    """What has happened in a map.

    Attributes
    ----------
    deaths : int
        Workers that died at an item.
    replaced : int
        Workers that were ended for the time of an item, or for the number of items or the memory of a worker.
    slowest : list of (float, int)
        The items that took longest: seconds and number, the longest first.
    """

    def __init__(self) -> None:
        self.deaths = self.replaced = 0
        self.slowest: list[tuple[float, int]] = []

    def note_time(self, seconds: float, number: int) -> None:
        """Note how long an item took."""
        self.slowest = sorted([*self.slowest, (seconds, number)], reverse=True)[:_NUM_SLOWEST]


class Packed(NamedTuple):
    """An item that the program could change, pickled when it was taken.

    Attributes
    ----------
    data : bytes
    copies : list of ArrayCopy
        What it refers to.
    new_nbytes : int
        The size of those that were made for it. Others were there, for items before it.
    """

    data: bytes
    copies: list[ArrayCopy]
    new_nbytes: int


class Pickled(NamedTuple):
    """Results as they have come, not loaded yet.

    Attributes
    ----------
    is_list : bool
        Whether it is a list of results, or one.
    data : buffer
    buffers : list of ndarray
        Its large arrays.
    """

    is_list: bool
    data: Any
    buffers: list[Any]


class Chunk(Owed):
    """Consecutive items of a job. It waits, is sent to one rank, and is done once it has an outcome.

    Attributes
    ----------
    job : Job
    numbers : sequence of int
    items : list
        Those that the program could change are ``Packed``.
    is_sent, is_done : bool
    is_blind : bool
        Whether it was sent before it was known that its rank has not taken in what came with the chunk before it.
    num_begun : int
        That of the job when the items were pickled.
    outcomes : list of (sequence of int, Pickled or Exception)
        Results and errors, with the numbers of their items.
    error : Exception or None
        What ends the job.
    nbytes : int
        The size of the items, and later of the results.
    late : Exception or None
        Why its rank is interrupted, once it is.
    late_item : int or None
        The item whose time is over.
    seen : (int or None, float)
        At which item its rank was when the program looked last, and since when it is there as far as the program knows.
    due : list of float
        When its rank is interrupted, once more, and killed.
    """

    rank = -1
    began_ns = nbytes = 0
    late: Exception | None = None
    late_item: int | None = None

    def __init__(self, job: Any, numbers: Sequence[int], items: list[Any], tag: Any = None) -> None:
        super().__init__((), "", None)
        self.job, self.numbers, self.items, self.tag = job, numbers, items, tag
        self.is_sent = self.is_done = self.is_blind = False
        self.num_begun: int = job.num_begun
        self.outcomes: list[tuple[Sequence[int], Any]] = []
        self.error: Exception | None = None
        self.due: list[float] = []
        self.seen: tuple[int | None, float] = None, 0.0

    def cut(self, count: int) -> Chunk:
        """Keep the first items. Return the others as a chunk that waits."""
        others = self.part(count, len(self.numbers))
        self.numbers, self.items = self.numbers[:count], self.items[:count]
        return others

    def part(self, low: int, high: int) -> Chunk:
        """Return some of its items as a chunk that waits."""
        part = Chunk(self.job, self.numbers[low:high], self.items[low:high], self.tag)
        part.num_begun = self.num_begun
        return part

    def named(self, index: int | None = None) -> str:
        """Return its items, or one of them, in words."""
        if index is not None or len(self.numbers) == 1:
            return f"item {self.numbers[index or 0]}"
        return f"items {self.numbers[0]} to {self.numbers[-1]}"

    def send_to(self, rank: int, number: int, deadline: float | None) -> None:
        """Note that it is about to be sent."""
        self.rank, self.number, self.deadline = rank, number, deadline
        self.ranks, self.pending = [rank], {rank}
        self.what = f"{self.job.name!r} ({self.named()})"
        self.is_sent, self.began_ns = True, time.monotonic_ns()

    def order(self) -> ItemsOrder:
        """Return what its rank is told."""
        job = self.job
        parts: list[tuple[int, int]] = []
        data: list[bytes] = []
        groups = itertools.groupby(self.items, _is_packed) if job.has_packed else [(False, self.items)]
        for is_packed, group in groups:
            if is_packed:
                own = [item.data for item in group]
                parts += [(0, len(each)) for each in own]
                data += own
            else:
                plain = list(group)
                data.append(pickle.dumps(plain, protocol=5))
                parts.append((len(plain), len(data[-1])))
        stream = b"".join(data)
        self.nbytes = len(stream)
        if job.has_packed:
            self.nbytes += sum(item.new_nbytes for item in self.items if type(item) is Packed)
        most_ns = AIM_NS if job.rules.batch_size is None else 0
        how = job.rules.returns_errors, most_ns, job.is_timed, self.num_begun == job.num_begun
        return ItemsOrder(job.function.id, job.number, self.numbers, *how, parts, wire.apart(stream))

    def segments(self) -> list[Segment]:
        """Return the memory to which its items refer."""
        if not self.job.has_packed:
            return []
        copies = (copy for item in self.items if type(item) is Packed for copy in item.copies)
        return list({copy.segment.id: copy.segment for copy in copies}.values())

    def finish(self, error: Exception | None = None) -> None:
        """It has an outcome; ``error`` ends its job."""
        self.error, self.is_done = error, True

    def end(self, error: BaseException) -> None:
        """It has ended together with all that was in flight."""
        if not self.is_done:
            what = f"map {self.job.name!r}: its items were ended by an interrupt. Map them again."
            self.finish(error if isinstance(error, SynkError) else CallCancelled(what))

    def take(self, content: Any, fds: list[Descriptor]) -> tuple[int, int, tuple[int, int]]:
        """Take the results out of a reply. Return how many items have an outcome, how many of them succeeded, and the
        longest time that one took, with its position.
        """
        outcomes, stream, sizes, slowest = content
        buffers = [_mapped(fds.pop(0), nbytes) for nbytes in sizes]
        view = memoryview(stream)
        self.nbytes = len(view) + sum(sizes)
        index = at = taken = num_failed = 0
        for count, what in outcomes:
            numbers = self.numbers[index : index + max(count, 1)]
            if count:
                found: Any = Pickled(True, view[at : at + what], [])
                at += what
            elif type(what[0]) is int:
                nbytes, num_buffers = what
                found = Pickled(False, view[at : at + nbytes], buffers[taken : taken + num_buffers])
                at, taken = at + nbytes, taken + num_buffers
            else:
                found = self.job.rebuilt(numbers[0], *what)
                num_failed += 1
            self.outcomes.append((numbers, found))
            index += len(numbers)
        return index, index - num_failed, slowest


def _is_packed(item: Any) -> bool:
    return type(item) is Packed


def _mapped(fd: int, nbytes: int) -> Any:
    """Return the bytes of a large array, private to this process."""
    segment = Segment(fd, round_up(nbytes, PAGE_NBYTES), is_writable=True, segment_id=0, is_private=True)
    segment.close_fd()
    return segment.buffer[:nbytes]


def waiting(chunks: Iterable[Chunk]) -> Chunk | None:
    """Return the first chunk that is to be sent."""
    return next((chunk for chunk in chunks if not chunk.is_sent and not chunk.is_done), None)
