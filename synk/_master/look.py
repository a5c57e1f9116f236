"""What the last call of a function was given: its arguments, as the next ones are compared with them, and its rows."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from synk._master.arguments import Argument, rows_of
from synk._master.binding import choose_rows, index_arrays, ranks_with_rows
from synk._master.plans import Call
from synk._pure.interrupts import is_from_handler
from synk._pure.nested import take_apart


class Look:
    """The look of a call. Holds nothing of what was passed but its structure.

    Parameters
    ----------
    name : str
        Of the function, for errors.
    arguments : sequence of Argument
    staged : sequence of ndarray
        Where those of them that are arrays are copied to.

    Attributes
    ----------
    leaves : list of (first, second, target, is_minibatch)
        What to compare each leaf with: weak references to a ``Data`` and its contents, or to a variable or resident
        object, and None; for
        arrays the dtype, the shape, and the place to copy them to. ``is_minibatch`` is that of ``Data``.
    is_flat : bool
        Whether the leaves are what was passed, by position.
    has_variables : bool
    """

    def __init__(self, name: str, arguments: Sequence[Argument], staged: Sequence[np.ndarray]) -> None:
        self._name = name
        places = iter(staged)
        self.leaves: list[tuple[Any, Any, np.ndarray | None, bool]] = []
        for argument in arguments:
            if argument.array is not None:
                self.leaves.append((argument.array.dtype, argument.array.shape, next(places), False))
            elif argument.contents is not None:
                contents = weakref.ref(argument.contents.array)
                self.leaves.append((weakref.ref(argument.data), contents, None, argument.is_minibatch))
            else:
                self.leaves.append((weakref.ref(argument.value), None, None, False))
        self._keywords: tuple[str, ...] = ()
        self._nests: list[tuple[int, Any]] = []  # positions and structures, the last ones first
        self._num_values = 0
        self._note_passed(arguments)
        self.is_flat = not self._keywords and not self._nests
        self._rows = rows_of(arguments)
        self._shards = [(each.label, weakref.ref(each.value)) for each in arguments if each.kind == "shard"]
        self.has_variables = any(argument.kind in ("shard", "replica") for argument in arguments)

    def _note_passed(self, arguments: Sequence[Argument]) -> None:
        num_inner = 0
        for argument in arguments:
            if num_inner:  # leaves of the nesting before
                num_inner -= 1
                continue
            if argument.nest is not None:
                self._nests.insert(0, (self._num_values, argument.nest.structure))
                num_inner = argument.nest.num_leaves - 1
            if argument.keyword:
                self._keywords = (*self._keywords, argument.keyword)
            self._num_values += 1

    def taken_apart(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """Return the leaves of what is passed; None where its keywords or nestings are others."""
        values = [*args, *kwargs.values()]
        if tuple(kwargs) != self._keywords or len(values) != self._num_values:
            return None
        try:
            for position, structure in self._nests:
                leaves, found = take_apart(values[position])
                if found != structure:
                    return None
                values[position : position + 1] = leaves
        except (TypeError, RecursionError) as error:  # the ordinary way says what is wrong
            if is_from_handler(error):
                raise
            return None
        return values

    def choose(self, call: Call, world_size: int, batch: Any, shard_batch: Any) -> Call | None:
        """Return ``call`` with the rows of a batch; None where other ranks run it, or by another plan.

        The arguments have been compared.

        Raises
        ------
        ValueError, IndexError, TypeError
            If the batch does not fit, as in an ordinary call.
        """
        shards: list[Any] = [(label, variable()) for label, variable in self._shards]
        selection, bounds, owned = choose_rows(self._rows, shards, batch, shard_batch, world_size, self._name)
        indices = index_arrays(selection, owned, self._rows)
        counts = [None if each is None else len(each) for each in indices]
        if counts != [None if each is None else len(each) for each in call.index_arrays]:
            return None
        if ranks_with_rows(bounds) != call.ranks:
            return None
        rows = [bounds[rank][1] - bounds[rank][0] for rank in call.ranks]
        return replace(call, selection=selection, bounds=bounds, rows=rows, owned=owned, index_arrays=indices)
