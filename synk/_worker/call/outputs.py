"""The outputs of a call on its rank: into its slot, and assembled where they are large; kept until then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synk._pure.dtypes import foreign_name
from synk._pure.ops import Reduction
from synk._pure.output_ops import match_ops, wanted_leaves
from synk._pure.table_outputs import num_rows
from synk._pure.trees import flatten, output_name, skeleton_of
from synk._wire.memory import Segment
from synk._wire.messages import LARGE_NBYTES, Layout, Leaf, Move, Status
from synk._worker.call.large_outputs import LargeOutputs, own
from synk._worker.call.values import Object, Partial, array_or_object, take_lists
from synk._worker.held.plans import LoadedFunction, OutputSlots, PreparedPlan, is_plain_output
from synk._worker.held.slots import NO_VIEW, Slots
from synk._worker.held.variables import VariableStore
from synk.backends import Backend
from synk.errors import SharedMemoryError


class Outputs:
    """The outputs of the last call of one lane.

    Parameters
    ----------
    rank : int
    backend : Backend
    down : ndarray
        The numbers that the master writes for the lane.
    meanwhile : callable
        Called while the device may still be at work on the outputs.

    Attributes
    ----------
    slots : Slots
    large : LargeOutputs
    held_plan : PreparedPlan or None
        That of the call, as long as anything of it is held.
    is_waiting : bool
        Whether outputs are still to be assembled.
    nbytes : int
    """

    def __init__(self, rank: int, backend: Backend, down: np.ndarray, meanwhile: Callable[[], None]) -> None:
        self._backend = backend
        self._meanwhile = meanwhile
        self.slots = Slots(rank, down)
        self.large = LargeOutputs(backend, self.slots)
        self.held_plan: PreparedPlan | None = None
        self.is_waiting = False
        self.nbytes = 0
        self._values: list[Any] = []
        self._is_published = False
        self._lost: BaseException | None = None  # why the outputs are there no more
        self._result: Any = None

    def publish(self, prepared: PreparedPlan, result: Any, variables: VariableStore) -> tuple[Status, Any]:
        """Bring the outputs into the rank's slot, and new values of variables into their second buffers; return the
        status and the reply's body (None: nothing new).

        The body is ``(layout or None, objects)``: the layout where it differs from that of the plan's last call, and
        the outputs that are no arrays.
        """
        slots = prepared.slots
        is_assigning = variables.assigned or (prepared.layout is not None and prepared.layout.assigned)
        if slots is not None and not is_assigning and slots.fill(result):
            self.nbytes = slots.nbytes
            return Status.DONE, None
        function = prepared.function
        subset = prepared.plan.output_subset
        if function.lists is not None:
            result = take_lists(result, function.lists)
        values, structure = flatten(result)
        if prepared.layout is None or structure != prepared.structure:
            skeleton = skeleton_of(structure, len(values))
            prepared.ops = match_ops(function.ops, skeleton, len(values), repr(function.name))
            prepared.structure = structure
            prepared.layout = None
        else:
            skeleton = prepared.layout.skeleton
        outputs: list[Any] = []
        leaves: list[Leaf] = []
        objects: list[Any] = []
        wanted = wanted_leaves(skeleton, subset, function.name)
        for position, (value, op) in enumerate(zip(values, prepared.ops)):
            if wanted is not None and position not in wanted:
                value = None  # neither reduced nor sent
                outputs.append(None)
                leaves.append(Leaf((), None))
                continue
            partial_of = None
            if isinstance(value, Partial):
                value, partial_of = value.value, value.dtype
            array = array_or_object(self._backend, value, op, output_name(skeleton, position), function)
            if self._backend.is_array(array):
                outputs.append(array)
                leaves.append(Leaf(tuple(array.shape), array.dtype, function.is_tensor(value), partial_of))
            else:
                outputs.append(None)
                # Of objects only tables are reduced, and these have rows.
                leaves.append(Leaf((num_rows(array.value),) if isinstance(op, Reduction) else (), None))
                objects.append(array.value if isinstance(array, Object) else array)
        layout = prepared.layout
        self.nbytes = sum(leaf.nbytes for leaf in leaves)
        assigned = variables.assignments() if variables.assigned else ()
        is_new = layout is None or layout.leaves != tuple(leaves) or layout.assigned != assigned
        if is_new:
            layout = prepared.layout = Layout(skeleton, tuple(leaves), assigned)
            prepared.slot_key = None
        self.held_plan, self._values, self._result = prepared, outputs, result
        self.is_waiting = any(leaf.nbytes >= LARGE_NBYTES for leaf in leaves)
        status = self._fill_slot(prepared)
        if assigned and not variables.store():
            status = Status.UNPUBLISHED
        self._is_published = status == Status.DONE
        self._meanwhile()
        self._backend.synchronize()
        is_complete = status == Status.DONE and not objects and subset is None
        prepared.slots = self._slots_of(prepared, result, values) if is_complete else None
        return status, (layout if is_new else None, objects) if is_new or objects else None

    def _slots_of(self, prepared: PreparedPlan, result: Any, values: Sequence[Any]) -> OutputSlots | None:
        """Return where the outputs of the next call go if they look like these, where it can be told so easily."""
        function = prepared.function
        is_plain = all(is_plain_output(value) or _is_converted(value, function) for value in values)
        is_small = all(
            view is not NO_VIEW and view.nbytes < LARGE_NBYTES and (view.dtype.kind != "V" or foreign_name(view.dtype))
            for view in prepared.slot_views
        )
        if not (is_plain and is_small) or self._backend.name != "numpy":
            return None
        return OutputSlots(result, values, prepared.slot_views, prepared.structure, function)

    def _fill_slot(self, prepared: PreparedPlan) -> Status:
        if not self.slots.lay_out(prepared):
            return Status.UNPUBLISHED
        self.large.forget()
        is_first = self.slots.is_first
        for position, (array, view, op) in enumerate(zip(self._values, prepared.slot_views, prepared.ops)):
            if array is None or (op.is_of_rank_0 and not is_first):
                continue
            if array.nbytes < LARGE_NBYTES:
                self._backend.to_host(array, view)
            else:
                self.large.publish(position, array, view, op)
        return Status.DONE

    def republish(self, variables: VariableStore) -> Status:
        """Publish the outputs of the last call again, into new slots and buffers."""
        assert self.held_plan is not None
        if self._lost is not None:
            raise self._lost
        if variables.assigned and not variables.store():
            raise SharedMemoryError("cannot store the new value of a shared variable: its buffer has no room for it.")
        status = self._fill_slot(self.held_plan)
        self._is_published = status == Status.DONE
        self._backend.synchronize()
        return status

    def assemble(self, moves: Sequence[Move], result: Segment) -> None:
        """Bring this rank's part of the large outputs into the result segment."""
        if not self.is_waiting:  # its outputs are small, only those of others are large
            return
        if self._lost is not None:
            raise self._lost
        assert self.held_plan is not None
        self.large.assemble(self.held_plan, moves, result)
        self._backend.synchronize()
        self.is_waiting = False

    # -- held no longer than needed -----------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Hold the outputs of the last call no longer, or as copies: they may be views of its inputs."""
        if self.is_waiting or not self._is_published:
            self.detach()
        else:
            self.forget()

    def detach(self) -> None:
        """Copy what is kept of the outputs of the last call and still belongs to the user's code, which runs next.

        A function may return a buffer that it fills again in the next call, or state that it changes in place. In a
        repeated call nothing is kept as long: its outputs are published and assembled before it ends.
        """
        if self.held_plan is None or self._lost is not None:
            return
        self._result = None  # or its arrays would seem to be in use
        if self._is_published:
            self._values = [None] * len(self._values)
        else:
            self.large.forget()
        try:
            self.large.detach()
            for position, array in enumerate(self._values):
                if array is not None:
                    self._values[position] = own(self._backend, self._values, position)
        except Exception as error:  # no room: whoever asks for them is told
            self._lost = error
            self._values = []
            self.large.forget()

    def forget(self) -> None:
        """Drop the outputs of the last call."""
        self.is_waiting = False
        self.held_plan = self._result = self._lost = None
        self._values = []
        self.large.forget()


def _is_converted(value: Any, function: LoadedFunction) -> bool:
    """Whether an output is an array of the function's framework."""
    return function.from_framework is not None and type(function.from_framework(value)) is np.ndarray
