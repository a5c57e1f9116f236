"""The order of a graph's nodes: two listings published with the rules, and what holds of any graph."""

from __future__ import annotations

import sys
from collections.abc import Iterator
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


# The covariance of a Kalman filter's update on another rank. Both listings were published with
# https://gist.github.com/mrocklin/3750410 in 2012; the graphs are what its program computes.
KALMAN_0 = Graph(
    [
        ("work", "H.T", None, ()),
        ("work", "A = Sigma H.T", None, ("H.T",)),
        ("work", "B = R + H A", None, ("A = Sigma H.T",)),
        ("work", "residual = H mu - data", None, ()),
        ("work", "solve B, residual", None, ("B = R + H A", "residual = H mu - data")),
        ("work", "new mu = mu + A solved", None, ("A = Sigma H.T", "solve B, residual")),
        ("send", "send H", 1, ()),
        ("send", "send B", 2, ("B = R + H A",)),
        ("send", "send Sigma", 3, ()),
        ("send", "send A", 4, ("A = Sigma H.T",)),
        ("recv", "recv new Sigma", 5, ()),
        ("wait", "wait H", None, ("send H",)),
        ("wait", "wait B", None, ("send B",)),
        ("wait", "wait Sigma", None, ("send Sigma",)),
        ("wait", "wait A", None, ("send A",)),
        ("wait", "wait new Sigma", None, ("recv new Sigma",)),
    ]
)
LISTED_0 = [
    "send H",
    "send Sigma",
    "recv new Sigma",
    "H.T",
    "A = Sigma H.T",
    "send A",
    "B = R + H A",
    "send B",
    "residual = H mu - data",
    "solve B, residual",
    "new mu = mu + A solved",
    "wait H",
    "wait B",
    "wait Sigma",
    "wait A",
    "wait new Sigma",
]
KALMAN_1 = Graph(
    [
        ("work", "solve B, H", None, ("wait B", "wait H")),
        ("work", "A solved", None, ("wait A", "solve B, H")),
        ("work", "A solved Sigma", None, ("A solved", "wait Sigma")),
        ("work", "Sigma - A solved Sigma", None, ("wait Sigma", "A solved Sigma")),
        ("send", "send new Sigma", 5, ("Sigma - A solved Sigma",)),
        ("wait", "wait new Sigma", None, ("send new Sigma",)),
        ("recv", "recv H", 1, ()),
        ("recv", "recv B", 2, ()),
        ("recv", "recv Sigma", 3, ()),
        ("recv", "recv A", 4, ()),
        ("wait", "wait H", None, ("recv H",)),
        ("wait", "wait B", None, ("recv B",)),
        ("wait", "wait Sigma", None, ("recv Sigma",)),
        ("wait", "wait A", None, ("recv A",)),
    ]
)
LISTED_1 = [
    "recv H",
    "recv B",
    "recv Sigma",
    "recv A",
    "wait H",
    "wait B",
    "solve B, H",
    "wait A",
    "A solved",
    "wait Sigma",
    "A solved Sigma",
    "Sigma - A solved Sigma",
    "send new Sigma",
    "wait new Sigma",
]
KALMAN = [(KALMAN_0, LISTED_0), (KALMAN_1, LISTED_1)]


@pytest.mark.parametrize(("graph", "listed"), KALMAN, ids=["rank 0", "rank 1"])
def test_the_published_orders(graph: Graph, listed: list[str]) -> None:
    assert graph.ordered() == listed
    assert graph.ordered(graph.nodes[::-1]) == listed
    assert graph.ordered(sorted(graph.nodes)) == listed


def test_functions_and_mappings_say_the_same() -> None:
    needs, kinds, tags = KALMAN_0.needs, KALMAN_0.kinds, KALMAN_0.tags
    by_functions = schedule(iter(KALMAN_0.nodes), needs.__getitem__, kinds.__getitem__, tags.__getitem__)
    short = [
        {key: value for key, value in each.items() if value not in ((), "work", None)} for each in (needs, kinds, tags)
    ]
    assert by_functions == schedule(KALMAN_0.nodes, *short) == LISTED_0


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


any_graph = examples(15)


