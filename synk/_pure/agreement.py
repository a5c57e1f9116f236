"""Finds one structure for the outputs of several ranks. Under op None each rank has its own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from synk._pure.ops import EACH
from synk._pure.output_ops import each_op
from synk._pure.trees import flatten, unflatten

MISSING = -1
"""Stands for a position: the rank has no such leaf."""


class _Different(Exception):
    """The structures differ where no op None permits it."""


class Agreement(NamedTuple):
    """One structure for all ranks.

    Attributes
    ----------
    skeleton
        The nesting, with the number of each leaf in its place.
    positions : list of list of int
        ``positions[k][leaf]`` is where the leaf lies among those of the k-th rank, or ``MISSING``.
    apart : dict
        Maps a leaf that only the k-th rank has to k.
    """

    skeleton: Any
    positions: list[list[int]]
    apart: dict[int, int]


def agreed(skeletons: Sequence[Any], outputs: Any, ranks: Sequence[int], world_size: int) -> Agreement | None:
    """Return one structure for the outputs of all ranks, or None where the ranks do not agree.

    Under an op None the result has a list with each rank's own.

    Parameters
    ----------
    skeletons : sequence
        One for each rank: the nesting of its outputs, with the position of each leaf in its place.
    outputs : op or nesting of ops
    ranks : sequence of int
        The ranks that returned them.
    world_size : int

    Examples
    --------
    >>> agreed([(0, None), (0, 1)], ("sum", EACH), (0, 1), 2)
    Agreement(skeleton=(0, 1), positions=[[0, -1], [0, 1]], apart={})
    >>> agreed([[0], [0]], EACH, (0, 2), 3)
    Agreement(skeleton=[[0], None, [1]], positions=[[0, -1], [-1, 0]], apart={0: 0, 1: 1})
    >>> agreed([0, None], "sum", (0, 1), 2) is None
    True
    """
    found: list[list[int]] = []  # each leaf's position on each rank
    owners: dict[int, int] = {}

    def merge(nodes: Sequence[Any], outputs: Any) -> Any:
        given = [node for node in nodes if node is not None]
        if not given:
            return [None] * world_size if outputs is EACH else None
        first = given[0]
        if len(given) < len(nodes) and not all(op is EACH for op in each_op(outputs)):
            raise _Different
        keys = _common_keys(given)
        if isinstance(first, int):
            found.append([MISSING if node is None else node for node in nodes])
            return len(found) - 1
        parts = [
            merge_or_list([None if node is None else node[key] for node in nodes], _op_of(outputs, key)) for key in keys
        ]
        if isinstance(first, dict):
            made = dict(zip(keys, parts))
            return defaultdict(first.default_factory, made) if type(first) is defaultdict else type(first)(made)
        return type(first)(*parts) if hasattr(first, "_fields") else type(first)(parts)

    def merge_or_list(nodes: Sequence[Any], outputs: Any) -> Any:
        num_found = len(found)
        has_containers = not all(node is None or isinstance(node, int) for node in nodes)
        if not (outputs is EACH and has_containers):
            try:
                return merge(nodes, outputs)
            except _Different:
                if outputs is not EACH:
                    raise
        del found[num_found:]
        everyone: list[Any] = [None] * world_size
        for k, node in enumerate(nodes):
            positions, structure = flatten(node)
            leaves = list(range(len(found), len(found) + len(positions)))
            found.extend([position if voter == k else MISSING for voter in range(len(nodes))] for position in positions)
            owners.update(dict.fromkeys(leaves, k))
            everyone[ranks[k]] = unflatten(structure, leaves)
        return everyone

    try:
        merged = merge_or_list(skeletons, outputs)
    except _Different:
        return None
    order, structure = flatten(merged)
    positions = [[found[leaf][voter] for leaf in order] for voter in range(len(skeletons))]
    apart = {place: owners[leaf] for place, leaf in enumerate(order) if leaf in owners}
    return Agreement(unflatten(structure, list(range(len(order)))), positions, apart)


def _common_keys(nodes: Sequence[Any]) -> Sequence[Any]:
    """Return the keys or positions of nodes of one kind; leaves have none."""
    first = nodes[0]
    if any(type(node) is not type(first) for node in nodes):
        raise _Different
    if isinstance(first, int):
        return ()
    if any(len(node) != len(first) or (isinstance(first, dict) and node.keys() != first.keys()) for node in nodes):
        raise _Different
    return list(first) if isinstance(first, dict) else range(len(first))


def _op_of(outputs: Any, key: Any) -> Any:
    """Return the ops under a position or key; an op stands for all below it."""
    if isinstance(outputs, dict):
        return outputs.get(key, ())
    if isinstance(outputs, (tuple, list)):
        return outputs[key] if isinstance(key, int) and key < len(outputs) else ()
    return outputs
