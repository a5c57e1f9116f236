"""The quiet call on a rank: a plan's next call, when it is like the last one and no message with a body came between.

Prepared after an ordinary call of the plan, whose rows, inputs and outputs it relies on. It makes new views of the
inputs for each call, for a function may change the shape of one, writes the outputs to where the last ones went if they
look like them, and replies. Whatever else the function does (raises, assigns another variable, keeps an input, returns
something new) is left to the ordinary way, which goes on with its outcome.

Never for functions with slices, updates, a framework or broadcast objects, and never where failpoints are armed.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from synk._wire.cell import cell
from synk._wire.control import Down, Phase, Up, is_interrupted
from synk._wire.messages import DOORBELL, Kind, Status
from synk._worker import failpoints as _failpoints
from synk._worker.calls import Outcome
from synk._worker.dispatch import go_on
from synk._worker.plans import PreparedPlan
from synk._worker.rank import RSS_INTERVAL_NS, Interrupted, Worker
from synk._worker.variables import VariableStore

REPLIED: Any = object()
"""What a quiet call returns that has ended with the reply of a repeated call."""

_INTERRUPT, _CALL, _RESULT = int(Down.INTERRUPT), int(Down.CALL), int(Down.RESULT)
_FUNCTION_NS, _PHASE, _OUTPUT_NBYTES = int(Up.FUNCTION_NS), int(Up.PHASE), int(Up.OUTPUT_NBYTES)
_IDLE, _FUNCTION, _DONE = int(Phase.IDLE), int(Phase.FUNCTION), int(Status.DONE)


class QuietCall:
    """The quiet calls of one plan. Only what the master may change between two calls is compared."""

    def __init__(self, worker: Worker, prepared: PreparedPlan) -> None:
        lane, plan = worker.lane, prepared.plan
        numbers = worker.lane.down[worker.rank].tolist()
        slots, layout = prepared.slots, prepared.layout
        assert slots is not None and layout is not None
        self._prepared = prepared
        self._plan_id = plan.plan_id
        self._fn = prepared.function.fn
        self._lane = lane
        self._numbers = memoryview(lane.down[worker.rank])[Down.PARTICIPATES : Down.LOCAL_STEP + 1]
        self._known_numbers = self._numbers.tobytes()
        low, high = numbers[Down.LOW], numbers[Down.HIGH]
        starts = [low if item.is_minibatch else numbers[Down.START] + low for item in plan.inputs]
        # The arrays themselves are found in the plan: another reference to them would look like one of the function's.
        self._indices = [
            (position, slice(start, start + high - low) if item.kind == "rows" else ...)
            for position, (item, start) in enumerate(zip(plan.inputs, starts))
        ]
        self._slots, self._assigned = slots, layout.assigned
        # Of these some words belong to the rank, and only those of the first lane count.
        self._rank_down = memoryview(worker.down[worker.rank])
        self._rank_up = worker.lanes[0].own_up
        self._lane_up = lane.own_up
        self._first_down = lane.first_down
        # What peers that communicate must see of a rank that does not; see ``Rendezvous.skip``.
        self._left: memoryview | None = None
        self._sleeps: memoryview | tuple[()] = ()
        if lane.communicator is not None:
            self._left, self._sleeps = lane.communicator.skip_words()

    @staticmethod
    def fits(worker: Worker, plan_id: int) -> bool:
        """Whether the next call of a plan, of which one has just ended well, can be quiet."""
        prepared = worker.held.plans.get(plan_id)
        if prepared is None or prepared.slots is None or worker.lane.called is not prepared:
            return False
        plan, function = prepared.plan, prepared.function
        numbers = worker.lane.down[worker.rank].tolist()
        return (
            not worker.backend.is_device
            and worker.failpoint is _failpoints.nothing
            and plan.num_slices == 1
            and not plan.is_trial
            and not plan.nests
            and prepared.pickle_view is None
            and prepared.indices is prepared.local_indices is prepared.order is None
            and not function.updates
            and function.to_framework is None
            and all(item.kind in ("rows", "whole") and not item.name for item in plan.inputs)
            and numbers[Down.STEP] == 1
        )

    def run(self, worker: Worker, sequence: int, channel: Any) -> Any:
        """Run one call; return ``REPLIED``, or the reply that it ends with, or None where it is no quiet one."""
        lane, variables, prepared = self._lane, worker.variables, self._prepared
        arrays = prepared.bases
        if variables.stored[1]:  # by the call before: it holds if the master says so
            variables.resolve()
        if (
            holds_outputs(worker)
            or worker.held.kept_data
            or not variables.is_plain
            or variables.assigned
            or variables.given
            or variables.whole
            or self._first_down[_RESULT]
            or self._numbers.tobytes() != self._known_numbers
        ):
            return None
        rank_up, lane_up = self._rank_up, self._lane_up
        worker.sequence, worker.lane = sequence, lane
        worker.used_lanes.add(lane.index)
        variables.call_down = lane.down
        lane.called, cell.worker = prepared, worker
        arguments: Any = []
        result = failure = None
        is_expected = False
        started = ended = 0
        try:
            try:
                worker.is_interruptible = True
                interrupt = self._rank_down[_INTERRUPT]
                if interrupt >= 0 and is_interrupted(interrupt, sequence):
                    raise Interrupted  # the signal came before this call could take it
                rank_up[_PHASE] = _FUNCTION
                for position, rows in self._indices:
                    arguments.append(arrays[position][rows])
                started = time.monotonic_ns()
                result = self._fn(*arguments)
                ended = time.monotonic_ns()
                lane_up[_FUNCTION_NS] = ended - started
                is_expected = self._publish(variables, result)
            finally:
                worker.is_interruptible = False
        except BaseException as error:  # whatever the user's function raises is an answer
            worker.is_interruptible = False
            failure = error
        arguments = None
        if not is_expected or worker.peers.is_communicating or prepared.loans.are_open():
            outcome = Outcome(result, failure, ended - started)
            result = failure = None
            try:
                return go_on(worker, self._plan_id, sequence, outcome)
            finally:
                cell.worker = None
        cell.worker = None
        if os.getpid() != worker.pid:  # the function has forked, and this is the child: it must not answer
            os._exit(0)
        if self._left is not None:  # as leave_call
            self._left[worker.rank] = self._first_down[_CALL]
        rank_up[_PHASE] = _IDLE
        rank_up[_OUTPUT_NBYTES] += self._slots.nbytes
        if ended - worker.rss_measured > RSS_INTERVAL_NS:
            worker.measure(ended)
        flush_output(worker)
        os.write(channel.write_fd, DOORBELL.pack(_DONE, 0, sequence, 0))
        for number in self._sleeps:
            if number & 1:  # over a collective that this rank had no use for; the others look again by themselves
                lane.communicator.wake_sleepers()  # type: ignore[union-attr]
        return REPLIED

    def _publish(self, variables: VariableStore, result: Any) -> bool:
        """Bring outputs and new values of variables to their places, if they look like those of the call before."""
        if variables.given or not self._slots.fill(result):
            return False
        if variables.assigned or self._assigned:
            return variables.assignments() == self._assigned and variables.store()
        return True


def prepare(worker: Worker, kind: int, status: Status, plan_id: int, body: Any) -> None:
    """After the reply to a message: see whether the next one can be a quiet call."""
    if kind == Kind.CALL and status == Status.DONE and body is None and QuietCall.fits(worker, plan_id):
        worker.held.quiet[plan_id] = QuietCall(worker, worker.held.plans[plan_id])


def holds_outputs(worker: Worker) -> bool:
    """Whether something is kept of the outputs of a call that is not over."""
    for index in worker.used_lanes:  # asked at each call: no generator  # noqa: SIM110
        if worker.lanes[index].executor.outputs.held_plan is not None:
            return True
    return False


def flush_output(worker: Worker) -> None:
    """Have what was printed reach the master, where it does not go to the master's own streams."""
    for stream in () if worker.is_inline else (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # the user's function closed or replaced it: whatever it does must not end the worker
            continue
