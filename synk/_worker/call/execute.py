"""One call on one rank: its inputs -> the user's function, slice by slice -> the accumulated result.

This file knows plans, but neither processes nor channels.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from synk._pure.shards import shard_bounds
from synk._wire.control import Down, Up, control_blocks
from synk._wire.memory import Segment
from synk._worker.call.inputs import Inputs
from synk._worker.call.outputs import Outputs
from synk._worker.call.slices import run_slices
from synk._worker.held.plans import PreparedPlan
from synk._worker.held.rows import Rows
from synk._worker.held.variables import VariableStore
from synk.backends import Backend, DeviceBackend
from synk.communicators._shm import ShmCommunicator


class PlanExecutor:
    """Runs prepared plans in one lane of a rank.

    Attributes
    ----------
    inputs : Inputs
    outputs : Outputs
        The outputs of the lane's last call, kept until they are published and assembled.
    function_ns, ended : int
        How long the user's function took in the last call, and when it returned by the monotonic clock.
    """

    def __init__(self, rank: int, backend: Backend, down: np.ndarray) -> None:
        self._backend = backend
        self._down = down
        self._own_down = memoryview(down[rank])
        self._own_rows = self._own_down[Down.PARTICIPATES : Down.LOCAL_STEP + 1]  # the numbers by which rows are chosen
        inputs = self.inputs = Inputs(rank, backend, down)
        self.outputs = Outputs(rank, backend, down, meanwhile=lambda: inputs.look_ahead(False))
        self.function_ns = self.ended = 0

    def run(self, prepared: PreparedPlan, variables: VariableStore) -> Any:
        """Call the user's function on this rank's rows and return its result, accumulated over the slices."""
        if self.outputs.stage:
            # The lane's last call is over: the master uses a lane again only when it has collected the call before.
            self.outputs.forget()
        if variables.plan is not prepared:
            variables.begin(prepared.function, prepared.is_sliced, self._down, prepared)
        numbers = self._own_rows.tobytes()
        if numbers != prepared.numbers:  # other rows than in the plan's last call
            prepared.choose(numbers, self._own_down)
        rows, function = prepared.rows, prepared.function
        assert rows is not None
        if prepared.is_plain:
            bases, arguments = prepared.bases, []
            for position, part in rows.views.items():
                # A new view, because the function may change its shape. Nobody else may refer to it: if anything does
                # after the call, the function has kept it (InputViews.is_kept).
                arguments.append(bases[position][part])
            began = time.monotonic_ns()
            result = function.fn(*arguments)
            self.ended = time.monotonic_ns()
            self.function_ns = self.ended - began
        else:
            result = self._run(prepared, rows, variables)
        if variables.given:
            variables.check_given()
        return result

    def _run(self, prepared: PreparedPlan, rows: Rows, variables: VariableStore) -> Any:
        """Run a call that needs more than views of arrays."""
        ahead = self.inputs.take_ahead(prepared) if self._backend.is_device else None
        objects = () if prepared.pickle_view is None else self.inputs.load_objects(prepared, variables)
        if prepared.is_sliced:
            bounds = shard_bounds(rows.high - rows.low, prepared.plan.num_slices)
            slices = [prepared.cut(self._own_down, rows.low + a, rows.low + b) for a, b in bounds if b > a]
            result = self._run_slices(prepared, slices or [rows], objects, variables)
        else:
            result = self._call(prepared, rows, objects, variables, ahead)
        if prepared.function.updates:
            variables.finish_updates()
        return result

    def _run_slices(
        self, prepared: PreparedPlan, parts: Sequence[Rows], objects: Sequence[Any], variables: VariableStore
    ) -> Any:
        return run_slices(
            prepared.function, self._backend, parts, lambda part: self._call(prepared, part, objects, variables)
        )

    def _call(
        self,
        prepared: PreparedPlan,
        rows: Rows,
        objects: Sequence[Any],
        variables: VariableStore,
        ahead: dict[int, Any] | None = None,
    ) -> Any:
        """Call the function on some rows."""
        function = prepared.function
        args, kwargs = self.inputs.arguments(prepared, rows, objects, variables, ahead)
        began = time.monotonic_ns()
        if self._backend.is_device:
            cast(DeviceBackend, self._backend).note_begin()
        result = function.fn(*args, **kwargs)
        if self._backend.is_device:
            cast(DeviceBackend, self._backend).note_end()
        self.ended = time.monotonic_ns()
        self.function_ns += self.ended - began
        return variables.take_updates(function, result, rows.high - rows.low) if function.updates else result

    def note_times(self, own_up: memoryview, received: int) -> None:
        """Write when this rank received the call, began and ended its function, and had its outputs in place.

        A function on a device has ended when the device has done what it queued.
        """
        if self._backend.is_device:
            backend = cast(DeviceBackend, self._backend)
            own_up[Up.H2D_NBYTES], own_up[Up.D2H_NBYTES], own_up[Up.PAGEABLE_NBYTES] = backend.take_copied()
            queued_ns = max(backend.take_work_ns() - self.function_ns - own_up[Up.WAIT_NS], 0)
            self.ended += queued_ns
            self.function_ns += queued_ns
            own_up[Up.FUNCTION_NS] = self.function_ns
        own_up[Up.RECEIVED_NS] = received
        # With slices: as if they followed each other. What the function waited for other ranks is not in function_ns.
        own_up[Up.BEGAN_NS] = self.ended - self.function_ns - own_up[Up.WAIT_NS]
        own_up[Up.ENDED_NS] = self.ended
        own_up[Up.PUBLISHED_NS] = time.monotonic_ns()

    def forget(self) -> None:
        """Drop the outputs of the last call, and inputs that were brought ahead of the next one."""
        self.outputs.forget()
        self.inputs.forget()

    def settle_inputs(self, prepared: PreparedPlan) -> Segment | None:
        """Give inputs that the function has kept pages of their own. Return their segment, to be mapped again."""
        self.outputs.let_go()  # they may be views of the inputs
        inputs = prepared.inputs
        if inputs.staging is None or not inputs.is_kept():
            return None
        self._backend.forget_segment(inputs.staging)
        inputs.make_own(prepared.cut(self._own_down, self._own_down[Down.LOW], self._own_down[Down.HIGH]))
        return inputs.staging


_CALL = int(Down.CALL)


class WorkerLane:
    """The things that a call in flight has to itself on its rank; see ``synk._master.state.lanes``.

    Attributes
    ----------
    bit : int
        The lane's place in ``Worker.used_lanes``.
    left, sleeps : memoryview of int64
        The words by which a rank goes through a call without communicating; see ``Rendezvous.skip_words``. While there
        is no communicator, nobody reads ``left``, and ``sleeps`` is empty.
    """

    def __init__(self, index: int, rank: int, world_size: int, control: Segment, backend: Backend) -> None:
        self.bit = 1 << index
        self.down, self.up = control_blocks(control.buffer, world_size, index)
        self.executor = PlanExecutor(rank, backend, self.down)
        self.first_down = memoryview(self.down[0])
        self.own_up = memoryview(self.up[rank])  # stores through it cost a third of NumPy's
        self.published = memoryview(self.up.T[Up.PUBLISHED])
        self.collective: Segment | None = None
        self.communicator: ShmCommunicator | None = None
        self.has_waited = False
        self.left, self.sleeps = (memoryview(np.zeros(count, np.int64).data) for count in (world_size, 0))
        self.called: PreparedPlan | None = None  # the plan of the last call
        self._ranks: tuple[int, tuple[int, ...]] = -1, ()  # a cache: the number of a call, and its ranks

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that run the current call, ascending."""
        call = self.first_down[_CALL]
        if self._ranks[0] != call:
            self._ranks = call, tuple(self.rows())
        return self._ranks[1]

    def note_waits(self, waited_ns: int) -> None:
        """Write how long this rank has waited for others in the call, and do not count that as work of the function."""
        self.has_waited = waited_ns > 0
        self.own_up[Up.WAIT_NS] = waited_ns = min(waited_ns, self.executor.function_ns)
        self.executor.function_ns -= waited_ns

    def rows(self) -> dict[int, int]:
        """Return the number of rows of each rank that runs the current call."""
        return {rank: row[Down.ROWS] for rank, row in enumerate(self.down.tolist()) if row[Down.PARTICIPATES]}