@any_graph
@hypothesis.given(graphs())
def test_all_nodes_stand_after_what_they_need(graph: Graph) -> None:
    order = graph.ordered()
    assert sorted(order) == sorted(graph.nodes)
    place = {node: i for i, node in enumerate(order)}
    assert all(place[need] < place[node] for node, needs in graph.needs.items() for need in needs)


@any_graph
@hypothesis.given(graphs())
def test_no_start_could_stand_earlier(graph: Graph) -> None:
    """Right before a start stands one of its needs, or a start with a smaller tag (and so on)."""
    order, kinds, tags = graph.ordered(), graph.kinds, graph.tags
    for i, node in enumerate(order[1:], start=1):
        if kinds[node] in ("send", "recv"):
            before = order[i - 1]
            is_started = kinds[before] in ("send", "recv") and tags[before] <= tags[node]
            assert before in graph.needs[node] or is_started, (before, node)


@any_graph
@hypothesis.given(graphs())
def test_nothing_else_can_run_where_a_wait_stands(graph: Graph) -> None:
    for wait, rest in waits_of(graph):
        ready = [node for node in rest if not set(graph.needs[node]) & set(rest)]
        assert {graph.kinds[node] for node in ready} == {"wait"}, (wait, ready)


@any_graph
@hypothesis.given(graphs())
def test_a_wait_is_the_one_that_lets_something_run_soonest(graph: Graph) -> None:
    for wait, rest in waits_of(graph):
        missing = {node: all_before(graph, node) & set(rest) for node in rest if graph.kinds[node] != "wait"}
        if missing:
            soonest = min(missing.values(), key=len)
            assert any(wait in those and len(those) == len(soonest) for those in missing.values())


@any_graph
@hypothesis.given(graphs())
def test_work_for_a_send_goes_before_other_work(graph: Graph) -> None:
    order = graph.ordered()
    for i, node in enumerate(order):
        rest = order[i:]
        for_sends = {each for send in rest if graph.kinds[send] == "send" for each in all_before(graph, send)}
        if graph.kinds[node] == "work" and node not in for_sends:
            ready = [each for each in rest if not set(graph.needs[each]) & set(rest)]
            assert not [each for each in ready if graph.kinds[each] == "work" and each in for_sends]


@any_graph
@hypothesis.given(graphs(), st.randoms(use_true_random=False))
def test_the_order_of_the_nodes_makes_no_difference(graph: Graph, random: Any) -> None:
    shuffled = random.sample(graph.nodes, len(graph.nodes))
    assert graph.ordered(shuffled) == graph.ordered()


def waits_of(graph: Graph) -> Iterator[tuple[str, list[str]]]:
    """Yield each wait of the order with all that stands there or later."""
    order = graph.ordered()
    yield from ((node, order[i:]) for i, node in enumerate(order) if graph.kinds[node] == "wait")


def all_before(graph: Graph, node: str) -> set[str]:
    found, new = set(), {node}
    while new:
        new = {need for each in new for need in graph.needs[each]} - found
        found |= new
    return found


def test_equal_work_keeps_the_order_of_the_nodes() -> None:
    assert schedule("cab", {}, {}, {}) == ["c", "a", "b"]
    assert schedule("cab", {}, {}, {"a": 7, "b": 3}) == ["b", "a", "c"]


def test_messages_of_equal_tags_in_a_chain() -> None:
    needs = {"second": ["first"], "wait second": ["second"], "wait first": ["first", "late"], "late": ["second"]}
    kinds = {"first": "recv", "second": "recv", "wait second": "wait", "wait first": "wait"}
    tags = {"first": 3, "second": 3}
    expected = ["first", "second", "late", "wait first", "wait second"]
    assert schedule([*reversed(expected)], needs, kinds, tags) == expected


def test_waits_for_one_computation_stand_together() -> None:
    """Each pair lets one product run; taking them in the order of tags alone would delay the first."""
    program: list[tuple[str, str, Any, tuple[str, ...]]] = [("recv", f"recv {tag}", tag, ()) for tag in range(4)]
    program += [("wait", f"wait {tag}", None, (f"recv {tag}",)) for tag in range(4)]
    program += [("work", "even", 0, ("wait 0", "wait 2")), ("work", "odd", 1, ("wait 1", "wait 3"))]
    assert Graph(program).ordered()[4:] == ["wait 0", "wait 2", "even", "wait 1", "wait 3", "odd"]


SEND = {"a": "send", "b": "send"}


