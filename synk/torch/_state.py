"""The state of replicated objects: its parts, how an object takes it over, and how changes are found.

It covers modules, optimizers, schedulers and everything that has a ``state_dict`` or can be pickled, in the master and
on the ranks. Tensors are copied element by element, so a state has the same bits wherever it is loaded.

In one file because what a state holds and what a fingerprint sees must agree, part by part.
"""

from __future__ import annotations

import copy
import types
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch

from synk._wire.parcels import dumps
from synk.torch._take_over import CODE, PLAIN, updated

State = dict[str, Any]

TABLES = frozenset(vars(torch.nn.Module())) - {"training"}
"""Attributes that every module has. All others are the user's."""

_HOOKS = [name for name in vars(torch.nn.Module()) if name.endswith("_hooks")]

MAX_ELEMENTS = 1000
"""A container with at most this many elements is compared in full before each call."""


def is_module(obj: Any) -> bool:
    return isinstance(obj, torch.nn.Module)


def is_optimizer(obj: Any) -> bool:
    return isinstance(obj, torch.optim.Optimizer)


def tensors_of(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a module, including those that a checkpoint leaves out."""
    yield from torch.nn.Module.named_parameters(module)
    yield from torch.nn.Module.named_buffers(module)


def submodules(module: Any) -> list[torch.nn.Module]:
    return list(torch.nn.Module.modules(module))


def _has_state_dict(obj: Any) -> bool:
    return hasattr(type(obj), "state_dict") and hasattr(type(obj), "load_state_dict")


# -- state ------------------------------------------------------------------------------------------------------------


def dump(obj: Any) -> State:
    """Return the whole state of an object. It consists of the very objects that the object holds, not of copies."""
    if is_module(obj):
        state = dump_module(obj, [name for name, _ in tensors_of(obj)], has_gradients=True)
        state["attributes"] = {index: attributes_of(each) for index, each in enumerate(submodules(obj))}
        return state
    if is_optimizer(obj):
        slots = list(obj.__dict__["state"].items())
        return {"groups": obj.__dict__["param_groups"], "state": slots, "attributes": other_attributes(obj)}
    if _has_state_dict(obj):
        return {"state_dict": obj.state_dict()}
    return {"whole": copy.copy(obj)}


def attributes_of(module: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes in a module's pickle other than parameters, buffers, submodules, hooks and flags."""
    own = vars(module)
    getstate: Any = getattr(type(module), "__getstate__", None)
    if getstate is not getattr(torch.nn.Module, "__getstate__", None):
        carried = getstate(module)
        own = {name: own[name] for name in carried if name in own} if isinstance(carried, dict) else own
    return {
        name: value for name, value in own.items() if name not in TABLES and name != "training" and not _is_ours(value)
    }


def other_attributes(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's attributes other than its groups and state, including hooks that the program registered."""
    return {
        name: value
        for name, value in optimizer.__dict__.items()
        if name not in ("defaults", "state", "param_groups", "_opt_called")  # ``_opt_called`` is set before each call
        and not callable(value)
        and (value or not name.endswith("_hooks"))
    }


def _is_ours(value: Any) -> bool:
    """Whether it is a method that synk gave a module on the ranks."""
    return isinstance(value, types.MethodType) and str(value.__func__.__module__).startswith("synk.")


def _changed_attributes(module: Any, before: list[Any], now: list[Any]) -> dict[int, dict[str, Any]]:
    """Return the attributes that have changed, by the position of the submodule."""
    changed = {}
    for index, (part, new, was) in enumerate(zip(submodules(module), now, before)):
        names = [name for name, mark in new if (name, mark) not in was]
        if names:
            changed[index] = {name: vars(part)[name] for name in names}
    return changed


def dump_module(module: Any, names: Sequence[str], *, has_gradients: bool) -> State:
    """Return the state of a module: its flags, the tensors ``names``, and gradients if there are any."""
    wanted = set(names)
    state: State = {
        "training": [each.training for each in submodules(module)],
        "requires_grad": {name: each.requires_grad for name, each in torch.nn.Module.named_parameters(module)},
        "tensors": {name: tensor.detach() for name, tensor in tensors_of(module) if name in wanted},
    }
    if has_gradients:
        state["gradients"] = {name: each.grad for name, each in torch.nn.Module.named_parameters(module)}
    return state


def parameters_of(objects: Sequence[Any]) -> list[torch.Tensor]:
    """Return the parameters of all modules, each once."""
    found = [p for obj in objects if is_module(obj) for p in torch.nn.Module.parameters(obj)]
    return list({id(parameter): parameter for parameter in found}.values())


def load(obj: Any, state: State) -> None:
    """Bring an object into a state, or into the given parts of one. The object itself keeps its identity."""
    if is_module(obj):
        _load_module(obj, state)
    elif is_optimizer(obj):
        _load_optimizer(obj, state)
    elif "state_dict" in state:
        obj.load_state_dict(state["state_dict"])
    elif "whole" in state and updated(obj, state["whole"]) is not obj and hasattr(obj, "__dict__"):
        obj.__dict__.clear()
        obj.__dict__.update(state["whole"].__dict__)


def _load_module(module: Any, state: State) -> None:
    for each, flag in zip(submodules(module), state.get("training", ())):
        each.training = flag
    seen: dict[int, Any] = {}
    parts = submodules(module)
    for index, attributes in state.get("attributes", {}).items():
        own = vars(parts[index])
        own.update({name: updated(own.get(name), value, seen) for name, value in attributes.items()})
    parameters = dict(torch.nn.Module.named_parameters(module))
    tensors = dict(tensors_of(module))
    with torch.no_grad():
        for name, value in state.get("tensors", {}).items():
            _assign(tensors[name], value)
    for name, flag in state.get("requires_grad", {}).items():
        if parameters[name].requires_grad != flag:
            parameters[name].requires_grad_(flag)
    for name, gradient in state.get("gradients", {}).items():
        own = parameters[name]
        own.grad = None if gradient is None else gradient.to(own.device)


def _assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if tensor.shape != value.shape or tensor.dtype != value.dtype:
        tensor.data = value.to(tensor.device)
    else:
        tensor.copy_(value)


def _load_optimizer(optimizer: Any, state: State) -> None:
    groups = optimizer.__dict__["param_groups"]
    if "groups" in state:
        updated(groups, state["groups"])
    optimizer.__dict__.update(state.get("attributes", {}))
    if "state" in state:
        slots = {parameter: _beside(parameter, values) for parameter, values in state["state"]}
        own = optimizer.__dict__["state"]
        own.clear()
        own.update(slots)


def _beside(parameter: torch.Tensor, value: Any) -> Any:
    """Move an optimizer's state to its parameter's device. Counters of one element stay on the CPU, as in torch."""
    if isinstance(value, torch.Tensor):
        return value if value.ndim == 0 else value.to(parameter.device)
    if type(value) in (list, tuple):
        return type(value)(_beside(parameter, item) for item in value)
    return {key: _beside(parameter, item) for key, item in value.items()} if isinstance(value, dict) else value


# -- finding changes --------------------------------------------------------------------------------------------------


def fingerprint(obj: Any, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a value for each part of an object that differs after any change the program makes to the part.

    Checksums of all tensors are computed, because writing through ``tensor.data`` leaves no other trace. If ``before``
    is given, those of parameters and buffers are taken from it: pass it if nobody can have read, and so written into,
    the object since.
    """
    seen: dict[int, Any] = {}
    if is_module(obj):
        tensors = [tensor for _, tensor in tensors_of(obj)]
        return {
            "shape": [_Seen(tensor, (tensor.dtype, address(tensor))) for tensor in tensors],
            "hooks": [mark(hook, seen) for table in hook_tables(submodules(obj)) for hook in table.values()],
            "tensors": [tensor._version for tensor in tensors],
            "contents": [digest(tensor) for tensor in tensors] if before is None else before["contents"],
            "attributes": [
                [(name, mark(value, seen)) for name, value in attributes_of(each).items()] for each in submodules(obj)
            ],
            "gradients": [mark(each.grad) for each in torch.nn.Module.parameters(obj)],
            "flags": [each.training for each in submodules(obj)]
            + [each.requires_grad for each in torch.nn.Module.parameters(obj)],
        }
    if is_optimizer(obj):
        state = obj.__dict__["state"]
        groups = obj.__dict__["param_groups"]
        return {
            "shape": [[_Seen(parameter) for parameter in group["params"]] for group in groups],
            "groups": [[(key, mark(value)) for key, value in group.items() if key != "params"] for group in groups],
            "state": [[mark(value) for value in slots.values()] for slots in state.values()],
            "attributes": mark(other_attributes(obj))._what,
        }
    if _has_state_dict(obj):
        return {"state_dict": _marks(obj.state_dict())}
    return {"whole": dumps(obj)}


class Glance:
    """Tells in a few microseconds that a module or an optimizer has not changed, so that no fingerprint is needed.

    It looks at the same things as ``fingerprint``, except for the contents of parameters, buffers, gradients and the
    state of optimizers, and compares identities instead of values. So an object that looks changed may still have an
    equal fingerprint.
    """

    def __init__(self) -> None:
        self._found, self._marks = self._find(), self._read()

    @staticmethod
    def of(obj: Any) -> Glance | None:
        """Return a glance at an object; None if only a fingerprint can compare it."""
        if is_module(obj):
            return _ModuleGlance(obj)
        return _OptimizerGlance(obj) if is_optimizer(obj) else None

    def is_same(self) -> bool:
        found = self._find()
        return len(found) == len(self._found) and all(map(is_, found, self._found)) and self._read() == self._marks

    def _find(self) -> list[Any]:
        """Return the objects that make up this one."""
        raise NotImplementedError

    def _read(self) -> list[Any]:
        """Return marks that change when a tensor is written into, moved or frozen."""
        raise NotImplementedError


class _ModuleGlance(Glance):
    def __init__(self, module: Any) -> None:
        self._own = [(vars(each), [name for name in vars(each) if name not in TABLES]) for each in submodules(module)]
        self._parameters = list(torch.nn.Module.parameters(module))
        self._tensors = [each for _, each in tensors_of(module)]
        self._gradients = [each.grad for each in self._parameters if each.grad is not None]
        self._mutable = mutable_attributes(submodules(module))
        self._hooks = [each for each in hook_tables(submodules(module)) if each]
        own = [vars(each).get(name) for each in submodules(module) for name in _HOOKS]
        self._no_hooks = [each for each in own if each is not None and not each]
        super().__init__()

    def _find(self) -> list[Any]:
        found: list[Any] = [hook for table in self._hooks for hook in table.values()]
        found += [each for each in self._no_hooks if each]
        found += [each._backward_hooks for each in self._parameters]
        found += [each._post_accumulate_grad_hooks for each in self._parameters]
        for own, names in self._own:
            found.append(len(own))
            found += map(own.get, names)
            for table in ("_parameters", "_buffers", "_modules"):
                found += own[table].values()
        return found + [each.grad for each in self._parameters]

    def _read(self) -> list[Any]:
        marks: list[Any] = [each._version for each in self._gradients]
        if self._mutable:
            marks.append(mark(self._mutable))
        marks += [(each._version, address(each), each.dtype, each.requires_grad) for each in self._tensors]
        return marks


class _OptimizerGlance(Glance):
    def __init__(self, optimizer: Any) -> None:
        self._own = vars(optimizer)
        self._tensors = [each for each in self._slots() if isinstance(each, torch.Tensor)]
        super().__init__()

    def _find(self) -> list[Any]:
        found: list[Any] = []
        for group in self._own["param_groups"]:
            found += group
            found += group["params"]
        return found + self._slots()

    def _slots(self) -> list[Any]:
        """Return the hyper-parameters and the state."""
        slots = [value for group in self._own["param_groups"] for value in group.values()]
        for state in self._own["state"].values():
            slots += state.values()
        return slots

    def _read(self) -> list[Any]:
        return [each._version for each in self._tensors]


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor; 0 for a sparse tensor, which has no single address."""
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def digest(tensor: torch.Tensor) -> int:
    """Return a checksum of a dense tensor in host memory; 0 for others."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
        return 0
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return zlib.crc32(plain.reshape(-1).view(torch.uint8).numpy().data)


class _Seen:
    """An object as it was seen, with the value of its contents. It is kept alive, so its address is not used again."""

    __slots__ = ("_obj", "_what")

    def __init__(self, obj: Any, what: Any = None) -> None:
        self._obj, self._what = obj, what

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Seen) and self._obj is other._obj and self._what == other._what

    __hash__ = None  # type: ignore[assignment]


def mark(value: Any, seen: dict[int, Any] | None = None) -> Any:
    """Return a mark that changes when an object is replaced or, for tensors and containers, changed in place.

    A container with more than 1000 elements is marked by its length. ``seen`` holds the marks of objects that were met
    before, by address, which also ends the walk around a cycle.
    """
    if isinstance(value, PLAIN):
        return value
    seen = {} if seen is None else seen
    if id(value) not in seen:
        seen[id(value)] = _Seen(value)
        seen[id(value)] = _Seen(value, _inside(value, seen))
    return seen[id(value)]


def _inside(value: Any, seen: dict[int, Any]) -> Any:
    """Return the part of a mark that shows changes in place."""
    if isinstance(value, torch.Tensor):
        return value._version, digest(value)
    if isinstance(value, np.ndarray):
        return None if value.dtype.hasobject else zlib.crc32(np.ascontiguousarray(value).view(np.uint8).data)
    if isinstance(value, types.MethodType):
        return mark(value.__self__, seen)
    if isinstance(value, (torch.nn.Module, *CODE)):
        return None
    if isinstance(value, (list, tuple, dict, set, deque)):
        if len(value) > MAX_ELEMENTS:
            return len(value)
        if isinstance(value, dict):
            return [(key, mark(item, seen)) for key, item in value.items()]
        return set(value) if isinstance(value, set) else [mark(item, seen) for item in value]
    if isinstance(value, np.random.Generator):
        return value.bit_generator.state
    return _inside(vars(value), seen) if hasattr(value, "__dict__") else None


def _marks(value: Any) -> Any:
    """Return the marks of a ``state_dict``. Objects other than containers, tensors and numbers count by ``repr``."""
    if isinstance(value, dict):
        return {key: _marks(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marks(item) for item in value]
    if isinstance(value, torch.Tensor):
        return mark(value)
    return value if isinstance(value, PLAIN) else repr(value)


def hook_tables(modules: Sequence[torch.nn.Module]) -> list[dict[Any, Any]]:
    """Return the tables in which modules and their parameters keep hooks."""
    tables = [vars(each)[name] for each in modules for name in _HOOKS if name in vars(each)]
    for each in modules:
        for parameter in each._parameters.values():
            if parameter is not None:
                tables += [parameter._backward_hooks or {}, parameter._post_accumulate_grad_hooks or {}]
    return tables


def mutable_attributes(modules: Sequence[torch.nn.Module]) -> list[Any]:
    """Return the attributes and hooks of modules that can be changed in place."""
    found = [value for part in modules for name, value in vars(part).items() if name not in TABLES]
    hooks = [hook for table in hook_tables(modules) for hook in table.values()]
    found += [hook.__self__ if isinstance(hook, types.MethodType) else hook for hook in hooks]
    kept = (*PLAIN, *CODE, torch.nn.Module)
    return [value for value in {id(each): each for each in found}.values() if not isinstance(value, kept)]


def changes(obj: Any, before: dict[str, Any], now: dict[str, Any]) -> State:
    """Return the parts of an object's state whose fingerprints differ; empty if none do."""
    parts = {part for part in now if now[part] != before.get(part)}
    if not parts:
        return {}
    if is_module(obj):
        names = [name for name, _ in tensors_of(obj)]
        seen = zip(names, zip(now["tensors"], now["contents"]), zip(before["tensors"], before["contents"]))
        changed = [name for name, new, was in seen if new != was]
        partial = dump_module(obj, changed, has_gradients="gradients" in parts)
        if "attributes" in parts:
            partial["attributes"] = _changed_attributes(obj, before["attributes"], now["attributes"])
        return partial
    if is_optimizer(obj):
        return {part: value for part, value in dump(obj).items() if part == "groups" or part in parts}
    return dump(obj)
