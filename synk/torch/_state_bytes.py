"""The state of replicated objects as bytes: objects that both sides have are named, and tensors are stored as memory.

One pickler writes states for another process (``as_bytes``, ``load_all``) and for this process, which may have to undo
a step.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from synk._wire.parcels import TravelPickler
from synk.torch._state import State, dump, is_module, load, submodules, tensors_of
from synk.torch._take_over import CODE


class PackedTensor:
    """A dense tensor in a pickle: its bytes, dtype, shape and device."""

    __slots__ = ("_array", "_device", "_dtype", "_shape")

    def __init__(self, tensor: torch.Tensor, *, keeps_device: bool = False) -> None:
        plain = tensor.detach().cpu().contiguous()
        self._dtype, self._shape = plain.dtype, tuple(plain.shape)
        self._device = tensor.device if keeps_device and tensor.device.type != "cpu" else None
        self._array = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, np.uint8)

    def unpacked(self) -> torch.Tensor:
        """Return the tensor, on the CPU unless it keeps its device."""
        tensor = torch.empty(self._shape, dtype=self._dtype)
        if self._array.size:
            tensor = torch.from_numpy(self._array.copy()).view(self._dtype).reshape(self._shape)
        return tensor if self._device is None else tensor.to(self._device)


class StatePickler(TravelPickler):
    """Pickles a state. Objects that both sides already have (``references``) are named and not copied.

    ``code`` is given for a state that stays in this process: a list into which functions, classes and modules are put
    instead of being pickled.
    """

    def __init__(self, file: Any, references: dict[int, Any], code: list[Any] | None = None) -> None:
        super().__init__(file, protocol=5)
        self._references, self._code = references, code

    def reducer_override(self, obj: Any) -> Any:
        key = self._references.get(id(obj))
        if key is not None:
            return referred, (key,)
        if type(obj) is torch.nn.Parameter:
            return torch.nn.Parameter, (obj.detach(), obj.requires_grad)
        if type(obj) is torch.Tensor:
            if obj.layout is not torch.strided:
                return obj.detach().cpu().__reduce_ex__(5)
            made = PackedTensor.unpacked, (PackedTensor(obj, keeps_device=self._code is not None),)
            return (_requiring_grad, (obj.detach(),)) if obj.requires_grad and obj.is_leaf else made
        if self._code is not None and isinstance(obj, CODE) and obj is not referred:
            self._code.append(obj)
            return referred, (("code", len(self._code) - 1),)
        return super().reducer_override(obj)


class _StateUnpickler(pickle.Unpickler):
    def __init__(self, file: Any, referents: Any) -> None:
        super().__init__(file)
        self._referents = referents

    def find_class(self, module: str, name: str) -> Any:
        if name == "referred" and module == __name__:
            return self._referents.__getitem__
        return super().find_class(module, name)


def referred(key: Any) -> Any:
    """Stands in a pickle for the object that the loading side has under this key."""
    raise pickle.UnpicklingError(
        "cannot load a state of replicated objects: got no objects, expected those that it belongs to."
    )


def _requiring_grad(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.requires_grad_()


def referents(objects: Sequence[Any]) -> dict[Any, Any]:
    """Return the parts of replicated objects, under names that are the same in each process."""
    found: dict[Any, Any] = {}
    for number, obj in enumerate(objects):
        found[number] = obj
        if is_module(obj):
            found |= {(number, index): each for index, each in enumerate(submodules(obj))}
            found |= {(number, name): tensor for name, tensor in tensors_of(obj)}
    return found


def references_to(objects: Sequence[Any]) -> dict[int, Any]:
    """Return the names of the parts of replicated objects, by address: the inverse of ``referents``."""
    return {id(obj): key for key, obj in referents(objects).items()}


def as_bytes(objects: Sequence[Any], states: dict[int, State]) -> bytes:
    """Return states of objects, by position, in a form that another process can load."""
    return dumps(states, references_to(objects))


def dump_all(objects: Sequence[Any]) -> bytes:
    """Return the states of objects as bytes. Attributes that cannot be pickled are left out, and named in the state."""
    states = {index: dump(obj) for index, obj in enumerate(objects)}
    try:
        return as_bytes(objects, states)
    except Exception:
        pass
    references = references_to(objects)
    for obj, state in zip(objects, states.values()):
        if is_module(obj):
            parts = submodules(obj)
            for index, attributes in state["attributes"].items():
                kept = {name: value for name, value in attributes.items() if can_pickle(value, references)}
                left = [f"{type(parts[index]).__name__}.{name}" for name in attributes if name not in kept]
                state["attributes"][index] = kept
                state.setdefault("left_out", []).extend(left)
    return as_bytes(objects, states)


def dumps(value: Any, references: dict[int, Any], code: list[Any] | None = None) -> bytes:
    """Pickle a value with a ``StatePickler``."""
    file = io.BytesIO()
    StatePickler(file, references, code).dump(value)
    return file.getvalue()


def can_pickle(value: Any, references: dict[int, Any], code: list[Any] | None = None) -> bool:
    """Whether ``dumps`` succeeds."""
    try:
        dumps(value, references, code)
    except Exception:
        return False
    return True


def load_all(objects: Sequence[Any], data: bytes) -> list[str]:
    """Bring objects into the states that ``as_bytes`` wrote. Return the names of attributes that were left out."""
    states = loads(data, referents(objects))
    for index, state in states.items():
        load(objects[index], state)
    return [name for state in states.values() for name in state.get("left_out", ())]


def loads(data: bytes, referents: dict[Any, Any]) -> Any:
    """Load a value that a ``StatePickler`` wrote."""
    return _StateUnpickler(io.BytesIO(data), referents).load()
