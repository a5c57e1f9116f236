"""Orders the nodes of a dataflow graph so that messages travel while the rank computes.

It runs anywhere, on plain Python objects. It starts no messages, and knows neither arrays nor processes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

__all__ = ["schedule"]

Node = TypeVar("Node", bound=Hashable)
Told = TypeVar("Told")
Message: TypeAlias = tuple[int, ...]

_STARTS = ("recv", "send")
_KINDS = (*_STARTS, "work", "wait")


def schedule(
    nodes: Iterable[Node],
    needs: Callable[[Node], Iterable[Node]] | Mapping[Node, Iterable[Node]],
    kind: Callable[[Node], str] | Mapping[Node, str],
    tag: Callable[[Node], Any] | Mapping[Node, Any],
) -> list[Node]:
    """Order the nodes of one rank's graph so that communication and computation overlap.

    Sends and receives start as soon as their inputs exist, in the order of their tags. Work that a send depends on runs
    before other work. A wait comes only when nothing else can run. Among several waits, the first is the one after
    which the fewest nodes are missing until something can run again. Tags break ties.

    Parameters
    ----------
    nodes : iterable of hashable objects
        The nodes, each once.
    needs : callable or mapping
        The nodes that must come before a node. A mapping may leave out nodes that need nothing.
    kind : callable or mapping
        ``"send"`` or ``"recv"`` for the start of a message (`synk.comm.isend`, `synk.comm.irecv`), ``"wait"`` for the
        wait for one, ``"work"`` for everything else. A mapping may leave out work.
    tag : callable or mapping
        The tag of a send or receive: an int from 0 on, or ``(tag, peer)`` if the rank has more than one peer. A wait
        takes the tag of the receive that it needs, or else of the send. Work may have an int, such as its line in the
        program, or None. A mapping may leave out waits and work.

    Returns
    -------
    list
        The nodes in the order in which to run them. Nodes that are equal by these rules, such as work without tags,
        keep the order of ``nodes``. If all work has distinct tags, the order of ``nodes`` makes no difference.

    Raises
    ------
    ValueError
        If two sends to one peer, or two receives from it, have the same tag and neither needs the other, directly or
        through other nodes: the two messages could be confused. Also if nodes need each other in a cycle, a needed node
        is not among ``nodes``, a wait needs no send or receive, or a kind or tag is invalid.

    Notes
    -----
    The graph belongs to one rank. If a message is the answer to another one, its wait must need that other send,
    because nothing else in this graph shows the connection. The time grows with the square of the number of nodes at
    worst (0.1 s for 1000 nodes). The rules are those of Rocklin's scheduler for MPI operations in Theano (2012):
    https://gist.github.com/mrocklin/3750410.

    Examples
    --------
    Rank 0 sends ``x`` and its square, and receives what ranks 1 and 2 compute from them:

    >>> needs = {
    ...     "send square": ["square"],
    ...     "wait 1": ["recv 1"], "wait 2": ["recv 2"],
    ...     "add": ["wait 1", "cube"], "multiply": ["add", "wait 2"],
    ... }
    >>> kind = {"send x": "send", "send square": "send", "recv 1": "recv", "recv 2": "recv",
    ...         "wait 1": "wait", "wait 2": "wait"}
    >>> tag = {"send x": (0, 1), "send square": (0, 2), "recv 1": (1, 1), "recv 2": (1, 2)}
    >>> nodes = ["cube", "square", "add", "multiply", *kind]
    >>> for node in schedule(nodes, needs, kind, tag):
    ...     print(node)
    send x
    recv 1
    recv 2
    square
    send square
    cube
    wait 1
    add
    wait 2
    multiply
    """
    listed = list(nodes)
    known = frozenset(listed)
    if len(known) < len(listed):
        twice = next(node for i, node in enumerate(listed) if node in listed[:i])
        raise ValueError(f"cannot schedule {twice!r}: got it twice, expected each node once. Drop one of the two.")
    nothing: Iterable[Node] = ()
    needed = {node: tuple(its_needs) for node, its_needs in _values_of(listed, "needs", needs, nothing, known)}
    for node in listed:
        for need in needed[node]:
            if need not in known:
                raise ValueError(
                    f"cannot schedule {node!r}: got {need!r} among its needs, expected nodes of the graph. "
                    "Add it to nodes, or leave it out of the needs if it is an input."
                )
    kinds = dict(_values_of(listed, "kind", kind, "work", known))
    for node, its_kind in kinds.items():
        if its_kind not in _KINDS:
            raise ValueError(
                f"cannot schedule {node!r}: got kind {its_kind!r}, expected one of {', '.join(map(repr, _KINDS))}. "
                "Computations of any sort are work."
            )
    depths = _depths(needed)
    messages = _messages(dict(_values_of(listed, "tag", tag, None, known)), kinds, needed, depths)
    return _Graph(listed, needed, depths, kinds, messages).ordered()


def _values_of(
    nodes: Sequence[Node],
    name: str,
    given: Callable[[Node], Told] | Mapping[Node, Told],
    default: Told,
    known: frozenset[Node],
) -> Iterator[tuple[Node, Told]]:
    """Yield each node with its value of a function or a mapping."""
    if not isinstance(given, Mapping):
        yield from ((node, given(node)) for node in nodes)
        return
    for key in given:
        if key not in known:
            raise ValueError(
                f"cannot schedule the graph: got {key!r} in {name}, expected nodes of the graph. Add it to nodes."
            )
    yield from ((node, given.get(node, default)) for node in nodes)


def _messages(
    tags: Mapping[Node, Any],
    kinds: Mapping[Node, str],
    needed: Mapping[Node, Sequence[Node]],
    depths: Mapping[Node, int],
) -> dict[Node, Message]:
    """Return the sort key of each node within its class.

    The key of a start is ``(tag, kind, depth)``, with the peer, if there is one, after the tag. Starts with equal tags
    must form a chain, or the graph is refused. So their depths distinguish them. A wait that needs a receive and sends
    waits for the receive; the sends only come before it.
    """
    found: dict[Node, Message] = {}
    for node, tag in tags.items():
        if kinds[node] in _STARTS:
            parts = tag if isinstance(tag, tuple) else (tag,)
            if len(parts) not in (1, 2) or not all(_is_count(part) for part in parts):
                raise ValueError(
                    f"cannot schedule {node!r}: got tag {tag!r}, expected an int from 0 on, or a pair (tag, peer) of "
                    "them. Give each message one."
                )
            found[node] = (*parts, _STARTS.index(kinds[node]), depths[node])
        elif kinds[node] == "work":
            if tag is not None and (not isinstance(tag, int) or isinstance(tag, bool)):
                raise ValueError(f"cannot schedule {node!r}: got tag {tag!r}, expected an int or None for work.")
            found[node] = (1,) if tag is None else (0, tag)
    if len({len(message) for node, message in found.items() if kinds[node] in _STARTS}) > 1:
        raise ValueError(
            "cannot schedule the graph: got tags with and without a peer, expected either all or none with one. "
            "Give each send and receive a pair (tag, peer)."
        )
    for node in tags:
        if kinds[node] == "wait":
            of_kind = ({found[need] for need in needed[node] if kinds[need] == each} for each in _STARTS)
            starts = sorted(next(filter(None, of_kind), ()))
            if not starts:
                raise ValueError(
                    f"cannot schedule {node!r}: got a wait that needs no send or receive, expected one that does. "
                    "Add the message to its needs."
                )
            found[node] = sum(starts, ())
    return found


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


class _Graph:
    """A graph as sets of nodes in the bits of integers. Among several runnable nodes the lowest bit runs first.

    Attributes
    ----------
    nodes : list
        The node of each bit.
    needs, before : list of int
        For each bit, the nodes that its node needs directly, and all nodes that must come before it.
    users : list of list of int
        For each bit, the bits of the nodes that need its node.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        needed: Mapping[Node, Sequence[Node]],
        depths: Iterable[Node],
        kinds: Mapping[Node, str],
        messages: Mapping[Node, Message],
    ) -> None:
        self.nodes: list[Any] = sorted(nodes, key=lambda node: (_class(kinds[node]), messages[node]))
        bits = {node: bit for bit, node in enumerate(self.nodes)}
        self.needs = [0] * len(bits)
        self.before = [0] * len(bits)
        self.users: list[list[int]] = [[] for _ in bits]
        for node in depths:  # needed nodes first
            bit = bits[node]
            for need in {bits[need] for need in needed[node]}:
                self.needs[bit] |= 1 << need
                self.before[bit] |= self.before[need] | 1 << need
                self.users[need].append(bit)
        self.of_kind = {each: [bits[node] for node in self.nodes if kinds[node] == each] for each in _KINDS}
        self._refuse_equal_messages(kinds, messages)

    def _refuse_equal_messages(self, kinds: Mapping[Any, str], messages: Mapping[Any, Message]) -> None:
        for bit, (node, other) in enumerate(zip(self.nodes, self.nodes[1:], strict=False)):
            if {kinds[node], kinds[other]} - {*_STARTS} or messages[node][:-1] != messages[other][:-1]:
                continue
            if not self.before[bit + 1] >> bit & 1:
                tag, *peer = messages[node][:-2]
                raise ValueError(
                    f"cannot schedule {node!r} and {other!r}: got two of kind {kinds[node]!r} with tag {tag}"
                    f"{f' and peer {peer[0]}' if peer else ''} and no order between them, expected different tags or "
                    "one that needs the other. Give one of them another tag."
                )

    def ordered(self) -> list[Any]:
        """Return all nodes in the order in which they must run."""
        starts, work, waits = (
            sum(1 << bit for name in names for bit in self.of_kind[name]) for names in (_STARTS, ["work"], ["wait"])
        )
        sends = self.of_kind["send"]
        others = [*self.of_kind["recv"], *sends, *self.of_kind["work"]]
        ahead = (1 << len(self.nodes)) - 1
        ready = sum(1 << bit for bit, needs in enumerate(self.needs) if not needs)
        order = []
        while ready:
            if ready & starts:
                chosen = ready & starts
            elif ready & work:
                chosen = self._towards(sends, ready & work, ahead)
            else:
                chosen = self._towards(others, ready & waits, ahead)
            bit = (chosen & -chosen).bit_length() - 1
            order.append(self.nodes[bit])
            ahead &= ~(1 << bit)
            ready &= ~(1 << bit)
            for user in self.users[bit]:
                if not self.needs[user] & ahead:
                    ready |= 1 << user
        return order

    def _towards(self, goals: Sequence[int], ready: int, ahead: int) -> int:
        """Return the ready nodes that lead to the goals with the fewest missing nodes.

        If no ready node leads to a goal, return all ready nodes.
        """
        fewest, found = len(self.nodes) + 1, ready
        for goal in goals:
            if ahead >> goal & 1 and self.before[goal] & ready:
                missing = (self.before[goal] & ahead).bit_count()
                if missing < fewest:
                    fewest, found = missing, 0
                if missing == fewest:
                    found |= self.before[goal] & ready
        return found


def _class(kind: str) -> int:
    return 0 if kind in _STARTS else _KINDS.index(kind)


def _depths(needed: Mapping[Node, Sequence[Node]]) -> dict[Node, int]:
    """Return the length of the longest chain before each node, needed nodes first. Raise ValueError for a cycle."""
    depths: dict[Node, int] = {}
    for node in needed:
        path = [(node, iter(needed[node]))] if node not in depths else []
        inside = {node: None}
        while path:
            last, rest = path[-1]
            need = next((each for each in rest if each not in depths), None)
            if need is None:
                depths[last] = 1 + max((depths[each] for each in needed[last]), default=-1)
                del inside[last]
                path.pop()
            elif need in inside:
                circle = [*inside][[*inside].index(need) :]
                raise ValueError(
                    f"cannot schedule the graph: got nodes that need each other, {_arrows([*circle, need])}, "
                    "expected none. Remove one of these needs."
                )
            else:
                inside[need] = None
                path.append((need, iter(needed[need])))
    return depths


def _arrows(nodes: Sequence[Any]) -> str:
    return " -> ".join(map(repr, nodes))
