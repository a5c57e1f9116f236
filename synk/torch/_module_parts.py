"""What must hold of a module before it goes to the ranks, and its pickle without its tensors."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from synk._pure.tensors import array_of
from synk._wire.parcels import TravelPickler
from synk.errors import SerializationError, UnsupportedError
from synk.torch import _state as states


def check(name: str, tensors: Sequence[torch.Tensor]) -> None:
    if any(isinstance(tensor, (torch.nn.UninitializedParameter, torch.nn.UninitializedBuffer)) for tensor in tensors):
        raise ValueError(
            f"cannot make DataParallel of {name!r}: it has lazy parameters without a shape, expected a model that has "
            "run once. Call it with a batch first."
        )
    places = sorted({str(tensor.device) for tensor in tensors if tensor.device.type != "cpu"})
    if places:
        raise UnsupportedError(
            f"cannot make DataParallel of {name!r}: got tensors on {', '.join(places)}, expected a module on the CPU: "
            "the workers bring its parameters to their own devices. Make it before .to(device), or use "
            "synk.torch.replicate(model, optimizer)."
        )


def check_memory(what: str, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raise ValueError if two tensors share memory: as copies on the ranks they would not.

    Tensors in host memory are compared element by element, others by their first and last one.
    """
    spans = []
    for name, tensor in named:
        if tensor.layout is torch.strided and tensor.numel() and tensor.device.type != "meta":
            last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride()))
            start = tensor.data_ptr()
            spans.append((str(tensor.device), start, start + (last + 1) * tensor.element_size(), name, tensor))
    spans.sort(key=lambda span: span[:3])
    before: list[Any] = []
    for device, start, end, name, tensor in spans:
        before = [span for span in before if span[0] == device and span[2] > start]
        for *_, other_name, other in before:
            if other is not tensor and (device != "cpu" or np.shares_memory(array_of(other), array_of(tensor))):
                raise ValueError(
                    f"cannot {what}: got {other_name!r} and {name!r} that share memory but are different tensors, "
                    "expected memory of its own for each, because the workers' copies would be apart. Give both names "
                    "the same Parameter (b.weight = a.weight) and transpose or slice it in forward, or .clone() one."
                )
        before.append((device, start, end, name, tensor))


class _Pickler(TravelPickler):
    """Pickles a module without the values of its tensors."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.file = io.BytesIO()
        super().__init__(self.file, protocol=5)
        self._numbers = {
            id(tensor): number
            for number, tensor in enumerate(tensors)
            if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not vars(tensor)
        }

    def persistent_id(self, obj: Any) -> Any:
        return self._numbers.get(id(obj)) if isinstance(obj, torch.Tensor) else None


class _OfMakings(_Pickler):
    """Pickles objects without optimizers, and without the attributes that are in their states."""

    def persistent_id(self, obj: Any) -> Any:
        return type(obj).__name__ if states.is_optimizer(obj) else super().persistent_id(obj)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) or not hasattr(obj, "load_state_dict"):
            return super().reducer_override(obj)
        made, args, own, *others = obj.__reduce_ex__(5)
        if isinstance(own, dict):
            taken = states.numbers_of(obj) if states.is_module(obj) else obj.state_dict()
            own = {name: value for name, value in own.items() if name not in taken or taken[name] is not value}
        return made, args, own, *others


def makings_of(name: str, objects: Any, tensors: Sequence[torch.Tensor]) -> bytes:
    """Return what objects are made of as bytes: all but tensors, optimizers and what their states have."""
    return _dumped(name, objects, _OfMakings(tensors))


def pickled_without(name: str, module: Any, tensors: Sequence[torch.Tensor]) -> tuple[bytes, list[type]]:
    """Return a module pickled without some tensors, and the classes that the pickle names."""
    pickler = _Pickler(tensors)
    return _dumped(name, module, pickler), pickler.named


def _dumped(name: str, obj: Any, pickler: _Pickler) -> bytes:
    try:
        pickler.dump(obj)
    except Exception as error:
        raise SerializationError(
            f"cannot send module {name!r} to the workers: {type(error).__name__}: {str(error).rstrip('.')}. Make it of "
            "what can be pickled."
        ) from error
    return pickler.file.getvalue()
