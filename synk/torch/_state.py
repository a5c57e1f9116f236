"""The state of replicated objects: what their ``state_dict``s have, with gradients, flags, numbers and texts.

Of optimizers it is all but their hooks, and that of the optimizers that they wrap. All other attributes are each
process's own: they begin as the pickle of the objects has them, and nothing carries them from one process to another.
Tensors are copied element by element, so a state has the same bits wherever it is loaded; they travel beside the
pickle of everything else.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import optree
import torch

from synk._wire.parcels import TravelPickler
from synk.errors import SerializationError


class Apart:
    """Mixed into a pickler: ``place`` returns what stands for a tensor; None pickles it.

    Examples
    --------
    >>> class Pickler(Apart, pickle.Pickler):
    ...     pass
    >>> tensors, file = [], io.BytesIO()
    >>> pickler = Pickler(file)
    >>> pickler.place = lambda tensor: (tensors.append(tensor), len(tensors) - 1)[1]
    >>> pickler.dump({"x": [torch.ones(2), "text"], "n": 3})
    >>> len(tensors), load_joined(file.getvalue(), [torch.zeros(1)].__getitem__)
    (1, {'x': [tensor([0.]), 'text'], 'n': 3})
    """

    place: Callable[[torch.Tensor], Any]

    def persistent_id(self, obj: Any) -> Any:
        return self.place(obj) if isinstance(obj, torch.Tensor) else None


class _Joining(pickle.Unpickler):
    def __init__(self, data: bytes, tensor_of: Callable[[Any], torch.Tensor]) -> None:
        super().__init__(io.BytesIO(data))
        self._tensor_of = tensor_of

    def persistent_load(self, place: Any) -> torch.Tensor:
        return self._tensor_of(place)


def load_joined(data: bytes, tensor_of: Callable[[Any], torch.Tensor]) -> Any:
    """Return what a pickle holds, with the tensors that ``tensor_of`` returns for their places."""
    return _Joining(data, tensor_of).load()


class TensorlessPickler(Apart, TravelPickler):
    """Pickles what goes to the workers, without tensors."""


def dump_apart(
    what: str, value: Any, place: Callable[[torch.Tensor], Any], kind: Callable[..., Any] = TensorlessPickler
) -> tuple[bytes, list[type]]:
    """Return a value pickled without its tensors, and the classes that the pickle names.

    Raises
    ------
    SerializationError
        If it cannot be pickled.
    """
    file = io.BytesIO()
    pickler = kind(file, protocol=5)
    pickler.place = place
    try:
        pickler.dump(value)
    except Exception as error:
        raise SerializationError(
            f"cannot send {what}: {type(error).__name__}: {str(error).rstrip('.')}. Make it of what can be pickled."
        ) from error
    return file.getvalue(), pickler.named


State = dict[str, Any]

_PLAIN = frozenset({int, float, complex, bool, str, type(None)})

TABLES = frozenset(vars(torch.nn.Module())) - {"training"}
"""Attributes that every module has. All others are the user's."""


def is_plain(value: Any) -> bool:
    """Whether an attribute of a module is a number, a text or None, which travel with its state."""
    return type(value) in _PLAIN or isinstance(value, np.generic)


def names_of(objects: Sequence[Any]) -> str:
    """Return the names of the objects' classes."""
    return ", ".join(type(obj).__name__ for obj in objects)


def is_module(obj: Any) -> bool:
    return isinstance(obj, torch.nn.Module)


def is_optimizer(obj: Any) -> bool:
    return isinstance(obj, torch.optim.Optimizer)


def optimizers_of(objects: Sequence[Any]) -> list[Any]:
    """Return the optimizers among the objects, and those that they have as attributes."""
    found = list(filter(is_optimizer, objects))
    for each in found:  # which grows
        wrapped = filter(is_optimizer, vars(each).values())
        found += [other for other in wrapped if all(other is not known for known in found)]
    return found


