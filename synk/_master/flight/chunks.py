"""Chunks of items in flight to single workers, while the program works on earlier results.

While chunks are in flight no other operation has begun: whatever begins one first settles them and keeps their answers.
So the lock need not be held between two steps.
"""

from __future__ import annotations

import math
import pickle
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from synk._master.calls.call import load
from synk._master.calls.callee import Callee
from synk._master.flight.pending import caused_by, is_foreign
from synk._master.session import Session
from synk._master.state.item_pickles import ArrayCopy, ItemPickler
from synk._master.workers.failures import rebuild
from synk._master.workers.requests import Request
from synk._pure.interrupts import holding
from synk._wire.items import Items, ItemsDone
from synk._wire.messages import Failure, Reply, Status
from synk.errors import CallCancelled, CallTimeout, SerializationError, SynkError

_SMALL_NBYTES = 1 << 14
"""Results are loaded together up to this size of their pickles. What they load into is held until it is consumed."""

LONG_NS = 200_000_000
"""No chunk waits behind one that takes longer: it would be late, and an idle rank costs little next to a long chunk."""


class Chunk:
    """Consecutive items that are sent together, and their outcome.

    Attributes
    ----------
    first : int
        The position of the first item.
    num_items : int
    is_done : bool
        Whether the chunk has an outcome: the ``values`` (pickles) of the items up to the first that failed, and
        ``error``, which ends the results, or None.
    began_ns : int
        When its rank began to work on it, as far as the master knows.
    nbytes : int
        Size of the pickled items, and later of the results.
    duration_ns : int
        How long its rank worked on it.
    """

    def __init__(self, first: int) -> None:
        self.first = first
        self.pickles: list[bytes] = []
        self.copies: list[ArrayCopy] = []
        self.classes: set[type] = set()
        self.num_items = self.nbytes = self.duration_ns = 0
        self.rank = -1
        self.began_ns = 0
        self.request: Request  # once it was sent
        self.is_done = False
        self.values: deque[bytes] = deque()
        self.error: Exception | None = None

    def add(self, data: bytes, copies: list[ArrayCopy], classes: Sequence[type]) -> None:
        """Add one item."""
        self.pickles.append(data)
        self.num_items += 1
        self.nbytes += len(data)
        self.classes.update(classes)
        if copies:
            self.copies += copies
            self.nbytes += sum(copy.segment.nbytes for copy in copies)

    def end(self, error: Exception | None) -> None:
        """Set the outcome of the chunk, and release what was sent for it."""
        self.error, self.is_done = error, True
        self.pickles, self.copies, self.classes = [], [], set()

    def take(self, name: str) -> list[Any]:
        """Return the next results: small ones together, because each turn costs more than loading one.

        Raises
        ------
        SerializationError
            If the next result cannot be loaded.
        """
        found: list[Any] = []
        nbytes = 0
        try:
            while self.values and nbytes < _SMALL_NBYTES:
                nbytes += len(self.values[0])
                found.append(self._load(name))
                self.values.popleft()
        except SerializationError:
            if not found:  # else the next call raises it, after the results before it
                raise
        return found

    def _load(self, name: str) -> Any:
        position = self.first + self.num_items - len(self.values)
        try:
            return pickle.loads(self.values[0])
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # the user's classes run code here
            raise SerializationError(
                f"cannot load what {name!r} returned for item {position}: {type(error).__name__}: {error}. Return "
                "arrays, numbers or objects whose class can be loaded in the program."
            ) from error


