"""The user's code on a rank: what it raises becomes a reply, and a call goes from its plan to its reply.

All calls take the same path. What stays the same as in the plan's last call is compiled (``PreparedPlan``), so most
steps have a short cut. If it does not fit (other rows, another output), the step is done in full and kept for the next
call.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from synk._wire.control import Down, Phase, Up, is_interrupted
from synk._wire.messages import IS_ASSEMBLED, IS_COLLATERAL, Body, Plan, Status
from synk._worker.failures import pack_failure
from synk._worker.member import Interrupted
from synk._worker.process import drop_frames
from synk._worker.rank import Worker
from synk.errors import SynkError

Reply = tuple[Status, int, Any]
"""The status and flags of a reply, and its body before it is pickled."""

# Members of an enumeration are slow to look up.
_PHASE = int(Up.PHASE)
_FUNCTION, _PUBLISHING, _REDUCING = int(Phase.FUNCTION), int(Phase.PUBLISHING), int(Phase.REDUCING)
_RESULT, _INTERRUPT, _DONE = int(Down.RESULT), int(Down.INTERRUPT), Status.DONE


class DeviceLost(SynkError):
    """The device failed in a way that only a new process can recover from."""


def guarded(worker: Worker, action: Callable[[Worker, Any, Any], Reply], value: Any, body: Any) -> Reply:
    """Return the reply of ``action``, which may run the user's code: exceptions and interrupts become replies."""
    # The signal handler raises an interrupt while ``is_interruptible`` is set: here, and while a result is pickled. It
    # may still do so in the lines that reset it, so the outer ``try`` surrounds the inner ``finally``.
    try:
        try:
            worker.is_interruptible = True
            word = worker.own_down[_INTERRUPT]
            if word >= 0 and is_interrupted(word, worker.sequence):
                raise Interrupted  # the signal came before this message became interruptible
            if not worker.backend.is_device:
                return action(worker, value, body)
            with worker.backend.running():
                return action(worker, value, body)
        except Interrupted:
            raise
        except BaseException as error:  # not even SystemExit may end a worker
            return failed(worker, error)
        finally:
            worker.is_interruptible = False
    except Interrupted:
        worker.is_interruptible = False  # the signal may have come before the line above that says so
        recover(worker, "")
        return Status.INTERRUPTED, 0, None


def failed(worker: Worker, error: BaseException) -> Reply:
    """Return the reply that reports an exception, and drop what its call has left."""
    # A rank that waits for one that failed fails, too. It counts as the cause only if no rank failed otherwise.
    is_collateral = worker.peers.is_collateral(error) or (
        worker.process_group is not None and worker.process_group.is_lost_peer(error)
    )
    error = worker.backend.explain(error, repr(worker.function_name))
    failure = pack_failure(error, worker.number, worker.device, is_collateral=is_collateral)
    drop_frames(error)
    recover(worker, failure.traceback_text)
    return Status.ERROR, IS_COLLATERAL if is_collateral else 0, failure


def end_copy(worker: Worker) -> None:
    """End this process if the function has forked it: it may neither publish, nor print again, nor reply."""
    if worker.is_copy:
        os._exit(0)


def recover(worker: Worker, text: str) -> None:
    """Clean up after a call that failed or was interrupted, so that nothing of it is left on the device."""
    end_copy(worker)
    worker.peers.give_up_started(worker.lane)
    if worker.process_group is not None:
        worker.process_group.abandon()
    worker.executor.forget()
    if not worker.backend.recover():
        raise DeviceLost(f"{text}{worker.device} reports errors to every call from now on: this worker ends.")


def run_call(worker: Worker, plan_id: int, body: Body | None) -> Reply:
    """Call the function and publish its outputs. Assemble large ones here if all ranks have got that far."""
    lane, held, peers = worker.lane, worker.held, worker.peers
    executor = lane.executor
    reach = worker.failpoint if worker.is_armed else None
    if reach:
        reach("call.received")
    if body is not None and isinstance(body.content, Plan):
        lane.called = None  # if this plan cannot be compiled, the last one must not pass for it
        held.prepare(body.content)
    prepared = lane.called = held.plans[plan_id]
    if reach:
        reach("call.before_function")
    worker.own_up[_PHASE] = _FUNCTION
    result = executor.run(prepared, worker.variables)
    # Before anything is published: a message that no rank has received must fail the call, and nothing of a call that
    # fails may be committed.
    if peers.is_communicating or worker.is_copy:
        end_copy(worker)
        peers.complete(lane)
    if reach:
        reach("call.after_function")
    status, content = _DONE, None
    if not executor.outputs.repeat(prepared, result, worker.variables):
        worker.own_up[_PHASE] = _PUBLISHING
        status, content = executor.outputs.publish(prepared, result, worker.variables)
    if peers.group is not None:
        peers.check_group(lane)  # sums of a group that broke meanwhile must not reach the master as a success
    if reach:
        reach("call.published")
    result_id = lane.first_down[_RESULT]
    if not result_id:
        return status, 0, content
    # The master has lent a segment for the large outputs. This rank may write its part only if all ranks have published
    # theirs. Otherwise it replies without, and the master asks for the part once all have replied.
    looks_as_before = status == _DONE and (content is None or content[0] is None)
    if not (looks_as_before and peers.meet(lane)):
        return status, 0, content
    worker.own_up[_PHASE] = _REDUCING
    assemble(worker, result_id, None)
    return status, IS_ASSEMBLED, content


def assemble(worker: Worker, result_id: int, body: Body | None) -> Reply:
    """Write this rank's part of the large outputs to the result. The body says which part, if that is new."""
    worker.failpoint("reduce.before")
    lane = worker.lane
    prepared = lane.called
    assert prepared is not None
    if body is not None and body.content is not None:
        prepared.moves = body.content
    lane.executor.outputs.assemble(prepared, worker.held.segments[result_id])
    worker.peers.check_group(lane)
    worker.failpoint("reduce.after")
    return Status.DONE, 0, None


def publish_again(worker: Worker, value: int, body: Body | None) -> Reply:
    """Publish the outputs of the last call into larger slots."""
    prepared = worker.lane.called
    assert prepared is not None
    return worker.executor.outputs.republish(prepared, worker.variables), 0, None
