"""The arguments of the plain function, made from those of a call.

They are what was passed and not what a call makes of it, because that may be the mistake: a column of a table stays a
column. Only what must have another form gets it: ``Data`` and lists of numbers become arrays, ``batch`` selects rows,
and a function with a framework gets tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._api.plain_copy import NotComparable, why_no_handle
from synk._master.calls.binding import Rows, select
from synk._master.calls.callee import Callee
from synk._master.code.handles import Handle
from synk._master.objects.data import Data
from synk._pure.nested import SINGLE_VALUES, build, take_apart
from synk._pure.sparse import is_csr
from synk._pure.tables import is_table, taken_rows
from synk._pure.tensors import is_tensor
from synk._pure.trees import flatten, unflatten
from synk.backends._frameworks import Converter, host_converters


def plain_arguments(
    callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], batch: Any
) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments, by position and by name. They share memory with those that were passed.

    Raises
    ------
    NotComparable
        If an argument lives on the workers, or ``batch`` cannot select its rows here.
    ImportError
        If the program does not have the framework.
    """
    to_framework = host_converters(callee.framework)[0] if callee.framework is not None else None
    bound = callee.signature.bind(args, kwargs)
    apart = [take_apart(value) for _, _, is_broadcast, value in bound if not is_broadcast]
    picked = _PickedRows([leaf for leaves, _ in apart for leaf in leaves], batch, callee.name)
    scattered = iter(apart)
    positional, by_name = [], {}
    for _, keyword, is_broadcast, value in bound:
        if is_broadcast:
            plain = _in_framework(_as_plain(value), to_framework)
        else:
            leaves, structure = next(scattered)
            own = [_in_framework(picked.of(leaf), to_framework, is_column=True) for leaf in leaves]
            is_same = all(new is old for new, old in zip(own, leaves))
            plain = value if is_same else build(structure, iter(own))
        if keyword:
            by_name[keyword] = plain
        else:
            positional.append(plain)
    return positional, by_name


class _PickedRows:
    """The rows that ``batch`` selects from the scattered leaves of a call."""

    def __init__(self, leaves: Sequence[Any], batch: Any, name: str) -> None:
        self._selection = None
        if batch is not None:
            values = [(leaf, _as_plain(leaf)) for leaf in leaves]
            rows = [Rows("", _num_rows(value), _is_minibatch(leaf)) for leaf, value in values if _has_rows(value)]
            self._selection = select(rows, batch, name)

    def of(self, leaf: Any) -> Any:
        """Return a leaf with only these rows."""
        value = _as_plain(leaf)
        if isinstance(value, (list, tuple)) and _holds_single_values(value):
            value = np.asarray(value)
        if self._selection is None or not _has_rows(value):
            return value
        if _is_minibatch(leaf):
            return value[: self._selection.count]
        if isinstance(value, np.ndarray) or is_tensor(value) or is_csr(value):
            return value[self._selection.positions()]
        if is_table(value):
            return taken_rows(value, self._selection.positions())
        raise NotComparable(f"batch= picks rows of a {type(value).__name__} on the workers only")


def _as_plain(value: Any) -> Any:
    if isinstance(value, Handle):
        raise NotComparable(why_no_handle(value))
    return value._contents.array if isinstance(value, Data) else value


def _is_minibatch(leaf: Any) -> bool:
    return isinstance(leaf, Data) and leaf.minibatch


def _has_rows(value: Any) -> bool:
    return bool(value.shape) if hasattr(value, "shape") else isinstance(value, (list, tuple))


def _num_rows(value: Any) -> int:
    return int(value.shape[0]) if hasattr(value, "shape") else len(value)


def _holds_single_values(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_holds_single_values, value))
    return isinstance(value, SINGLE_VALUES)


def _in_framework(value: Any, to_framework: Converter | None, *, is_column: bool = False) -> Any:
    """Return a value with its arrays as those of the framework.

    ``is_column``: also convert what NumPy can make an array of, as a call does with the columns of a table.
    """
    if to_framework is None:
        return value
    leaves, structure = flatten(value)
    for position, leaf in enumerate(leaves):
        if is_column and not is_tensor(leaf) and hasattr(leaf, "__array__") and not isinstance(leaf, np.generic):
            leaf = np.asarray(leaf)
        if isinstance(leaf, np.ndarray) and not leaf.dtype.hasobject:
            leaves[position] = to_framework(leaf.view(np.ndarray))
    return unflatten(structure, leaves)
