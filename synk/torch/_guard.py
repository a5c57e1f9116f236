"""Tells what a program does by mistake with objects whose newer copies are on the workers.

At each step all that the program may have changed is compared with what was there when both were alike. While the
program's copy is behind, hooks of its modules and optimizers refuse to use it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from operator import is_
from typing import Any, NoReturn

from synk.torch import _state as states

_MISSING = object()


class Guard:
    """Watches the program's copy of replicated objects.

    Attributes
    ----------
    is_behind : bool
        Whether the workers' copies are newer.
    """

    def __init__(self, objects: Sequence[Any]) -> None:
        self._objects = objects
        self._hooks: list[Any] = []
        self.note_alike()

    def note_alike(self) -> None:
        """Note that the program's objects are like those of the workers now."""
        self.set_behind(False)
        self._owners = [(name, own, {**own}) for name, own in _owners(self._objects)]
        self._tensors = [each for obj in self._objects if states.is_module(obj) for each in states.tensors_of(obj)]
        self._marks = self._look()

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

    def difference(self) -> str:
        """Return the name of something that the program has changed; empty if it has changed nothing."""
        for name, own, before in self._owners:
            if len(own) != len(before) or not all(map(is_, own.values(), before.values())):
                for key in {**before, **own}:
                    if key != "_opt_called" and not _is_same(own.get(key, _MISSING), before.get(key, _MISSING)):
                        return f"{key!r} of {name}"
        changed = zip(self._tensors, self._marks, self._look())
        return next((repr(name) for (name, _), before, now in changed if before != now), "")

    def _look(self) -> list[Any]:
        """Return marks that change when a tensor is written into, moved or frozen."""
        return [(each._version, each.requires_grad, states.address(each)) for _, each in self._tensors]

    def __call__(self, *args: Any) -> NoReturn:
        """Refuse the use of an object, as its hook."""
        raise ValueError(
            f"cannot use {', '.join(type(obj).__name__ for obj in self._objects)} in the program: the workers' copies "
            "are newer. Call rep.pull() first, where rep is what replicate() has returned; `with rep.here():` also "
            "sends what you change."
        )

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self()  # hooks travel in pickles and copies of their modules


def _owners(objects: Sequence[Any]) -> Iterator[tuple[str, dict[Any, Any]]]:
    """Yield the dicts that hold what a program may replace, each with the name of what it belongs to."""
    for part in states.parts_of(objects):
        for own in (vars(part), part._parameters, part._buffers, part._modules):
            yield type(part).__name__, own
    for obj in objects:
        yield type(obj).__name__, vars(obj)
        if states.is_optimizer(obj):
            yield from ((f"group {k} of {type(obj).__name__}", group) for k, group in enumerate(obj.param_groups))


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (type(one) is type(other) and type(one) in {*states.PLAIN, tuple} and one == other)
