"""The order of a graph's nodes: what holds of any graph. The order that was published is in ``test_theano_mpi.py``."""

from __future__ import annotations

import doctest
import importlib
from typing import Any, TypeAlias

import hypothesis
import hypothesis.strategies as st
import pytest
from ordering import schedule
from support.seeds import examples

Graph: TypeAlias = dict[str, tuple[str, Any, tuple[str, ...]]]
"""Kind, tag and needs of each node by its name."""


def ordered(graph: Graph) -> list[str]:
    kinds, tags, needs = ({name: line[place] for name, line in graph.items()} for place in range(3))
    return schedule(graph, needs, kinds, tags)


def all_before(graph: Graph, node: str) -> set[str]:
    found, new = set(), {node}
    while new:
        new = {need for each in new for need in graph[each][2]} - found
        found |= new
    return found


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Any acyclic graph: messages to three peers, equal tags in chains, waits at any distance from their starts."""
    graph: Graph = {}
    last: dict[tuple[str, Any], str] = {}
    waiting: list[str] = []
    with_peers = draw(st.booleans())
    for number in range(draw(st.integers(0, 25))):
        kind = draw(st.sampled_from(["work", "work", "send", "recv", *["wait"] * bool(waiting)]))
        names = [name for name, (other, *_) in graph.items() if kind != "wait" or other not in ("send", "recv")]
        needs = tuple(draw(st.lists(st.sampled_from(names), unique=True, max_size=3))) if names else ()
        name, tag = f"{kind} {number}", None
        if kind in ("send", "recv"):
            tag = (draw(st.integers(0, 4)), draw(st.integers(0, 2))) if with_peers else draw(st.integers(0, 4))
            needs += (last[kind, tag],) if (kind, tag) in last else ()
            last[kind, tag] = name
            waiting.append(name)
        elif kind == "wait":
            needs += (start := waiting.pop(draw(st.integers(0, len(waiting) - 1))),)
            tag = graph[start][1]
        graph[name] = kind, tag, needs
    return graph


@examples(60)
@hypothesis.given(graphs())
def test_what_holds_of_any_graph(graph: Graph) -> None:
    order = ordered(graph)
    assert sorted(order) == sorted(graph)
    for place, node in enumerate(order):
        kind, tag, needs = graph[node]
        rest = order[place:]
        assert not set(needs) & set(rest), "what a node needs stands before it"
        ready = [each for each in rest if not set(graph[each][2]) & set(rest)]
        missing = [all_before(graph, each) & set(rest) for each in rest if graph[each][0] != "wait"]
        for_sends = {each for send in rest if graph[send][0] == "send" for each in all_before(graph, send)}
        if kind in ("send", "recv") and place:
            previous, (kind_before, tag_before, _) = order[place - 1], graph[order[place - 1]]
            is_start = kind_before in ("send", "recv") and tag_before <= tag
            assert previous in needs or is_start, "no start could stand earlier"
        elif kind == "wait":
            assert {graph[each][0] for each in ready} == {"wait"}, "nothing else can run where a wait stands"
            fewest = min(map(len, missing), default=0)
            is_soonest = any(node in those and len(those) == fewest for those in missing)
            assert is_soonest or not missing, "it is the wait that lets something run soonest"
        elif kind == "work" and node not in for_sends:
            assert not {each for each in ready if graph[each][0] == "work"} & for_sends, "work for a send goes first"


def test_what_has_no_order() -> None:
    text = "'a' and 'b': got two of kind 'send' with tag 3 and no order between them"
    with pytest.raises(ValueError, match=text):
        schedule("ab", {}, {"a": "send", "b": "send"}, {"a": 3, "b": 3})
    with pytest.raises(ValueError, match="cycle"):
        schedule("dabc", {"a": "b", "b": "c", "c": "a", "d": "a"}, {}, {})


@pytest.mark.parametrize("name", ["dataflow", "ordering", "rules"])
def test_the_examples(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


def test_a_chain_longer_than_the_limit_of_recursion() -> None:
    kinds = ("work", "send", "wait", "work")
    graph: Graph = {str(i): (kinds[i % 4], i, (str(i - 1),) if i else ()) for i in range(1200)}
    assert ordered(graph) == list(graph)
