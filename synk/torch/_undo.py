"""Keeps the state before a step until the step has completed. A step that fails leaves no trace in it on its rank.

It keeps everything that a step may change before the ranks communicate for the last time: buffers, attributes, flags,
the numbers of optimizers, schedulers and other objects, generators, and gradients that the step adds to. Parameters and
the state of optimizers are not kept, because a step usually changes them after its last reduction, and then each rank
can finish by itself. Some steps change them earlier (two optimizers in turn, LBFGS, a moving average of the model).
The first step notices this, and they are kept from the second step on.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import torch

from synk._wire.cell import cell
from synk.torch import _state as states
from synk.torch._checkpoint import load_generators, rank_generators
from synk.torch._reduction import GradientSum


class Undo:
    """Keeps the state of one rank's replicated objects before each step.

    ``keep`` is called before a step, the ``notice_*`` methods while it runs, and the function that ``keep`` returned
    after it, if it failed.
    """

    def __init__(self, objects: Sequence[Any], reduction: GradientSum) -> None:
        self._reduction = reduction
        parts = self._parts = states.parts_of(objects)
        self._objects, self._optimizers = objects, states.optimizers_of(objects)
        self._others = [obj for obj in objects if not (states.is_module(obj) or states.is_optimizer(obj))]
        self._tables: list[dict[str, Any]] = [
            table for part in parts for table in (vars(part), part._parameters, part._buffers, part._modules)
        ]
        self._structure = self._present_structure()
        self._parameters = states.parameters_of(objects)
        self._is_early = False  # whether steps change parameters before they communicate for the last time
        # How many collectives the call had begun when it first changed a parameter; None if it has not changed one.
        self._num_before: int | None = None
        self._has_stepped = False
        reduction.notice_reduction = self.notice_reduction

    # -- before a step ------------------------------------------------------------------------------------------------

    def keep(self, replica: Any) -> Callable[[], bytes | None]:
        """Return a function that restores the present state. It may be called several times.

        It returns None, and changes nothing, if the state cannot be restored. Otherwise it returns bytes that identify
        the gradients that were there: ranks with different bytes have dropped different gradients.
        """
        self._num_before, self._has_stepped = None, False
        self._before, self._flags = self._marks(), [each.requires_grad for each in self._parameters]
        self._reduction.keep()
        is_early = self._is_early
        lists = [(obj.param_groups, [*obj.param_groups]) for obj in self._optimizers]
        groups = [group for _, kept in lists for group in kept]
        lists += [(group["params"], [*group["params"]]) for group in groups]
        tables = [(table, table.copy()) for table in (*self._tables, *groups, *map(vars, self._optimizers))]
        tensors = [each for part in self._parts for each in part._buffers.values() if each is not None]
        tensors += [rate for group in groups for rate in group.values() if isinstance(rate, torch.Tensor)]
        tensors += self._parameters if is_early else []
        # Also large ones that nobody seems to have written: torch's batch norms write without a trace.
        copies = [(each, each.detach().clone(), states.address(each)) for each in tensors]
        of_optimizers = _copied(states.dump_optimizers(self._objects)) if is_early else None
        others = [copy.deepcopy(obj.state_dict()) for obj in self._others]
        num_steps, generators = replica.num_steps, rank_generators()

        def put_back() -> bytes | None:
            # The step may have been broken off at any line, and this runs later, when the program asks for a report. So
            # the parameters' versions and addresses decide whether the step has changed more than was kept.
            if not is_early and (self._has_stepped or self._has_changed()):
                return None
            for held, kept in lists:
                held[:] = kept
            for table, entries in tables:
                table.clear()
                table.update(entries)
            for tensor, copied, place in copies:
                states.write(tensor, copied, is_in_place=states.address(tensor) == place)
            if of_optimizers is not None:
                states.load_optimizers(self._objects, _copied(of_optimizers))
            for obj, state in zip(self._others, others):
                obj.load_state_dict(copy.deepcopy(state))
            for parameter, flag in zip(self._parameters, self._flags):
                parameter.requires_grad_(flag)
            replica.num_steps = num_steps
            load_generators(generators)
            return self._reduction.put_back()

        return put_back

    # -- while it runs ------------------------------------------------------------------------------------------------

    def notice_step(self) -> None:
        """Note that an optimizer is about to step."""
        self._has_stepped = True
        if self._num_before is None:
            self._num_before = cell.worker.num_collectives

    def notice_reduction(self) -> None:
        """Note that the ranks are about to communicate. Parameters that have changed by now are kept in later steps."""
        self._check_structure()
        if self._num_before is None and self._has_changed():
            self._num_before = -1

    def notice_end(self) -> None:
        """Note that the step has completed on this rank, and learn what later steps must keep."""
        self._check_structure()
        if self._num_before is not None and cell.worker.num_collectives > self._num_before:
            self._is_early = True

    def _present_structure(self) -> list[Any]:
        return [each for part in self._parts for own in (part._modules, part._parameters) for each in own.values()]

    def _check_structure(self) -> None:
        """Raise ValueError if the body has added a module or a parameter, or removed one."""
        now = self._present_structure()
        if len(now) != len(self._structure) or not all(map(is_, now, self._structure)):
            raise ValueError(
                "cannot take a step: its body has added, removed or replaced a module or a parameter, which the other "
                "workers and the optimizer do not know of, expected the model as it was. Change it inside of "
                "`with rep.here():`."
            )

    def _has_changed(self) -> bool:
        """Whether a parameter was written or moved since the step began."""
        return self._marks() != self._before

    def _marks(self) -> list[Any]:
        return [(states.version(each), states.address(each)) for each in self._parameters]


def _copied(of_optimizers: dict[str, Any]) -> dict[str, Any]:
    return {**of_optimizers, "tensors": [each.detach().clone() for each in of_optimizers["tensors"]]}
