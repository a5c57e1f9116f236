"""The pattern that arguments must match so that a call fits the compiled one, and the rows of the last call."""

from __future__ import annotations

import pickle
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from synk._master.calls.arguments import Argument, Nest, padded
from synk._master.calls.binding import Divider, choose_rows, index_arrays, ranks_with_rows, rows_of
from synk._master.calls.plans import Call
from synk._master.code.handles import Handle
from synk._pure.nested import SINGLE_VALUES, is_plain_object, take_apart, take_apart_whole
from synk._pure.read_only import ReadOnlyArray
from synk._pure.tensors import memory_of, torch_dtypes

_ARRAYS = (np.ndarray, ReadOnlyArray)


class Pattern:
    """The pattern that the arguments of a call must match to fit the last one. It holds none of the arguments.

    Parameters
    ----------
    name : str
        Name of the function, for errors.
    arguments : sequence of Argument
    staged : sequence of ndarray
        Where the arguments that are arrays are copied to.
    pickled : ndarray of uint8, or None
        Where the pickle of the broadcast objects is copied to.

    Attributes
    ----------
    leaves : list of (first, second, target)
        The pattern of each leaf. For ``Data``: weak references to it and its contents. For a variable or a
        resident object: a weak reference, and None. For an array: its dtype, its shape, and the place to copy it to.
        The pickle of all broadcast objects is one more array at the end, with the length of its place.
    has_variables : bool
    pickled_nbytes : int
        Size of the pickle of the broadcast objects in the call that was compared last.
    """

    def __init__(
        self, name: str, arguments: Sequence[Argument], staged: Sequence[np.ndarray], pickled: np.ndarray | None
    ) -> None:
        self._name = name
        places = iter(staged)
        self.leaves: list[tuple[Any, Any, np.ndarray | None]] = []
        self._objects: list[int] = []  # their positions
        self._tensors: list[tuple[int, Any, Any]] = []  # position, dtype, the dtype in which NumPy sees it
        for position, argument in enumerate(arguments):
            if argument.is_tensor and argument.array is not None:
                dtypes = torch_dtypes(argument.tensor_dtype or argument.array.dtype.name, argument.array.dtype.name)
                self._tensors.append((position, *dtypes))
            if argument.array is not None:
                self.leaves.append((argument.array.dtype, argument.array.shape, next(places)))
            elif argument.kind == "object":
                self._objects.append(position)
            elif argument.contents is not None:
                contents = weakref.ref(argument.contents.array)
                self.leaves.append((weakref.ref(argument.data), contents, None))
            else:
                self.leaves.append((weakref.ref(argument.value), None, None))
        if pickled is not None:
            self.leaves.append((pickled.dtype, pickled.shape, pickled))
        self.pickled_nbytes = 0
        self._keywords: tuple[str, ...] = ()
        self._nests: list[tuple[int, Nest]] = []  # nested arguments with their positions, the last one first
        self._inner: set[int] = set()  # leaves of nested arguments that have rows
        self._num_values = 0
        self._note_passed(arguments)
        self._is_flat = not (self._keywords or self._nests or self._tensors or self._objects)
        self._rows = rows_of(arguments)
        self._shards = [(each.label, weakref.ref(each.value)) for each in arguments if each.kind == "shard"]
        self.has_variables = any(argument.kind in ("shard", "replica") for argument in arguments)

    def _note_passed(self, arguments: Sequence[Argument]) -> None:
        num_inner = 0
        for position, argument in enumerate(arguments):
            if num_inner:  # a further leaf of the same nested argument
                num_inner -= 1
                continue
            if argument.nest is not None:
                self._nests.insert(0, (self._num_values, argument.nest))
                if not argument.nest.is_whole:
                    self._inner.update(range(position, position + argument.nest.num_leaves))
                num_inner = argument.nest.num_leaves - 1
            if argument.keyword:
                self._keywords = (*self._keywords, argument.keyword)
            self._num_values += 1

    def values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """Return what to copy if the arguments match, else None."""
        leaves: Sequence[Any] | None = args if self._is_flat and not kwargs else self._taken_apart(args, kwargs)
        if leaves is None or len(leaves) != len(self.leaves):
            return None
        values = []
        for leaf, (first, second, target) in zip(leaves, self.leaves):
            if target is not None:
                if type(leaf) not in _ARRAYS or leaf.shape != second:
                    return None
                dtype = leaf.dtype
                if dtype is not first and dtype != first:
                    return None
                values.append(leaf)
            elif (
                leaf is None or leaf is not first() or leaf._contents.array is not second()
                if second is not None
                else not isinstance(leaf, Handle) or leaf._referent is not first()
            ):
                return None
        return values

    def _taken_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """Return the leaves of the arguments, tensors as arrays and objects pickled, or None if they do not match."""
        values = [*args, *kwargs.values()]
        if tuple(kwargs) != self._keywords or len(values) != self._num_values:
            return None
        if (self._nests or self._tensors) and not self._open(values):
            return None
        return self._with_pickle(values) if self._objects else values

    def _open(self, values: list[Any]) -> bool:
        """Replace nested values by their leaves and tensors by arrays. Return whether they match."""
        try:
            for position, nest in self._nests:
                value = values[position]
                leaves, found = take_apart_whole(value) if nest.is_whole else take_apart(value)
                if found != nest.structure:
                    return False
                values[position : position + 1] = leaves
        except (TypeError, RecursionError):  # a new call will say what is wrong
            return False
        for position, dtype, plain in self._tensors:
            array = values[position] = memory_of(values[position], dtype, plain)
            if array is None:
                return False
        return True

    def _with_pickle(self, values: list[Any]) -> list[Any] | None:
        """Return the leaves with one pickle in place of the objects, or None if one of these may hold arrays."""
        objects = [values[position] for position in self._objects]
        for position, value in zip(self._objects, objects):
            if not is_plain_object(value) or (position in self._inner and not isinstance(value, SINGLE_VALUES)):
                return None
        data = pickle.dumps(tuple(objects), protocol=5)
        self.pickled_nbytes = len(data)
        for position in reversed(self._objects):
            del values[position]
        (capacity,) = self.leaves[-1][1]
        values.append(padded(data, capacity))
        return values

    def choose(self, call: Call, divide: Divider, batch: Any) -> Call | None:
        """Return ``call`` with the rows of a batch, or None if other ranks would run it or it needs another plan.

        The arguments must have been compared.

        Raises
        ------
        ValueError, IndexError, TypeError
            If the batch does not fit, as in a new call.
        """
        shards: list[Any] = [(label, variable()) for label, variable in self._shards]
        selection, bounds, owned = choose_rows(self._rows, shards, batch, divide, self._name)
        indices = index_arrays(selection, owned)
        counts = [None if each is None else len(each) for each in indices]
        if counts != [None if each is None else len(each) for each in call.index_arrays]:
            return None
        if ranks_with_rows(bounds) != call.ranks:
            return None
        rows = [bounds[rank][1] - bounds[rank][0] for rank in call.ranks]
        return replace(
            call, selection=selection, bounds=bounds, rows=rows, owned=owned, index_arrays=indices, block=None
        )
