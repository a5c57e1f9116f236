"""A value that a recorded program has not computed yet. Operations on it are recorded, or compute it at once.

It uses two methods of the recording: one adds an operation, one computes a value at once.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

# Methods and attributes of arrays that give new values and are recorded. All others need the value.
_METHODS = frozenset(
    """
    all any argmax argmin argpartition argsort astype choose clip compress conj conjugate copy cumprod cumsum diagonal
    dot flatten max mean min nonzero prod ravel repeat reshape round searchsorted squeeze std sum swapaxes take trace
    transpose var view
    """.split()  # noqa: SIM905
)
_PARTS = frozenset(("T", "mT", "real", "imag"))
_WRITERS = frozenset(("byteswap", "fill", "partition", "put", "resize", "setfield", "setflags", "sort"))


class Deferred(NDArrayOperatorsMixin):
    """An array, or another result of an operation, that a flow computes later.

    Arithmetic, indexing, NumPy functions and array methods give further deferred values. Operations that need the value
    compute it at once, with everything it depends on: ``float``, ``bool``, ``if``, ``len``, ``shape``, ``dtype``,
    iteration, ``numpy.asarray``, printing. A deferred value cannot be written into.

    Raises
    ------
    TypeError
        When the program writes into it.
    """

    __slots__ = ("_node", "_recording")
    _node: Any
    _recording: Any

    def __init__(self, recording: Any, node: Any) -> None:
        self._recording = recording
        self._node = node

    def _forced(self) -> Any:
        return self._recording.value_of(self._node)

    def _work(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Deferred:
        work: Deferred = self._recording.work(name, function, args, kwargs)
        return work

    # -- recorded -----------------------------------------------------------------------------------------------------

    def __array_ufunc__(self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any) -> Any:
        name = ufunc.__name__ if method == "__call__" else f"{ufunc.__name__}.{method}"
        if method == "at":
            _refuse_write(f"{name}()")
        _refuse_out(name, kwargs)
        result = self._work(name, getattr(ufunc, method), *inputs, **kwargs)
        return result if ufunc.nout == 1 else tuple(result[place] for place in range(ufunc.nout))

    def __array_function__(self, function: Callable[..., Any], types: Any, args: Any, kwargs: Any) -> Any:
        name = function.__name__
        _refuse_out(name, kwargs)
        return self._work(name, function, *args, **kwargs)

    def __getitem__(self, index: Any) -> Deferred:
        return self._work("getitem", operator.getitem, self, index)

    def __getattr__(self, name: str) -> Any:
        if name in _METHODS:

            def method(*args: Any, **kwargs: Any) -> Deferred:
                _refuse_out(name, kwargs)
                return self._work(name, called, self, *args, **kwargs)

            def called(value: Any, *args: Any, **kwargs: Any) -> Any:
                return getattr(value, name)(*args, **kwargs)

            return method
        if name in _PARTS:
            return self._work(name, operator.attrgetter(name), self)
        if name in _WRITERS:
            _refuse_write(f"{name}()")
        if name.startswith("__"):  # a library asks whether this is one of its own arrays
            raise AttributeError(name)
        return getattr(read_only(self._forced()), name)

    # -- refused ------------------------------------------------------------------------------------------------------

    def __setitem__(self, index: Any, value: Any) -> NoReturn:
        _refuse_write("an assignment to a part of it")

    def __delitem__(self, index: Any) -> NoReturn:
        _refuse_write("the deletion of a part of it")

    # -- operations that need the value -------------------------------------------------------------------------------

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(read_only(self._forced()), dtype, copy=copy)

    def __bool__(self) -> bool:
        return bool(self._forced())

    def __int__(self) -> int:
        return int(self._forced())

    def __float__(self) -> float:
        return float(self._forced())

    def __complex__(self) -> complex:
        return complex(self._forced())

    def __index__(self) -> int:
        return operator.index(self._forced())

    def __len__(self) -> int:
        return len(self._forced())

    def __iter__(self) -> Iterator[Any]:
        return iter(mapped(read_only, self._forced()))

    def __contains__(self, item: Any) -> bool:
        return item in self._forced()

    def __repr__(self) -> str:
        return repr(self._forced())

    def __str__(self) -> str:
        return str(self._forced())

    def __format__(self, spec: str) -> str:
        return format(self._forced(), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return read_only(self._forced()).__reduce_ex__(protocol)


def mapped(change: Callable[[Any], Any], tree: Any) -> Any:
    """Return a nesting of tuples, lists, dicts and slices with each leaf changed."""
    kind = type(tree)
    if kind is Deferred or kind is np.ndarray:
        return change(tree)
    if kind is tuple:
        return tuple([mapped(change, each) for each in tree])
    if kind is list:
        return [mapped(change, each) for each in tree]
    if kind is dict:
        return {key: mapped(change, each) for key, each in tree.items()}
    if kind is slice:
        return slice(*(mapped(change, each) for each in (tree.start, tree.stop, tree.step)))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return kind(*(mapped(change, each) for each in tree))
    return change(tree)


def read_only(value: Any) -> Any:
    """Return a value that cannot be written into. For an array it is a view."""
    if isinstance(value, np.ndarray) and value.flags.writeable:
        value = value.view()
        value.flags.writeable = False
    return value


def _refuse_out(name: str, kwargs: dict[str, Any]) -> None:
    out = kwargs.get("out")
    if any(each is not None for each in (out if isinstance(out, tuple) else (out,))):
        _refuse_write(f"{name}() with out=, or an assignment such as x += y")


def _refuse_write(what: str) -> NoReturn:
    raise TypeError(
        f"cannot write into an array of a flow: got {what}, expected operations with results of their own. "
        "Write x = x + y, or numpy.where; the flow's results may be changed when it has returned."
    )
