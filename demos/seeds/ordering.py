"""Seed 000: the order of a rank's operations with which messages travel while it computes.

The rules are those of M. Rocklin's scheduler for MPI operations in Theano (2012),
https://gist.github.com/mrocklin/3750410. It orders plain Python objects, and knows neither arrays nor processes.
"""

from __future__ import annotations

import graphlib
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
    >>> print(*schedule(nodes, needs, kind, tag), sep=", ")
    recv H, recv B, recv Sigma, recv A, wait H, wait B, solve, wait A, dot A, wait Sigma, dot Sigma, subtract, send new, wait new
    """
    listed = list(nodes)
    places = {node: place for place, node in enumerate(listed)}
    # A node is a bit: among several that can run the lowest goes first. Starts come before work, and work before waits.
    sorter = graphlib.TopologicalSorter({node: needs.get(node, ()) for node in listed})
    depths = {node: depth for depth, node in enumerate(sorter.static_order())}

    def key(node: Node) -> tuple[Any, ...]:
        its_kind = kind.get(node, "work")
        if its_kind == "work":
            return 1, places[node]
        return (2 if its_kind == "wait" else 0), tag[node], its_kind, depths[node]

    in_order = sorted(listed, key=key)
    bits = {node: 1 << place for place, node in enumerate(in_order)}
    needed, before = {}, {}
    for node in depths:
        needed[node] = sum({bits[need] for need in needs.get(node, ())})
        before[node] = needed[node]
        for need in needs.get(node, ()):
            before[node] |= before[need]
    for one, other in zip(in_order, in_order[1:]):
        if kind.get(one) in STARTS and key(one)[1:3] == key(other)[1:3] and not before[other] & bits[one]:
            raise ValueError(
                f"cannot schedule {one!r} and {other!r}: got two of kind {kind[one]!r} with tag {tag[one]} and no "
                "order between them, expected different tags or one that needs the other. Give one another tag."
            )
    all_of = {
        each: sum(bits[node] for node in listed if kind.get(node, "work") == each) for each in (*STARTS, "work", "wait")
    }
    sends = [node for node in in_order if kind.get(node) == "send"]
    others = [node for node in in_order if kind.get(node) != "wait"]
    users: dict[Node, list[Node]] = {node: [] for node in listed}
    for node in listed:
        for need in needs.get(node, ()):
            users[need].append(node)

    ahead = (1 << len(listed)) - 1
    ready = sum(bits[node] for node in listed if not needed[node])

    def towards(goals: list[Node], runnable: int) -> int:
        """Return those that lead to the goals with the fewest missing nodes, or all of them if none does."""
        fewest, found = len(listed) + 1, runnable
        for goal in goals:
            if bits[goal] & ahead and before[goal] & runnable:
                missing = (before[goal] & ahead).bit_count()
                if missing < fewest:
                    fewest, found = missing, 0
                if missing == fewest:
                    found |= before[goal] & runnable
        return found

    result = []
    while ready:
        chosen = ready & (all_of["send"] | all_of["recv"])
        if not chosen:
            work = ready & all_of["work"]
            chosen = towards(sends, work) if work else towards(others, ready)
        node = in_order[(chosen & -chosen).bit_length() - 1]
        result.append(node)
        ahead &= ~bits[node]
        ready &= ~bits[node]
        ready |= sum({bits[user] for user in users[node] if not needed[user] & ahead})
    return result
