"""Takes tensors out of nested arguments and results, leaving slots in their places, and puts tensors back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from synk._pure.nested import build, is_nested, take_apart


class Slot(NamedTuple):
    """Stands for a tensor: its number among the tensors with rows, or among those that each rank gets whole."""

    number: int
    is_whole: bool


class OtherNest(NamedTuple):
    """A container other than a list, with its parts."""

    structure: Any
    parts: list[Any]


def take(value: Any, rows: list[torch.Tensor], whole: list[torch.Tensor] | None = None, is_whole: bool = False) -> Any:
    """Return a nesting with slots. Append its tensors to ``rows`` or, with ``is_whole`` or no axes, to ``whole``.

    Without ``whole`` all tensors count as rows.

    Examples
    --------
    >>> rows = []
    >>> nesting = take({"x": [torch.ones(2), "text"], "n": 3}, rows)
    >>> len(rows), put(nesting, [torch.zeros(1)], [])
    (1, {'x': [tensor([0.]), 'text'], 'n': 3})
    """
    if isinstance(value, torch.Tensor):
        is_whole = whole is not None and (is_whole or value.ndim == 0)
        tensors = whole if is_whole and whole is not None else rows
        tensors.append(value)
        return Slot(len(tensors) - 1, is_whole)
    if type(value) is list:
        return [take(part, rows, whole, is_whole) for part in value]
    if is_nested(value):
        leaves, structure = take_apart(value)
        return OtherNest(structure, [take(leaf, rows, whole, is_whole) for leaf in leaves])
    return value


def put(nesting: Any, rows: Sequence[Any], whole: Sequence[Any]) -> Any:
    """Undo :func:`take`, with other tensors."""
    if type(nesting) is Slot:
        return (whole if nesting.is_whole else rows)[nesting.number]
    if type(nesting) is list:
        return [put(part, rows, whole) for part in nesting]
    if type(nesting) is OtherNest:
        return build(nesting.structure, iter([put(part, rows, whole) for part in nesting.parts]))
    return nesting
