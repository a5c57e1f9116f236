"""The quiet call: one like the last call of its function, when nothing has changed since. Waited for, or submitted.

It is prepared by an ordinary call, one for each lane, and relies on all that this one has found out. Three comparisons
tell whether it still may: the epoch (what the runtime itself has changed, ``synk._master.epoch``), the news (what
finalizers dropped, calls in flight, whatever the workers' descriptors report), and what the function's code names,
which the caller has compared before (``synk._master.watch``). Then come the arguments (``synk._master.look``). Their
rows may be others if the same ranks run the call. Nothing is written before, and anything else is an ordinary call.

From the first doorbell on, the quiet call is a request like others: an interrupt at any line finds it among those in
flight, and what the workers answer is taken here only if it is, byte for byte, what a repeated call answers. Everything
else (errors, deaths, prints, new outputs, time limits) is left to the ordinary wait, which knows about it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the public functions make an enum of each handler
import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from synk._master.arguments import shapes_beside_rows
from synk._master.call import abandon, collect
from synk._master.callee import Callee
from synk._master.handles import ArgumentHandle
from synk._master.launched import Launched
from synk._master.look import Look
from synk._master.plans import Call
from synk._master.requests import Request
from synk._master.results import Lease
from synk._master.session import Session
from synk._master.staging import write_numbers
from synk._pure.arrays import PARALLEL_NBYTES, copy_into
from synk._pure.interrupts import num_cancels
from synk._pure.limits import poll_ms
from synk._pure.read_only import ReadOnlyArray
from synk._wire.cell import cell
from synk._wire.control import Down, Up
from synk._wire.messages import ASSEMBLED, DONE, DOORBELL, IS_ALONE, LANE_SHIFT, Kind, Status

NOT_QUIET: Any = object()
"""What a call returns that has done nothing, because it is another one, or whose end is left to the ordinary way."""

_WAIT_MS = 100
"""The longest wait here; the ordinary one, which goes on then, knows deadlines and reports calls that seem stuck."""

_ARRAYS = (np.ndarray, ReadOnlyArray)
_SIGINT, _raises_keyboard_interrupt = int(signal.SIGINT), signal.default_int_handler
_CALL, _DONE = int(Kind.CALL), int(Status.DONE)
_NUMBER, _RESULT, _FUNCTION_NS = int(Down.CALL), int(Down.RESULT), int(Up.FUNCTION_NS)


class QuietCall(Request):
    """The quiet calls of one function in one lane, which are one object: never more than one of them is in flight.

    Holds neither the function nor its arguments: what the user drops is freed.
    """

    def __init__(self, session: Session, launched: Launched) -> None:
        super().__init__(0, (), None, "call", repr(launched.function.name))
        cached, arguments = launched.cached, launched.call.arguments
        call = replace(launched.call, arguments=[], objects=None, beside_rows=shapes_beside_rows(arguments))
        lane, assembly = cached.lane, cached.assembly
        assert assembly is not None
        self._epoch = launched.epoch
        self._name = launched.function.name
        # The call whose rows come next, with the batch that they stand for, and the one whose rows were written last.
        self._chosen = _remembered(call, call.options.batch)
        self._written = call
        self._cached = cached
        self._plan_id = cached.plan.plan_id
        self._assembly = assembly
        self.look = look = Look(self._name, arguments, cached.staged, cached.places.pickle)
        self._leaves, self._is_flat = look.leaves, look.is_flat
        self._repeated_copies = launched.function.repeated_copies
        labels = [each.label for each in arguments if each.array is not None]
        targets = [(position, target) for position, (_, _, target, _) in enumerate(self._leaves) if target is not None]
        self._copies = [
            (position, target, label if target.nbytes >= PARALLEL_NBYTES else "")
            for (position, target), label in zip(targets, [*labels, ""])
        ]
        places = [place for place in cached.places.indices if place is not None]
        self._staged_nbytes = sum(target.nbytes for target in (*cached.staged, *places))
        self._lane = lane
        self._bounds = lane.last_numbers
        self._block = lane.down[:, Down.PARTICIPATES : Down.LOCAL_STEP + 1].copy()
        self._ranks = frozenset(call.ranks)
        self._poll, self._channels, self._rank_of = session.workers.doorbells(call.ranks)
        self._flags = lane.index << LANE_SHIFT
        self._numbers = memoryview(lane.down[0])
        self._function_ns = [lane.up_words[rank] for rank in call.ranks]
        self._result_nbytes = assembly.result_nbytes
        self._answer = ASSEMBLED if assembly.result_nbytes else DONE
        self._expected = b""  # the doorbell that stands for it
        self._lease: Lease | None = None
        self._number = self._started = 0

    def run(
        self,
        session: Session,
        function: Callee,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: Any,
        shard_batch: Any,
    ) -> Any:
        """Return the result of one call, or ``NOT_QUIET`` where it is another one; what the function names is current.

        Raises
        ------
        Exception
            As an ordinary call.
        """
        if session._lock._is_owned() or cell.worker is not None:  # type: ignore[attr-defined]
            return NOT_QUIET
        started = time.monotonic_ns()
        with session._lock:
            workers = session.workers
            if workers.requests or session.queue.calls:
                return NOT_QUIET
            values = self.compare(session, function, args, kwargs, batch, shard_batch)
            if values is None:
                return NOT_QUIET
            try:
                self.send(session, values, started)
                result = self.finish(session, function)
            except BaseException as error:
                workers.recovery.settle_after(error)
                abandon(session, self.hand_over(function), error)
                raise
            return collect(session, self.hand_over(function)) if result is NOT_QUIET else result

    def compare(
        self,
        session: Session,
        function: Callee,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch: Any,
        shard_batch: Any,
    ) -> Sequence[Any] | None:
        """Return what was passed, leaf by leaf, if such a call is like the last one and nothing has changed since.

        Writes nothing. A batch that does not fit raises, as in an ordinary call.
        """
        workers, cached = session.workers, self._cached
        if (
            self._epoch != workers.epoch.number
            or session.memory.released
            or session.functions.dropped
            or session.variables.dropped
            or session.residents.dropped
            or session.variables.to_flip
            or function.is_stale
            or os.getpid() != session.pid  # a copy of the master that was made without at-fork hooks
            or not cached.is_agreed
            or cached.assembly is not self._assembly
            # Ctrl-C would only cancel a task of asyncio, and not be heard here.
            or (_signal.getsignal(_SIGINT) is not _raises_keyboard_interrupt and num_cancels() >= 0)
        ):
            return None
        values: Sequence[Any] | None = args if self._is_flat and not kwargs else self.look.taken_apart(args, kwargs)
        if values is None or len(values) != len(self._leaves):
            return None
        for value, (first, second, target, is_minibatch) in zip(values, self._leaves):
            if target is not None:
                if type(value) not in _ARRAYS or value.dtype != first or value.shape != second:
                    return None
            elif (
                value is None
                or value is not first()
                or value._contents.array is not second()
                or value.minibatch is not is_minibatch
                if second is not None
                else not isinstance(value, ArgumentHandle) or value._meant is not first()
            ):
                return None
        known, call = self._chosen
        if shard_batch is not None or type(batch) is not type(known) or batch != known:
            chosen = self.look.choose(call, session.world_size, batch, shard_batch)
            if chosen is None:
                return None
            self._chosen = _remembered(chosen, batch)
        for fd, _ in self._poll.poll(0):
            if fd not in self._rank_of or not workers.requests:  # more than replies to calls before this one
                return None
        nbytes = self._result_nbytes
        lease = session.memory.lease_known(nbytes, self._ranks) if nbytes else None
        is_quiet = self._epoch == workers.epoch.number and (lease is not None or not nbytes)
        self._lease = lease if is_quiet else None  # an ordinary call finds the buffer idle
        return values if is_quiet else None

    def send(
        self, session: Session, values: Sequence[Any], started_ns: int, wait: Callable[[], bool] | None = None
    ) -> bool:
        """Bring what ``compare`` has returned and the ranks' bounds to where the workers read them, and ring.

        ``wait`` waits for what must have happened before the doorbell. Return False where that, or anything else that
        has happened meanwhile, leaves the call to the ordinary way; nobody has been told of it then.
        """
        workers, lane, numbers, counters = session.workers, self._lane, self._numbers, session.counters
        for position, target, large in self._copies:
            if large:
                self._repeated_copies.look(large, target, values[position])
                copy_into(target, values[position])
            else:
                target[...] = values[position]
        _, call = self._chosen
        if call is not self._written:
            for place, indices in zip(self._cached.places.indices, call.index_arrays):
                if place is not None:
                    place[...] = indices
            write_numbers(lane, call)
            self._bounds, self._written = lane.last_numbers, call
            self._block = lane.down[:, Down.PARTICIPATES : Down.LOCAL_STEP + 1].copy()
        elif lane.last_numbers is not self._bounds:  # a call with others came between
            lane.last_numbers = None  # until all of them are written
            lane.down[:, Down.PARTICIPATES : Down.LOCAL_STEP + 1] = self._block
            lane.last_numbers = self._bounds
        if wait is not None:
            self.sequence = 0  # what breaks the wait off is not about this call
            if not wait() or self._epoch != workers.epoch.number:
                self._lease = None  # the end of its array brings the buffer back
                return False
        self._number = numbers[_NUMBER] = next(session.numbers)
        numbers[_RESULT] = 0 if self._lease is None else self._lease.segment.id
        self.sequence = sequence = workers.requests.sequence = workers.requests.sequence % 0xFFFF + 1
        self.pending, self.replies, self.is_lost, self.is_cut = set(self._ranks), {}, False, False
        self._started, self.began = started_ns, started_ns * 1e-9
        workers.began, workers.waiting.num_cancels = self.began, -1
        timeout = session.timeout
        self.deadline = None if timeout is None else self.began + timeout
        self._expected = DOORBELL.pack(_DONE, self._answer.flags, sequence, 0)
        self._cached.is_agreed = False  # until it has ended well, as in an ordinary call
        flags = self._flags if workers.requests else self._flags | IS_ALONE
        workers.requests[sequence] = self
        for channel in self._channels:
            channel.ring(_CALL, flags, sequence, self._plan_id)
        counters["calls"] += 1
        counters["messages_down"] += len(self._channels)
        counters["bytes_down"] += 8 * len(self._channels)
        counters["bytes_staged"] += self._staged_nbytes
        if self.look.pickled_nbytes:
            counters["bytes_pickled"] += self.look.pickled_nbytes
        return True

    def finish(self, session: Session, function: Callee) -> Any:
        """Wait for the replies and return the result; ``NOT_QUIET`` where something else has come than expected."""
        if self.pending and not self._wait(session):
            return NOT_QUIET
        for reply in self.replies.values():
            if reply is not self._answer:
                return NOT_QUIET
        lease, (_, call) = self._lease, self._chosen
        order = None if call.owned is None else call.owned.order
        result = self._assembly.build(call.rows, None, None if lease is None else lease.deliver(), order)
        if self._assembly.has_assignments:
            session.variables.commit(call.ranks, self._assembly.layouts, self._number)
        session.workers.requests.pop(self.sequence, None)
        self._lease = None
        if function.changes:
            session.residents.note_changed(function.changes, self._number, call.ranks)
        self._cached.is_agreed = True
        slowest = 0
        for words in self._function_ns:
            slowest = max(slowest, words[_FUNCTION_NS])
        record = session.profile.records.get(self._name) or session.profile.record(self._name)
        record.num_calls += 1
        record.function_ns += slowest
        record.output_nbytes += self._cached.output_nbytes
        record.staged_nbytes += self._staged_nbytes
        record.pickled_nbytes += self.look.pickled_nbytes
        record.wall_ns += time.monotonic_ns() - self._started
        return result

    def _wait(self, session: Session) -> bool:
        """Take replies until all ranks have answered this call; return False where the ordinary wait must go on."""
        workers, rank_of, pending, counters = session.workers, self._rank_of, self.pending, session.counters
        timeout_ms = _WAIT_MS if self.deadline is None else min(poll_ms(self.deadline - self.began), _WAIT_MS)
        while pending:
            events = workers.patience.wait(self._poll, timeout_ms)
            if not events:
                return False
            for fd, _ in events:
                if fd not in rank_of:  # a printed line, a death, the end of the runtime
                    return False
            for fd, _ in events:
                rank, channel = rank_of[fd]
                doorbell = os.read(channel.read_fd, 8)
                if doorbell == self._expected:
                    self.replies[rank] = self._answer
                    pending.discard(rank)
                    counters["messages_up"] += 1
                    counters["bytes_up"] += 8
                elif not workers.requests.take_doorbell(rank, doorbell):
                    return False
            if self.deadline is not None:
                timeout_ms = min(poll_ms(self.deadline - time.monotonic()), _WAIT_MS)
        return True

    def launched(self, function: Callee) -> Launched:
        """Return the call under way, as the ordinary way knows calls."""
        return Launched(
            function, self._chosen[1], self._cached, self._number, self, None, self.deadline, self._started,
            self._staged_nbytes, self.look.pickled_nbytes,
        )  # fmt: skip

    def hand_over(self, function: Callee) -> Launched:
        """Return the call under way for the ordinary way to go on with it, which then owns its buffer."""
        launched = self.launched(function)
        launched.lease, self._lease = self._lease, None
        return launched


def _remembered(call: Call, batch: Any) -> tuple[Any, Call]:
    """Return a call with the batch that it stands for, where another one that is equal means the same rows."""
    is_plain = batch is None or type(batch) is int
    return (batch if is_plain and call.owned is None else NOT_QUIET), call
