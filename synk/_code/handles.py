"""Handles of what lives on the workers and of functions, and the pickler that replaces them by references."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from synk._pure.tensors import is_tensor, is_torch_module, is_torch_optimizer
from synk._wire.cell import Elsewhere
from synk._wire.parcels import TravelPickler


class Handle:
    """The base of :class:`synk.Shared`, :class:`synk.Resident` and replicated modules: what the pickler looks for.

    Attributes
    ----------
    _reference : (callable, tuple)
        How the handle is pickled: a worker calls the function and gets its own value.
    _referent : object
        The variable or resident object behind the handle. Set only for handles that can be arguments of calls.
    """

    __slots__ = ("_reference", "_referent")
    _reference: tuple[Callable[..., Any], tuple[Any, ...]]
    _referent: Any


class FunctionHandle:
    """The base of :class:`synk.Function`, which stays in the program: on workers ``Elsewhere`` stands for it.

    A module may hold one under the function's name. Workers that import the module make their own; see
    ``code.modules.is_told_by_import``.
    """

    _is_made_by_import = True
    _callee: Any
    __name__: str

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        TravelPickler.dispatch_table[cls] = _elsewhere


def _elsewhere(function: FunctionHandle) -> Any:
    return Elsewhere, (function.__name__,)


class HandlePickler(TravelPickler):
    """Pickles by cloudpickle's rules, except that a handle becomes a reference to what the rank has.

    Attributes
    ----------
    handles : list of Handle
        The handles it has met.
    modules, optimizers, tensors : list
        The torch modules, optimizers and tensors it has met.
    """

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, protocol=5, **options)
        self.handles: list[Handle] = []
        self.modules: list[Any] = []
        self.optimizers: list[Any] = []
        self.tensors: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Handle):
            self.handles.append(obj)
            return obj._reference
        if is_torch_module(obj):
            self.modules.append(obj)
        elif is_torch_optimizer(obj):
            self.optimizers.append(obj)
        elif is_tensor(obj):
            self.tensors.append(obj)
        return super().reducer_override(obj)
