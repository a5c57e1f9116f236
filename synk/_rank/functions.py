"""Functions and plans as a rank holds them: views of shared memory, ready to be cut into rows."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from synk._pure.nested import PLAIN_TYPES
from synk._pure.ops import EACH
from synk._pure.output_ops import each_op, ops_of
from synk._pure.tensors import is_tensor
from synk._pure.trees import flatten, key_orders
from synk._rank.reading import Reading
from synk._wire.messages import Leaf
from synk.backends import Backend
from synk.errors import SerializationError

FIXED_TYPES = (float, complex, bool)
"""Python's numbers whose dtype does not depend on their value."""


class LoadedFunction:
    """A function as a worker holds it."""

    def __init__(
        self,
        fn: Callable[..., Any],
        name: str,
        outputs: Any,
        framework: str | None,
        updates: Any,
        modules: Any,
        classes: Any,  # only to be kept
        backend: Backend,
    ) -> None:
        self.fn = Reading(fn, modules, name) if modules else fn
        self.name = name
        self.ops = ops_of(outputs, repr(name))
        # By these ops a list counts as rows, or anything as one object.
        self.whole = self.ops if any(op.concatenates or op is EACH for op in each_op(self.ops)) else None
        self.updates = updates
        self.to_framework: Callable[[Any], Any] | None = None
        self.from_framework: Callable[[Any], Any] | None = None
        self.is_tensor: Callable[[Any], bool] = is_tensor if framework == "torch" else _is_nothing
        if framework is not None:
            self.to_framework, self.from_framework = backend.converters(framework)


class OutputSlots:
    """Where the outputs go as long as they have the form of the last call's.

    It exists only if all outputs are small arrays, tensors, numbers or texts, or tuples, lists and dicts of these. That
    is what most functions return.
    """

    def __init__(
        self,
        result: Any,
        values: Sequence[Any],
        skeleton: Any,
        leaves: Sequence[Leaf],
        views: Sequence[np.ndarray],
        structure: Any,
        function: LoadedFunction,
    ) -> None:
        self._kind = type(result)
        is_dict = type(skeleton) is dict and set(map(type, skeleton)) == {str}
        parts = list(skeleton.values()) if is_dict else skeleton if type(skeleton) is tuple else [skeleton]
        # None for a single value, a tuple of values, or a dict of values: then the slots are in the order of the dict.
        is_flat = all(type(part) is int for part in parts)
        self._structure = None if is_flat else structure
        self._orders = None if is_flat else key_orders(result)
        self._keys: tuple[str, ...] = ()
        if is_flat and is_dict:
            self._keys = tuple(skeleton)
            values, views = [values[k] for k in parts], [views[k] for k in parts]
            leaves = tuple(leaves[k] for k in parts)
        self._slots = [
            (type(value), _conversion(value, leaf, function), view.dtype, view.shape, view)
            for value, leaf, view in zip(values, leaves, views)
        ]

    def moved(self, views: dict[int, Any]) -> OutputSlots:
        """Return slots for the same outputs, of which some lie elsewhere: by the ``id()`` of the slot's view."""
        other = copy.copy(self)
        other._slots = [(*slot[:-1], views.get(id(slot[-1]), slot[-1])) for slot in self._slots]
        return other

    def fill(self, result: Any) -> bool:
        """Write ``result`` into the slots. Return False if its form differs.

        The slots may be torn then: partly overwritten. Nobody reads them, because the program has not been told.
        """
        if type(result) is not self._kind:
            return False
        values: Collection[Any] = result if self._kind is tuple else (result,)
        if self._keys:
            if tuple(result) != self._keys:
                return False
            values = result.values()
        elif self._structure is not None:
            values, structure = flatten(result)
            if structure != self._structure or key_orders(result) != self._orders:
                return False
        if len(values) != len(self._slots):
            return False
        for value, (kind, as_array, dtype, shape, view) in zip(values, self._slots):
            if type(value) is not kind or (as_array is put_pickle and not put_pickle(value, view)):
                return False
            if as_array is put_pickle:
                continue
            if as_array is not None:
                value = as_array(value)
            if kind not in FIXED_TYPES and (value.dtype != dtype or value.shape != shape):
                return False
            view[...] = value
        return True


def _conversion(value: Any, leaf: Leaf, function: LoadedFunction) -> Callable[..., Any] | None:
    """Return what makes the array that lies in the slot of an output like ``value``; None if it is that already."""
    if leaf.dtype is None:
        return put_pickle
    return None if is_plain_output(value) else function.from_framework


def is_single_value(value: Any) -> bool:
    """Whether an output is a text, a number or None."""
    return type(value) in PLAIN_TYPES


def put_pickle(value: Any, view: np.ndarray) -> bool:
    """Write the pickle of a single value to its place in the slot. Return False if that cannot be."""
    if not is_single_value(value):
        return False
    pickled = pickle.dumps(value, protocol=5)
    if len(pickled) > view.size:
        return False
    view.data[: len(pickled)] = pickled
    return True


def is_plain_output(value: Any) -> bool:
    """Whether an output is a NumPy array or a number whose dtype does not depend on its value."""
    return type(value) is np.ndarray or type(value) in FIXED_TYPES or isinstance(value, np.generic)


def _is_nothing(value: Any) -> bool:
    return False


def load_nests(data: bytes, name: str) -> Sequence[tuple[int, int, Any]]:
    """Unpickle the structure of nested arguments. This runs code of the user's classes."""
    try:
        return pickle.loads(data) if data else ()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise SerializationError(
            f"cannot load the structure of the arguments of {name!r} on the workers: {type(error).__name__}: {error}. "
            "Keys and classes of nested arguments must be importable there, or defined in the script."
        ) from error