class Chunks:
    """The chunks of one map.

    Parameters
    ----------
    session : Session
    function : Callee
    num_ranks : int
        How many workers to use; 0 for all.
    are_named : bool
        Whether errors name the item.

    Attributes
    ----------
    pickler : ItemPickler
        Pickles the items.
    verb : str
        For errors.
    is_abandoned : bool
        Whether the results are no longer wanted. A finalizer may set it.
    """

    def __init__(self, session: Session, function: Callee, num_ranks: int = 0, *, are_named: bool = True) -> None:
        self._session = session
        self._num_ranks = num_ranks or session.world_size
        self._are_named = are_named
        self._function = function
        # Other nodes share no memory, so large arrays travel in the pickles of their items.
        self.pickler = ItemPickler(session.memory.copies if session.workers.has_shared_memory else None)
        self.verb = f"map {function.name!r}"
        self.is_abandoned = False
        self._in_flight: list[Chunk] = []
        self._are_short = False  # unknown before the first answer

    @property
    def has_room(self) -> bool:
        """Whether another chunk can be sent, as far as the master knows."""
        return self._free_rank() is not None

    @property
    def are_in_flight(self) -> bool:
        return bool(self._in_flight)

    # -- called by the map --------------------------------------------------------------------------------------------

    def step(self, chunk: Chunk | None, *, is_waiting: bool, until: float | None = None) -> None:
        """Send ``chunk`` and take in answers. ``is_waiting``: wait for at least one, at most until ``until``.

        Raises
        ------
        ReentrancyError, ClosedError, StartupError, SerializationError, KeyboardInterrupt
            An error that ends chunks is not raised here: it becomes their outcome.
        """
        session = self._session
        with holding(), session.entered(self.verb):
            if chunk is not None:
                self._send(chunk)
            if self._in_flight:
                self._take(is_waiting, until)
            session.memory.free_copies()

    def _free_rank(self) -> int | None:
        """Return the rank for the next chunk: one that is idle or will be soon; None if there is none."""
        in_flight = list(self._in_flight)  # a copy, since another thread may settle them
        ranks = [chunk.rank for chunk in in_flight]
        rank = min(range(self._num_ranks), key=ranks.count)
        if rank not in ranks:
            return rank
        since = (time.monotonic_ns() - LONG_NS) if self._are_short else math.inf
        soon = [chunk.rank for chunk in in_flight if chunk.began_ns > since and ranks.count(chunk.rank) == 1]
        return soon[0] if soon else None

    def end(self, error: Exception) -> None:
        """End the chunks in flight with ``error``."""
        if self._in_flight and not self._session.is_closed:
            with holding(), self._session.entered(self.verb):
                self.cancel(error)

    def _send(self, chunk: Chunk) -> None:
        session, processes = self._session, self._session.workers.processes
        # Only when nothing is in flight are dead workers replaced, and ranks told what has changed.
        capture = self._function.capture
        if self._in_flight and (processes.has_dead or (capture is not None and capture.has_changed())):
            self.settle(self.verb, None)
        if not self._in_flight:
            self._function.meet_classes(chunk.classes)
            self._begin()
        ranks = [each.rank for each in self._in_flight]
        free = self._free_rank()
        chunk.rank = min(range(self._num_ranks), key=ranks.count) if free is None else free
        chunk.began_ns = time.monotonic_ns()
        last = chunk.first + chunk.num_items - 1
        which = f"item {last}" if chunk.num_items == 1 else f"items {chunk.first} to {last}"
        # otherwise its time begins when the chunk before it is answered
        deadline = None if chunk.rank in ranks else session.deadline(None)
        session.functions.book.note_brought(chunk.classes)
        session.queue.chunks = self  # before any chunk is in flight: from here on, whatever begins settles it
        try:
            chunk.request = session.ranks.send_items(
                chunk.rank,
                Items(self._function.id, chunk.pickles),
                [copy.segment for copy in chunk.copies],
                deadline,
                f"{self._function.name!r} ({which})",
                has_residents=session.residents.has_any,
            )
            self._in_flight.append(chunk)
        except BaseException as error:
            self._lose(error)
            was_broken_off = CallCancelled(f"{self._function.name!r} ({which}) was broken off.")
            chunk.end(error if isinstance(error, Exception) else was_broken_off)
            raise
        session.counters["bytes_pickled"] += sum(map(len, chunk.pickles))

    def _begin(self) -> None:
        """Begin an operation, and see that all workers have the function."""
        session, function = self._session, self._function
        deadline = session.deadline(None)
        session.begin(self.verb, deadline)
        function.renew()
        load(session, function, (), deadline, self.verb)
        check_mapped(function)

    # -- in flight ----------------------------------------------------------------------------------------------------

    def _take(self, is_waiting: bool, until: float | None) -> None:
        """Take in answers; ``is_waiting``: wait for at least one. Errors become the outcome of chunks."""
        workers = self._session.workers
        try:
            if is_waiting:
                workers.wait_any([chunk.request for chunk in self._in_flight], until)
            else:
                workers.pump()
        except BaseException as error:
            # A death of any worker, or a time limit, has made all other ranks idle by now. The chunks that they had not
            # answered are lost, too.
            self._lose(error)
            if is_foreign(error):
                raise
        self._sort()

    def _sort(self) -> None:
        """Give an outcome to the chunks that were answered or lost."""
        requests = self._session.workers.requests
        for chunk in list(self._in_flight):
            request = chunk.request
            if request.is_lost:
                self._forget(
                    chunk, CallCancelled(f"{request.what} was ended together with another call. Map it again.")
                )
            elif not request.pending:
                error = self._note(chunk, self._session.ranks.reply(request, chunk.rank))
                # Only now, with the answer noted: what is no longer among the requests is not settled by anybody.
                requests.pop(request.sequence, None)
                self._forget(chunk, error)
                for other in self._in_flight:  # the time of the next chunk begins
                    if other.rank == chunk.rank:
                        other.began_ns = time.monotonic_ns()
                        if other.request.deadline is None:
                            other.request.deadline = self._session.deadline(None)
        if not self._in_flight and self._session.queue.chunks is self:
            self._session.queue.chunks = None

    def _forget(self, chunk: Chunk, error: Exception | None) -> None:
        chunk.end(error)
        self._in_flight.remove(chunk)

    def _note(self, chunk: Chunk, reply: Reply) -> Exception | None:
        """Note a rank's answer. Return the error that it reports."""
        if reply.status == Status.INTERRUPTED:
            return CallCancelled(f"{self._function.name!r} was interrupted. Map it again.")
        answer = pickle.loads(reply.body)
        if isinstance(answer, Failure):
            return self._failed(answer, "")
        done: ItemsDone = answer
        chunk.values, chunk.duration_ns = deque(done.values), done.duration_ns
        chunk.num_items = len(done.values)
        chunk.nbytes = len(reply.body)
        sent_nbytes, wall_ns = sum(map(len, chunk.pickles)), time.monotonic_ns() - chunk.began_ns
        self._function.record.add_items(
            chunk.rank, chunk.num_items, sent_nbytes, chunk.nbytes, done.duration_ns, wall_ns
        )
        tracer = self._session.tracer
        if tracer is not None:
            now = time.monotonic_ns()
            tracer.note_chunk(self._function.name, chunk.rank, chunk.num_items, now - done.duration_ns, now)
        self._are_short = done.duration_ns <= LONG_NS and not self._session.workers.is_inline
        if done.failure is None:
            return None
        item = _described(chunk, done.failed_item) if self._are_named else ""
        return self._failed(done.failure, item)

    def _failed(self, failure: Failure, item: str) -> Exception:
        return rebuild([failure], self._session.world_size, self._function.name, item)

    def _lose(self, error: BaseException) -> None:
        """After ``error``: end the chunks that were lost with it."""
        lost: Exception
        if isinstance(error, SynkError):
            lost = error
        else:
            what = f"{self.verb}: its items were ended by an interrupt. Map them again."
            lost = caused_by(error, CallCancelled(what))
        for chunk in list(self._in_flight):
            if chunk.request.is_lost:
                self._forget(chunk, lost)

    # -- called by whatever begins an operation -----------------------------------------------------------------------

    def settle(self, verb: str, deadline: float | None) -> None:
        """Wait for all chunks and keep their results, or end them if the results are no longer wanted.

        Raises
        ------
        CallTimeout
            If they have not ended by ``deadline``. They keep running.
        """
        if self.is_abandoned:
            self.cancel(CallCancelled(f"{self.verb}: its results were dropped."))
        self._sort()
        while self._in_flight:
            is_answered = True
            try:
                is_answered = self._session.workers.wait_until(self._in_flight[0].request, deadline)
            except BaseException as error:
                self._lose(error)
                if is_foreign(error):
                    raise
            self._sort()
            if not is_answered:
                raise CallTimeout(
                    f"cannot {verb} in time: items of a map of {self._function.name!r} are still in flight. Raise "
                    "timeout=, or take its results first."
                )

    def cancel(self, error: Exception) -> None:
        """End all chunks that were not answered, with ``error``."""
        self._session.workers.recovery.settle_after(error)
        for chunk in list(self._in_flight):
            if chunk.request.pending:
                self._forget(chunk, error)
        self._sort()


def _described(chunk: Chunk, text: str) -> str:
    """Return a text that names the item after the last one that succeeded."""
    position = f"item {chunk.first + chunk.num_items}"
    return f"{position} ({text})" if text else position


def check_mapped(function: Callee) -> None:
    """Raise TypeError if a mapped function refers to a sharded variable.

    Raises
    ------
    TypeError
    """
    for variable in function.variables:
        if variable.is_sharded:
            raise TypeError(
                f"cannot map {function.name!r}: it refers to the sharded variable {variable.name!r}, whose rows "
                "differ from worker to worker, expected a function that is the same on all workers. Use a replicated "
                "variable (sharded=False), or synk.function."
            )
