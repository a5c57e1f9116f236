"""Seed 000: the order of a rank's operations with which messages travel while it computes.

The rules are those of M. Rocklin's scheduler for MPI operations in Theano (2012),
https://gist.github.com/mrocklin/3750410. It orders plain Python objects, and knows neither arrays nor processes.
"""

from __future__ import annotations

import graphlib
import itertools
from collections.abc import Hashable, Iterable, Mapping
from typing import Any, TypeVar

Node = TypeVar("Node", bound=Hashable)

STARTS = ("recv", "send")


def schedule(
    nodes: Iterable[Node], needs: Mapping[Node, Iterable[Node]], kind: Mapping[Node, str], tag: Mapping[Node, Any]
) -> list[Node]:
    """Order the nodes of one rank's graph so that communication and computation overlap.

    Sends and receives start as soon as their inputs exist, in the order of their tags. Work that a send depends on runs
    before other work. A wait comes only when nothing else can run. Among several waits, the first is the one after
    which the fewest nodes are missing until something can run again. Tags break ties; equal work keeps its order.

    Parameters
    ----------
    nodes : iterable of hashable objects
    needs : mapping
        The nodes that must come before a node. It may leave out nodes that need nothing.
    kind : mapping
        ``"send"`` or ``"recv"`` for the start of a message, ``"wait"`` for the wait for one. All others are work.
    tag : mapping
        The tag of each start and of its wait: an int, or ``(tag, peer)``.

    Raises
    ------
    ValueError
        If two sends to one peer, or two receives from it, have the same tag and neither needs the other: the messages
        could be confused. Also if nodes need each other in a cycle.

    Notes
    -----
    The graph belongs to one rank. If a message is the answer to another one, its wait must need that other send,
    because nothing else in this graph shows the connection.

    Examples
    --------
    The half of a Kalman filter that gets four matrices from rank 0 and sends the new covariance back:

    >>> needs = {
    ...     "solve": ["wait B", "wait H"], "dot A": ["wait A", "solve"], "dot Sigma": ["dot A", "wait Sigma"],
    ...     "subtract": ["wait Sigma", "dot Sigma"], "send new": ["subtract"], "wait new": ["send new"],
    ...     **{f"wait {name}": [f"recv {name}"] for name in ("H", "B", "Sigma", "A")},
    ... }
    >>> names = {"H": 1, "B": 2, "Sigma": 3, "A": 4, "new": 5}
    >>> messages = [f"{kind} {name}" for kind in ("recv", "send", "wait") for name in names]
    >>> nodes = dict.fromkeys([*needs, *(need for each in needs.values() for need in each)])
    >>> kind = {node: node.split()[0] for node in messages}
    >>> tag = {node: names[node.split()[1]] for node in messages}
    >>> order = schedule(nodes, needs, kind, tag)
    >>> print(*order[:9], sep=", ")
    recv H, recv B, recv Sigma, recv A, wait H, wait B, solve, wait A, dot A
    >>> print(*order[9:], sep=", ")
    wait Sigma, dot Sigma, subtract, send new, wait new
    """
    listed = list(nodes)
    places = {node: place for place, node in enumerate(listed)}
    depths = {node: depth for depth, node in enumerate(_sorted({node: needs.get(node, ()) for node in listed}))}

    def key(node: Node) -> tuple[Any, ...]:
        its_kind = kind.get(node, "work")
        if its_kind == "work":
            return 1, places[node]
        return (2 if its_kind == "wait" else 0), tag[node], its_kind, depths[node]

    # A node is a bit: among several that can run the lowest goes first. Starts come before work, and work before waits.
    in_order = sorted(listed, key=key)
    bits = {node: 1 << place for place, node in enumerate(in_order)}
    needed, before = _before(depths, needs, bits)
    for one, other in itertools.pairwise(in_order):
        if kind.get(one) in STARTS and key(one)[1:3] == key(other)[1:3] and not before[other] & bits[one]:
            raise ValueError(
                f"cannot schedule {one!r} and {other!r}: got two of kind {kind[one]!r} with tag {tag[one]} and no "
                "order between them, expected different tags or one that needs the other. Give one another tag."
            )
    starts, work = (
        sum(bits[node] for node in listed if kind.get(node, "work") in each) for each in (STARTS, ("work",))
    )
    sends = [(bits[node], before[node]) for node in in_order if kind.get(node) == "send"]
    others = [(bits[node], before[node]) for node in in_order if kind.get(node) != "wait"]
    users: dict[Node, list[Node]] = {node: [] for node in listed}
    for node in listed:
        for need in needs.get(node, ()):
            users[need].append(node)
    ahead = (1 << len(listed)) - 1
    ready = sum(bits[node] for node in listed if not needed[node])
    result = []
    while ready:
        if ready & starts:
            chosen = ready & starts
        elif ready & work:
            chosen = _towards(sends, ready & work, ahead)
        else:
            chosen = _towards(others, ready, ahead)
        node = in_order[(chosen & -chosen).bit_length() - 1]
        result.append(node)
        ahead &= ~bits[node]
        ready &= ~bits[node]
        ready |= sum({bits[user] for user in users[node] if not needed[user] & ahead})
    return result


def _sorted(needs: Mapping[Node, Iterable[Node]]) -> Iterable[Node]:
    """Return the nodes, each after those that it needs. Raise ValueError for a cycle."""
    return graphlib.TopologicalSorter(needs).static_order()


def _before(
    nodes: Iterable[Node], needs: Mapping[Node, Iterable[Node]], bits: Mapping[Node, int]
) -> tuple[dict[Node, int], dict[Node, int]]:
    """Return the bits of all nodes that each node needs directly, and of all that must come before it."""
    needed: dict[Node, int] = {}
    before: dict[Node, int] = {}
    for node in nodes:
        needed[node] = before[node] = sum({bits[need] for need in needs.get(node, ())})
        for need in needs.get(node, ()):
            before[node] |= before[need]
    return needed, before


def _towards(goals: Iterable[tuple[int, int]], ready: int, ahead: int) -> int:
    """Return the ready nodes that lead to the goals with the fewest missing nodes, or all of them if none does.

    A goal is its bit, and those of all nodes before it.
    """
    fewest, found = ahead.bit_count() + 1, ready
    for goal, before in goals:
        if goal & ahead and before & ready:
            missing = (before & ahead).bit_count()
            if missing < fewest:
                fewest, found = missing, 0
            if missing == fewest:
                found |= before & ready
    return found
