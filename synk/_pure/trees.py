"""Takes nested results apart into flat lists of leaves, and builds them again, by optree. A single value needs none."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from synk._pure.environment import imported_late

_NODES: tuple[type[Any], ...] = (tuple, list, dict, type(None))
"""What is structure. Everything else is a leaf."""

_EXACT = frozenset((str, bytes, bool, int, type(None)))
"""Types of keys of which those that are equal cannot be told apart."""


def _is_leaf(value: Any) -> bool:
    # optree also opens containers that the documentation does not promise (deque, ...). They are plain objects here.
    return not isinstance(value, _NODES)


def flatten(tree: Any) -> tuple[list[Any], Any]:
    """Return the leaves of a nesting of tuples, lists, dicts and named tuples, and its structure.

    None is part of the structure, dicts flatten in sorted key order. Structures compare with ``==`` and
    ``unflatten(structure, leaves)`` builds the nesting again.

    Examples
    --------
    >>> leaves, structure = flatten({"b": 1, "a": (2, None)})
    >>> leaves
    [2, 1]
    >>> unflatten(structure, [20, 10])
    {'b': 10, 'a': (20, None)}
    """
    if not isinstance(tree, _NODES):
        return [tree], "leaf"
    leaves, structure = imported_late("optree").tree_flatten(tree, is_leaf=_is_leaf)
    return leaves, structure


def describe(structure: Any) -> str:
    """Return a structure as a user would write it."""
    if structure == "leaf":
        return "one array"
    return str(structure).removeprefix("PyTreeSpec(").removesuffix(")")


def key_orders(tree: Any) -> list[Any]:
    """Return the keys of all dicts in a nesting, in their order, and what tells them apart. A structure tells neither.

    Examples
    --------
    >>> key_orders({"b": 1, "a": 2}) == key_orders({"a": 2, "b": 1}), key_orders({1: 2}) == key_orders({True: 2})
    (False, False)
    """
    orders: list[Any] = []
    pending: list[Any] = [(tree,)]
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            orders += [*node, *told_apart(node)]
            node = node.values()
        pending += [part for part in node if isinstance(part, (tuple, list, dict))]
    return orders


def told_apart(keys: Iterable[Any]) -> list[Any]:
    """Return what tells keys apart that are equal. An object that may change, or that says itself what equals it, is
    like no other, nor like itself at another time.

    Examples
    --------
    >>> told_apart([1, (1,)]) == told_apart([1, (1,)]), told_apart([1, (1,)]) == told_apart([1, (True,)])
    (True, False)
    >>> told_apart([0.0]) == told_apart([-0.0]), told_apart([len]) == told_apart([len])
    (False, False)
    """
    return [_told_apart(key) for key in keys]


def _told_apart(key: Any) -> Any:
    kind = type(key)
    if kind in _EXACT:
        return kind
    if kind in (float, complex) or isinstance(key, np.generic):
        return kind, repr(key)
    return (kind, *told_apart(key)) if kind is tuple else object()


def skeleton_of(structure: Any, num_leaves: int) -> Any:
    """Return the nesting of ``structure``, with the position of each leaf in its place."""
    return unflatten(structure, list(range(num_leaves)))


def paths(skeleton: Any) -> list[str]:
    """Return the path of each leaf in a result, by its position, as one would write it behind the result's name.

    Examples
    --------
    >>> paths({"a": (0, 1), "b": 2})
    ["['a'][0]", "['a'][1]", "['b']"]
    """
    found, places, _ = imported_late("optree").tree_flatten_with_path(skeleton)
    return ["".join(f"[{step!r}]" for step in path) for _, path in sorted(zip(places, found))]


def output_names(skeleton: Any) -> list[str]:
    """Return the names of a result's leaves in errors.

    Examples
    --------
    >>> output_names(0), output_names((0, 1)), output_names({"a": (0, 1)})
    (['the output'], ['output 0', 'output 1'], ["output['a'][0]", "output['a'][1]"])
    """
    if isinstance(skeleton, int):
        return ["the output"]
    if type(skeleton) is tuple and all(isinstance(part, int) for part in skeleton):
        return [f"output {position}" for position in skeleton]
    return [f"output{path}" for path in paths(skeleton)]


def unflatten(structure: Any, leaves: list[Any]) -> Any:
    """Return the nesting of ``structure`` with ``leaves`` in their places."""
    if structure == "leaf":
        return leaves[0]
    return imported_late("optree").tree_unflatten(structure, leaves)
