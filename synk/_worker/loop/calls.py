"""A call on its rank, from its plan to its reply, and what the master may ask for after that.

All calls go this one way. What stays the same as in the plan's last call is compiled (``PreparedPlan``), so most steps
have a short cut. If it does not fit (other rows, another output), the step is done in full and kept for the next call.
"""

from __future__ import annotations

from typing import Any

from synk._wire.control import Down, Phase, Traits, Up
from synk._wire.messages import IS_ASSEMBLED, Body, Plan, Status
from synk._worker.held.plans import PreparedPlan
from synk._worker.rank import Reply, Worker

# Members of an enumeration are slow to look up.
_PHASE = int(Up.PHASE)
_FUNCTION, _PUBLISHING, _REDUCING = int(Phase.FUNCTION), int(Phase.PUBLISHING), int(Phase.REDUCING)
_RESULT, _DONE = int(Down.RESULT), Status.DONE


def run_call(worker: Worker, plan_id: int, body: Body | None) -> Reply:
    """Call the function and publish its outputs. Assemble large ones here if all ranks have got that far."""
    lane, held, peers = worker.lane, worker.held, worker.peers
    executor = lane.executor
    reach = worker.failpoint if worker.is_armed else None
    if reach:
        reach("call.received")
    if body is not None and isinstance(body.content, Plan):
        lane.called = None
        held.prepare(body.content)
    prepared = lane.called = held.plans[plan_id]
    if reach:
        reach("call.before_function")
    if held.kept_data:
        held.renew_data(prepared)
    worker.own_up[_PHASE] = _FUNCTION
    result = _try(worker, prepared) if prepared.plan.is_trial else executor.run(prepared, worker.variables)
    if peers.is_communicating:
        peers.complete(lane)
    if reach:
        reach("call.after_function")
    status, content = _DONE, None
    if not executor.outputs.repeat(prepared, result, worker.variables):
        worker.own_up[_PHASE] = _PUBLISHING
        status, content = executor.outputs.publish(prepared, result, worker.variables)
    if peers.group is not None:
        peers.check_group(lane)
    if reach:
        reach("call.published")
    result_id = lane.first_down[_RESULT]
    if not result_id:
        return status, 0, content
    looks_as_before = status == _DONE and (content is None or content[0] is None)
    if not (looks_as_before and peers.meet(lane)):
        return status, 0, content
    worker.own_up[_PHASE] = _REDUCING
    assemble(worker, result_id, None)
    return status, IS_ASSEMBLED, content


def _try(worker: Worker, prepared: PreparedPlan) -> Any:
    """Call a copy of the function on trial, and undo what it does to this process."""
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
    """Write this rank's part of the large outputs to the result. The body says which part, if that is new."""
    worker.failpoint("reduce.before")
    lane = worker.lane
    prepared = lane.called
    assert prepared is not None
    if body is not None and body.content is not None:
        prepared.moves = body.content
    lane.executor.outputs.assemble(prepared.moves, worker.held.segments[result_id])
    worker.peers.check_group(lane)
    worker.failpoint("reduce.after")
    return Status.DONE, 0, None


def publish_again(worker: Worker, value: int, body: Body | None) -> Reply:
    """Publish the outputs of the last call into larger slots."""
    return worker.executor.outputs.republish(worker.variables), 0, None
