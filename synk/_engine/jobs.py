"""Jobs: what chunks are made of. Here the items of one map, in their order; ``tasks`` has what is submitted one by one.

Items are pulled from the user's iterable and sent in chunks, and results come lazily. The iterable, and the classes of
results, are user code that may use the runtime, so the lock is not held while they run. ``Job.chunks`` changes only
under the lock.
"""

from __future__ import annotations

import itertools
import operator
import pickle
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from synk._engine.callee import Callee
from synk._engine.chunks import AIM_NS, Chunk, Packed, Pickled, PoolStats, Rules, waiting
from synk._engine.failures import rebuild
from synk._engine.item_pickles import ItemPickler
from synk._engine.pool import Pool
from synk._engine.session import refuse_limit
from synk._pure.interrupts import raise_if_of_handler
from synk._pure.nested import PLAIN_TYPES
from synk._pure.words import message_of, short_repr, text_of
from synk._wire.messages import ITEM_BITS
from synk.errors import ItemError, RemoteError, SerializationError, SynkError

_MOST = (1 << ITEM_BITS) - 1

_LARGE_NBYTES = 1 << 23
"""A chunk of at least this size gets no more items, and the next one is made smaller."""

_PULL_S = 0.02
"""A chunk is sent as it is if pulling its items takes longer than this."""

_PER_RANK = 4
"""How many chunks per rank may be sent before their results are taken: the oldest may be the slowest."""

_QUIET = frozenset(map(type, map(iter, ([], (), range(0), "", b""))))
"""Iterators that run none of the user's code, so that many items can be taken at once."""

_SMALL_TYPES = PLAIN_TYPES - {str, bytes}
"""Plain types whose objects are small, so that their sizes need not be asked one by one."""

Run = tuple[Sequence[int], list[Any]]
"""Results, and the numbers of their items."""


def length_of(items: Iterable[Any]) -> int:
    """Return how many items there will be; 0 if that is unknown, also because the user's code cannot say."""
    try:
        return operator.length_hint(items)
    except Exception as error:
        raise_if_of_handler(error)
        return 0


def is_failure(outcome: Any) -> bool:
    """Whether an outcome stands for an item that has failed.

    A function may return an ``ItemError`` of another map. It comes in a pickle, and pickles keep no cause.
    """
    return isinstance(outcome, ItemError) and outcome.__cause__ is not None