def tensors_of(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters and buffers of a module, including those that a checkpoint leaves out."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def parts_of(objects: Sequence[Any]) -> list[torch.nn.Module]:
    """Return the modules among the objects, and all modules in them."""
    return [part for obj in objects if is_module(obj) for part in obj.modules()]


def parameters_of(objects: Sequence[Any]) -> list[torch.Tensor]:
    """Return the parameters of all modules, each once."""
    found = [parameter for obj in objects if is_module(obj) for parameter in obj.parameters()]
    return list({id(parameter): parameter for parameter in found}.values())


def address(tensor: torch.Tensor) -> int:
    """Return the address of a tensor; 0 for a sparse tensor, which has no single address."""
    return tensor.data_ptr() if tensor.layout is torch.strided else 0


def version(tensor: torch.Tensor) -> int:
    """Return how often a tensor was written into; 0 for one made in inference mode, where torch does not count."""
    return 0 if tensor.is_inference() else tensor._version


# -- state ------------------------------------------------------------------------------------------------------------


def dump(objects: Sequence[Any]) -> list[State]:
    """Return the states of objects, and that of all optimizers as the last one.

    They consist of the very tensors that the objects hold, not of copies.
    """
    others = [{} if is_optimizer(obj) else _dump_one(obj) for obj in objects]
    return [*others, dump_optimizers(objects)]


def _dump_one(obj: Any) -> State:
    if is_module(obj):
        parts = dict(obj.named_modules())
        return {
            "numbers": {name: numbers_of(part) for name, part in parts.items()},
            "requires_grad": {name: each.requires_grad for name, each in obj.named_parameters()},
            "tensors": {name: tensor.detach() for name, tensor in tensors_of(obj)},
            "gradients": {name: each.grad for name, each in obj.named_parameters()},
            "extra": {name: part.get_extra_state() for name, part in parts.items() if _has_extra(part)},
        }
    return {"state_dict": obj.state_dict()}


def numbers_of(part: torch.nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(part).items() if is_plain(value) and name not in TABLES}


def _has_extra(part: torch.nn.Module) -> bool:
    return type(part).get_extra_state is not torch.nn.Module.get_extra_state


def load(objects: Sequence[Any], states: Sequence[State]) -> None:
    """Bring objects into their states. The objects, their parameters and buffers keep their identity."""
    for obj, state in zip(objects, states):
        if is_module(obj):
            _load_module(obj, state)
        elif not is_optimizer(obj):
            obj.load_state_dict(state["state_dict"])
    load_optimizers(objects, states[-1])


def _load_module(module: Any, state: State) -> None:
    parts = dict(module.named_modules())
    tensors, parameters = dict(tensors_of(module)), dict(module.named_parameters())
    if parts.keys() != state["numbers"].keys() or parameters.keys() != state["gradients"].keys():
        raise ValueError(
            f"cannot take over the state of {type(module).__name__}: it has other modules or parameters, expected the "
            "same in the program and on every worker. Add and remove them inside of `with rep.here():`."
        )
    for name, numbers in state["numbers"].items():
        own = parts[name].__dict__  # what is something else here, such as a tensor, is this process's own
        own.update({key: value for key, value in numbers.items() if key not in own or is_plain(own[key])})
    for name in {**tensors, **state["tensors"]}:  # buffers that are None on one side
        if name not in tensors or name not in state["tensors"]:
            path, _, key = name.rpartition(".")
            parts[path]._buffers[key] = None if name in tensors else _as_here(state["tensors"][name], parameters)
    for name in tensors.keys() & state["tensors"].keys():
        write(tensors[name], state["tensors"][name])
    for name, gradient in state["gradients"].items():
        tensors[name].requires_grad_(state["requires_grad"][name])
        tensors[name].grad = None if gradient is None else gradient.to(tensors[name].device)
    for name, extra in state["extra"].items():
        parts[name].set_extra_state(extra)


def write(tensor: torch.Tensor, value: torch.Tensor, *, is_in_place: bool = True) -> None:
    """Write into a tensor's own memory, or give it other memory: the shape differs, as of a buffer that grows."""
    if is_in_place and (tensor.shape, tensor.dtype) == (value.shape, value.dtype):
        tensor.detach().copy_(value)
    else:
        tensor.data = value.to(tensor.device, copy=True)


def _as_here(value: torch.Tensor, parameters: dict[str, torch.Tensor]) -> torch.Tensor:
    """Return a copy of a buffer of elsewhere, where the parameters lie."""
    device = next((each.device for each in parameters.values()), value.device)
    return value.to(device, copy=True)


class _InPlaces(TensorlessPickler):
    """Pickles optimizers without what each process has in the same place."""

    def persistent_id(self, obj: Any) -> Any:
        return self.place(obj)


def dump_optimizers(objects: Sequence[Any]) -> State:
    """Return the attributes, groups and slots of optimizers, pickled without tensors, and these tensors."""
    optimizers = optimizers_of(objects)
    places = {id(each): number for number, each in enumerate(_in_places(objects, optimizers))}
    tensors: list[torch.Tensor] = []

    def place(obj: Any) -> int | None:
        if isinstance(obj, torch.Tensor) and id(obj) not in places:
            tensors.append(obj)
            places[id(obj)] = -len(tensors)
        return places.get(id(obj))

    parts = [(_own_of(each), [{**group} for group in each.param_groups], {**each.state}) for each in optimizers]
    pickled, _ = dump_apart(names_of(optimizers), parts, place, _InPlaces)
    return {
        "group counts": [len(each.param_groups) for each in optimizers],
        "pickled": pickled,
        "tensors": [each if each.is_leaf else each.detach() for each in tensors],
    }


def load_optimizers(objects: Sequence[Any], state: State) -> None:
    """Bring optimizers into such a state. They, their groups and tables of slots keep their identity."""
    optimizers = optimizers_of(objects)
    if len(optimizers) != len(state["group counts"]):
        raise ValueError(
            f"cannot take over the state of {names_of(optimizers)}: got {len(state['group counts'])} optimizers, "
            f"expected {len(optimizers)}, with those that are attributes of others, in the program and on every worker "
            "alike. Make them before replicate(), or inside of `with rep.here():`."
        )
    for optimizer, count in zip(optimizers, state["group counts"]):
        groups = optimizer.param_groups
        groups[count:] = [{} for _ in range(count - len(groups))]
    devices = [parameter.device for parameter in parameters_of(objects)[:1]]
    tensors = [each.to(devices[0]) if each.ndim and devices else each for each in state["tensors"]]
    in_places = _in_places(objects, optimizers)
    parts = load_joined(state["pickled"], lambda place: tensors[-place - 1] if place < 0 else in_places[place])
    for optimizer, (own, groups, slots) in zip(optimizers, parts):
        vars(optimizer).update(own)
        for group, saved in zip(optimizer.param_groups, groups):
            group.clear()
            group.update(saved)
        optimizer.state.clear()
        for key, values in slots.items():
            optimizer.state[key] = _beside(key, values) if isinstance(key, torch.Tensor) else values


def _own_of(optimizer: Any) -> dict[str, Any]:
    """Return the attributes of an optimizer beside groups, slots and hooks, such as a counter or its own buffers."""
    others = {name for name in vars(optimizer) if name.startswith("_optimizer_")} | {"param_groups", "state"}
    return {name: value for name, value in vars(optimizer).items() if name not in others and not callable(value)}


def _in_places(objects: Sequence[Any], optimizers: Sequence[Any]) -> list[Any]:
    """Return what every process has for itself, in the same order."""
    tables = [table for each in optimizers for table in (each.param_groups, *each.param_groups, each.state)]
    return [*parameters_of(objects), *parts_of(objects), *objects, *optimizers, *tables]


def _beside(parameter: torch.Tensor, value: Any) -> Any:
    """Move an optimizer's state to its parameter's device. Counters of one element stay on the CPU, as in torch."""

    def beside(leaf: Any) -> Any:
        return leaf.to(parameter.device) if isinstance(leaf, torch.Tensor) and leaf.ndim else leaf

    return optree.tree_map(beside, value, none_is_leaf=True)
