"""The order of a graph's nodes: what holds of any graph. The orders that were published are in ``test_flow.py``."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest
from support.seeds import examples

from synk.extensions.dataflow import schedule


@dataclass
class Graph:
    """What `schedule` takes. ``program`` has a line for each node: kind, name, tag, needs."""

    program: list[tuple[str, str, Any, tuple[str, ...]]] = field(default_factory=list)

    def ordered(self, nodes: list[str] | None = None) -> list[str]:
        return schedule(self.nodes if nodes is None else nodes, self.needs, self.kinds, self.tags)

    @property
    def nodes(self) -> list[str]:
        return [name for _, name, _, _ in self.program]

    @property
    def needs(self) -> dict[str, tuple[str, ...]]:
        return {name: needs for _, name, _, needs in self.program}

    @property
    def kinds(self) -> dict[str, str]:
        return {name: kind for kind, name, _, _ in self.program}

    @property
    def tags(self) -> dict[str, Any]:
        return {name: tag for _, name, tag, _ in self.program}

    def before(self, node: str) -> set[str]:
        """Return all nodes that a node needs, and those that they need."""
        found, new = set(), {node}
        while new:
            new = {need for each in new for need in self.needs[each]} - found
            found |= new
        return found


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any acyclic graph: messages to three peers, equal tags in chains, waits at any distance from their starts."""
    program: list[tuple[str, str, Any, tuple[str, ...]]] = []
    last: dict[tuple[str, Any], str] = {}
    waiting: list[str] = []
    with_peers = draw(st.booleans())
    for number in range(draw(st.integers(0, 25))):
        kind = draw(st.sampled_from(["work", "work", "send", "recv", *["wait"] * bool(waiting)]))
        names = [name for other, name, _, _ in program if kind != "wait" or other not in ("send", "recv")]
        needs = tuple(draw(st.lists(st.sampled_from(names), unique=True, max_size=3))) if names else ()
        tag: Any = number if kind == "work" else None
        if kind in ("send", "recv"):
            tag = (draw(st.integers(0, 4)), draw(st.integers(0, 2))) if with_peers else draw(st.integers(0, 4))
            needs += (last[kind, tag],) if (kind, tag) in last else ()
            last[kind, tag] = f"{kind} {number}"
            waiting.append(f"{kind} {number}")
        elif kind == "wait":
            needs += (waiting.pop(draw(st.integers(0, len(waiting) - 1))),)
        program.append((kind, f"{kind} {number}", tag, needs))
    return Graph(program)


@examples(60)
@hypothesis.given(graphs(), st.randoms(use_true_random=False))
def test_what_holds_of_any_graph(graph: Graph, random: Any) -> None:
    order, needs, kinds, tags = graph.ordered(), graph.needs, graph.kinds, graph.tags
    assert graph.ordered(random.sample(graph.nodes, len(order))) == order, "the order of the nodes makes no difference"
    assert schedule(iter(graph.nodes), needs.__getitem__, kinds.__getitem__, tags.__getitem__) == order
    assert sorted(order) == sorted(graph.nodes)
    for place, node in enumerate(order):
        rest = order[place:]
        assert not set(needs[node]) & set(rest), "what a node needs stands before it"
        ready = [each for each in rest if not set(needs[each]) & set(rest)]
        missing = [graph.before(each) & set(rest) for each in rest if kinds[each] != "wait"]
        for_sends = {each for send in rest if kinds[send] == "send" for each in graph.before(send)}
        match kinds[node]:
            case "send" | "recv" if place:
                previous = order[place - 1]
                is_start = kinds[previous] in ("send", "recv") and tags[previous] <= tags[node]
                assert previous in needs[node] or is_start, "no start could stand earlier"
            case "wait":
                assert {kinds[each] for each in ready} == {"wait"}, "nothing else can run where a wait stands"
                fewest = min(map(len, missing), default=0)
                is_soonest = any(node in those and len(those) == fewest for those in missing)
                assert is_soonest or not missing, "it is the wait that lets something run soonest"
            case "work" if node not in for_sends:
                others = {each for each in ready if kinds[each] == "work"}
                assert not others & for_sends, "work for a send goes before other work"


def line(kind: str, name: str, tag: Any, *needs: str) -> tuple[str, str, Any, tuple[str, ...]]:
    return kind, name, tag, needs


