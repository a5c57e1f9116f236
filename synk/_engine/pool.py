"""The pool: the chunks in flight of all maps, executors and joblib's tasks of one runtime, and what happens to them.

Calls and chunks are never in flight together: whatever begins a call first waits for the chunks that are wanted and has
the others ended, and a pool that begins ends the calls. In between the lock is free. Chunks are independent of one
another: a rank that dies, or is ended because an item takes too long, or has run enough items, loses its own chunk and
is replaced while the others go on. What is to be sent next, and how large, is the jobs' affair (``jobs``).

In one file because what is sent, heard and ended of chunks must be read together.
"""

from __future__ import annotations

import itertools
import math
import time
import weakref
from collections.abc import Sequence
from typing import Any

from synk._engine.chunks import Chunk, waiting
from synk._engine.item_pickles import ArrayCopies
from synk._engine.processes import own_nbytes
from synk._engine.things import Once
from synk._engine.workers import GRACE_S
from synk._pure.interrupts import holding
from synk._wire import orders as wire
from synk._wire.messages import ITEM_BITS
from synk._wire.orders import Down, Up
from synk.errors import CallCancelled, CallTimeout, WorkerDied, add_note

LONG_NS = 200_000_000
"""No chunk waits behind one that takes longer: it would be late, and an idle rank costs little next to a long chunk."""

_LOOK_S = 0.02
"""How often the pool looks for items whose time is over, at most."""


