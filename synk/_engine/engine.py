"""The one way of a call: begin (copy, note, ring each rank), then settle (hear, learn, reduce, build, commit).

A call is made, then sent (it is in ``flight``, and its lane is its own), then ended, with a value or an error. It ends
in :meth:`Call.settle` or, together with all others in flight, in ``Workers.recover``, and nowhere else.

In one file because a call and the engine that runs it must be read together.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from synk._engine.captures import Functions
from synk._engine.devices import check_not_lost
from synk._engine.failures import rebuild
from synk._engine.lanes import Joint, Lane
from synk._engine.ledger import Transfer
from synk._engine.outputs import Outputs, loaded
from synk._engine.plan import Plan
from synk._engine.residents import Residents, note_outcome
from synk._engine.rows import Division
from synk._engine.things import Living, Once, Thing
from synk._engine.variables import Variable
from synk._engine.workers import Owed, Workers
from synk._pure.interrupts import deferred
from synk._wire import orders as wire
from synk._wire.mapping import Descriptor
from synk._wire.memory import Segment
from synk._wire.messages import COUNTED, ON_DEVICE, News
from synk._wire.orders import NUM_LANES, Down
from synk.errors import (
    CallCancelled,
    CallTimeout,
    ClosedError,
    SerializationError,
    SharedMemoryError,
    SynkError,
    WorkerDied,
)

_CALL = int(Down.CALL)

_logger = logging.getLogger("synk")


class Call(Owed):
    """A call in flight.

    Attributes
    ----------
    has_ended : bool
    is_heard : bool
        Whether what the replies tell has been noted.
    value, error : object, BaseException or None
    started_ns, sent_ns, heard_ns : int
        When the program called, when the ranks were told (in a trace), and when all had answered (in a trace, or after
        ``note_begun``).
    begin_ns : int
        How long it took to begin, if others are ahead of it or the program goes on meanwhile.
    nbytes : int
        How much was copied.
    """

    plan: Plan
    nbytes = sent_ns = heard_ns = begin_ns = 0
    has_ended = is_heard = False
    value: Any = None
    error: BaseException | None = None
    future: weakref.ref[Any] | None = None  # whoever asks for the outcome of a submitted call
    _root: np.ndarray | None = None
    _lease: Any = None
    _destination: Any = None
    _brings = False
    _varying: tuple[Transfer, ...] = ()

    def __init__(
        self,
        engine: Engine,
        callee: Any,
        plan: Plan,
        values: Sequence[Any],
        division: Division,
        objects: list[Any] | None,
        deadline: float | None,
        started_ns: int,
    ) -> None:
        super().__init__(division.ranks, plan.what, deadline)
        self.engine, self.callee, self.plan, self.lane = engine, callee, plan, plan.lane
        self.division, self._values, self._objects = division, values, objects
        self.started_ns = started_ns
        self._news: dict[int, list[Any]] = {}

    # -- begin --------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Copy what is passed by value, and ring each rank. The caller has the lock."""
        engine, plan, division, lane = self.engine, self.plan, self.division, self.lane
        objects = self._objects or ()
        self.nbytes = plan.stage(self._values, objects, division, self.callee)
        engine.counters["bytes_staged"] += self.nbytes
        if objects or plan.table_rooms:
            self._varying = plan.varying_of(self._values, objects)
        self._values, self._objects = (), None
        target, things, numbers = plan.number, [plan], plan.known_by_all
        if plan.outputs is not None and plan.outputs.can_be_placed and self._lease_result(plan.outputs):
            target, things = self._destination.number, [plan, self._destination]
            numbers = numbers | self._destination.known
        number = self.number = next(engine.numbers)
        if division.shares is not lane.shares:
            lane.show(division.shares)
        lane.first_down[_CALL] = number
        if engine.has_devices:
            check_not_lost(plan.variables, range(engine.world_size), f"call {self.callee.name!r}")
            engine.nccl.announce(lane, len(division.ranks))
        engine.counters["calls"] += 1
        engine.is_sure = False
        lane.call = engine.flight[number] = self  # before anything is sent: from here on ``recover`` knows of it
        self._brings = bool(engine.functions.unsettled)
        if engine.tracer is not None:
            self.sent_ns = time.monotonic_ns()
        engine.send(self, division.ranks, target, len(objects), division.packed, things, numbers)
        engine.is_sure = True

    def note_begun(self) -> None:
        """Note how long it took to begin. From here on it may wait for its turn, or for the program to ask."""
        self.begin_ns = time.monotonic_ns() - max(self.started_ns, self.engine.last_end_ns)

    def _lease_result(self, outputs: Outputs) -> bool:
        """See that ranks whose large outputs look like the last ones write them into the result. False if they cannot.

        They cannot if outputs are reduced, or other ranks run the call, or with other rows.
        """
        engine, division = self.engine, self.division
        if outputs.rows != division.rows or outputs.voters != division.ranks:
            return False
        if not engine.has_shared_memory or engine.has_devices:
            return False
        self._lease, self._root = engine.memory.lease_result(outputs.result_nbytes)
        self._destination = outputs.destination(engine, self.plan.number, self._lease.segment)
        return True

    # -- settle -------------------------------------------------------------------------------------------------------

    def settle(self, until: float | None = None, *, is_polled: bool = False) -> bool:
        """End the call. Whatever breaks off one of the steps leaves state as it was before the call.

        Return False if not all ranks have answered by ``until``, or if ``is_polled`` and the end must wait for the
        calls that were submitted later; the call is still in flight then.
        """
        engine = self.engine
        if self.has_ended:  # a signal handler has broken off what follows
            engine.flight.pop(self.number, None)
            self._drop()
            return True
        try:
            if self.pending:
                engine.is_sure = False
                is_answered = engine.wait(self, until)
                engine.is_sure = True
                if not is_answered:
                    return False
            if is_polled and len(engine.flight) > 1 and self._must_wait():
                return False
            if engine.tracer is not None or self.begin_ns:
                self.heard_ns = time.monotonic_ns()
            if self.has_news:
                self.hear()
            self.learn()
            if self.plan.outputs.result_nbytes or self._lease is not None:
                self.reduce()
            self.build()
            self.commit()
        except Exception as error:
            is_own = isinstance(error, SynkError) or engine.is_sure
            self._end(error)
            is_unheard = self.has_news and not self.is_heard  # a handler has raised: ranks will not tell it again
            if self.pending or is_unheard or not engine.is_sure:  # a death, a time limit: nobody is sure of the ranks
                engine.recover(error)
            else:
                engine.settle_failed()
            if not is_own:
                raise
        except BaseException as error:
            self._end(error)
            engine.recover(error)
            raise
        engine.flight.pop(self.number, None)
        self._drop()
        return True

    def _must_wait(self) -> bool:
        """Whether outputs may be reduced by another message, and ranks have calls before them that would delay it."""
        outputs = self.plan.outputs
        if outputs is not None and (not outputs.result_nbytes or len(self._placed()) == len(self.ranks)):
            return False
        self.engine.listen()
        return any(each.pending for each in self.engine.flight.values())

    def hear(self) -> None:
        """Note what the replies tell of memory and layouts: that must not get lost."""
        engine = self.engine
        engine.is_sure = False
        for rank, (status, body, _) in self.replies.items():
            if status == wire.TOLD:
                with deferred():  # memory ends here, and Ctrl-C in a finalizer would be lost
                    self._note(rank, *body)
            elif status in wire.MAY_LACK:  # it is told again next time
                engine.note_unread(rank, self.news.get(rank))
                self.lane.begin_anew()
        engine.is_sure = self.is_heard = True

    def release_peers(self) -> None:
        self.lane.abort()

    def _note(self, rank: int, content: tuple[Any, ...], fds: list[Descriptor]) -> None:
        news = News(*content)
        self._news[rank] = news.objects
        if news.slot:
            self.engine.note_slot(self.lane, rank, fds.pop(0), news.slot)
            self.plan.outputs = None
        for number, which, nbytes in news.places:
            segment = Segment(fds.pop(0), nbytes, is_writable=True, segment_id=0)
            segment.is_worker_writable = True
            variable = self.engine.variables.get(number)
            if variable is not None:
                variable.note_made(rank, which, segment)
        if news.layout is not None:
            self.plan.layouts[rank] = news.layout
            self.plan.outputs = None

    def learn(self) -> None:
        """Raise the error of the lowest rank that failed. Else see that the outputs of the ranks fit together."""
        engine, plan = self.engine, self.plan
        if self._brings:
            is_taken_in = all(status != wire.UNREAD for status, _, _ in self.replies.values())
            engine.functions.settle(is_taken_in=is_taken_in)
            self._brings = False
        if self.has_news and any(status > wire.TOLD for status, _, _ in self.replies.values()):
            engine.raise_failures(self)
        outputs = plan.outputs
        if outputs is None or outputs.voters != self.ranks:
            callee, ranks = self.callee, self.division.ranks
            layouts = [plan.layouts[rank] for rank in ranks]
            outputs = Outputs(callee.name, callee.ops, plan.subset, ranks, layouts, self.lane, engine.world_size)
            outputs.rows, plan.outputs = self.division.rows, outputs
        if self.division.unequal and outputs.has_weights:
            raise ValueError(self.division.unequal)

    def reduce(self) -> None:
        """Have the ranks put large outputs in place, each its share, unless they have written them there."""
        engine, outputs, placed = self.engine, self.plan.outputs, self._placed()
        if len(placed) == len(self.ranks):
            self._lease.deliver()
            return
        if placed:  # the others have returned something else than the last time
            back = {rank: Once(engine, "back", self._destination.number) for rank in placed}
            engine.ask(back, self.what, "reduce", self.deadline)
        self._lease = self._root = None
        if outputs.result_nbytes:
            lease, self._root = engine.memory.lease_result(outputs.result_nbytes)
            shares = outputs.reductions(engine, lease.segment, self.division.rows)
            if shares:
                engine.reduce(shares, self)
            lease.deliver()

    def _placed(self) -> list[int]:
        """Return the ranks that have written their large outputs into the result."""
        if self._lease is None:
            return []
        return [rank for rank, (status, _, _) in self.replies.items() if status == wire.PLACED]

    def build(self) -> None:
        """Put the result together. Nothing of it lies in memory that a later call writes."""
        name, order = self.callee.name, None if self.division.owned is None else self.division.owned.order
        objects: list[list[Any]] = []
        if self._news:
            sent = [(rank, self._news.get(rank, [])) for rank in self.ranks]
            objects = [[loaded(data, name, rank, output) for output, data in own] for rank, own in sent]
        self.value = self.plan.outputs.build(self.division.rows, objects, self._root, order)

    def commit(self) -> None:
        """Make what the ranks have assigned and changed count, on all of them: one store decides."""
        engine, plan, ranks = self.engine, self.plan, self.ranks
        if plan.has_state:
            moves = engine.moves(plan.outputs.assigned, ranks)
            if self.callee.changes:
                engine.residents.note_changed(self.callee.changes, ranks)
            engine.commit(moves, ranks, self.number)
        nbytes = plan.outputs.nbytes
        if self._news:
            nbytes += sum(len(each) for news in self._news.values() for _, each in news)
        if self._varying != plan.varying or plan.moved[-1].nbytes != nbytes:
            plan.note_moved(self._varying, nbytes)
        now = time.monotonic_ns()
        wall_ns = now - self.started_ns
        if self.begin_ns:
            on_ranks = (published - received for _, _, (received, _, _, published, _) in self.replies.values())
            wall_ns = self.begin_ns + max(on_ranks) + now - self.heard_ns
        self.callee.record.add(plan.moved, self.division.count, self.replies, wall_ns)
        if engine.has_devices:
            engine.device_values.note_copies(self)
        self.has_ended = True
        if engine.tracer is not None:
            engine.tracer.note(self)

    # -- the end ------------------------------------------------------------------------------------------------------

    def end(self, error: BaseException) -> None:
        """The call has ended with this error, unless it has been settled."""
        self._end(error)
        self._drop()

    def _end(self, error: BaseException) -> None:
        if self.has_ended:
            return
        if self._brings:
            self.engine.functions.settle(is_taken_in=False)
            self._brings = False
        has_counted = bool(self.number) and self.engine.has_committed(self.number)
        if self.plan.has_state and not has_counted:
            self.engine.ended = max(self.engine.ended, self.number)
        for variable in self.plan.variables:
            variable.note_failed(self.ranks)
        if self.callee.changes and self.number:
            if has_counted:
                note_outcome(error, self.callee.changes, [COUNTED] * len(self.callee.changes))
            else:
                self.engine.residents.note_failed(self.callee.changes, self.number, error)
        self.error, self.has_ended = error, True
        if self.engine.tracer is not None:
            self.engine.tracer.note(self)

    def _drop(self) -> None:
        """Let go of all but the outcome, which may be kept for long."""
        self._news, self.replies, self._root, self._values = {}, {}, None, ()
        self._lease = self._destination = None
        if self.future is not None:
            self.engine.last_end_ns = time.monotonic_ns()
            future = self.future()
            if future is not None:
                future._note_end()
            elif isinstance(self.error, Exception) and not isinstance(self.error, (CallCancelled, ClosedError)):
                _logger.error(
                    "a submitted call of %s failed, and nobody asked for its result: %r", self.what, self.error
                )
            self.future = None
        if self.lane.call is self:  # last: until then the next call in the lane does this again
            self.lane.call = None


