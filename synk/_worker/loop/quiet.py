"""The quiet call on a rank: a plan's next call, when it is like the last one and no message with a body came between.

Prepared after an ordinary call of the plan, whose inputs and outputs it relies on; the rows may be others. It makes new
views of the inputs for each call, for a function may change the shape of one, writes the outputs to where the last ones
went if they look like them, and replies. Whatever else the function does (raises, assigns another variable, returns
something new) is left to the ordinary way, which goes on with its outcome.

Never for functions with slices or updates, for broadcast objects that hold arrays, and where failpoints are armed.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import reduce
from operator import or_
from typing import Any

import numpy as np

from synk._pure.tensors import as_dtype
from synk._wire.cell import cell
from synk._wire.control import Down, Phase, Up, is_interrupted
from synk._wire.messages import DOORBELL, Kind, Status
from synk._worker import failpoints as _failpoints
from synk._worker.call.inputs import nested, row_range
from synk._worker.held.plans import PreparedPlan
from synk._worker.loop.calls import Outcome
from synk._worker.loop.dispatch import go_on, settle_inputs
from synk._worker.rank import RSS_INTERVAL_NS, Interrupted, Worker

_MADE_ANEW = ("object", "shard", "replica", "resident")
"""Kinds of inputs that are no views of arrays."""

REPLIED: Any = object()
"""What a quiet call returns that has ended with the reply of a repeated call."""

_INTERRUPT, _CALL, _RESULT = int(Down.INTERRUPT), int(Down.CALL), int(Down.RESULT)
_FUNCTION_NS, _PHASE, _OUTPUT_NBYTES = int(Up.FUNCTION_NS), int(Up.PHASE), int(Up.OUTPUT_NBYTES)
_IDLE, _FUNCTION, _DONE = int(Phase.IDLE), int(Phase.FUNCTION), int(Status.DONE)


class QuietCall:
    """The quiet calls of one plan. Only what the master may change between two calls is compared."""

    def __init__(self, worker: Worker, prepared: PreparedPlan) -> None:
        lane, plan = worker.lane, prepared.plan
        slots, layout = prepared.slots, prepared.layout
        assert slots is not None and layout is not None
        self._prepared = prepared
        self._plan_id = plan.plan_id
        self._rank = worker.rank
        self._fn = prepared.function.fn
        self._to_framework = prepared.function.to_framework
        self._from_framework = prepared.function.from_framework
        self._lane = lane
        self._numbers = memoryview(lane.down[worker.rank])[Down.PARTICIPATES : Down.LOCAL_STEP + 1]
        self._known_numbers = b""
        self._low = self._high = 0
        # The arrays themselves are found in the plan: another reference to them would look like one of the function's.
        self._others: list[tuple[int, Any, Any]] = []  # inputs that are not views of arrays
        self._spans: list[tuple[int, int]] = []  # of memory that the function could write into
        self._places = self._choose_rows()
        self._arrays = [(k, item.tensor_dtype) for k, item in enumerate(plan.inputs) if item.kind in ("rows", "whole")]
        self._keywords = [keyword for keyword in prepared.keywords if keyword]  # of the last arguments
        self._is_flat = not (plan.nests or self._keywords or self._others or self._to_framework)
        self._slots, self._assigned = slots, layout.assigned
        # Of these some words belong to the rank, and only those of the first lane count.
        self._rank_down = memoryview(worker.down[worker.rank])
        self._rank_up = worker.lanes[0].own_up
        self._lane_up = lane.own_up
        self._first_down = lane.first_down
        # What peers that communicate must see of a rank that does not; see ``Rendezvous.skip``.
        self._left = memoryview(np.zeros(worker.world_size, np.int64).data)  # of nobody, where there are none
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
        return (
            not worker.backend.is_device
            and worker.failpoint is _failpoints.nothing
            and plan.num_slices == 1
            and not plan.is_trial
            and not plan.buffers
            and not function.updates
            and all(item.kind in ("rows", "whole", *_MADE_ANEW) for item in plan.inputs)
        )

    def run(self, worker: Worker, sequence: int, channel: Any) -> Any:
        """Run one call; return ``REPLIED``, or the reply that it ends with, or None where it is no quiet one."""
        lane, variables, prepared = self._lane, worker.variables, self._prepared
        arrays = prepared.bases
        if variables.stored[1]:  # by the call before: it holds if the master says so
            variables.resolve()
        if (
            holds_outputs(worker)
            or not variables.is_plain
            or variables.assigned
            or variables.given
            or variables.whole
            or self._first_down[_RESULT]
        ):
            return None
        variables.to_framework, variables.from_framework = self._to_framework, self._from_framework
        places = self._places if self._numbers.tobytes() == self._known_numbers else self._choose_rows()
        rank_up, lane_up = self._rank_up, self._lane_up
        worker.sequence, worker.lane = sequence, lane
        worker.used_lanes.add(lane.index)
        variables.call_down = lane.down
        lane.called, cell.worker = prepared, worker
        arguments: Any = []
        named: Any = None
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
                for position, rows in places:
                    arguments.append(arrays[position][rows])
                is_flat = self._is_flat and not worker.held.kept_data
                arguments, named = (arguments, {}) if is_flat else self._composed(worker, arguments)
                started = time.monotonic_ns()
                result = self._fn(*arguments, **named)
                ended = time.monotonic_ns()
                lane_up[_FUNCTION_NS] = ended - started
                is_expected = self._publish(worker, result)
            finally:
                worker.is_interruptible = False
        except BaseException as error:  # whatever the user's function raises is an answer
            worker.is_interruptible = False
            failure = error
        arguments = named = None
        if not is_expected:
            outcome = Outcome(result, failure, ended - started)
            result = failure = None
            return go_on(worker, self._plan_id, sequence, outcome)
        result = cell.worker = None
        flush_output(worker)
        if self._assigned:  # not before: the ordinary way would not know of them
            variables.note_stored()
        if worker.peers.is_communicating:
            worker.peers.leave_call(lane)
        self._left[worker.rank] = self._first_down[_CALL]  # as leave_call
        is_touched = prepared.loans.are_touched(self._spans, worker.held.kept_data)
        if is_touched and (problem := settle_inputs(worker, prepared)) is not None:
            return problem
        rank_up[_PHASE] = _IDLE
        rank_up[_OUTPUT_NBYTES] += self._slots.nbytes
        if ended - worker.rss_measured > RSS_INTERVAL_NS:
            worker.measure(ended)
        os.write(channel.write_fd, DOORBELL.pack(_DONE, 0, sequence, 0))
        if reduce(or_, self._sleeps, 0) & 1:  # over a collective that this rank had no use for; others look again
            lane.communicator.wake_sleepers()  # type: ignore[union-attr]
        return REPLIED

    def _choose_rows(self) -> list[tuple[int, Any]]:
        """Return which part of which array the function gets by the master's numbers, which have changed."""
        known, prepared = self._numbers.tobytes(), self._prepared
        numbers = self._lane.down[self._rank].tolist()
        self._low, self._high = low, high = numbers[Down.LOW], numbers[Down.HIGH]
        places: list[tuple[int, Any]] = []
        self._others = []
        for position, item in enumerate(prepared.plan.inputs):
            indices = prepared.indices_for(item) if item.kind == "rows" else None
            if indices is not None or item.kind in _MADE_ANEW:
                self._others.append((position, item, None if indices is None else indices[low:high]))
            else:
                places.append((position, ... if item.kind == "whole" else row_range(item, numbers, low, high)))
        if self._to_framework is not None:
            self._spans = prepared.loans.spans(self._lane.executor.inputs.lent_rows(prepared, low, high))
        self._places, self._known_numbers = places, known
        return places

    def _composed(self, worker: Worker, arguments: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Return what the function gets by position and by keyword; so far ``arguments`` are views of arrays."""
        prepared, low, high = self._prepared, self._low, self._high
        if worker.held.kept_data:
            worker.held.renew_data(prepared)
        objects: Sequence[Any] = ()
        if prepared.pickle_view is not None:
            objects = self._lane.executor.inputs.load_objects(prepared, worker.variables)
        for position, item, indices in self._others:
            if indices is not None:
                value = worker.backend.take_rows(prepared.bases[position], indices)
            elif item.kind == "resident":
                value = worker.residents.get(item.segment_id).value
            elif item.kind == "object":
                value = objects[item.offset]
            else:
                value = worker.variables.argument(item, prepared.local_indices, low, high, low)
            arguments.insert(position, value)
        to_framework = self._to_framework
        if to_framework is not None:
            for position, dtype in self._arrays:
                value = to_framework(arguments[position])
                arguments[position] = as_dtype(value, dtype) if dtype else value
        if prepared.nests:
            arguments = nested(arguments, prepared.nests)
        first = len(arguments) - len(self._keywords)
        return arguments[:first], dict(zip(self._keywords, arguments[first:]))

    def _publish(self, worker: Worker, result: Any) -> bool:
        """Bring outputs and new values of variables to their places, if they look like those of the call before."""
        peers, variables = worker.peers, worker.variables
        if peers.is_communicating:
            peers.complete(self._lane)
        if variables.given or not self._slots.fill(result):
            return False
        return variables.write_as_before(self._assigned) if variables.assigned or self._assigned else True


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
    """Have what was printed reach the master, where it does not go to the master's own streams.

    A copy of this process that the function has forked ends here: it must neither print it once more nor answer.
    """
    if os.getpid() != worker.pid:
        os._exit(0)
    for stream in () if worker.is_inline else (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BaseException:  # the user's function closed or replaced it: whatever it does must not end the worker
            continue
