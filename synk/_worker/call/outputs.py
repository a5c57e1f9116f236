"""The outputs of a call on its rank: published in its slot, assembled if they are large, and kept until then."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import Any

import numpy as np

from synk._pure.dtypes import foreign_name
from synk._pure.output_ops import match_ops, wanted_leaves
from synk._pure.trees import flatten, key_orders, output_names, skeleton_of
from synk._wire.memory import Segment
from synk._wire.messages import LARGE_NBYTES, Layout, Status
from synk._worker.call.large_outputs import LargeOutputs, own
from synk._worker.call.values import take_whole, taken
from synk._worker.held.plans import LoadedFunction, OutputSlots, PreparedPlan, is_plain_output, is_single_value
from synk._worker.held.slots import NO_VIEW, Slots
from synk._worker.held.variables import VariableStore
from synk.backends import Backend
from synk.errors import SharedMemoryError


class Stage(IntEnum):
    """How far the outputs of a call have got."""

    EMPTY = 0  # none are held
    UNPUBLISHED = 1  # there is no room for them yet
    UNASSEMBLED = 2  # some are large, and not yet in the result
    DONE = 3  # nobody needs them any more


# Members of an enumeration are slow to look up.
_EMPTY, _UNPUBLISHED, _UNASSEMBLED, _DONE = Stage.EMPTY, Stage.UNPUBLISHED, Stage.UNASSEMBLED, Stage.DONE


class Outputs:
    """The outputs of the last call of one lane.

    Parameters
    ----------
    rank : int
    backend : Backend
    down : ndarray
        The control block that the master writes for the lane.
    meanwhile : callable
        Called while the device may still be computing the outputs.

    Attributes
    ----------
    slots : Slots
    large : LargeOutputs
    stage : Stage
    """

    def __init__(self, rank: int, backend: Backend, down: np.ndarray, meanwhile: Callable[[], None]) -> None:
        self._backend = backend
        self._meanwhile = meanwhile
        self.slots = Slots(rank, down)
        self.large = LargeOutputs(backend, self.slots)
        self.stage = _EMPTY
        self._values: list[Any] = []
        self._lost: BaseException | None = None  # why the outputs no longer exist

    def repeat(self, prepared: PreparedPlan, result: Any, variables: VariableStore) -> bool:
        """Publish a result that looks like that of the plan's last call, to the same places. Else return False."""
        slots, layout = prepared.slots, prepared.layout
        if slots is None or layout is None or not slots.fill(result):
            return False
        return not (variables.assigned or layout.assigned) or variables.store_as_before(layout.assigned)

    def publish(self, prepared: PreparedPlan, result: Any, variables: VariableStore) -> tuple[Status, Any]:
        """Write the outputs to the rank's slot, and new values of variables to their second buffers.

        Return the status and the body of the reply. The body is None if there is nothing new, else
        ``(layout or None, objects)``: the layout if it differs from that of the plan's last call, and the outputs that
        have no place in the slot, each with its name: neither arrays nor plain and short. What is plain is pickled.
        """
        function, layout = prepared.function, prepared.layout
        subset = prepared.plan.output_subset
        if function.whole is not None:
            result = take_whole(result, function.whole)
        values, structure = flatten(result)
        orders = key_orders(result)
        if layout is None or structure != prepared.structure or orders != prepared.orders:
            skeleton = skeleton_of(structure, len(values))
            prepared.ops = match_ops(function.ops, skeleton, len(values), repr(function.name))
            prepared.structure, prepared.orders = structure, orders
            layout = prepared.layout = None
        else:
            skeleton = layout.skeleton
        wanted = wanted_leaves(skeleton, subset, function.name)
        before = None if layout is None else layout.leaves
        outputs, leaves, objects = taken(
            self._backend, function, values, prepared.ops, output_names(skeleton), wanted, before
        )
        assigned = variables.assignments() if variables.assigned else ()
        is_new = layout is None or layout.leaves != leaves or layout.assigned != assigned
        if is_new:
            layout = prepared.layout = Layout(skeleton, leaves, assigned)
            prepared.slot_key = None
        # From here on the lane holds the outputs: ``forget`` drops them, wherever the call is broken off.
        self.stage, self._values = _UNPUBLISHED, outputs
        status = self._fill_slot(prepared)
        if assigned and not variables.store():
            status = Status.UNPUBLISHED
        self._note_published(prepared, status)
        self._meanwhile()
        self._backend.synchronize()
        is_complete = status == Status.DONE and not objects and subset is None
        prepared.slots = self._slots_of(prepared, result, values) if is_complete else None
        return status, (layout if is_new else None, objects) if is_new or objects else None

    def _slots_of(self, prepared: PreparedPlan, result: Any, values: Sequence[Any]) -> OutputSlots | None:
        """Return where the next call's outputs go if they look like these. None unless a quick check can tell."""
        function, layout = prepared.function, prepared.layout
        assert layout is not None
        is_plain = all(
            is_single_value(value) if leaf.dtype is None else is_plain_output(value) or _is_converted(value, function)
            for value, leaf in zip(values, layout.leaves)
        )
        is_small = all(
            view is not NO_VIEW and view.nbytes < LARGE_NBYTES and (view.dtype.kind != "V" or foreign_name(view.dtype))
            for view in prepared.slot_views
        )
        if not (is_plain and is_small) or self._backend.is_device:
            return None
        return OutputSlots(result, values, layout, prepared.slot_views, prepared.structure, function)

    def _fill_slot(self, prepared: PreparedPlan) -> Status:
        if not self.slots.lay_out(prepared):
            return Status.UNPUBLISHED
        # The slot may be torn meanwhile. Other ranks read it only after ``Peers.meet`` or the master's next message,
        # and the master reads it only after the reply.
        self.large.forget()
        is_first = self.slots.is_first
        for position, (array, view, op) in enumerate(zip(self._values, prepared.slot_views, prepared.ops)):
            if type(array) is bytes:
                view.data[: len(array)] = array
                continue
            if array is None or (op.is_of_rank_0 and not is_first):
                continue
            if array.nbytes < LARGE_NBYTES:
                self._backend.to_host(array, view)
            else:
                self.large.publish(position, array, view, op)
        return Status.DONE

    def _note_published(self, prepared: PreparedPlan, status: Status) -> None:
        """Move on to the next stage if the outputs were published."""
        assert prepared.layout is not None
        if status == Status.DONE:
            has_large = any(leaf.nbytes >= LARGE_NBYTES for leaf in prepared.layout.leaves)
            self.stage = _UNASSEMBLED if has_large else _DONE

    def republish(self, prepared: PreparedPlan, variables: VariableStore) -> Status:
        """Publish the outputs of the last call again, into new slots and buffers."""
        if self._lost is not None:
            raise self._lost
        if variables.assigned and not variables.store():
            raise SharedMemoryError("cannot store the new value of a shared variable: its buffer has no room for it.")
        status = self._fill_slot(prepared)
        self._note_published(prepared, status)
        self._backend.synchronize()
        return status

    def assemble(self, prepared: PreparedPlan, result: Segment) -> None:
        """Write this rank's part of the large outputs to the result segment."""
        if self.stage is not _UNASSEMBLED:  # only other ranks have large outputs
            return
        if self._lost is not None:
            raise self._lost
        self.large.assemble(prepared, prepared.moves, result)
        self._backend.synchronize()
        self.stage = _DONE

    # -- no longer than needed ----------------------------------------------------------------------------------------

    def let_go(self) -> None:
        """Drop the outputs of the last call, which may be views of its inputs. Keep copies if they are still needed."""
        if self.stage is _DONE:
            self.forget()
        else:
            self.detach()

    def detach(self) -> None:
        """Copy outputs of the last call whose memory still belongs to the user's code, which runs next.

        A function may return a buffer that it fills again in the next call, or state that it changes in place. A
        repeated call keeps nothing that long: its outputs are published and assembled before it ends.
        """
        if self.stage is _EMPTY or self._lost is not None:
            return
        if self.stage is _UNPUBLISHED:
            self.large.forget()
        else:
            self._values = [None] * len(self._values)
        try:
            self.large.detach()
            for position, array in enumerate(self._values):
                if array is not None and type(array) is not bytes:
                    self._values[position] = own(self._backend, self._values, position)
        except Exception as error:  # no memory: the message that asks for the outputs raises this
            self._lost = error
            self._values = []
            self.large.forget()

    def forget(self) -> None:
        """Drop the outputs of the last call."""
        self.stage, self._lost = _EMPTY, None
        self._values = []
        self.large.forget()


def _is_converted(value: Any, function: LoadedFunction) -> bool:
    """Whether an output is an array of the function's framework."""
    return function.from_framework is not None and type(function.from_framework(value)) is np.ndarray
