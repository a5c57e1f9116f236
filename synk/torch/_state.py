"""The state of replicated objects: as bytes that another process can load, and as what shows that it was changed.

Works on modules, optimizers, schedulers and whatever has a ``state_dict`` or can be pickled; in the master and on the
ranks alike. Tensors are copied element by element, so a state is the same bit for bit wherever it is loaded.
"""

from __future__ import annotations

import functools
import pickle
import zlib
from collections.abc import Callable, Iterator, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch

State = dict[str, Any]

_PLAIN = (int, float, bool, str, type(None))

_TABLES = frozenset(vars(torch.nn.Module())) - {"training"}
"""Attributes of every module; those beside them are the user's."""


class Packed:
    """A tensor in a pickle: its bytes, with what is needed to make it again; a sparse one as torch pickles it."""

    __slots__ = ("_array", "_dtype", "_shape", "_sparse")

    def __init__(self, tensor: torch.Tensor) -> None:
        plain = tensor.detach().cpu()
        self._sparse = None if plain.layout is torch.strided else plain
        plain = torch.empty(0) if self._sparse is not None else plain.contiguous()
        self._dtype, self._shape = plain.dtype, tuple(plain.shape)
        self._array = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)

    def unpacked(self) -> torch.Tensor:
        """Return the tensor, on the CPU."""
        if self._sparse is not None:
            return self._sparse
        if not self._array.size:
            return torch.empty(self._shape, dtype=self._dtype)
        return torch.from_numpy(self._array.copy()).view(self._dtype).reshape(self._shape)


def _mapped(value: Any, kind: type, act: Callable[[Any], Any]) -> Any:
    """Return a nesting with all that is of a kind replaced."""
    if isinstance(value, kind):
        return act(value)
    if type(value) in (list, tuple):
        return type(value)(_mapped(item, kind, act) for item in value)
    if isinstance(value, dict):
        return {key: _mapped(item, kind, act) for key, item in value.items()}
    return value


def packed(value: Any) -> Any:
    """Return a nesting whose tensors are packed."""
    return _mapped(value, torch.Tensor, Packed)


def unpacked(value: Any) -> Any:
    """Undo :func:`packed`."""
    return _mapped(value, Packed, Packed.unpacked)


def is_module(obj: Any) -> bool:
    return isinstance(obj, torch.nn.Module)


def is_optimizer(obj: Any) -> bool:
    return isinstance(obj, torch.optim.Optimizer)


