"""Keeps the state before a step until the step has completed. A step that fails leaves no trace on its rank.

It keeps everything that a step may change before the ranks communicate for the last time: buffers, attributes, flags,
the numbers of optimizers, schedulers and other objects, generators, and gradients that the step adds to. Parameters and
the state of optimizers are not kept, because a step usually changes them after its last reduction, and then each rank
can finish by itself. Some steps change them earlier (two optimizers in turn, LBFGS, a moving average of the model).
The first step notices this, and they are kept from the second step on.
"""

from __future__ import annotations

import functools
import pickle
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from synk._pure.generators import generator_states, restore_generators
from synk._wire.cell import cell
from synk.torch import _state as states
from synk.torch import _state_bytes
from synk.torch._reduction import GradientSum
from synk.torch._take_over import updated

_FIXED = frozenset(
    {int, float, bool, str, bytes, complex, type(None), type, torch.dtype, torch.device, torch.Size}
    | {types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial}
)

_TABLES = states.TABLES | {"state", "param_groups", "defaults"}

_SMALL_NBYTES = 1 << 20
"""A tensor of at most this size is copied before each step. A larger one is copied if its version shows a write."""


class Undo:
    """Keeps the state of one rank's replicated objects before each step.

    ``keep`` is called before a step, the ``notice_*`` methods while it runs, and the function that ``keep`` returned
    after it, if it failed.
    """

    def __init__(self, objects: Sequence[Any], reduction: GradientSum) -> None:
        self._objects, self._reduction = objects, reduction
        self._owners: list[Any] = []  # the dicts of attributes of modules and optimizers
        self._names: list[list[str]] = []  # the names in them; empty if the objects must be inspected again
        self._attributes: list[list[str]] = []  # the names that a step may change
        self._made_of: list[int] = []  # the addresses of submodules, parameters and buffers
        self._buffers: list[torch.Tensor] = []
        self._referents: dict[int, Any] = {}  # objects that pickles name instead of copying, by a number
        self._references: dict[int, int] = {}  # the same numbers, by address
        self._structure: list[Any] = []  # the modules' tables of submodules, parameters and buffers
        self._tables: list[Any] = []  # the parameter groups of optimizers, and the contents of other objects
        self._parameters: list[torch.Tensor] = []
        self._draws, self._drawn = False, b""  # whether steps draw from the process's generators; their last states
        self._early: set[int] = set()  # positions of parameters that steps change before they communicate
        self._is_early = False  # whether optimizers step before the last communication
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor, Any]] = {}
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
        self._inspect()
        self._before, self._flags = self._marks(), [each.requires_grad for each in self._parameters]
        self._reduction.keep()
        shallow = [(own, {name: own[name] for name in names}) for own, names in zip(self._owners, self._attributes)]
        is_early, early = self._is_early, self._early
        tables = [*self._tables, *(self._slots() if is_early else ())]
        shallow += [(table, table.copy()) for table in tables]
        known = self._references.keys() | set(map(id, tables))
        tensors = [*self._buffers, *(self._parameters[index] for index in sorted(early))]
        mutable: dict[Any, Any] = {}
        for number, (_, copied) in enumerate(shallow):
            for name, value in copied.items() if isinstance(copied, dict) else enumerate(copied):
                if type(value) in _FIXED or id(value) in known or _is_fixed_tuple(value):
                    continue
                if isinstance(value, torch.Tensor):
                    tensors.append(value)
                else:
                    mutable[number, name] = value
        structure = [(table, table.copy()) for table in self._structure]
        # The copies of the last step are overwritten here. Nobody calls its ``put_back`` any more: that step has
        # completed, or the master has asked for a report since.
        copies, pickled = self._copied(tensors), self._pickled(mutable) if mutable else None
        num_steps, share = replica.num_steps, self._reduction.share
        generators = self._generators(num_steps)

        def put_back() -> bytes | None:
            # The step may have been broken off at any line, and this runs later, when the master asks for a report. So
            # the parameters' versions and addresses decide whether the step has changed more than was kept.
            if (self._has_stepped and not is_early) or self._changed() - early:
                return None
            self._put_tables_back(shallow, structure)
            for tensor, copied in copies:
                self._write(tensor, copied)
            if pickled is not None:
                self._put_values_back(shallow, *pickled)
            for parameter, flag in zip(self._parameters, self._flags):
                parameter.requires_grad_(flag)
            replica.num_steps, self._reduction.share = num_steps, share
            if generators:
                cell.worker.rng.bit_generator.state = generators["synk.comm"]
                restore_generators({name: state for name, state in generators.items() if name != "synk.comm"})
            return self._reduction.put_back()

        return put_back

    def _inspect(self) -> None:
        """Find the parts of the objects again if they have changed."""
        names = [[*own] for own in self._owners]
        made_of = [each for table in self._structure for each in table.values()]
        if names and names == self._names and [*map(id, made_of)] == self._made_of:
            return
        self._names = []  # an interrupt may come at any line; with no names the next step inspects everything again
        objects = self._objects
        modules = [part for obj in objects if states.is_module(obj) for part in torch.nn.Module.modules(obj)]
        self._owners = [vars(part) for part in modules] + [vars(obj) for obj in objects if states.is_optimizer(obj)]
        self._attributes = [[name for name in own if _is_own(name)] for own in self._owners]
        self._structure = [vars(part)[name] for part in modules for name in ("_modules", "_parameters", "_buffers")]
        self._made_of = [id(each) for table in self._structure for each in table.values()]
        parameters = states.parameters_of(objects)
        if {*map(id, parameters)} != {*map(id, self._parameters)}:
            self._early.clear()
        self._parameters = parameters
        self._buffers = [each for part in modules for each in part._buffers.values() if each is not None]
        known: list[Any] = [*modules, *parameters, *self._buffers]
        self._tables = []
        for obj in objects:
            if states.is_optimizer(obj):
                self._tables.append(obj.param_groups)
                known += [obj, obj.defaults, obj.state]
            elif not states.is_module(obj):
                is_table = isinstance(obj, (dict, list, set))
                self._tables.append(obj if is_table else getattr(obj, "__dict__", {"": obj}))
                known += [obj] if is_table or hasattr(obj, "__dict__") else []
        self._referents = dict(enumerate(known))
        self._references = {id(each): key for key, each in self._referents.items()}
        self._names = [[*own] for own in self._owners]

    def _slots(self) -> Iterator[dict[Any, Any]]:
        for obj in self._objects:
            if states.is_optimizer(obj):
                yield obj.state
                yield from (slots for slots in obj.state.values() if isinstance(slots, dict))

    def _generators(self, num_steps: int) -> dict[str, Any]:
        """Return the states of this process's generators if steps draw from them.

        Whether they do is checked before steps 1, 2, 4, 8 and so on.
        """
        if not self._draws and num_steps & (num_steps - 1):
            return {}
        now = generator_states() | {"synk.comm": cell.worker.rng.bit_generator.state}
        now.pop("torch", None)  # seeded before each step
        seen = pickle.dumps(now)
        self._draws = self._draws or self._drawn not in (b"", seen)
        self._drawn = seen
        return now

    def _copied(self, tensors: Sequence[torch.Tensor]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return tensors with copies of them, which reuse the memory of the last step's copies.

        A large tensor is copied again only if its version or address has changed: writing through ``tensor.data`` is
        noticed for small ones only.
        """
        before, self._copies = self._copies, {}
        pairs, old, new = [], [], []
        for tensor in tensors:
            marks = tensor._version, states.address(tensor)
            held, copied, seen = before.get(id(tensor), (None, tensor, None))
            plain = tensor.detach()
            if held is not tensor or copied.shape != tensor.shape or copied.dtype != tensor.dtype or plain.is_sparse:
                copied = plain.clone()
            elif tensor.nbytes <= _SMALL_NBYTES or seen != marks:
                old.append(copied)
                new.append(plain)
            self._copies[id(tensor)] = tensor, copied, marks
            pairs.append((tensor, copied))
        if old:
            torch._foreach_copy_(old, new)
        return pairs

    def _pickled(self, mutable: dict[Any, Any]) -> tuple[bytes, dict[Any, Any]]:
        """Return objects as bytes, with the code that they refer to. Objects that cannot be pickled are left out."""
        code: list[Any] = []
        try:
            data = _state_bytes.dumps(mutable, self._references, code)
        except Exception:
            kept = {k: each for k, each in mutable.items() if _state_bytes.can_pickle(each, self._references, [])}
            return self._pickled(kept if len(kept) < len(mutable) else {})
        return data, {("code", number): each for number, each in enumerate(code)}

    def _put_tables_back(self, shallow: Sequence[tuple[Any, Any]], structure: Sequence[tuple[Any, Any]]) -> None:
        """Give dicts and lists their old contents. Attributes that every module has, which no step changes, stay."""
        num_owners = len(self._owners)
        for table, copied in shallow[:num_owners]:
            for name in [name for name in table if name not in copied and _is_own(name)]:
                del table[name]
            table.update(copied)
        for table, copied in (*structure, *shallow[num_owners:]):
            table.clear()
            table.extend(copied) if isinstance(copied, list) else table.update(copied)

    def _put_values_back(self, shallow: Sequence[tuple[Any, Any]], data: bytes, code: dict[Any, Any]) -> None:
        """Bring the objects in these dicts and lists back into the state in which they were pickled."""
        seen: dict[int, Any] = {}
        for (number, name), value in _state_bytes.loads(data, {**self._referents, **code}).items():
            table, copied = shallow[number]
            table[name] = updated(copied[name], value, seen)

    def _write(self, tensor: torch.Tensor, copied: torch.Tensor) -> None:
        is_in_place = self._copies[id(tensor)][2][1] == states.address(tensor)
        if is_in_place and tensor.shape == copied.shape and tensor.dtype == copied.dtype:
            tensor.detach().copy_(copied)
        else:
            tensor.data = copied.clone()

    # -- while it runs ------------------------------------------------------------------------------------------------

    def notice_step(self) -> None:
        """Note that an optimizer is about to step."""
        self._has_stepped = True
        if self._num_before is None:
            self._num_before = cell.worker.num_collectives

    def notice_reduction(self) -> None:
        """Note that the ranks are about to communicate. Parameters that have changed by now are kept in later steps."""
        if self._num_before is None and self._changed():
            self._num_before = -1

    def notice_end(self) -> None:
        """Note that the step has completed on this rank, and learn what later steps must keep."""
        if self._num_before is not None and cell.worker.num_collectives > self._num_before:
            self._early |= self._changed()
            self._is_early = self._is_early or self._has_stepped

    def _changed(self) -> set[int]:
        """Return which parameters were written or moved since the step began."""
        return {index for index, (now, was) in enumerate(zip(self._marks(), self._before)) if now != was}

    def _marks(self) -> list[Any]:
        return [(each._version, states.address(each)) for each in self._parameters]


def _is_own(name: str) -> bool:
    """Whether an attribute of a module or an optimizer was added by its class or by the user."""
    return name not in _TABLES and not name.endswith("_hooks")


def _is_fixed_tuple(value: Any) -> bool:
    return type(value) is tuple and all(type(item) in _FIXED for item in value)