@pytest.mark.parametrize(
    ("nodes", "needs", "kinds", "tags", "text"),
    [
        ("ab", {}, SEND, {"a": 3, "b": 3}, "'a' and 'b': got two of kind 'send' with tag 3 and no order between them"),
        ("ab", {}, SEND, {"a": (3, 1), "b": (3, 1)}, "with tag 3 and peer 1 and no order between them"),
        ("abc", {"b": "c"}, SEND, {"a": 0, "b": 0}, "'a' and 'b': got two of kind 'send' with tag 0 and no order"),
        ("aba", {}, {}, {}, "'a': got it twice"),
        ("ab", {"a": "x"}, {}, {}, "'a': got 'x' among its needs"),
        ("ab", {"x": "a"}, {}, {}, "got 'x' in needs, expected nodes of the graph"),
        ("ab", {}, {"x": "send"}, {}, "got 'x' in kind, expected nodes of the graph"),
        ("ab", {}, {}, {"x": 3}, "got 'x' in tag, expected nodes of the graph"),
        ("ab", {}, {"a": "bcast"}, {}, "'a': got kind 'bcast', expected one of 'recv', 'send', 'work', 'wait'"),
        ("ab", {}, {"a": "wait"}, {}, "'a': got a wait that needs no send or receive"),
        ("ab", {"a": "b"}, {"a": "wait"}, {}, "'a': got a wait that needs no send or receive"),
        ("ab", {}, {"a": "send"}, {}, "'a': got tag None, expected an int from 0 on"),
        ("ab", {}, {"a": "send"}, {"a": -1}, "'a': got tag -1, expected an int from 0 on"),
        ("ab", {}, {"a": "send"}, {"a": True}, "'a': got tag True, expected an int from 0 on"),
        ("ab", {}, {"a": "send"}, {"a": (1, 2, 3)}, "'a': got tag (1, 2, 3), expected an int from 0 on"),
        ("ab", {}, {}, {"a": "first"}, "'a': got tag 'first', expected an int or None for work"),
        ("ab", {}, SEND, {"a": 1, "b": (1, 2)}, "got tags with and without a peer"),
        ("a", {"a": "a"}, {}, {}, "got nodes that need each other, 'a' -> 'a'"),
        (
            "dabc",
            {"a": "b", "b": "c", "c": "a", "d": "a"},
            {},
            {},
            "need each other, 'a' -> 'b' -> 'c' -> 'a', expected",
        ),
    ],
)
def test_what_cannot_be_ordered_is_named(nodes: str, needs: Any, kinds: Any, tags: Any, text: str) -> None:
    with pytest.raises(ValueError, match=r"^cannot schedule .*: got .*expected .*[.]$") as caught:
        schedule(nodes, needs, kinds, tags)
    assert text in str(caught.value)


def test_equal_tags_with_an_order_or_of_other_peers_and_kinds() -> None:
    chained = schedule("abc", {"a": "c", "c": "b"}, SEND, {"a": 3, "b": 3})
    assert chained == ["b", "c", "a"]
    assert schedule("ab", {}, SEND, {"a": (3, 1), "b": (3, 0)}) == ["b", "a"]
    assert schedule("ab", {}, {"a": "send", "b": "recv"}, {"a": 3, "b": 3}) == ["b", "a"]


def test_large_graphs_take_few_steps_and_no_deep_calls() -> None:
    """A chain longer than the usual limit of recursion, with sends and waits in it. Counts calls, not seconds."""
    size = 1200
    program: list[tuple[str, str, Any, tuple[str, ...]]] = []
    for i in range(size):
        before = (program[-1][1],) if program else ()
        kind = ("work", "send", "wait", "work")[i % 4]
        program.append((kind, str(i), i, before))
    graph = Graph(program)
    calls = 0

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
    assert calls < size * size / 2


def test_a_wait_for_a_receive_goes_by_its_tag_where_sends_must_stand_before_it() -> None:
    graph = Graph(
        [
            ("send", "send question", 0, ()),
            ("recv", "recv other", 1, ()),
            ("recv", "recv answer", 2, ()),
            ("wait", "wait answer", None, ("send question", "recv answer")),
            ("wait", "wait other", None, ("recv other",)),
        ]
    )
    assert graph.ordered() == ["send question", "recv other", "recv answer", "wait other", "wait answer"]
