"""Takes nested results apart into flat lists of leaves, and builds them again. A single container needs no optree."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from synk._pure.environment import imported_late

_NODES: tuple[type[Any], ...] = (tuple, list, dict, type(None))
"""What is structure. Everything else is a leaf."""


class DictStructure:
    """The structure of a dict that holds no containers. Equal for equal keys in any order, as in optree.

    Attributes
    ----------
    keys : tuple of str
        The keys in the order of the leaves: sorted.
    order : tuple of str
        The keys in the order of the dict.
    places : tuple of int
        For each key in that order, the position of its leaf.
    """

    __slots__ = ("_places", "keys", "order")

    def __init__(self, keys: tuple[str, ...], order: tuple[str, ...]) -> None:
        self.keys, self.order = keys, order
        self._places: tuple[int, ...] | None = None

    @property
    def places(self) -> tuple[int, ...]:
        if self._places is None:
            found = {key: place for place, key in enumerate(self.keys)}
            self._places = tuple([found[key] for key in self.order])
        return self._places

    def __eq__(self, other: object) -> bool:
        return type(other) is DictStructure and self.keys == other.keys

    def __hash__(self) -> int:
        return hash(self.keys)

    def __str__(self) -> str:
        return f"{{{', '.join(f'{key!r}: *' for key in self.keys)}}}"


def _is_leaf(value: Any) -> bool:
    # optree also opens containers that the documentation does not promise (deque, ...). They are plain objects here.
    return not isinstance(value, _NODES)


def _has_nodes(parts: Iterable[Any]) -> bool:
    return any(issubclass(kind, _NODES) for kind in set(map(type, parts)))


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
    kind = type(tree)
    if kind in (tuple, list) and not _has_nodes(tree):
        return list(tree), (kind, len(tree))
    if kind is dict and not _has_nodes(tree.values()) and set(map(type, tree)) == {str}:
        keys = tuple(sorted(tree))
        return [tree[key] for key in keys], DictStructure(keys, tuple(tree))
    leaves, structure = imported_late("optree").tree_flatten(tree, is_leaf=_is_leaf)
    return leaves, structure


def describe(structure: Any) -> str:
    """Return a structure as a user would write it."""
    if structure == "leaf":
        return "one array"
    if isinstance(structure, tuple):
        return f"a {structure[0].__name__} of {structure[1]}"
    return str(structure).removeprefix("PyTreeSpec(").removesuffix(")")


def key_orders(tree: Any) -> list[Any]:
    """Return the keys of all dicts in a nesting, in their order, and the types of keys. A structure tells neither.

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
            orders += [*node, *map(type, node)]
            node = node.values()
        pending += [part for part in node if isinstance(part, (tuple, list, dict))]
    return orders


def skeleton_of(structure: Any, num_leaves: int) -> Any:
    """Return the nesting of ``structure``, with the position of each leaf in its place."""
    return unflatten(structure, list(range(num_leaves)))


def paths(skeleton: Any) -> list[str]:
    """Return the path of each leaf in a result, as one would write it behind the result's name.

    Examples
    --------
    >>> paths({"a": (0, 1), "b": 2})
    ["['a'][0]", "['a'][1]", "['b']"]
    """
    found = [""] * len(flatten(skeleton)[0])

    def walk(node: Any, path: str) -> None:
        if isinstance(node, int):
            found[node] = path
        elif isinstance(node, dict):
            for key, child in node.items():
                walk(child, f"{path}[{key!r}]")
        elif node is not None:
            for position, child in enumerate(node):
                walk(child, f"{path}[{position}]")

    walk(skeleton, "")
    return found


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


def leaves_of(structure: Any, tree: Any) -> list[Any]:
    """Return what ``tree`` holds in the places of the leaves of ``structure``: leaves, or nestings.

    Examples
    --------
    >>> leaves_of(flatten((1, 2))[1], ([3, 4], 5))
    [[3, 4], 5]
    """
    if structure == "leaf":
        return [tree]
    if isinstance(structure, tuple):
        return list(tree)
    if type(structure) is DictStructure:
        return [tree[key] for key in structure.keys]
    return list(structure.flatten_up_to(tree))


def unflatten(structure: Any, leaves: list[Any]) -> Any:
    """Return the nesting of ``structure`` with ``leaves`` in their places."""
    if structure == "leaf":
        return leaves[0]
    if isinstance(structure, tuple):
        kind, _ = structure
        return kind(leaves)
    if type(structure) is DictStructure:
        return dict(zip(structure.order, map(leaves.__getitem__, structure.places)))
    return imported_late("optree").tree_unflatten(structure, leaves)