class Job:
    """What the chunks of one map, or of one executor's tasks, have in common.

    Parameters
    ----------
    session : Session
    function : Callee
    rules : Rules
    num_ranks : int
        How many workers to use; 0 for all.
    stats : PoolStats, optional
        What has happened is noted here, and which items took longest.

    Attributes
    ----------
    number : int
        Seeds the random numbers of its items, with theirs.
    chunks : list of Chunk
        Those that were not taken yet, in the order of their items.
    size : int or None
        Chunks get no more items than this: what ``batch_size`` says, or as many as take ``AIM_NS``. None before the
        first answer.
    new_classes : set of type
        The program's classes that items name and that were not brought with the function's captured objects.
    awaits_classes : bool
        Whether an item of a new class waits for those in flight. A task does not, because they may wait for it.
    has_packed : bool
        Whether any of its items was ``Packed``.
    are_short : bool
        Whether a chunk may wait behind another; unknown before the first answer.
    num_begun : int
        How often the classes that its items name were brought with the function.
    num_deaths : int
        Workers that died since an item succeeded.
    is_abandoned : bool
        Whether the results are no longer wanted. A finalizer may set it.
    """

    are_named = awaits_classes = True

    def __init__(
        self, session: Any, function: Callee, rules: Rules, num_ranks: int = 0, stats: PoolStats | None = None
    ) -> None:
        self.session, self.function, self.rules = session, function, rules
        self.name, self.verb = function.name, f"map {function.name!r}"
        if session.is_inline:
            refuse_limit(rules.item_s)
        if rules.item_s is not None or rules.max_tasks is not None or rules.max_memory is not None:
            session.check_here(f"{self.verb} with limits of items or workers", "Leave them out there.")
        self.check()
        self.pool: Pool = session.pool
        self.number = next(self.pool.numbers)
        self.num_ranks = num_ranks or session.world_size
        self.stats, self.is_timed = stats or PoolStats(), stats is not None
        self.chunks: list[Chunk] = []
        self.num_begun = self.num_deaths = 0
        self.is_abandoned = self.are_short = self.has_packed = False
        self._pickler = ItemPickler(self.pool.copies if session.has_shared_memory else None, function.lacks)
        self.new_classes: weakref.WeakSet[type] = weakref.WeakSet()
        self.size = rules.batch_size

    def check(self) -> None:
        """Raise TypeError if the function refers to a sharded variable."""
        for variable in self.function.variables:
            if variable.is_sharded:
                raise TypeError(
                    f"cannot map {self.name!r}: it refers to the sharded variable {variable.name!r}, whose "
                    "rows differ from worker to worker, expected a function that is the same on all workers. Use a "
                    "replicated variable (sharded=False), or synk.function."
                )

    # -- called by the pool, under the lock ---------------------------------------------------------------------------

    @property
    def wants_more(self) -> bool:
        """Whether it has more to send, now or later."""
        return waiting(self.chunks) is not None

    def replace(self, chunk: Chunk, parts: Iterable[Chunk]) -> None:
        """Put others in the place of a chunk: its items are done again, or its outcome is theirs."""
        at = self.chunks.index(chunk)
        self.chunks[at : at + 1] = [part for part in parts if part.numbers]

    def lose(self, chunk: Chunk, index: int, error: Exception) -> None:
        """``error`` has ended an item of a chunk that has not answered: the others are done again."""
        if not self.rules.returns_errors:
            self.fail(chunk, error)
            return
        lost = chunk.part(index, index + 1)
        lost.outcomes.append((lost.numbers, error))
        lost.finish()
        self.replace(chunk, (chunk.part(0, index), lost, chunk.part(index + 1, len(chunk.numbers))))

    def fail(self, chunk: Chunk, error: Exception) -> None:
        """``error`` has ended a chunk, and the job with it: whoever waits for another is not to wait in vain."""
        for each in self.chunks:
            if not each.is_done:
                each.finish(error)

    def rebuilt(self, number: int, failure: Any, text: str) -> Exception:
        """Return the exception of an item that has failed on its rank."""
        item = "" if not self.are_named else f"item {number} ({text})" if text else f"item {number}"
        return rebuild([failure], self.session.world_size, self.name, item)

    def take_done(self) -> list[Chunk]:
        """Return the chunks that are done and whose turn has come."""
        done = [chunk for chunk in self.chunks if chunk.is_done]
        if self.rules.is_ordered:
            done = list(itertools.takewhile(lambda chunk: chunk.is_done, self.chunks))
        if done:
            self.chunks = [chunk for chunk in self.chunks if chunk not in done]
        return done

    def note(self, chunk: Chunk, count: int, num_good: int, spent_ns: int, slowest: tuple[int, int]) -> None:
        """Note how long items took, and so how many a chunk is to have."""
        if num_good:
            self.num_deaths = 0
        if self.is_timed and slowest[0] >= 0:
            self.stats.note_time(slowest[0] / 1e9, chunk.numbers[slowest[1]])
        if self.rules.batch_size is None:
            size = min(AIM_NS * count // max(spent_ns, 1), _MOST)
            self.size = max(1, size if chunk.nbytes < _LARGE_NBYTES else min(size, count // 2))

    # -- items and results --------------------------------------------------------------------------------------------

    def _packed(self, item: Any) -> Any:
        """Return an item as a chunk holds it."""
        if type(item) in PLAIN_TYPES or (type(item) is tuple and PLAIN_TYPES.issuperset(map(type, item))):
            return item
        data, copies, classes = self._pickler.dumps(item)
        self.new_classes.update(filter(self.function.lacks, classes))
        self.has_packed = True
        return Packed(data, copies, sum(copy.take_new() for copy in copies))

    def runs_of(self, chunk: Chunk) -> Iterator[Run]:
        """Yield the results of a chunk that is done, in lists.

        Raises
        ------
        Exception
            The error of an item, or what has ended the job.
        """
        chunk.outcomes.reverse()
        while chunk.outcomes:
            numbers, found = chunk.outcomes.pop()
            try:
                results = [self._failed(numbers[0], found)] if isinstance(found, Exception) else self._loaded(found)
            except BaseException as error:  # the user's classes run code here
                raise_if_of_handler(error)
                if isinstance(found, Exception):
                    raise
                results = [self._failed(numbers[0], self._unloadable(numbers[0], error))]
            del found
            yield numbers, results
        if chunk.error is not None:
            raise chunk.error

    @staticmethod
    def _loaded(found: Pickled) -> list[Any]:
        loaded = pickle.loads(found.data, buffers=found.buffers)
        return loaded if found.is_list else [loaded]

    def _unloadable(self, number: int, error: BaseException) -> SerializationError:
        unloadable = SerializationError(
            f"cannot load what {self.name!r} returned for item {number}: {text_of(error)}. Return "
            "arrays, numbers or objects whose class can be loaded in the program."
        )
        unloadable.__cause__ = error
        return unloadable

    def _failed(self, number: int, error: Exception) -> ItemError:
        """Return what stands in the place of an item that has failed, or raise its error."""
        if not self.rules.returns_errors:
            raise error
        cause = error.__cause__ if isinstance(error.__cause__, RemoteError) else error
        text = cause.traceback_text if isinstance(cause, RemoteError) else ""
        what = message_of(error) if isinstance(error, SynkError) else text_of(error)
        message = f"item {number} of the map of {self.name!r} failed: {what}"
        return ItemError(message, exception=error, item=number, traceback=text)


class MapJob(Job):
    """One map of a function over items.

    Parameters
    ----------
    session, function, rules
    items : iterator
    numbers : deque of int, optional
        Where the iterator puts the number of each item as it gives it. By default they are counted.
    **options
        As for :class:`Job`.
    """

    def __init__(
        self,
        session: Any,
        function: Callee,
        rules: Rules,
        items: Iterator[Any],
        numbers: deque[int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(session, function, rules, **options)
        self._items, self._numbers, self._is_quiet = items, numbers, type(items) in _QUIET
        self._position, self._length = 0, length_of(items)
        self._is_at_end = False
        self._error: Exception | None = None  # what comes after the results
        self._most = self.num_ranks * (1 if session.is_inline else _PER_RANK)

    @property
    def wants_more(self) -> bool:
        return not self._is_at_end or super().wants_more

    def runs(self) -> Iterator[Run]:
        """Yield the results in lists, and raise the error that ends them."""
        try:
            while (done := self.next_done(is_waiting=True)) is not None:
                done.reverse()
                while done:
                    yield from self.runs_of(done.pop())
        finally:  # also if the caller drops this iterator, in any thread: the next operation ends the chunks in flight
            self.is_abandoned = True
            self._items = iter(())  # a generator is closed now: chunks in flight hold this job
            done = self._error = None  # its traceback holds this frame

    def next_done(self, *, is_waiting: bool) -> list[Chunk] | None:
        """Return the next chunks that are done, and keep the workers busy meanwhile; None at the end.

        Raises
        ------
        Exception
            What the iterable raised, after all results.
        """
        while True:
            pulled = self._pull() if self._has_room() else []
            if not pulled and self._is_at_end and not self.chunks:
                if self._error is not None:
                    raise self._error
                return None
            done = self.pool.step(self, pulled, is_waiting=is_waiting and not pulled)
            if done or not (pulled or is_waiting):
                return done

    def _has_room(self) -> bool:
        return (
            not self._is_at_end
            and len(self.chunks) < self._most
            and waiting(self.chunks) is None
            and self.pool.room(self) >= 1
        )

    def _pull(self) -> list[Chunk]:
        """Return a chunk of the next items, and one for an item that cannot be sent; nothing at the end."""
        is_adaptive = self.rules.batch_size is None
        most = int(min(self._next_size(), self.pool.room(self), _MOST))
        items: list[Any] = []
        unsent: Exception | None = None
        if type(self._items) in _QUIET:
            items = list(itertools.islice(self._items, most))
            kinds = set(map(type, items))
            if kinds <= _SMALL_TYPES or (kinds <= PLAIN_TYPES and sum(map(sys.getsizeof, items)) < _LARGE_NBYTES):
                self._is_at_end = len(items) < most
                return [self._numbered(items)] if items else []
            self._items, items = itertools.chain(items, self._items), []
        began, nbytes, known = time.monotonic(), 0, self._pickler.current
        try:
            for item in itertools.islice(self._items, most):
                if not self._is_quiet:
                    known.clear()
                try:
                    items.append(self._packed(item))
                except BaseException as error:
                    raise_if_of_handler(error)
                    unsent = self._unsendable(item, len(items), error)
                    break
                nbytes += _nbytes_of(items[-1])
                if is_adaptive and (nbytes >= _LARGE_NBYTES or time.monotonic() - began > _PULL_S):
                    break
            else:
                self._is_at_end = len(items) < most
        except Exception as error:
            self._is_at_end, self._error = True, error
        finally:
            known.clear()
        pulled = [self._numbered(items)] if items else []
        if unsent is not None and self.rules.returns_errors:
            lost = self._numbered([None])
            lost.outcomes.append((lost.numbers, unsent))
            lost.finish()
            pulled.append(lost)
        elif unsent is not None:
            self._is_at_end, self._error = True, unsent
        return pulled

    def _next_size(self) -> int:
        """Return how many items to pull for the next chunk."""
        if self.rules.batch_size is not None:
            return self.rules.batch_size
        left = self._length - self._position
        share = max(left // (2 * self.num_ranks), 1)  # all ranks are to end together
        if self.size is None:
            return share
        few = self.size // 20  # which take next to no time
        return min(self.size, max(share, few)) if left > 0 else self.size

    def _numbered(self, items: list[Any]) -> Chunk:
        """Return the next items as a chunk, with their numbers."""
        numbers: Sequence[int] = range(self._position, self._position + len(items))
        if self._numbers is not None:
            numbers = [self._numbers.popleft() for _ in items]
        self._position += len(items)
        return Chunk(self, numbers, items)

    def _unsendable(self, item: Any, index: int, error: BaseException) -> SerializationError:
        number = self._position + index if self._numbers is None else self._numbers[-1]
        unsent = SerializationError(
            f"cannot send item {number} ({short_repr(item)}) of the map of {self.name!r} to a worker: "
            f"{text_of(error).rstrip('.')}."
        )
        unsent.__cause__ = error
        return unsent


def _nbytes_of(item: Any) -> int:
    if type(item) is Packed:
        return len(item.data) + item.new_nbytes
    return sys.getsizeof(item)
