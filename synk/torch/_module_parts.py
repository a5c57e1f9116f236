"""What must hold of objects before they go to the ranks, and what they are made of beside their states."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from synk._pure.tensors import array_of
from synk.torch import _state as states
from synk.torch._state import TensorlessPickler, dump_apart


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
                    "expected separate memory for each, because the workers' copies would be apart. Give both names "
                    "the same Parameter (b.weight = a.weight) and transpose or slice it in forward, or .clone() one."
                )
        before.append((device, start, end, name, tensor))


def check_gradients(what: str, modules: Iterable[torch.nn.Module]) -> None:
    """Raise ValueError if a tensor that is no parameter wants a gradient, which nobody would sum over the ranks.

    What the hooks of a module have computed (``weight_norm``) is computed anew on the ranks.
    """
    for part in modules:
        for name, value in {**part._buffers, **({} if part._forward_pre_hooks else vars(part))}.items():
            is_other = isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter)
            if is_other and value.is_leaf and value.requires_grad:
                raise ValueError(
                    f"cannot {what}: {name!r} of {type(part).__name__} requires a gradient and is no Parameter, so its "
                    "gradient would not be that of all rows. Make it a torch.nn.Parameter, or .detach() it."
                )


class _OfMakings(TensorlessPickler):
    """Pickles objects without optimizers, and without the attributes that are in their states."""

    def persistent_id(self, obj: Any) -> Any:
        return type(obj).__name__ if states.is_optimizer(obj) else super().persistent_id(obj)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, type) or not hasattr(type(obj), "load_state_dict"):
            return super().reducer_override(obj)
        recipe = obj.__reduce_ex__(5)
        if len(recipe) < 3 or not isinstance(recipe[2], dict):  # a rule of its own, as of torch.fx
            return super().reducer_override(obj)
        made, args, own, *others = recipe
        taken = states.numbers_of(obj) if states.is_module(obj) else obj.state_dict()
        own = {name: value for name, value in own.items() if name not in taken or taken[name] is not value}
        return made, args, own, *others


def numbers_of(tensors: Sequence[torch.Tensor]) -> Callable[[torch.Tensor], int | None]:
    """Return a function that numbers these tensors. Others are pickled, and those of a class of the user's own."""
    numbers = {
        id(tensor): number
        for number, tensor in enumerate(tensors)
        if type(tensor) in (torch.Tensor, torch.nn.Parameter) and not vars(tensor)
    }
    return lambda tensor: numbers.get(id(tensor))


def makings_of(what: str, objects: Any, tensors: Sequence[torch.Tensor]) -> bytes:
    """Return what objects are made of as bytes: all but tensors, optimizers and what their states have."""
    return dump_apart(what, objects, numbers_of(tensors), _OfMakings)[0]
