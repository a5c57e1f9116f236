"""What a user holds of something that lives on the workers, and how a pickle refers to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from synk._pure.interrupts import operation
from synk._pure.tensors import is_torch_module, is_torch_optimizer
from synk._wire.parcels import Pickler


class Handle:
    """The base of :class:`synk.Shared`, :class:`synk.Resident` and replicated modules, which are known by their class.

    Attributes
    ----------
    _reference : (callable, tuple)
        What becomes of it in a pickle: how a worker finds what it has itself.
    _referent : object
        What a call knows it by, if it can be an argument of one.
    """

    __slots__ = ("_reference", "_referent")
    _reference: tuple[Callable[..., Any], tuple[Any, ...]]
    _referent: Any


class HandlePickler(Pickler):
    """Pickles by cloudpickle's rules, but a handle as a reference to what the rank has.

    Attributes
    ----------
    handles : list of Handle
    modules, optimizers : list
        Of torch.
        All three: those it has met.
    """

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, protocol=5, **options)
        self.handles: list[Handle] = []
        self.modules: list[Any] = []
        self.optimizers: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Handle):
            self.handles.append(obj)
            return obj._reference
        if is_torch_module(obj):
            self.modules.append(obj)
        elif is_torch_optimizer(obj):
            self.optimizers.append(obj)
        with operation():  # cloudpickle ends errors of its own there, and would end a handler's
            return super().reducer_override(obj)