ORDERS: dict[str, list[tuple[str, str, Any, tuple[str, ...]]]] = {
    "equal work keeps the order of the nodes": [line("work", "c", None), line("work", "a", None)],
    "work by its tag": [line("work", "b", 3), line("work", "a", 7), line("work", "c", None)],
    "equal tags in a chain": [
        line("recv", "first", 3),
        line("recv", "second", 3, "first"),
        line("work", "late", None, "second"),
        line("wait", "wait first", None, "first", "late"),
        line("wait", "wait second", None, "second"),
    ],
    "equal tags of other peers": [line("send", "b", (3, 0)), line("send", "a", (3, 1))],
    "equal tags of other kinds": [line("recv", "b", 3), line("send", "a", 3)],
    "waits for one computation stand together": [
        *(line("recv", f"recv {tag}", tag) for tag in range(4)),
        line("wait", "wait 0", None, "recv 0"),
        line("wait", "wait 2", None, "recv 2"),
        line("work", "even", 0, "wait 0", "wait 2"),
        line("wait", "wait 1", None, "recv 1"),
        line("wait", "wait 3", None, "recv 3"),
        line("work", "odd", 1, "wait 1", "wait 3"),
    ],
    "a wait for a receive goes by its tag where sends must stand before it": [
        line("send", "send question", 0),
        line("recv", "recv other", 1),
        line("recv", "recv answer", 2),
        line("wait", "wait other", None, "recv other"),
        line("wait", "wait answer", None, "send question", "recv answer"),
    ],
}
"""Programs in the order that they must have."""


def test_orders_of_small_graphs(subtests: pytest.Subtests) -> None:
    for name, program in ORDERS.items():
        with subtests.test(name=name):
            nodes = [each[1] for each in program]
            shuffled = nodes if name.startswith("equal work") else nodes[::-1]
            assert Graph(program).ordered(shuffled) == nodes


SEND = {"a": "send", "b": "send"}
REFUSED: list[tuple[str, Any, Any, Any, str]] = [
    ("ab", {}, SEND, {"a": 3, "b": 3}, "'a' and 'b': got two of kind 'send' with tag 3 and no order between them"),
    ("ab", {}, SEND, {"a": (3, 1), "b": (3, 1)}, "with tag 3 and peer 1 and no order between them"),
    ("abc", {"b": "c"}, SEND, {"a": 0, "b": 0}, "'a' and 'b': got two of kind 'send' with tag 0 and no order"),
    ("aba", {}, {}, {}, "'a': got it twice"),
    ("ab", {"a": "x"}, {}, {}, "'a': got 'x' among its needs"),
    ("ab", {"x": "a"}, {}, {}, "got 'x' in needs, expected nodes of the graph"),
    ("ab", {}, {"x": "send"}, {}, "got 'x' in kind, expected nodes of the graph"),
    ("ab", {}, {}, {"x": 3}, "got 'x' in tag, expected nodes of the graph"),
    ("ab", {}, {"a": "bcast"}, {}, "'a': got kind 'bcast', expected one of 'recv', 'send', 'work', 'wait'"),
    ("ab", {"a": "b"}, {"a": "wait"}, {}, "'a': got a wait that needs no send or receive"),
    ("ab", {}, {"a": "send"}, {}, "'a': got tag None, expected an int from 0 on"),
    ("ab", {}, {"a": "send"}, {"a": -1}, "'a': got tag -1, expected an int from 0 on"),
    ("ab", {}, {"a": "send"}, {"a": (1, 2, 3)}, "'a': got tag (1, 2, 3), expected an int from 0 on"),
    ("ab", {}, {}, {"a": "first"}, "'a': got tag 'first', expected an int or None for work"),
    ("ab", {}, SEND, {"a": 1, "b": (1, 2)}, "got tags with and without a peer"),
    ("a", {"a": "a"}, {}, {}, "got nodes that need each other, 'a' -> 'a'"),
    ("dabc", {"a": "b", "b": "c", "c": "a", "d": "a"}, {}, {}, "need each other, 'a' -> 'b' -> 'c' -> 'a', expected"),
]


def test_what_cannot_be_ordered_is_named(subtests: pytest.Subtests) -> None:
    for nodes, needs, kinds, tags, text in REFUSED:
        with subtests.test(text=text):
            with pytest.raises(ValueError, match=r"^cannot schedule .*: got .*expected .*[.]$") as caught:
                schedule(nodes, needs, kinds, tags)
            assert text in str(caught.value)


def test_large_graphs_take_few_steps_and_no_deep_calls() -> None:
    """A chain longer than the usual limit of recursion, with sends and waits in it. Counts calls, not seconds."""
    kinds, calls = ("work", "send", "wait", "work"), 0
    graph = Graph([line(kinds[i % 4], str(i), i, *([str(i - 1)] if i else [])) for i in range(1200)])

    def count(frame: Any, event: str, what: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    previous = sys.getprofile()
    sys.setprofile(count)
    try:
        order = graph.ordered()
    finally:
        sys.setprofile(previous)
    assert order == graph.nodes
    assert calls < 1200 * 1200 / 2
