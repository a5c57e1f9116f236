"""One call on one rank: its inputs -> the user's function, slice by slice -> the accumulated result.

Knows plans, no processes and no channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synk._pure.shards import shard_bounds
from synk._wire.control import Down, Up, control_blocks
from synk._wire.memory import Segment
from synk._worker.call.inputs import Inputs
from synk._worker.call.outputs import Outputs
from synk._worker.call.slices import run_slices
from synk._worker.held.pages import give_back
from synk._worker.held.plans import PreparedPlan
from synk._worker.held.variables import VariableStore
from synk.backends import Backend
from synk.communicators._shm import ShmCommunicator


class Executor:
    """Runs prepared plans in one lane of a rank.

    Attributes
    ----------
    inputs : Inputs
    outputs : Outputs
        Of the last call of the lane, kept until they are published and assembled.
    """

    def __init__(self, rank: int, backend: Backend, down: np.ndarray) -> None:
        self.rank = rank
        self.backend = backend
        self._down = down
        inputs = self.inputs = Inputs(rank, backend, down)
        self.outputs = Outputs(rank, backend, down, meanwhile=lambda: inputs.look_ahead(False))

    def run(self, prepared: PreparedPlan, variables: VariableStore) -> Any:
        """Call the user's function on this rank's rows and return its result, accumulated over the slices."""
        ahead = self.inputs.take_ahead(prepared)
        self.outputs.forget()
        plan, function = prepared.plan, prepared.function
        numbers = self._down[self.rank].tolist()
        low, high = numbers[Down.LOW], numbers[Down.HIGH]
        arrays = None if ahead is None else self.inputs.join(ahead)
        is_sliced = plan.num_slices > 1 and not plan.is_rowless
        variables.begin(function, is_sliced, self._down)
        objects = self.inputs.load_objects(prepared, variables)
        if prepared.whole:
            variables.show(prepared.whole)
        if is_sliced:
            bounds = [(low + a, low + b) for a, b in shard_bounds(high - low, plan.num_slices) if b > a]
            result = run_slices(
                function,
                self.backend,
                bounds or [(low, high)],
                lambda start, stop: self._call(prepared, numbers, start, stop, objects, variables),
                lambda start, stop: self.take_back(prepared, start, stop),
            )
        else:
            result = self._call(prepared, numbers, low, high, objects, variables, arrays)
        if function.updates:
            variables.finish_updates()
        variables.check_given()
        variables.whole = {}  # what still refers to it now is the function
        return result

    def _call(
        self,
        prepared: PreparedPlan,
        numbers: list[int],
        low: int,
        high: int,
        objects: Sequence[Any],
        variables: VariableStore,
        arrays: list[Any] | None = None,
    ) -> Any:
        function = prepared.function
        args, kwargs = self.inputs.arguments(prepared, numbers, low, high, objects, variables, arrays)
        result = function.fn(*args, **kwargs)
        return variables.take_updates(function, result, high - low) if function.updates else result

    def run_part(
        self, prepared: PreparedPlan, variables: VariableStore, low: int, high: int, take: Callable[[Any], Any]
    ) -> Any:
        """Call the function on some of this rank's rows, on trial after the call; return what ``take`` makes of it."""
        numbers = self._down[self.rank].tolist()
        first = numbers[Down.LOW]
        variables.begin(prepared.function, False, self._down)
        shards = [item.segment_id for item in prepared.plan.inputs if item.kind == "shard"]
        variables.show_rows(numbers[Down.HIGH] - first, low - first, high - first, shards)
        objects = self.inputs.load_objects(prepared, variables)
        try:
            return take(self._call(prepared, numbers, low, high, objects, variables))
        finally:
            self.take_back(prepared, low, high)

    def forget(self) -> None:
        """Drop the outputs of the last call, and inputs that were brought ahead."""
        self.outputs.forget()
        self.inputs.forget()

    # -- what the function keeps of its inputs, and writes into them --------------------------------------------------

    def take_back(self, prepared: PreparedPlan, low: int, high: int) -> None:
        """Drop what the function has written into its inputs, if they are tensors, when it got these rows."""
        for address, nbytes in prepared.loans.written(self.inputs.lent_rows(prepared, low, high)):
            self.outputs.let_go()
            give_back(address, nbytes)

    def settle_inputs(self, prepared: PreparedPlan) -> bool:
        """When a function has returned, see to what it keeps of its inputs and has written into them.

        Return whether it keeps plain arrays. They have their own memory now, and the segment must be mapped anew.
        """
        low, high = self._down[self.rank, Down.LOW : Down.HIGH + 1].tolist()
        loans = prepared.loans
        if loans.is_kept():
            self.outputs.let_go()
            if loans.is_kept():
                self.backend.forget_segment(loans.staging)
                loans.make_own(self.inputs.lent_rows(prepared, low, high))
                return True
        self.take_back(prepared, low, high)
        return False


_CALL = int(Down.CALL)


class WorkerLane:
    """What a call has to itself on its rank; see ``synk._master.state.lanes``."""

    def __init__(self, index: int, rank: int, world_size: int, control: Segment, backend: Backend) -> None:
        self.index = index
        self.down, self.up = control_blocks(control.buffer, world_size, index)
        self.executor = Executor(rank, backend, self.down)
        self.first_down = memoryview(self.down[0])
        self.own_up = memoryview(self.up[rank])  # stores through it cost a third of NumPy's
        self.published = memoryview(self.up.T[Up.PUBLISHED])
        self.collective: Segment | None = None
        self.communicator: ShmCommunicator | None = None
        self.called: PreparedPlan | None = None  # the plan of the last call
        self._ranks: tuple[int, tuple[int, ...]] = -1, ()  # and the number of the call

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that run the call under way, ascending."""
        call = self.first_down[_CALL]
        if self._ranks[0] != call:
            self._ranks = call, tuple(self.rows())
        return self._ranks[1]

    def rows(self) -> dict[int, int]:
        """Return how many rows each rank has that runs the call under way."""
        return {rank: row[Down.ROWS] for rank, row in enumerate(self.down.tolist()) if row[Down.PARTICIPATES]}