class Pool:
    """The chunks in flight of one runtime.

    Attributes
    ----------
    numbers : iterator of int
        A number for each job.
    copies : ArrayCopies
        The large arrays of items, which lie in shared memory.
    is_open : bool
        Whether no other operation has begun since chunks could be sent: ranks know all that chunks need.
    """

    def __init__(self, engine: Any) -> None:
        self._engine: Any = weakref.proxy(engine)
        self._sees_words = bool(engine.has_shared_memory)  # of ranks; those of other nodes are not at hand
        self.numbers = itertools.count()
        self.is_open = False
        self._asked_ns = 0  # when the program came back from its own work
        self._leaving: set[int] = set()  # ranks that were killed to be replaced, and are not buried yet
        self._served: dict[int, tuple[int, int]] = {}  # by rank: which of its processes, and how many items it has run
        self.copies = ArrayCopies(engine.numbers)

    def _chunks(self) -> list[Chunk]:
        """Return the chunks in flight, in the order in which they were sent."""
        return [each for each in list(self._engine.flight.values()) if isinstance(each, Chunk)]

    # -- called by jobs -----------------------------------------------------------------------------------------------

    def room(self, job: Any) -> float:
        """Return how many items can be sent now, as far as the program knows."""
        if not self.is_open:
            return math.inf if job.rules.max_tasks is None else job.rules.max_tasks
        rank = self._free_rank(job)
        return 0 if rank is None else self._limit(rank, job)

    def step(
        self, job: Any, new: Sequence[Chunk] = (), *, is_waiting: bool = False, until: float | None = None
    ) -> list[Chunk]:
        """Add chunks to a job, send what can be sent, take in answers, and return what the job has done.

        ``is_waiting``: if there is nothing to return, wait for an event, at most until ``until``. A wait may end early.

        Raises
        ------
        ReentrancyError, ClosedError, StartupError, SerializationError, KeyboardInterrupt
            An error that ends chunks is not raised here: it becomes their outcome.
        """
        engine = self._engine
        with holding(), engine.entered(job.verb):
            engine.check_open(job.verb)  # another thread may have closed it while this one waited for the lock
            try:
                engine.settle_torn()
                job.chunks += new
                if self.is_open:
                    engine.note_news()
                    self._take(0.0)
                    self._tend(job)
                self._send_waiting(job)
                done: list[Chunk] = job.take_done()
                if not done and is_waiting and self.is_open:
                    self._take(self._seconds(until))
                    self._tend(job)
                    done = job.take_done()
                for segment in self.copies.sweep():
                    engine.forget(segment.id)  # a function may have kept the array
                    segment.close()
                return done
            except BaseException as error:
                if not engine.is_closed and not engine.is_sure:
                    engine.recover(error)
                raise

    # -- sending ------------------------------------------------------------------------------------------------------

    def _send_waiting(self, job: Any) -> None:
        while (chunk := waiting(job.chunks)) is not None:
            if self._must_begin(job):
                try:
                    self._begin(job)
                except WorkerDied:  # a replacement, as it started: the next step starts another one
                    if not job.rules.returns_errors:
                        raise
                    return
            rank = self._free_rank(job)
            if rank is None:
                return
            limit = self._limit(rank, job)
            if job.rules.batch_size is None and job.size is not None:
                limit = min(limit, job.size)
            if len(chunk.items) > limit:
                job.replace(chunk, [chunk, chunk.cut(int(limit))])
            self._send(chunk, rank)

    def _free_rank(self, job: Any) -> int | None:
        """Return the rank for the next chunk of a job: one that is idle or will be soon; None if there is none."""
        in_flight = self._chunks()
        ranks = [chunk.rank for chunk in in_flight]
        able = [rank for rank in range(job.num_ranks) if self._is_up(rank) and self._limit(rank, job) > 0]
        if not able:
            return None
        rank = min(able, key=ranks.count)
        if rank not in ranks:
            return rank
        if job.rules.max_memory is not None:  # its memory is looked at between its chunks
            return None
        since = (time.monotonic_ns() - LONG_NS) if job.are_short else math.inf
        soon = [each.rank for each in in_flight if each.began_ns > since and ranks.count(each.rank) == 1]
        return next((rank for rank in soon if rank in able), None)

    def _is_up(self, rank: int) -> bool:
        worker = self._engine.by_rank[rank]
        return worker.is_ready and not worker.is_dead and rank not in self._leaving

    def _limit(self, rank: int, job: Any) -> float:
        """Return how many more items the process of a rank may be sent."""
        if job.rules.max_tasks is None or self._engine.is_inline:
            return math.inf
        sent = sum(len(chunk.numbers) for chunk in self._chunks() if chunk.rank == rank)
        return float(job.rules.max_tasks - self._num_served(rank) - sent)

    def _num_served(self, rank: int) -> int:
        process, count = self._served.get(rank, (0, 0))
        return count if process == self._engine.by_rank[rank].num_starts else 0

    def _must_begin(self, job: Any) -> bool:
        """Whether ranks must be told more than a chunk can bring, which needs all of them idle."""
        engine, function = self._engine, job.function
        if not self.is_open or function.session is not job.session or function.capture is None:
            return True
        if job.new_classes and (job.awaits_classes or not self._chunks()):
            return True
        new = [worker for worker in engine.by_rank if self._is_up(worker.rank)]
        if engine.functions.on_restart is not None and not all(worker.is_prepared for worker in new):
            return True
        numbers = {resident.number for resident in function.residents}
        return not all(worker.known >= numbers for worker in new) or function.capture.has_changed()

    def _begin(self, job: Any) -> None:
        """Begin an operation, and see that all ranks have the function and what it refers to."""
        session, function = job.session, job.function
        deadline = session.deadline(None)
        session.begin(job.verb, deadline)
        session.prepare_restarted(deadline)
        function.renew()
        function.meet_classes(job.new_classes)
        job.new_classes.clear()
        job.num_begun += 1
        function.load(session)
        if session.functions.unsettled:
            session.load(repr(function.name), deadline)
        job.check()
        residents = sorted(function.residents, key=lambda each: each.number)
        session.residents.settle(residents, job.verb, deadline)
        self.is_open = True

    def _send(self, chunk: Chunk, rank: int) -> None:
        engine, job = self._engine, chunk.job
        engine.functions.book.note_brought(job.new_classes)
        needs = [*job.function.variables, *job.function.residents, *chunk.segments()]
        news = Once(engine, "items", tuple(chunk.order()), needs)
        is_behind = any(each.rank == rank for each in self._chunks())
        # Otherwise its time begins when the chunk before it is answered.
        chunk.send_to(rank, next(engine.numbers), None if is_behind else engine.deadline(None))
        engine.counters["bytes_pickled"] += len(news.payload[-1])
        engine.is_sure = False
        engine.flight[chunk.number] = chunk
        engine.send(chunk, [rank], news.number, 0, {rank: wire.NO_ROWS}, [news], news.numbers())
        engine.is_sure = True

    # -- answers ------------------------------------------------------------------------------------------------------

    def _take(self, seconds: float | None) -> None:
        """Take in answers and deaths; wait so long for the first."""
        engine = self._engine
        if seconds == 0:
            self._asked_ns = time.monotonic_ns()
        engine.is_sure = False
        try:
            if engine.is_inline:
                while engine._file(engine.by_rank[0]):
                    pass
            else:
                processes = engine.processes
                events = processes.events() if seconds == 0 else processes.wait(seconds)
                if events:
                    engine.take_in(events)
        except CallCancelled as error:  # by ``Runtime.interrupt``
            engine.recover(error)
        engine.is_sure = True
        for chunk in self._chunks():
            if not chunk.pending:
                engine.flight.pop(chunk.number)
                self._note(chunk, *chunk.replies.pop(chunk.rank))
            elif engine.by_rank[chunk.rank].is_dead:
                died = engine.died([chunk.rank], chunk)
                engine.flight.pop(chunk.number)
                self._on_death(chunk, died)

    def _note(self, chunk: Chunk, status: int, body: Any, times: Sequence[int]) -> None:
        """Note a rank's answer."""
        engine, job, rank = self._engine, chunk.job, chunk.rank
        for other in self._chunks():  # the time of the next chunk begins
            if other.rank == rank:
                other.began_ns = time.monotonic_ns()
                other.deadline = other.deadline or engine.deadline(None)
                break
        if status in wire.MAY_LACK:
            engine.note_unread(rank, chunk.news.get(rank))
            for other in self._chunks():
                other.is_blind = other.is_blind or other.rank == rank
        if chunk.is_done or job.is_abandoned:
            return
        if status == wire.UNREAD and chunk.is_blind:
            job.replace(chunk, [chunk.part(0, len(chunk.items))])
            return
        if status == wire.INTERRUPTED and chunk.late is not None:
            self._on_late(chunk)
            return
        if status != wire.TOLD:
            chunk.replies[rank] = status, body, times
            try:
                engine.raise_failures(chunk)
            except Exception as error:
                job.fail(chunk, error)
            return
        received_ns, began_ns, ended_ns, published_ns, _ = times
        spent_ns, sent_nbytes = ended_ns - began_ns, chunk.nbytes
        lay_ns = max(self._asked_ns - published_ns, 0) if self._sees_words else 0  # other nodes have other clocks
        wall_ns = max(time.monotonic_ns() - chunk.began_ns - lay_ns, published_ns - received_ns)
        count, num_good, slowest = chunk.take(*body)
        if count < len(chunk.numbers) and (num_good == count or job.rules.returns_errors):
            job.replace(chunk, [chunk, chunk.cut(count)])
        job.function.record.add_items(rank, count, sent_nbytes, chunk.nbytes, spent_ns, wall_ns)
        if engine.tracer is not None:
            engine.tracer.note_chunk(job.function.name, rank, count, began_ns, ended_ns)
        job.are_short = spent_ns <= LONG_NS and not engine.is_inline
        self._served[rank] = engine.by_rank[rank].num_starts, self._num_served(rank) + count
        job.note(chunk, count, num_good, spent_ns, slowest)
        chunk.items = []
        chunk.finish()

    def _place(self, chunk: Chunk) -> int | None:
        """Return which item of a chunk its rank is at; None if it has not begun with one."""
        word = int(self._engine.processes.up[chunk.rank, Up.ITEM])
        return word & ((1 << ITEM_BITS) - 1) if word >> ITEM_BITS == chunk.number else None

    def _on_death(self, chunk: Chunk, error: WorkerDied) -> None:
        """Give an outcome to a chunk whose rank has died. It is sent again if it had not begun with an item."""
        job, index = chunk.job, self._place(chunk)
        if chunk.late is not None or job.rules.returns_errors:
            self._engine.forgiven.add(chunk.rank)
        if chunk.is_done or job.is_abandoned:
            return
        if chunk.late is not None:
            job.stats.replaced += 1
            self._on_late(chunk)
        elif index is None and self._sees_words:
            job.replace(chunk, [chunk.part(0, len(chunk.items))])
        elif index is None and job.rules.returns_errors and len(chunk.numbers) > 1:
            job.replace(chunk, [chunk.part(k, k + 1) for k in range(len(chunk.numbers))])
        else:
            job.stats.deaths += 1
            job.num_deaths = 1 if index else job.num_deaths + 1  # those before it in its chunk have succeeded
            most = self._engine.max_restarts
            if index is not None and len(chunk.numbers) > 1:
                add_note(error, f"at {chunk.named(index)}")
            if job.rules.returns_errors and job.num_deaths > most:
                add_note(error, f"workers died {job.num_deaths} times, and no item succeeded in between")
                job.fail(chunk, error)
            else:
                job.lose(chunk, index or 0, error)

    # -- what must end ------------------------------------------------------------------------------------------------

    def _end_late(self) -> None:
        """Interrupt the ranks whose chunk must end, and kill those that do not answer."""
        engine, now = self._engine, time.monotonic()
        busy: set[int] = set()
        for chunk in self._chunks():
            if chunk.rank in busy:  # its rank is at another one: a signal would end that
                continue
            busy.add(chunk.rank)
            if chunk.late is None:
                chunk.late, chunk.late_item = self._verdict(chunk, now)
                if chunk.late is not None:
                    chunk.due = [now, now + GRACE_S / 2, now + GRACE_S]
            if chunk.due and now >= chunk.due[0]:
                del chunk.due[0]
                process = engine.by_rank[chunk.rank].process
                if chunk.due:
                    engine.processes.down[chunk.rank, Down.INTERRUPT] = chunk.number  # before the signal
                    process.interrupt()
                else:
                    process.kill()

    def _verdict(self, chunk: Chunk, now: float) -> tuple[Exception | None, int | None]:
        """Return why a chunk must end, if it must, and the item whose time is over."""
        job, limit_s = chunk.job, chunk.job.rules.item_s
        if chunk.is_done or job.is_abandoned:
            return CallCancelled(f"{job.verb}: its results were dropped."), None
        if chunk.deadline is not None and now >= chunk.deadline:
            ranks = self._engine.processes.placement.among_all([chunk.rank])
            late = CallTimeout(
                f"{chunk.what} did not end in time on {ranks}. Raise timeout=, or give the function less to do."
            )
            if not job.rules.returns_errors:
                job.fail(chunk, late)
            return late, None
        if limit_s is not None:
            index = self._place(chunk)
            if chunk.seen[0] != index:
                chunk.seen = index, now
            if index is not None and now - chunk.seen[1] >= limit_s:
                text = f"{chunk.named(index)} of {job.name!r} did not end in {limit_s:g} s. Raise item_timeout=."
                return CallTimeout(text), index
        return None, None

    def _on_late(self, chunk: Chunk) -> None:
        """Give an outcome to a chunk that was interrupted, or its rank killed, because its time was over."""
        assert chunk.late is not None
        job = chunk.job
        if chunk.late_item is None and len(chunk.numbers) > 1:  # nobody knows which one took so long
            job.replace(chunk, [chunk.part(k, k + 1) for k in range(len(chunk.numbers))])
        else:  # it has lost its time, even if it ended before the signal came and the rank is at another one by now
            job.lose(chunk, chunk.late_item or 0, chunk.late)

    # -- ranks that end and start -------------------------------------------------------------------------------------

    def _tend(self, job: Any) -> None:
        """End what must end, replace ranks that have done their share or died, and greet new ones."""
        engine = self._engine
        if engine.is_inline:
            return
        self._end_late()
        self._retire(job)
        for rank in [rank for rank in self._leaving if engine.by_rank[rank].is_dead]:
            self._leaving.discard(rank)
            engine.forgive(rank)
        if engine.has_dead:
            engine._replace()
        if not engine.all_ready:
            engine.greet_all()

    def _retire(self, job: Any) -> None:
        """End idle ranks that have run enough items of the job, or hold too much memory."""
        most = job.rules.max_memory
        if (job.rules.max_tasks is None and most is None) or not job.wants_more:
            return
        busy = {chunk.rank for chunk in self._chunks()}
        for rank in range(job.num_ranks):
            if rank in busy or not self._is_up(rank) or not self._num_served(rank):
                continue
            process = self._engine.by_rank[rank].process
            if self._limit(rank, job) <= 0 or (most is not None and own_nbytes(process.pid) > most):
                process.kill()
                self._leaving.add(rank)
                job.stats.replaced += 1

    def _seconds(self, until: float | None) -> float | None:
        """Return how long to wait for an answer: until the next look for what must end."""
        now = time.monotonic()
        ends = [] if until is None else [until]
        for chunk in self._chunks():
            limit_s = chunk.job.rules.item_s
            ends += chunk.due[:1] + ([] if chunk.deadline is None else [chunk.deadline])
            ends += [] if limit_s is None else [now + limit_s / 20]
        return max(min(ends) - now, _LOOK_S) if ends else None

    def settle(self, verb: str, deadline: float | None) -> None:
        """Wait for the chunks that are wanted and keep their results; end the others. Something else begins.

        Raises
        ------
        CallTimeout
            If they have not ended by ``deadline``. They keep running.
        """
        engine = self._engine
        engine.settle_torn()
        self._take(0.0)  # what was answered in time, while nobody looked, is not late
        while in_flight := self._chunks():
            wanted = [chunk for chunk in in_flight if not (chunk.is_done or chunk.job.is_abandoned)]
            if wanted and deadline is not None and time.monotonic() >= deadline:
                raise CallTimeout(
                    f"cannot {verb} in time: items of a map of {wanted[0].job.name!r} are still in flight. "
                    "Raise timeout=, or take its results first."
                )
            if not engine.is_inline:
                self._end_late()
            self._take(self._seconds(deadline))
        for rank in self._leaving:
            engine.bury(engine.by_rank[rank])
            engine.forgive(rank)
        self._leaving.clear()
        self.is_open = False

    def close(self) -> None:
        """End all chunks: the runtime is closed."""
        self.is_open = False
        self.copies.close()
