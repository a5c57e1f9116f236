"""What each rank knows, what is sent to it, what it answers, and how all become idle again after trouble.

Everything here may find the other side dead at any line, and may be left at any line by Ctrl-C. So a call enters
``flight`` before anything is sent; what a rank knows is noted after it was sent, for what is sent twice replaces what
was there; whoever breaks off leaves ``is_sure`` False, and whoever comes next begins with :meth:`Workers.recover`. In
one file because sending, hearing and recovery must be read together.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import math
import pickle
import sys
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from synk._engine.processes import Processes, Worker
from synk._engine.things import Thing, described
from synk._processes.output import report, warn_at_users_line
from synk._processes.reports import DeathReports, at_work, signs_of_life, stderr_tails
from synk._pure.environment import stuck_after_s
from synk._pure.interrupts import deferred
from synk._pure.words import text_of
from synk._wire import orders as wire
from synk._wire.logs import levels
from synk._wire.memory import Segment
from synk._wire.messages import versions
from synk._wire.orders import Down
from synk._wire.parcels import dumps
from synk._wire.settings import Reader
from synk.errors import CallCancelled, CallTimeout, ClosedError, StartupError, SynkError, WorkerDied

GRACE_S = 2.0
START_TIMEOUT_S = 120.0
RESTART_WINDOW_S = 60.0


class Owed:
    """A message in flight: a call, or a question, such as a share of a result. Some ranks owe it a reply.

    Attributes
    ----------
    ranks : sequence of int
    pending : set of int
    replies : dict of int to (status, body, times)
    news : dict of int to (set of int, set of int, list)
        By rank, the things and the parcels that the message brought, and what it told to forget.
    has_news : bool
        Whether a reply says more than that all is as it was.
    what, phase : str
        For errors.
    """

    number = 0
    phase = "call"
    has_news = False

    def __init__(self, ranks: Sequence[int], what: str, deadline: float | None) -> None:
        self.ranks, self.what, self.deadline = ranks, what, deadline
        self.pending = set(ranks)
        self.replies: dict[int, tuple[int, Any, Sequence[int]]] = {}
        self.news: dict[int, tuple[set[int], set[int], list[Any]]] = {}
        self.began = time.monotonic()

    def end(self, error: BaseException) -> None:
        """Take note of the error with which it has ended."""

    def release_peers(self) -> None:
        """Have ranks that wait for one that could not begin give up."""


class Workers:
    """All ranks: one operation on them at a time."""

    functions: Any  # see ``captures``
    grace_s = GRACE_S
    """How long ranks that are interrupted may take to answer."""

    def __init__(self, processes: Processes, *, max_restarts: int, counters: dict[str, int]) -> None:
        self._stuck_after_s = stuck_after_s()  # first, for it may be refused
        self.processes = processes
        self.by_rank = processes.by_rank
        self.is_inline = processes.is_inline
        self.world_size = processes.world_size
        self.max_restarts, self.counters = max_restarts, counters
        self.numbers: Iterator[int] = itertools.count(1)
        self.flight: dict[int, Owed] = {}
        self.is_sure = True
        self.ended = 0
        self.redo: tuple[Sequence[Any], Sequence[int], int] | None = None
        self.cause: BaseException | None = None
        self.is_closing = self.is_exiting = self.is_interrupted = False
        self.settings = Reader()
        self.settings_values: dict[str, Any] | None = None
        self.settings_state = 0
        self.has_dead = False
        self.all_ready = False
        self.restarts: deque[float] = deque()
        self.forgiven: set[int] = set()  # dead ranks that do not count for ``max_restarts``
        self._refs: dict[int, tuple[weakref.ref[Any], int]] = {}
        self.parts: dict[int, Segment] = {}  # by variable, its place in memory that it shares with others
        self.dropped: deque[weakref.ref[Any]] = deque()  # filled in C: no handler of a signal can break that off
        self._reports = DeathReports(processes)
        self._unreported: dict[int, str] = {}
        self._news_of_deaths: list[str] = []
        self._last_death: WorkerDied | None = None
        self._signs: dict[int, tuple[int, float]] = {}  # by pid: signs of life, and when they were seen to change
        self._once_stuck: set[int] = set()  # ranks whose process replaces one that got stuck while it started

    # -- things -------------------------------------------------------------------------------------------------------

    def watch(self, thing: Thing) -> None:
        """See to it that ranks forget a thing when it goes."""
        reference = weakref.ref(thing, self.dropped.append)
        self._refs[id(reference)] = reference, thing.number

    def note_drops(self) -> None:
        """Have the ranks forget the things that have gone. Nothing that refers to them will be sent any more."""
        while self.dropped:
            reference = self.dropped[0]
            number = self._refs.get(id(reference), (None, 0))[1]
            self.forget(number)
            if number in self.parts:  # another variable may lie there from now on
                self.forget(self.parts.pop(number).id)
            self._refs.pop(id(reference), None)
            self.dropped.popleft()

    def forget(self, number: int) -> None:
        """Have the ranks that know a thing forget it."""
        for worker in self.by_rank:
            if number in worker.known or number in worker.stale:
                worker.forgets.append(("thing", number, None))
                worker.known.discard(number)
                worker.stale.discard(number)

    def retell(self, number: int, ranks: Iterable[int] | None = None) -> None:
        """Have ranks told anew of a thing that they go on holding."""
        for worker in self.by_rank if ranks is None else [self.by_rank[rank] for rank in ranks]:
            if number in worker.known:
                worker.stale.add(number)
                worker.known.discard(number)

    # -- operations ---------------------------------------------------------------------------------------------------

    def enter(self, deadline: float | None = None) -> None:
        """Begin an operation. Afterwards every rank is idle or in calls of ``flight``, and alive as far as is known."""
        self.settle_torn()
        self.listen()
        while not self.all_ready:
            if self.has_dead:
                self._replace()
            self._await_ready(deadline)
        self.note_news()

    def settle_torn(self) -> None:
        """Settle what an operation that was broken off has left."""
        if not self.is_sure or self.redo is not None:
            self.recover(CallCancelled("the call was ended: an operation before it was broken off. Call it again."))

    def note_news(self) -> None:
        """Note what ranks are to be told with their next message: things that have gone, settings that have changed."""
        if self.dropped:
            self.note_drops()
        if not self.is_inline and self.settings.may_differ():
            values = self.settings.read()
            if values != self.settings_values:
                self.settings_values = values
                self.settings_state += 1

    # -- sending ------------------------------------------------------------------------------------------------------

    def send(
        self,
        owed: Owed,
        ranks: Iterable[int],
        plan: int,
        in_place: int,
        rows: Sequence[bytes] | Mapping[int, bytes],
        things: Sequence[Thing],
        numbers: Iterable[int],
    ) -> None:
        """Send an order to ranks, and with it whatever they lack.

        Parameters
        ----------
        rows : sequence or mapping of bytes
            By rank, what the order says of its rows.
        things : sequence of Thing
            They are told with all they need, whose ``numbers`` are these.
        """
        for rank in ranks:
            worker = self.by_rank[rank]
            if worker.is_dead:  # the wait for its reply finds that
                continue
            self.counters["messages_down"] += 1
            if (
                worker.known.issuperset(numbers)
                and worker.parcels_state == self.functions.state
                and worker.settings_state == self.settings_state
                and not worker.forgets
            ):
                order = wire.ORDER.pack(owed.number, plan, worker.committed, self.ended, in_place, 0)
                worker.link.write(order + rows[rank])
            else:
                order = wire.ORDER.pack(owed.number, plan, worker.committed, self.ended, in_place, 1)
                self._send_news(owed, worker, order + rows[rank], things)

    def _send_news(self, owed: Owed, worker: Worker, order: bytes, things: Sequence[Thing]) -> None:
        """Send a rank what it lacks, then the order that says so."""
        content, segments, told = self._news(worker, things)
        parcels = {parcel[0] for parcel in content[1]}
        owed.news[worker.rank] = told, parcels, content[0]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the wait finds the death
            self.counters["bytes_down"] += worker.link.send_body(owed.number, content, segments)
        worker.link.write(order)
        worker.known |= told
        worker.stale -= told
        worker.parcels |= parcels
        worker.forgets = []
        worker.parcels_state, worker.settings_state = self.functions.state, self.settings_state

    def _news(self, worker: Worker, things: Sequence[Thing]) -> tuple[Any, list[Segment], set[int]]:
        """Return what a rank lacks, in an order in which each thing finds what it needs."""
        items: list[tuple[str, int, Any]] = []
        segments: list[Segment] = []
        told: set[int] = set()

        def tell(needed: Thing | Segment) -> None:
            number = needed.number if isinstance(needed, Thing) else needed.id
            if number in told:
                return
            for each in needed.needs if isinstance(needed, Thing) else ():
                tell(each)
            if number in worker.known:
                return
            if isinstance(needed, Segment):
                if needed.arena is not None:
                    tell(needed.arena)
                else:
                    segments.append(needed)
                items.append(("memory", number, described(needed)))
            else:
                payload, own = needed.told(worker.rank)
                items.append((needed.kind, number, (payload, len(own))))
                segments.extend(own)
                if needed.is_once or not needed.is_current:
                    return
            told.add(number)

        lacking, of_parcels, referred = self.functions.lacking(worker)
        for each in (*of_parcels, *referred):
            tell(each)
        for each in things:
            tell(each)
        settings = None
        if worker.settings_state != self.settings_state and self.settings_values is not None:
            settings = dumps(self.settings_values)
        search_path = ([entry for entry in sys.path if isinstance(entry, str)], levels()) if lacking else None
        return (list(worker.forgets), lacking, items, settings, search_path, worker.heard), segments, told

    # -- hearing ------------------------------------------------------------------------------------------------------

    def listen(self) -> None:
        """Take in the replies that are there. What ranks that start have to say is left to the wait for them."""
        if self.all_ready and not self.is_inline and (events := self.processes.events()):
            self.is_sure = False  # a reply that is read and not filed is lost
            self.take_in(events)
            self.is_sure = True

    def wait(self, owed: Owed, until: float | None = None) -> bool:
        """Take in replies until nobody owes ``owed`` one. Return False if ``until`` came first.

        A death, or the time limit of anything in flight, ends the wait with an error.
        """
        report_at = owed.began + self._stuck_after_s
        has_looked = False  # a limit that is over when the wait begins looks first at the replies that are there
        while owed.pending:
            if self.is_inline:
                self._file(self.by_rank[0])
                continue
            if self.has_dead and any(self.by_rank[rank].is_dead for rank in self.needed(owed)):
                raise self._deaths(owed)
            urgent = owed
            if len(self.flight) > 1:
                timed = [each for each in self.flight.values() if each.deadline is not None and each.pending]
                urgent = min(timed, key=lambda each: each.deadline or 0.0, default=owed)
            has_limit = urgent.deadline is not None or until is not None
            limits = [each for each in (urgent.deadline, until) if each is not None] if has_limit else []
            now = time.monotonic() if has_looked or limits else 0.0
            if has_looked:
                if urgent.deadline is not None and now >= urgent.deadline:
                    self._late(owed, urgent)
                if until is not None and now >= until:
                    return False
                if now >= report_at:
                    report_at = math.inf
                    text = at_work(self.processes, [] if owed.replies else owed.pending)
                    report("%s has run for more than %g s:%s", owed.what or owed.phase, self._stuck_after_s, text)
            if events := self.processes.wait(min(limits) - now if limits else None):
                self.take_in(events)
            has_looked = True
        return True

    def _deaths(self, owed: Owed) -> WorkerDied:
        """Return one error for all ranks that have died, or do not answer, while they owed ``owed`` a reply."""
        self._quiet(
            [self.by_rank[rank] for rank in sorted({rank for each in self.flight.values() for rank in each.ranks})]
        )
        return self.died(sorted(rank for rank in self.needed(owed) if self.by_rank[rank].is_dead), owed)

    def needed(self, owed: Owed) -> Iterable[int]:
        """Return the ranks without which a message does not end well."""
        return owed.pending

    def _late(self, owed: Owed, urgent: Owed) -> NoReturn:
        ranks = self.processes.placement.among_all(sorted(urgent.pending))
        if urgent.phase == "start":
            raise CallTimeout(
                f"the workers were not up in time: {ranks} is still starting. Raise timeout=, or call again."
            )
        error = CallTimeout(
            f"{urgent.what or urgent.phase} did not end in time on {ranks}. Raise timeout=, or give the function less "
            "to do."
        )
        if urgent is owed:
            raise error
        urgent.end(error)
        raise ended_with(owed.what, error)

    def take_in(self, events: Sequence[tuple[int, int]]) -> None:
        """File the replies that are there, then note deaths: a reply that came before a death counts."""
        replied, ended, is_woken = self.processes.sort(events)
        for worker in replied:
            self._file(worker)
        for worker in ended:
            while self._file(worker):
                pass
            self.bury(worker)
            if not any(worker.rank in each.pending for each in self.flight.values()):
                self._unreported[worker.rank] = f"ended with {worker.process.exit_text} while idle"
        if is_woken:
            self._on_wake()

    def _file(self, worker: Worker) -> bool:
        """File one reply. Return whether there was one."""
        link = worker.link
        if not link.is_open:
            return False
        data = link.read(wire.REPLY.size)
        if not data:
            return False
        number, status, *times = wire.REPLY.unpack(data.ljust(wire.REPLY.size))
        owed = self.flight.get(number)
        is_owed = owed is not None and worker.rank in owed.pending
        if not (is_owed or (number == 0 and status == wire.READY and not worker.is_ready)):
            report("rank %s was killed: code in it has written into the channel of its replies.", worker.rank)
            worker.process.kill()  # the wait finds the death
            return False
        body, worker.heard = None, number
        self.counters["messages_up"] += 1
        if status in wire.WITH_BODY:
            try:
                body = link.receive_body(number)
            except (EOFError, ConnectionResetError):  # it died, and the body with it
                return False
            if status == wire.READY:
                worker.hello = body[0]
                return True
        assert owed is not None
        owed.replies[worker.rank] = status, body, times
        owed.pending.discard(worker.rank)
        if status > wire.PLACED:
            owed.has_news = True
            if status == wire.UNREAD:
                owed.release_peers()
        return True

    def _on_wake(self) -> None:
        """End the current operation if another thread asked for that."""
        self.processes.drain_wake()
        if self.is_exiting:
            raise SystemExit  # ends a daemon thread silently: the program is over
        if self.is_closing:
            raise ClosedError("the call was ended: the runtime is being closed by another thread.")
        if self.is_interrupted:
            self.is_interrupted = False
            raise interrupted()

    def died(self, ranks: Sequence[int], owed: Owed) -> WorkerDied:
        """Return the error for the deaths of ranks."""
        for rank in ranks:
            self._unreported.pop(rank, None)
        error = self._reports.died(ranks, owed.phase, owed.what, owed.began)
        self._last_death = copy.copy(error)  # without the traceback, which will hold the caller's frames
        return error

    # -- commits ------------------------------------------------------------------------------------------------------

    def commit(self, moves: Sequence[Any], ranks: Sequence[int] = (), number: int = 0) -> None:
        """Let variables have other places as their values, all at once. One store decides; the rest can be redone."""
        self.redo = moves, ranks, number
        self.finish_commit()

    def has_committed(self, number: int) -> bool:
        """Whether it was decided that call ``number`` counts."""
        is_decided = self.redo is not None and self.redo[2] == number
        return is_decided or any(worker.committed == number for worker in self.by_rank)

    def finish_commit(self) -> None:
        assert self.redo is not None
        moves, ranks, number = self.redo
        for variable, rank, which, shapes in moves:
            variable.turn(rank, which, shapes)
        for rank in ranks:
            self.by_rank[rank].committed = number
        if number:
            self.ended = max(self.ended, number)
        self.redo = None

    # -- recovery -----------------------------------------------------------------------------------------------------

    def recover(self, error: BaseException) -> None:
        """Make every rank idle or dead, and nothing in flight. May be broken off and begun again."""
        self.is_sure = False
        if self.redo is not None:
            self.finish_commit()
        in_flight = list(self.flight.values())
        # All ranks of a call, not only those that owe a reply: what the others have told is lost with the call.
        ranks = {rank for each in in_flight for rank in each.ranks}
        for each in in_flight:
            each.end(ended_with(each.what, error))
        if self.is_inline:
            self.by_rank[0].process.link.reset()
        elif not self.processes.is_closed:
            self._quiet([self.by_rank[rank] for rank in sorted(ranks)], int(isinstance(error, KeyboardInterrupt)))
        for rank in ranks:
            self.by_rank[rank].heard = next(self.numbers)  # all that was sent
        self.after_recovery()
        self.flight.clear()
        self.is_sure = True
        self.settle_failed()

    def after_recovery(self) -> None:
        """Settle what depended on calls in flight."""

    def settle_failed(self) -> None:
        """Find out what has become of the objects that calls were to change and that failed."""

    def _quiet(self, workers: Sequence[Worker], num_interrupts: int = 0) -> None:
        """Interrupt ranks and ask them; drop what they say before they answer. Who stays silent is killed.

        A Ctrl-C ends the wait for them. A second one, with those that have led here, closes the runtime.
        """
        doubtful = [worker for worker in workers if worker.is_ready and not worker.is_dead]
        if not doubtful:
            return
        sync = next(self.numbers)
        self.on_trouble()
        end = time.monotonic() + self.grace_s

        def on_interrupt() -> None:
            nonlocal end, num_interrupts
            num_interrupts += 1
            end = 0.0
            self.processes.wake()

        silent: dict[int, Worker] = {}
        with deferred(on_interrupt):
            for worker in doubtful:
                self.processes.down[worker.rank, Down.INTERRUPT] = sync  # before the signal, whose handler reads it
                worker.process.interrupt()
                order = wire.ORDER.pack(sync, wire.SYNC, worker.committed, self.ended, 0, 0)
                worker.link.write(order + wire.NO_ROWS)
                silent[worker.rank] = worker
            repeat_at = time.monotonic() + self.grace_s / 2
            while silent and (left := end - time.monotonic()) > 0:
                events = self.processes.wait(min(left, max(repeat_at - time.monotonic(), 0.001)), awake=False)
                replied, ended, is_woken = self.processes.sort(events)
                if is_woken:
                    self.processes.drain_wake()
                for worker in replied:
                    self._hear_out(worker, sync, silent)
                for worker in ended:
                    self._hear_out(worker, sync, silent)
                    silent.pop(worker.rank, None)
                    self.bury(worker)
                if time.monotonic() >= repeat_at:  # the user's code may have swallowed the first signal
                    repeat_at = math.inf
                    for worker in silent.values():
                        worker.process.interrupt()
            for worker in silent.values():
                self.bury(worker)
            self.on_idle()
            if num_interrupts > 1:
                self.fail(ClosedError("the runtime was closed by a second Ctrl-C while it ended a call."))

    def bury(self, worker: Worker) -> None:
        """End a rank's process. It is noted first: the handler of a signal may raise before the process is buried."""
        worker.is_dead = self.has_dead = True
        self.all_ready = False
        self.processes.bury(worker)

    def _hear_out(self, worker: Worker, sync: int, silent: dict[int, Worker]) -> None:
        while len(data := worker.link.read(wire.REPLY.size)) == wire.REPLY.size:
            if wire.REPLY.unpack(data)[0] == sync:
                worker.link.drain()
                silent.pop(worker.rank, None)
                return

    def on_trouble(self) -> None:
        """Called before ranks are interrupted, so that ranks that wait for each other give up."""

    def on_idle(self) -> None:
        """Called when ranks were made idle after trouble, before anything else is sent."""

    # -- starting -----------------------------------------------------------------------------------------------------

    def _await_ready(self, deadline: float | None) -> None:
        """Wait until every rank has said hello."""
        started = Owed([], "", deadline)
        started.phase = "start"
        while waiting := [worker for worker in self.by_rank if not worker.is_ready and not worker.is_dead]:
            if self.is_inline:
                self._file(self.by_rank[0])
            else:
                limit = self._last_sign(waiting) + START_TIMEOUT_S
                now = time.monotonic()
                if deadline is not None and now >= deadline:
                    started.pending = {worker.rank for worker in waiting}
                    self._late(started, started)
                if now >= limit:
                    self._end_stuck(waiting)
                    continue
                left = min(limit, math.inf if deadline is None else deadline, now + START_TIMEOUT_S / 4) - now
                if events := self.processes.wait(left, awake=False):
                    with deferred(), self._without_silent(waiting):
                        self._take_hellos(events)
            self.greet_all()
        self.greet_all()

    @contextlib.contextmanager
    def _without_silent(self, starting: Sequence[Worker]) -> Iterator[None]:
        """Bury ranks whose hello may have been read and not filed, and would never come again: a handler has raised."""
        try:
            yield
        except SynkError:
            raise
        except BaseException:
            for worker in starting:
                if worker.hello is None and not worker.is_dead:
                    self.forgive(worker.rank)
                    self.bury(worker)
            raise

    def greet_all(self) -> None:
        """Take in the hellos that have come, and note whether all ranks are up."""
        for worker in self.by_rank:
            if worker.hello is not None and not worker.is_ready and not worker.is_dead:
                self._greet(worker)
        if not all(worker.is_ready and not worker.is_dead for worker in self.by_rank):
            return
        self.has_dead, self.all_ready = False, True
        self._once_stuck.clear()
        self._signs.clear()
        if self._news_of_deaths:
            news, self._news_of_deaths = self._news_of_deaths, []
            told = "; ".join(f"{each} and was started again" for each in news)
            warn_at_users_line(f"{told}. What functions kept there, in closures or globals, is gone.", RuntimeWarning)

    def _take_hellos(self, events: Sequence[tuple[int, int]]) -> None:
        before = {worker.rank for worker in self.by_rank if worker.is_dead}
        self.take_in(events)
        fallen = [worker for worker in self.by_rank if worker.is_dead and worker.rank not in before]
        starting = [worker.rank for worker in fallen if not worker.is_ready]
        if not starting:
            return
        owed = Owed(starting, "", None)
        owed.phase, owed.began = "start", 0.0
        error = self.died(starting, owed)
        if all(
            self.by_rank[rank].num_starts > 1 for rank in starting
        ):  # a replacement died: one more death, and the next operation starts another
            raise error
        self._fail(starting, f"did not come up. {error}", error)

    def _last_sign(self, waiting: Sequence[Worker]) -> float:
        """Return when the first of some processes that start gave its last sign of life: it started, or read files.

        A library on a slow file system takes minutes to import, and is read all the time.
        """
        found = []
        for worker in waiting:
            pid, number = worker.process.pid, signs_of_life(worker.process.pid)
            before, seen = self._signs.get(pid, (number, 0.0))
            self._signs[pid] = number, seen if number == before else time.monotonic()
            found.append(max(self._signs[pid][1], worker.process.started))
        return min(found)

    def _end_stuck(self, waiting: Sequence[Worker]) -> None:
        """Kill ranks that give no sign of life, so that they are replaced. If a replacement gets stuck too, give up."""
        latest = time.monotonic() - START_TIMEOUT_S
        stuck = [worker for worker in waiting if self._last_sign([worker]) <= latest]
        ranks = {worker.rank for worker in stuck}
        for worker in stuck:
            self.bury(worker)
            self._unreported[worker.rank] = f"was not up {START_TIMEOUT_S:g} s after its last sign of life, was killed,"
        if self.max_restarts == 0 or ranks & self._once_stuck:
            tails = "\n".join(["", *stderr_tails(stuck, 0.0)])
            self._fail(sorted(ranks), f"was not up {START_TIMEOUT_S:g} s after its last sign of life.{tails}", None)
        self._once_stuck |= ranks

    def _fail(self, ranks: Iterable[int], what_happened: str, error: BaseException | None) -> NoReturn:
        who = self.processes.placement.among_all(ranks)
        failure = StartupError(f"cannot start the workers: {who} {what_happened}")
        self.fail(failure)
        raise failure from error

    def _greet(self, worker: Worker) -> None:
        hello = pickle.loads(worker.hello)
        mine = versions()
        if hello["versions"] != mine:
            differing = [f"{k} {v} (program: {mine[k]})" for k, v in hello["versions"].items() if v != mine[k]]
            error = StartupError(f"cannot use worker rank {worker.rank}: it runs {', '.join(differing)}.")
            self.fail(error)
            raise error
        worker.description = hello["device"]
        worker.is_ready = True

    def _replace(self) -> None:
        """Start new processes for ranks that are dead.

        Raises
        ------
        ClosedError
            If ranks died too often.
        """
        dead = [worker for worker in self.by_rank if worker.is_dead]
        owing = [each for each in self.flight.values() if not each.pending.isdisjoint(worker.rank for worker in dead)]
        if owing:
            self.recover(self._deaths(owing[0]))
            dead = [worker for worker in self.by_rank if worker.is_dead]
        now = time.monotonic()
        while self.restarts and now - self.restarts[0] > RESTART_WINDOW_S:
            self.restarts.popleft()
        news = [
            f"rank {rank} (pid {self.by_rank[rank].process.pid}) {what}"
            for rank, what in sorted(self._unreported.items())
        ]
        self._unreported.clear()
        counts = any(worker.rank not in self.forgiven for worker in dead)
        self.forgiven.clear()
        if counts and len(self.restarts) >= self.max_restarts:
            ended = ", ".join(f"rank {worker.rank} ({worker.process.exit_text})" for worker in dead)
            error = ClosedError(
                f"the runtime closed itself: workers died {len(self.restarts) + 1} times within "
                f"{RESTART_WINDOW_S:.0f} s, last {ended}; max_restarts is {self.max_restarts}. Call synk.fork() again."
            )
            error.__cause__ = self._last_death
            self.fail(error)
            raise error
        self._last_death = None
        if counts:
            self.restarts.append(now)
        self._news_of_deaths += news
        self.start_again(dead)

    def forgive(self, rank: int) -> None:
        """Note that a rank was killed to be replaced: nobody is told, and it does not count."""
        self._unreported.pop(rank, None)
        self.forgiven.add(rank)

    def start_again(self, workers: Sequence[Worker]) -> None:
        self.on_idle()
        self.all_ready = False
        for worker in workers:
            self.counters["restarts"] += 1
            worker.is_prepared = False
            self.processes.start_again(worker)
        self.has_dead = any(worker.is_dead for worker in self.by_rank)

    def fail(self, error: BaseException) -> None:
        """Close the runtime at once because of ``error``."""
        self.cause = self.cause or error
        self.processes.tear_down()

    def say_goodbye(self) -> None:
        """Ask idle ranks to end, and give them some time. The teardown kills those that do not."""
        if self.processes.is_closed or self.is_inline or self.flight or not self.is_sure:
            return
        leaving = [worker for worker in self.by_rank if worker.is_ready and not worker.is_dead]
        number = next(self.numbers)
        for worker in leaving:
            order = wire.ORDER.pack(number, wire.CLOSE, worker.committed, self.ended, 0, 0)
            worker.link.write(order + wire.NO_ROWS)
        end = time.monotonic() + GRACE_S
        left = {worker.rank for worker in leaving}
        while left and (seconds := end - time.monotonic()) > 0:
            replied, ended, is_woken = self.processes.sort(self.processes.wait(seconds, awake=False))
            for worker in replied:
                worker.link.read(wire.REPLY.size)
            for worker in ended:
                self.bury(worker)
                left.discard(worker.rank)
            if is_woken:
                self.processes.drain_wake()

    def close_things(self) -> None:
        self.flight.clear()
        self._refs.clear()
        self.parts.clear()
        self.dropped.clear()


def interrupted() -> CallCancelled:
    """Return the error of a call that was interrupted."""
    return CallCancelled("the call was ended by Runtime.interrupt(). Call it again.")


def ended_with(what: str, error: BaseException) -> BaseException:
    """Return the error of a call that ``error`` has ended together with others."""
    if isinstance(error, CallCancelled) and error.__cause__ is not None:
        error = error.__cause__  # what has ended the other call, too
    elif isinstance(error, (WorkerDied, ClosedError, CallCancelled)):
        return copy.copy(error)
    text = str(error) if isinstance(error, SynkError) else text_of(error)
    why = f"together with another: {text.rstrip('.')}" if isinstance(error, Exception) else "by an interrupt"
    cancelled = CallCancelled(f"the call of {what} was ended {why}. Submit it again.")
    cancelled.__cause__ = error if isinstance(error, Exception) else None
    return cancelled
