"""Tells what a program does by mistake with objects whose newer copies are on the workers.

At each step all that the program may have changed is compared with what was there when both were alike. While the
program's copy is behind, hooks of its modules and optimizers refuse to use it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import attrgetter, is_, itemgetter
from typing import Any, NoReturn

import torch

from synk.torch import _state as states

_MARK, _SECOND = attrgetter("_version", "requires_grad"), itemgetter(1)


class Guard:
    """Watches the program's copy of replicated objects.

    Attributes
    ----------
    is_behind : bool
        Whether the workers' copies are newer.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects, self._hooks = objects, list[Any]()
        self.note_alike()

    def note_alike(self) -> None:
        """Note that the program's objects are like those of the workers now."""
        self.set_behind(False)
        self._owners = [(name, own, {**own}) for name, own in _owners(self._objects)]
        modules = filter(states.is_module, self._objects)
        self._tensors = {id(tensor) for module in modules for _, tensor in states.tensors_of(module)}
        self._values = [value for *_, before in self._owners for value in before.values()]
        held = [(_named(key, name), value) for name, _, before in self._owners for key, value in before.items()]
        self._written = [each for each in held if isinstance(each[1], torch.Tensor) and not each[1].is_inference()]
        self._grown = [each for each in held if isinstance(each[1], list)]  # such as that of the groups
        self._marks = self._marks_now()

    def set_behind(self, is_behind: bool) -> None:
        """Refuse the use of the program's objects from now on, or allow it."""
        self.is_behind = is_behind
        while self._hooks:
            self._hooks.pop().remove()
        for part in states.parts_of(self._objects) if is_behind else ():
            self._hooks += [part.register_forward_pre_hook(self), part.register_state_dict_pre_hook(self)]
        for obj in filter(states.is_optimizer, self._objects if is_behind else ()):
            self._hooks += [obj.register_step_pre_hook(self), obj.register_state_dict_pre_hook(self)]

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Let synk itself use the objects."""
        was_behind = self.is_behind
        self.set_behind(False)
        try:
            yield
        finally:
            self.set_behind(was_behind)

    def shares_with(self, other: Guard) -> bool:
        """Whether both watch the same parameter or buffer."""
        return not self._tensors.isdisjoint(other._tensors)

    def difference(self) -> str:
        """Return the name of something that the program has changed; empty if it has changed nothing."""
        values = [*chain.from_iterable(own.values() for _, own, _ in self._owners)]
        if len(values) != len(self._values) or not all(map(is_, values, self._values)):
            for name, own, before in self._owners:
                for key in {**before, **own}:
                    if not (_is_no_change(key, own, before) or _is_same(own.get(key, self), before.get(key, self))):
                        return _named(key, name)
        now = self._marks_now()
        names = [name for name, _ in (*self._written, *self._grown)] if now != self._marks else []
        return next((name for name, mark, before in zip(names, now, self._marks) if mark != before), "")

    def _marks_now(self) -> list[Any]:
        """Return what changes when a tensor is written into or frozen, or a list grows."""
        return [*map(_MARK, map(_SECOND, self._written)), *map(len, map(_SECOND, self._grown))]

    def __call__(self, *args: Any) -> NoReturn:
        """Refuse the use of an object, as its hook."""
        raise ValueError(
            f"cannot use {states.names_of(self._objects)} in the program: the workers' copies are newer. Call "
            "rep.pull() first, where rep is what replicate() has returned; `with rep.here():` also sends what you "
            "change."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        # Hooks travel in pickles and copies of their modules.
        raise ValueError(
            f"cannot pickle or copy {states.names_of(self._objects)}: the workers' copies are newer. In the body of a "
            "step use its own parameters instead of the program's objects; elsewhere call rep.pull() first."
        )


def _owners(objects: Sequence[Any]) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield the dicts that hold what a program may replace, each with the name of what it belongs to."""
    for obj in objects:
        name = type(obj).__name__
        if not states.is_optimizer(obj):
            yield name, vars(obj)
        for path, part in obj.named_modules() if states.is_module(obj) else ():
            for own in (vars(part), part._parameters, part._buffers, part._modules):
                yield f"{name}.{path}" if path else name, own
    for obj in states.optimizers_of(objects):
        name = type(obj).__name__
        for number, group in enumerate(obj.param_groups):
            yield f"group {number} of {name}", group
        yield name, vars(obj)
        yield f"the state of {name}", obj.state


def _named(key: Any, name: str) -> str:
    return name if isinstance(key, torch.Tensor) else f"{key!r} of {name}"


def _is_no_change(key: Any, own: dict[Any, Any], before: dict[Any, Any]) -> bool:
    """Whether torch's schedulers have made an entry, or a program that has looked for slots of a parameter."""
    return key not in before and not own[key] if isinstance(key, torch.Tensor) else key == "_opt_called"


def _is_same(one: Any, other: Any) -> bool:
    if type(one) is tuple is type(other):  # tensors in it cannot be compared by ==
        return len(one) == len(other) and all(map(_is_same, one, other))
    if type(one) is dict is type(other):  # such as the tables that torch.fx makes anew when a module is pickled
        return one.keys() == other.keys() and all(_is_same(one[key], other[key]) for key in one)
    return one is other or (type(one) is type(other) and states.is_plain(one) and one == other)