class Engine(Workers):
    """The workers, the lanes, and what they share: one operation at a time."""

    memory: Any
    has_shared_memory: bool
    joint_type = Joint
    nccl: Any
    device_values: Any
    has_devices: bool
    tracer: Any = None
    last_end_ns = 0  # of a submitted call

    def __init__(self, processes: Any, *, max_restarts: int, counters: dict[str, int], on_restart: Any) -> None:
        super().__init__(processes, max_restarts=max_restarts, counters=counters)
        self.functions = Functions(self, on_restart)
        self.variables: Living[Variable] = Living(self)
        self.residents = Residents(self)
        self.lanes: list[Lane] = []

    def open_lanes(self) -> None:
        self.lanes = [Lane(self, index) for index in range(NUM_LANES)]
        self._last_lane = 0

    # -- lanes --------------------------------------------------------------------------------------------------------

    def next_lane(self, verb: str, deadline: float | None) -> Lane:
        """Return the lane of the next call. A call that had it before has ended."""
        index = self._last_lane = (self._last_lane + 1) % NUM_LANES if self.flight else 0
        lane = self.lanes[index]
        if lane.call is not None:
            self.settle_first([lane.call], verb, deadline)
        return lane

    def calls(self) -> list[Call]:
        """Return the calls that have not ended, oldest first."""
        found = [lane.call for lane in self.lanes if lane.call is not None and not lane.call.has_ended]
        return sorted(found, key=lambda call: call.number)

    def settle_first(self, calls: Iterable[Call], verb: str, deadline: float | None) -> None:
        """End calls for which ``verb`` must wait."""
        for call in calls:
            if not call.settle(deadline):
                raise CallTimeout(
                    f"cannot {verb} in time: submitted calls are still in flight. Raise timeout=, or wait for their "
                    "results first."
                )

    def settle_all(self) -> None:
        for call in self.calls():
            call.settle()

    def settle_to(self, last: Call, until: float | None = None, *, is_polled: bool = False) -> None:
        """End a call, and before it those that were sent before it: whoever waits for one learns of all."""
        for call in self.calls() if len(self.flight) > 1 else ():
            if call.number < last.number:
                call.settle(until, is_polled=is_polled)
        last.settle(until, is_polled=is_polled)

    def settle_state(self, verb: str, deadline: float | None) -> None:
        """End calls in flight that use state: what comes next depends on whether they are committed."""
        self.settle_first([call for call in self.calls() if call.plan.has_state], verb, deadline)

    def settle_unsettled(self) -> None:
        """End calls that brought parcels: nothing else is packed before it is known whether they have arrived."""
        if self.functions.unsettled:
            for call in self.calls():
                if call._brings:
                    call.settle()
            if self.functions.unsettled:  # they were packed for a call that was never sent
                self.functions.settle(is_taken_in=False)

    def note_slot(self, lane: Lane, rank: int, fd: int, nbytes: int) -> None:
        """Note that a rank has made a slot."""
        old = lane.slots.get(rank)
        lane.slots[rank] = Segment(fd, nbytes, is_writable=False, segment_id=next(self.numbers))
        if old is not None:
            self.forget(old.id)
            old.close()

    def start_again(self, workers: Sequence[Any]) -> None:
        super().start_again(workers)
        self.residents.may_lag = True

    def on_trouble(self) -> None:
        self.nccl.break_up()
        for lane in self.lanes:
            lane.abort()

    def on_idle(self) -> None:
        for lane in self.lanes:
            lane.begin_anew()

    def after_recovery(self) -> None:
        for lane in self.lanes:
            lane.call = None
            lane.shares = None
        # A rank that was asked has forgotten which places it has made, and takes those that the program knows.
        ranks = {rank for owed in self.flight.values() for rank in owed.ranks}
        for variable in self.variables:
            self.retell(variable.number, ranks)
        for owed in self.flight.values():
            for rank, news in owed.news.items():
                self.note_unread(rank, news)

    def settle_failed(self) -> None:
        if self.processes.is_closed:
            return
        try:
            self.residents.settle_failed()
        except WorkerDied as error:  # one more: the others are asked again
            self.recover(error)

    def note_unread(self, rank: int, news: Any) -> None:
        """Note that a rank may not have taken in the news that came with a message."""
        worker = self.by_rank[rank]
        if news is not None:
            told, parcels, forgets = news
            worker.forgets = [*forgets, *worker.forgets]  # to forget twice does no harm
            worker.stale |= told
            worker.known -= told
            worker.parcels -= parcels
        worker.parcels_state = worker.settings_state = -1

    # -- memory that ranks do not share; see ``synk.cluster.session`` --------------------------------------------------

    def note_written(self, number: int, key: tuple[int, int]) -> None:
        """Note that the program writes into the place of a variable."""

    def reduce(self, shares: dict[int, Thing], call: Call) -> None:
        """Have the ranks put large outputs in place."""
        self.ask(shares, call.what, "reduce", call.deadline)

    # -- questions ----------------------------------------------------------------------------------------------------

    def ask(
        self,
        things: Mapping[int, Thing | None],
        what: str,
        phase: str,
        deadline: float | None = None,
        rows: bytes = wire.NO_ROWS,
    ) -> dict[int, Any]:
        """Send each rank a thing, or only the news, wait for the replies, and return what they bring.

        Raises
        ------
        Exception
            What a rank has raised.
        """
        question = Owed(list(things), what, deadline)
        question.phase, question.number = phase, next(self.numbers)
        self.is_sure = False
        self.flight[question.number] = question
        for rank, thing in things.items():
            numbers = () if thing is None else thing.numbers()
            plan = wire.LOAD if thing is None or thing.kind == "resident" else thing.number
            self.send(question, [rank], plan, 0, {rank: rows}, () if thing is None else (thing,), numbers)
        self.wait(question)
        for rank, (status, _, _) in question.replies.items():
            if status in wire.MAY_LACK:
                self.note_unread(rank, question.news.get(rank))
        self.is_sure = True
        self.flight.pop(question.number, None)
        if any(status > wire.TOLD for status, _, _ in question.replies.values()):
            self.raise_failures(question)
        return {rank: None if body is None else body[0] for rank, (_, body, _) in question.replies.items()}

    def load(self, names: str, deadline: float | None) -> None:
        """Have all ranks take in the functions that were packed."""
        question = dict.fromkeys(range(self.world_size))
        try:
            self.ask(question, names, "distribute", deadline)
        except BaseException:
            self.functions.settle(is_taken_in=False)
            raise
        self.functions.settle(is_taken_in=True)

    def raise_failures(self, owed: Owed) -> None:
        """Raise what the lowest rank has raised. The others are named in a note."""
        replies = [(status, body) for _, (status, body, _) in sorted(owed.replies.items())]
        unread = [body[0] for status, body in replies if status == wire.UNREAD]
        failures = [body[0] for status, body in replies if status == wire.FAILED]
        name = owed.what[1:-1] if owed.what[:1] == "'" else owed.what
        if unread:
            error = rebuild(unread, self.world_size, name)
            if isinstance(error, SharedMemoryError):  # a limit of the system: nothing is wrong with what was sent
                raise error
            raise SerializationError(
                f"cannot load {owed.what} on the workers: {unread[0].type_name}: {unread[0].message}. "
                "What a function needs must be importable there, or defined in the script itself."
            ) from error
        if failures:
            raise rebuild(failures, self.world_size, name)
        if self.is_inline:
            raise KeyboardInterrupt
        raise CallCancelled(f"the call of {owed.what} was ended: a worker was interrupted. Call it again.")

    # -- state --------------------------------------------------------------------------------------------------------

    def moves(self, assigned: Sequence[Any], ranks: Sequence[int]) -> list[Any]:
        """Return what turns when a call is committed: (variable, rank, place, shapes)."""
        moves: list[Any] = []
        if not any(assigned):
            return moves
        for rank, own in zip(ranks, assigned):
            for number, is_on_device, found in own:
                variable: Any = self.variables.get(number)
                which = variable.spare(rank) + (ON_DEVICE if is_on_device else 0)
                variable.note_assigned(rank, which, found)
                moves.append((variable, rank, which, found))
        absent = [rank for rank in range(self.world_size) if rank not in ranks]
        for number, _, found in assigned[0] if absent else ():
            variable = self.variables.get(number)
            if variable.is_sharded:
                continue
            # Ranks without rows get the value of the lowest rank that ran; otherwise replicas would drift apart.
            value = variable.views(ranks[0], variable.spare(ranks[0]), found)
            for rank in absent:
                spare = variable.spare(rank)
                for target, source in zip(variable.room(rank, spare, found), value):
                    np.copyto(target, source)
                moves.append((variable, rank, spare, found))
        return moves

    # -- memory -------------------------------------------------------------------------------------------------------

    def free(self, segment: Segment) -> None:
        """Free a segment: here now, on the ranks with their next message."""
        self.forget(segment.id)
        for function in list(self.functions.bound):
            plans = function.plans_by_key
            for key in [key for key, plan in plans.items() if segment.id in plan.segments or plan.staging is segment]:
                plans.pop(key, None)
        segment.discard()
