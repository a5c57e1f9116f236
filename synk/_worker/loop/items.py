"""Items of a map on their rank: each is loaded, the function called with it, and its result pickled at once.

The result is pickled at once, because a function may return the same object for each item, changed in place.
"""

from __future__ import annotations

import pickle
import time
from typing import Any

from synk._pure.nested import PLAIN_TYPES
from synk._pure.texts import short_repr
from synk._wire.control import Phase, Up
from synk._wire.items import Items, ItemsDone
from synk._wire.messages import Body, Failure, Status
from synk._worker.held.pickling import dumps
from synk._worker.held.plans import LoadedFunction
from synk._worker.loop.calls import Reply, end_copy, failed, guarded
from synk._worker.member import Interrupted
from synk._worker.rank import Worker
from synk.errors import SerializationError

_UNLOADED: Any = object()


def run_items(worker: Worker, body: Body | None) -> Reply:
    """Run a function on some items. Return the reply, with the results up to the first item that fails."""
    # If this rank dies here, the master counts all items of the message as unanswered and the map raises.
    assert body is not None
    order: Items = body.content
    worker.forget_lanes(worker.lanes)  # all earlier calls are over
    function = worker.mapped = worker.held.functions[order.function_id]
    try:
        return guarded(worker, _run, function, order)
    finally:
        worker.mapped = None
        worker.variables.abandon()
        worker.own_up[Up.PHASE] = Phase.IDLE


def _run(worker: Worker, function: LoadedFunction, order: Items) -> Reply:
    worker.own_up[Up.PHASE] = Phase.FUNCTION
    started = time.monotonic_ns()
    values: list[bytes] = []
    failure: Failure | None = None
    failed_item = ""
    worker.variables.begin(function, False, worker.down)
    for data in order.pickles:
        item = _UNLOADED
        try:
            item = _loaded(data, function)
            values.append(_pickled(_result(worker, function, item), function))
        except Interrupted:
            raise
        except BaseException as error:  # not even SystemExit may end a worker
            failure = failed(worker, error)[2]
            failed_item = "" if item is _UNLOADED else short_repr(item)
            break
    return Status.DONE, 0, ItemsDone(values, failure, failed_item, time.monotonic_ns() - started)


def _loaded(data: bytes, function: LoadedFunction) -> Any:
    try:
        return pickle.loads(data)
    except Interrupted:
        raise
    except BaseException as error:
        raise SerializationError(
            f"cannot load an item of the map of {function.name!r} on the workers: {type(error).__name__}: {error}. "
            "Its class must be importable there, or defined in the script."
        ) from error


def _result(worker: Worker, function: LoadedFunction, item: Any) -> Any:
    result = function.fn(item)
    end_copy(worker)
    variables = worker.variables
    if variables.given:
        variables.check_given()
    if variables.assigned:
        names = ", ".join(repr(replica.name) for replica in variables.assigned)
        variables.abandon()
        raise TypeError(
            f"cannot assign variable {names} in a map of {function.name!r}: each item runs on one worker alone, and "
            "the others would not have the new value. Return it, and assign in the program; or use synk.function."
        )
    return result


def _pickled(result: Any, function: LoadedFunction) -> bytes:
    try:
        return pickle.dumps(result, protocol=5) if type(result) in PLAIN_TYPES else dumps(result)
    except Interrupted:
        raise
    except BaseException as error:  # __reduce__ of a result is the user's code
        raise SerializationError(
            f"cannot send what {function.name!r} returned: {type(error).__name__}: {error}. Return arrays, numbers or "
            "picklable objects (a generator: return list(...))."
        ) from error
