"""Objects that the user's own code makes on a rank, and that may hold copies of what it is given there.

An object with a pickling rule of its own may copy what its recipe mentions, in its ``__setstate__`` or its constructor.
A change of that reaches the rank's object that was copied, and not the copy. So whatever may hold copies of something
that has changed since is sent anew: inner objects first, because outer ones may copy them.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from synk._code.facets import Facet, State
from synk._code.modules import is_of_program
from synk._code.parcels import Node

_NEVER_COPIED = (type, types.FunctionType, types.ModuleType, types.CellType)


def stale_copies(nodes: Sequence[Node], changed: Mapping[int, int]) -> dict[Node, set[int]]:
    """Return the objects that may hold copies of something older, inner ones first.

    With each come the ids of what it mentions and that has changed, directly or further in. What holds the object
    itself in turn is left out: no code can copy that.

    Parameters
    ----------
    nodes : sequence of Node
        All that a function captures.
    changed : dict of int to int
        The number of the last parcel that changed an object, by the object's id.
    """
    known = {id(node.obj): node for node in nodes if not isinstance(node.obj, _NEVER_COPIED)}
    held = {key: known.keys() & _held_by(*node.facets) for key, node in known.items()}
    newest: dict[int, int] = {}
    found: dict[Node, set[int]] = {}
    for group in _groups(held):
        number = 0
        for key in group:
            node, outside = known[key], held[key].difference(group)
            if is_made_by_own_code(node):
                told_at = max(node.parcel.number, *(each.number for each in node.sources.values()), 0)
                mentioned = _held_by(*(each for each in node.facets if isinstance(each, State)))
                if keys := {each for each in mentioned & outside if newest[each] > told_at}:
                    found[node] = keys
                    number = sys.maxsize  # later than whatever holds it
            else:
                number = max([number, *(newest[each] for each in outside)])
            number = max(number, changed.get(key, 0))
        newest.update(dict.fromkeys(group, number))
    return found


def is_made_by_own_code(node: Node) -> bool:
    """Whether code of the user's makes the ranks' object from a recipe or a state."""
    has_recipe = any(isinstance(facet, State) for facet in node.facets)
    return has_recipe and not isinstance(node.obj, _NEVER_COPIED) and is_of_program(type(node.obj))


def _held_by(*facets: Facet) -> set[int]:
    """Return the ids of the objects that facets mention. The containers in a recipe are copies: it looks into them."""
    found: set[int] = set()
    met: dict[int, Any] = {}  # by id: a container may hold itself
    for facet in facets:
        told = getattr(facet, "told", None)
        inner = (tuple, list, set, dict) if isinstance(facet, State) else (tuple,)
        pending = [told.values() if isinstance(told, dict) else told] if isinstance(told, (dict, tuple, list)) else []
        while pending:
            parts = pending.pop()
            found.update(map(id, parts))
            new = {id(each): each for each in parts if type(each) in inner and id(each) not in met}
            met.update(new)
            pending += [(*each, *each.values()) if type(each) is dict else each for each in new.values()]
    return found


def _groups(held: Mapping[int, Iterable[int]]) -> Iterator[list[int]]:
    """Yield keys in groups, each of which holds itself, after the groups that it holds (Tarjan, 1972)."""
    order: dict[int, int] = {}  # by key, when it was met
    lowest: dict[int, int] = {}  # by key without a group as yet, the first met of those that it reaches
    waiting: list[int] = []
    for first in held:
        path = [] if first in order else [(first, iter(held[first]))]
        while path:
            key, inner = path[-1]
            if key not in order:
                order[key] = lowest[key] = len(order)
                waiting.append(key)
            for each in inner:
                if each not in order:
                    path.append((each, iter(held[each])))
                    break
                if each in lowest:
                    lowest[key] = min(lowest[key], order[each])
            else:
                path.pop()
                reached = lowest[key]
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], reached)
                if reached == order[key]:
                    group: list[int] = []
                    while not group or group[-1] != key:
                        group.append(waiting.pop())
                        del lowest[group[-1]]
                    yield group
