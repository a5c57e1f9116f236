"""The quiet call: one like the last call of its function, when nothing has changed since.

It is prepared by an ordinary call, and relies on all that this one has found out. Three comparisons tell whether it
still may: the epoch (what the runtime itself has changed, ``synk._master.epoch``), the news (what finalizers dropped,
other calls in flight, whatever the workers' descriptors report), and what the function's code names, which the caller
has compared before (``synk._master.watch``). Then come the arguments. Up to there nothing is written, and anything else
is an ordinary call.

From the first doorbell on, the quiet call is a request like others: an interrupt at any line finds it among those in
flight, and what the workers answer is taken here only if it is, byte for byte, what a repeated call answers. Everything
else (errors, deaths, prints, new outputs, time limits) is left to the ordinary wait, which knows about it.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # the public functions make an enum of each handler
import os
import signal
import time
from typing import Any

from synk._master.call import CallOptions, abandon, collect, launch
from synk._master.launched import Callee, Launched
from synk._master.plans import ARRAYS, RepeatedCall
from synk._master.session import Session
from synk._master.trials import try_shorter
from synk._master.workers import Request, Workers
from synk._pure.arrays import PARALLEL_NBYTES, copy_into
from synk._pure.interrupts import num_cancels
from synk._pure.limits import poll_ms
from synk._wire.cell import cell
from synk._wire.control import Down, Up
from synk._wire.messages import DONE, DOORBELL, IS_ALONE, Kind, Status

NOT_QUIET: Any = object()
"""What a call returns that has done nothing, because it is another one."""

_WAIT_MS = 100
"""The longest wait here; the ordinary one, which goes on then, knows deadlines and reports calls that seem stuck."""

_SIGINT, _raises_keyboard_interrupt = int(signal.SIGINT), signal.default_int_handler
_CALL, _DONE = int(Kind.CALL), int(Status.DONE)
_NUMBER, _RESULT, _FUNCTION_NS = int(Down.CALL), int(Down.RESULT), int(Up.FUNCTION_NS)


def run_call(
    session: Session,
    function: Callee,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    options: CallOptions,
    deadline: float | None,
) -> Any:
    """Run one call the ordinary way, prepare the quiet ones that may follow, and return its result."""
    epoch = session.workers.epoch.number
    launched = launch(session, function, args, kwargs, options, deadline, session.lanes.first)
    result = collect(session, launched)
    if function.row_shapes.wants_trial:
        try_shorter(session, launched)
    # Where the epoch has not ended no rank had to be told anything: the next call need not tell it either.
    if session.workers.epoch.number == epoch and options.is_plain and not kwargs:
        repeat = function.plans.repeats.get(launched.cached.lane.index)
        if repeat is not None and QuietCall.fits(session, repeat):
            function.plans.quiet = QuietCall(session, function, repeat, epoch)
    return result


class QuietCall(Request):
    """The quiet calls of one function, which are one object: there is never more than one of them in flight.

    Holds neither the function nor its arguments: what the user drops is freed.
    """

    def __init__(self, session: Session, function: Callee, repeat: RepeatedCall, epoch: int) -> None:
        super().__init__(0, (), None, "call", repr(function.name))
        cached = repeat.cached
        lane, assembly = cached.lane, cached.assembly
        assert assembly is not None
        self._epoch = epoch
        self._name = function.name
        self._repeat = repeat
        self._call = repeat.call
        self._cached = cached
        self._plan_id = cached.plan.plan_id
        self._assembly = assembly
        # As RepeatedCall's, with the dtype alone: none of them is one of records.
        self._arguments = [(kind[0] if into is not None else kind, what, into) for kind, what, into in repeat.arguments]
        self._copies = [
            (position, target, target.nbytes >= PARALLEL_NBYTES)
            for position, (_, _, target) in enumerate(self._arguments)
            if target is not None
        ]
        self._staged_nbytes = sum(target.nbytes for _, target, _ in self._copies)
        self._bounds = lane.last_numbers
        self._lane = lane
        self._ranks = frozenset(repeat.call.ranks)
        self._poll, self._channels, self._rank_of = session.workers.doorbells(repeat.call.ranks)
        self._numbers = memoryview(lane.down[0])
        self._function_ns = [lane.up_words[rank] for rank in repeat.call.ranks]

    @staticmethod
    def fits(session: Session, repeat: RepeatedCall) -> bool:
        """Whether calls like the one that has just ended well can be quiet."""
        assembly = repeat.cached.assembly
        return (
            assembly is not None
            and repeat.cached.is_agreed
            and not session.workers.is_inline
            and not session.has_devices
            and not repeat.call.sources
            and assembly.is_small_and_plain
            and all(value.dtype.kind != "V" for _, _, value in repeat.arguments if value is not None)
        )

    def run(self, session: Session, function: Callee, args: tuple[Any, ...]) -> Any:
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
            workers, cached = session.workers, self._cached
            if (
                self._epoch != workers.epoch.number
                or workers.requests
                or session.queue.calls
                or session.memory.released
                or session.functions.dropped
                or session.variables.dropped
                or function.is_stale
                or os.getpid() != session.pid  # a copy of the master that was made without at-fork hooks
                or not cached.is_agreed
                or cached.assembly is not self._assembly
                # Ctrl-C would only cancel a task of asyncio, and not be heard here.
                or (_signal.getsignal(_SIGINT) is not _raises_keyboard_interrupt and num_cancels() >= 0)
                or not self._are_like(args)
                or self._poll.poll(0)
            ):
                return NOT_QUIET
            self._stage(args)
            number = next(session.numbers)
            self._numbers[_NUMBER], self._numbers[_RESULT] = number, 0
            self.sequence = sequence = workers.sequence = workers.sequence % 0xFFFF + 1
            self.pending, self.replies = set(self._ranks), {}
            self.began = workers.began = started * 1e-9
            timeout = session.timeout
            self.deadline = None if timeout is None else self.began + timeout
            workers.num_cancels = -1
            cached.is_agreed = False  # until it has ended well, as in an ordinary call
            try:
                workers.requests[sequence] = self
                message = DOORBELL.pack(_CALL, IS_ALONE, sequence, self._plan_id)
                for channel in self._channels:
                    os.write(channel.write_fd, message)
                counters = session.counters
                counters["calls"] += 1
                counters["messages_down"] += len(self._channels)
                counters["bytes_down"] += 8 * len(self._channels)
                counters["bytes_staged"] += self._staged_nbytes
                is_expected = self._wait(workers)
                counters["messages_up"] += len(self.replies)
                counters["bytes_up"] += 8 * len(self.replies)
            except BaseException as error:
                workers.settle_after(error)
                abandon(session, self._launched(function, number, started), error)
                raise
            if not is_expected:
                return collect(session, self._launched(function, number, started))
            workers.requests.pop(sequence, None)
            if function.changes:
                session.residents.note_changed(function.changes, number, self._call.ranks)
            return self._result(session, started)

    def _are_like(self, args: tuple[Any, ...]) -> bool:
        """Whether the arguments are the same ``Data``, unchanged, and arrays that look the same."""
        if len(args) != len(self._arguments):
            return False
        for value, (first, second, target) in zip(args, self._arguments):
            if target is None:
                if value is None or value is not first() or value._contents.array is not second():
                    return False
            elif type(value) not in ARRAYS or value.dtype != first or value.shape != second:
                return False
        return True

    def _stage(self, args: tuple[Any, ...]) -> None:
        """Bring the arguments and the ranks' bounds to where the workers read them."""
        for position, target, is_large in self._copies:
            if is_large:
                copy_into(target, args[position])
            else:
                target[...] = args[position]
        if self._lane.last_numbers is not self._bounds:
            self._repeat.write_numbers()

    def _wait(self, workers: Workers) -> bool:
        """Take the replies of all ranks; return False where something else has come, for the ordinary wait."""
        timeout_ms = _WAIT_MS if self.deadline is None else min(poll_ms(self.deadline - self.began), _WAIT_MS)
        expected = DOORBELL.pack(_DONE, 0, self.sequence, 0)
        rank_of, pending = self._rank_of, self.pending
        while pending:
            events = workers.patience.wait(self._poll, timeout_ms)
            if not events:
                return False
            for fd, _ in events:
                if fd not in rank_of:  # a printed line, a death, the end of the runtime
                    return False
            for fd, _ in events:
                rank, channel = rank_of[fd]
                reply = os.read(channel.read_fd, 8)
                if reply != expected:
                    workers.take_doorbell(rank, reply)
                    return False
                self.replies[rank] = DONE
                pending.discard(rank)
        return True

    def _result(self, session: Session, started_ns: int) -> Any:
        """Return the result of a call that has ended well, and note what it cost."""
        result = self._assembly.build(self._call.rows, None, None, None)
        self._cached.is_agreed = True
        slowest = 0
        for words in self._function_ns:
            slowest = max(slowest, words[_FUNCTION_NS])
        record = session.profile.records.get(self._name) or session.profile.record(self._name)
        record.num_calls += 1
        record.function_ns += slowest
        record.output_nbytes += self._cached.output_nbytes
        record.staged_nbytes += self._staged_nbytes
        record.wall_ns += time.monotonic_ns() - started_ns
        return result

    def _launched(self, function: Callee, number: int, started_ns: int) -> Launched:
        """Return what the ordinary way needs in order to go on with this call."""
        nbytes = self._staged_nbytes
        return Launched(function, self._call, self._cached, number, self, None, self.deadline, started_ns, nbytes)
