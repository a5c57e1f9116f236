"""A call on its rank: run, published, and assembled where the ranks meet; and what the master asks for after that."""

from __future__ import annotations

import time
from typing import Any

from synk._wire.control import Down, Phase, Traits, Up, is_interrupted
from synk._wire.messages import IS_ASSEMBLED, Body, Plan, Status
from synk._worker.held.plans import PreparedPlan
from synk._worker.rank import RSS_INTERVAL_NS, Interrupted, Reply, Worker


class Outcome:
    """What a function returned or raised that the quiet way has run (``synk._worker.loop.quiet``)."""

    def __init__(self, result: Any, failure: BaseException | None, function_ns: int) -> None:
        self._result = result
        self._failure = failure
        self.function_ns = function_ns

    def take(self) -> Any:
        """Return the result, of which nothing is held any more, or raise."""
        result, failure, self._result, self._failure = self._result, self._failure, None, None
        if failure is not None:
            raise failure
        return result


def run_call(worker: Worker, plan_id: int, sequence: int, body: Body | None, outcome: Outcome | None = None) -> Reply:
    """Run a call, or go on with one whose function has been run, and return the reply."""
    worker.failpoint("call.received")
    worker.held.quiet.pop(plan_id, None)  # it relies on what the call before has told the master
    lane, up = worker.lane, worker.own_up
    lane.own_up[Up.FUNCTION_NS] = 0
    try:
        try:
            worker.is_interruptible = True
            interrupt = worker.own_down[Down.INTERRUPT]
            if interrupt >= 0 and is_interrupted(interrupt, sequence):
                raise Interrupted  # the signal came before this call could take it
            reply = _run(worker, _prepared(worker, plan_id, body), outcome)
        except Interrupted:
            raise
        except BaseException as error:  # whatever the user's function raises is an answer
            reply = worker.failed(error)
        finally:
            worker.is_interruptible = False
    except Interrupted:
        worker.is_interruptible = False
        worker.recover("")
        reply = (Status.INTERRUPTED, 0, None)
    worker.peers.leave_call(lane)
    ended = time.monotonic_ns()
    up[Up.PHASE] = Phase.IDLE
    up[Up.OUTPUT_NBYTES] += lane.executor.outputs.nbytes
    if ended - worker.rss_measured > RSS_INTERVAL_NS:
        worker.measure(ended)
    return reply


def _prepared(worker: Worker, plan_id: int, body: Body | None) -> PreparedPlan:
    """Return the plan of a call, which its first message brings."""
    if body is not None and isinstance(body.content, Plan):
        worker.held.prepare(body.content)
    prepared = worker.lane.called = worker.held.plans[plan_id]
    return prepared


def _run(worker: Worker, prepared: PreparedPlan, outcome: Outcome | None) -> Reply:
    """Call the function, publish its outputs, and bring large ones into place where all ranks are as far."""
    lane, up = worker.lane, worker.own_up
    executor = lane.executor
    worker.failpoint("call.before_function")
    if worker.held.kept_data and outcome is None:  # else it was done before the function, and outputs may lie there
        worker.held.renew_data(prepared)
    with worker.backend.running():
        up[Up.PHASE] = Phase.FUNCTION
        if outcome is None:
            started = time.monotonic_ns()
            result = _try(worker, prepared) if prepared.plan.is_trial else executor.run(prepared, worker.variables)
            function_ns = time.monotonic_ns() - started
        else:
            result, function_ns = outcome.take(), outcome.function_ns
            worker.variables.check_given()
        worker.peers.complete(lane)
        lane.own_up[Up.FUNCTION_NS] = function_ns
        up[Up.PHASE] = Phase.PUBLISHING
        worker.failpoint("call.after_function")
        status, body = executor.outputs.publish(prepared, result, worker.variables)
        worker.peers.check_group(lane)
        worker.failpoint("call.published")
        result_id = lane.first_down[Down.RESULT]
        looks_as_before = status == Status.DONE and (body is None or body[0] is None)
        if not (result_id and looks_as_before and worker.peers.meet(lane)):
            return status, 0, body
        worker.failpoint("reduce.before")
        up[Up.PHASE] = Phase.REDUCING
        executor.outputs.assemble(prepared.moves, worker.held.segments[result_id])
        worker.failpoint("reduce.after")
        return status, IS_ASSEMBLED, body


def _try(worker: Worker, prepared: PreparedPlan) -> Any:
    """Call a copy of the function, and undo what it does to this process."""
    from synk._worker.call.trial import Trial

    plan = prepared.plan
    trial = Trial(worker.held.functions[plan.function_id], is_apart=plan.is_apart)
    prepared.function = trial.function
    worker.lane.own_up[Up.TRAITS] = 0
    with trial.running():
        result = worker.executor.run(prepared, worker.variables)
    worker.lane.own_up[Up.TRAITS] = trial.traits | (Traits.COMMUNICATES if worker.peers.is_communicating else 0)
    return result


def assemble(worker: Worker, result_id: int, body: Body | None) -> Reply:
    """Bring this rank's part of the large outputs into the result; the body says which, where that is new."""
    worker.failpoint("reduce.before")
    lane = worker.lane
    prepared = lane.called
    assert prepared is not None
    if body is not None and body.content is not None:
        prepared.moves = body.content

    def act() -> None:
        with worker.backend.running():
            lane.executor.outputs.assemble(prepared.moves, worker.held.segments[result_id])
        worker.peers.check_group(lane)
        worker.failpoint("reduce.after")

    return worker.guarded(act)


def publish_again(worker: Worker) -> Reply:
    """Publish the outputs of the last call into larger slots."""

    def publish() -> Status:
        with worker.backend.running():
            return worker.executor.outputs.republish(worker.variables)

    status, flags, body = worker.guarded(publish)
    return (body, 0, None) if status == Status.DONE else (status, flags, body)
