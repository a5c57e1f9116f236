"""One structure for the outputs of several ranks, where some have None in the place of others' values under op None."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from synk._pure.ops import each_op
from synk._pure.trees import flatten, unflatten

MISSING = -1
"""In the place of a position: the rank has no such leaf."""


class _Different(Exception):
    """The structures differ in another way."""


def agreed(skeletons: Sequence[Any], outputs: Any) -> tuple[Any, list[list[int]]] | None:
    """Return a skeleton that stands for all, and where each of its leaves lies among those of each rank.

    Parameters
    ----------
    skeletons : sequence
        Of each rank, the nesting of its outputs with the position of each leaf in its place.
    outputs : op or nesting of ops

    Returns
    -------
    skeleton, positions
        ``positions[k][leaf]`` is the position on the k-th rank, or ``MISSING``. None where they do not agree.

    Examples
    --------
    >>> agreed([(0, None), (0, 1)], ("sum", None))
    ((0, 1), [[0, -1], [0, 1]])
    >>> agreed([0, None], "sum") is None
    True
    """
    found: list[list[int]] = []  # the positions of each leaf

    def merge(nodes: Sequence[Any], outputs: Any) -> Any:
        given = [node for node in nodes if node is not None]
        if not given:
            return None
        first = given[0]
        if len(given) < len(nodes) and any(op is not None for op in each_op(outputs)):
            raise _Different
        if any(type(node) is not type(first) for node in given):
            raise _Different
        if isinstance(first, int):
            found.append([MISSING if node is None else node for node in nodes])
            return len(found) - 1
        keys = list(first) if isinstance(first, dict) else range(len(first))
        if any(len(node) != len(first) or (isinstance(first, dict) and node.keys() != first.keys()) for node in given):
            raise _Different
        parts = [merge([None if node is None else node[key] for node in nodes], _op_of(outputs, key)) for key in keys]
        if isinstance(first, dict):
            return type(first)(zip(keys, parts))
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)

    try:
        merged = merge(skeletons, outputs)
    except _Different:
        return None
    order, structure = flatten(merged)
    positions = [[found[leaf][rank] for leaf in order] for rank in range(len(skeletons))]
    return unflatten(structure, list(range(len(order)))), positions


def _op_of(outputs: Any, key: Any) -> Any:
    """Return the ops under a position or key; an op stands for all below it."""
    if isinstance(outputs, dict):
        return outputs.get(key, ())
    if isinstance(outputs, (tuple, list)):
        return outputs[key] if isinstance(key, int) and key < len(outputs) else ()
    return outputs