def tensors_of(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a module, those that a checkpoint leaves out too."""
    yield from torch.nn.Module.named_parameters(module)
    yield from torch.nn.Module.named_buffers(module)


def _submodules(module: Any) -> list[torch.nn.Module]:
    return list(torch.nn.Module.modules(module))


def _has_state_dict(obj: Any) -> bool:
    return hasattr(type(obj), "state_dict") and hasattr(type(obj), "load_state_dict")


# -- state ------------------------------------------------------------------------------------------------------------


def dump(obj: Any) -> State:
    """Return the whole state of an object."""
    if is_module(obj):
        state = dump_module(obj, [name for name, _ in tensors_of(obj)], has_gradients=True)
        state["attributes"] = {index: _numbers(each) for index, each in enumerate(_submodules(obj))}
        return state
    if is_optimizer(obj):
        return {"groups": groups_of(obj), "state": packed(_slots_of(obj))}
    if _has_state_dict(obj):
        return {"state_dict": packed(obj.state_dict())}
    return {"whole": obj}


def _attributes(module: torch.nn.Module) -> dict[str, Any]:
    """Return what a module was given besides parameters, buffers, parts and hooks."""
    return {name: value for name, value in vars(module).items() if name not in _TABLES and name != "training"}


def _numbers(module: torch.nn.Module) -> dict[str, Any]:
    """Return the attributes that are numbers or texts: others may be a rank's own, or no other process's to have."""
    return {name: value for name, value in _attributes(module).items() if isinstance(value, _PLAIN)}


def _changed_attributes(module: Any, before: list[Any], now: list[Any]) -> dict[int, dict[str, Any]]:
    """Return, by the position of the part, the attributes that are other ones now."""
    changed = {}
    for index, (part, new, was) in enumerate(zip(_submodules(module), now, before)):
        names = [name for name, mark in new if (name, mark) not in was]
        if names:
            changed[index] = {name: packed(vars(part)[name]) for name in names}
    return changed


def dump_module(module: Any, names: Sequence[str], *, has_gradients: bool) -> State:
    """Return the state of a module: its flags, the tensors ``names``, and gradients where there are any."""
    wanted = set(names)
    state: State = {
        "training": [each.training for each in _submodules(module)],
        "requires_grad": {name: each.requires_grad for name, each in torch.nn.Module.named_parameters(module)},
        "tensors": {name: Packed(tensor) for name, tensor in tensors_of(module) if name in wanted},
    }
    if has_gradients:
        parameters = torch.nn.Module.named_parameters(module)
        state["gradients"] = {name: None if each.grad is None else Packed(each.grad) for name, each in parameters}
    return state


def groups_of(optimizer: Any) -> list[dict[str, Any]]:
    """Return the numbers of an optimizer's parameter groups."""
    groups = optimizer.__dict__["param_groups"]
    return [{key: packed(value) for key, value in group.items() if key != "params"} for group in groups]


def parameters_of(objects: Sequence[Any]) -> list[torch.Tensor]:
    """Return the parameters of all modules, each once."""
    found = [p for obj in objects if is_module(obj) for p in torch.nn.Module.parameters(obj)]
    return list({id(parameter): parameter for parameter in found}.values())


def _slots_of(optimizer: Any) -> list[Any]:
    """Return an optimizer's state of each parameter, in the order of its groups; None where it has none."""
    state = optimizer.__dict__["state"]
    return [state.get(parameter) for group in optimizer.__dict__["param_groups"] for parameter in group["params"]]


def load(obj: Any, state: State) -> None:
    """Bring an object into a state, or into the part of one that is given; the object itself stays the same."""
    if is_module(obj):
        _load_module(obj, state)
    elif is_optimizer(obj):
        _load_optimizer(obj, state)
    elif "state_dict" in state:
        obj.load_state_dict(unpacked(state["state_dict"]))
    elif "whole" in state:
        _become(obj, state["whole"])


def _load_module(module: Any, state: State) -> None:
    for each, flag in zip(_submodules(module), state.get("training", ())):
        each.training = flag
    for index, attributes in state.get("attributes", {}).items():
        vars(_submodules(module)[index]).update(unpacked(attributes))
    parameters = dict(torch.nn.Module.named_parameters(module))
    tensors = dict(tensors_of(module))
    with torch.no_grad():
        for name, value in state.get("tensors", {}).items():
            _assign(tensors[name], value.unpacked())
    for name, flag in state.get("requires_grad", {}).items():
        if parameters[name].requires_grad != flag:
            parameters[name].requires_grad_(flag)
    for name, gradient in state.get("gradients", {}).items():
        own = parameters[name]
        own.grad = None if gradient is None else gradient.unpacked().to(own.device)


def _assign(tensor: torch.Tensor, value: torch.Tensor) -> None:
    if tensor.shape != value.shape or tensor.dtype != value.dtype:
        tensor.data = value.to(tensor.device)
    else:
        tensor.copy_(value)


def _load_optimizer(optimizer: Any, state: State) -> None:
    groups = optimizer.__dict__["param_groups"]
    for group, numbers in zip(groups, state.get("groups", ())):
        group.update({key: _like(group.get(key), unpacked(value)) for key, value in numbers.items()})
    if "state" not in state:
        return
    parameters = [parameter for group in groups for parameter in group["params"]]
    own = optimizer.__dict__["state"]
    for parameter, slots in zip(parameters, state["state"]):
        if slots is None:
            own.pop(parameter, None)
        else:
            own[parameter] = _mapped(slots, Packed, functools.partial(_placed, device=parameter.device))


def _placed(value: Packed, device: torch.device) -> torch.Tensor:
    """Return an optimizer's tensor beside its parameter; counters of one element stay on the CPU, as torch has them."""
    tensor = value.unpacked()
    return tensor if tensor.ndim == 0 else tensor.to(device)


def _like(old: Any, new: Any) -> Any:
    """Return ``new``; in the tensor that was there before, where a learning rate is one that others refer to."""
    if isinstance(old, torch.Tensor) and isinstance(new, torch.Tensor) and old.shape == new.shape:
        with torch.no_grad():
            old.copy_(new)
        return old
    return new


def _become(obj: Any, other: Any) -> None:
    """Give an object the contents of another one of its class."""
    if isinstance(obj, dict):
        obj.clear()
        obj.update(other)
    elif isinstance(obj, (list, bytearray)):
        obj[:] = other
    elif isinstance(obj, set):
        obj.clear()
        obj |= other
    elif hasattr(obj, "__dict__"):
        obj.__dict__.clear()
        obj.__dict__.update(other.__dict__)


# -- what shows a change ----------------------------------------------------------------------------------------------


def fingerprint(obj: Any, before: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return what differs from an earlier one, by part, after a change that a program makes to an object.

    The contents of tensors are read, because what is written through ``tensor.data`` leaves no other trace. They are
    taken from ``before`` where it is given: nobody can have looked at the object since.
    """
    if is_module(obj):
        tensors = [tensor for _, tensor in tensors_of(obj)]
        return {
            "shape": [_Seen(tensor, (tensor.dtype, _address(tensor))) for tensor in tensors],
            "tensors": [tensor._version for tensor in tensors],
            "contents": [digest(tensor) for tensor in tensors] if before is None else before["contents"],
            "attributes": [[(k, _mark(v)) for k, v in _attributes(each).items()] for each in _submodules(obj)],
            "gradients": [_mark(each.grad) for each in torch.nn.Module.parameters(obj)],
            "flags": [each.training for each in _submodules(obj)]
            + [each.requires_grad for each in torch.nn.Module.parameters(obj)],
        }
    if is_optimizer(obj):
        state = obj.__dict__["state"]
        groups = obj.__dict__["param_groups"]
        return {
            "shape": [[_Seen(parameter) for parameter in group["params"]] for group in groups],
            "groups": [[(key, _mark(value)) for key, value in group.items() if key != "params"] for group in groups],
            "state": [[_mark(value) for value in slots.values()] for slots in state.values()],
        }
    if _has_state_dict(obj):
        return {"state_dict": _marks(obj.state_dict())}
    return {"whole": pickle.dumps(obj, protocol=5)}


class Glance:
    """Tells in a few microseconds that a module or an optimizer is as it was, for a fingerprint to be taken as read.

    Compares what ``fingerprint`` reads, but for the contents of tensors, and identities where it compares values: what
    looks different may still have an equal fingerprint.
    """

    def __init__(self, obj: Any) -> None:
        self._is_module = is_module(obj)
        self._own = [each.__dict__ for each in _submodules(obj)] if self._is_module else [obj.__dict__]
        self._names = [[name for name in own if name not in _TABLES] for own in self._own] if self._is_module else []
        self._parameters = list(torch.nn.Module.parameters(obj)) if self._is_module else []
        self._found = self._find()
        found = [each for _, each in tensors_of(obj)] if self._is_module else self._slots()
        self._tensors = [each for each in found if isinstance(each, torch.Tensor)]
        self._gradients = [each for each in self._find_gradients() if each is not None]
        self._marks = self._read()

    @staticmethod
    def of(obj: Any) -> Glance | None:
        """Return a glance at an object; None where it takes a fingerprint."""
        return Glance(obj) if is_module(obj) or is_optimizer(obj) else None

    def is_same(self) -> bool:
        found = self._find()
        return len(found) == len(self._found) and all(map(is_, found, self._found)) and self._read() == self._marks

    def _find(self) -> list[Any]:
        """Return the objects that make up this one."""
        found: list[Any] = []
        if self._is_module:
            for own, names in zip(self._own, self._names):
                found.append(len(own))
                found += map(own.get, names)
                for table in ("_parameters", "_buffers", "_modules"):
                    found += own[table].values()
            return found + self._find_gradients()
        for group in self._own[0]["param_groups"]:
            found += group
            found += group["params"]
        return found + self._slots()

    def _find_gradients(self) -> list[Any]:
        return [each.grad for each in self._parameters]

    def _slots(self) -> list[Any]:
        """Return the numbers and the state of an optimizer."""
        own = self._own[0]
        slots = [value for group in own["param_groups"] for value in group.values()]
        for state in own["state"].values():
            slots += state.values()
        return slots

    def _read(self) -> list[Any]:
        """Return what is another one after a tensor was written into, moved or frozen."""
        if not self._is_module:
            return [each._version for each in self._tensors]
        marks: list[Any] = [each._version for each in self._gradients]
        marks += [(each._version, _address(each), each.dtype, each.requires_grad) for each in self._tensors]
        return marks


def _address(tensor: torch.Tensor) -> int:
    """Return where a tensor lies; 0 for a sparse one, which has no single place."""
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def digest(tensor: torch.Tensor) -> int:
    """Return a checksum of a dense tensor in the host's memory; 0 for others."""
    if tensor.device.type != "cpu" or tensor.layout is not torch.strided or not tensor.numel():
        return 0
    return zlib.crc32(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)


class _Seen:
    """An object as it was seen: held, so that no other one can come to have its address."""

    __slots__ = ("_obj", "_what")

    def __init__(self, obj: Any, what: Any = None) -> None:
        self._obj, self._what = obj, what

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Seen) and self._obj is other._obj and self._what == other._what

    __hash__ = None  # type: ignore[assignment]


def _mark(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return _Seen(value, value._version)
    return value if isinstance(value, (*_PLAIN, tuple)) else _Seen(value)


def _marks(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _marks(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_marks(item) for item in value]
    return _mark(value) if isinstance(value, (torch.Tensor, *_PLAIN)) else repr(value)


def changes(obj: Any, before: dict[str, Any], now: dict[str, Any]) -> State:
    """Return the part of an object's state that differs, by its fingerprints; empty if nothing does."""
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
        state: State = {"groups": groups_of(obj)}
        if "state" in parts:
            state["state"] = packed(_slots_of(obj))
        return state
    return dump(obj)
