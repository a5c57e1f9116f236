"""Functions of NumPy that are recorded and ordered, against the same functions in plain NumPy: the same bits.

What holds of the order of any graph's nodes. The order that was published is in ``test_theano_mpi.py``.
"""

from __future__ import annotations

import doctest
import importlib
import pickle
import random
from collections import defaultdict, deque
from collections.abc import Callable
from typing import Any, TypeAlias

import dataflow
import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
from dataflow import Deferred, flow, recv, send
from ordering import schedule
from support.tables import examples

import synk

Event = tuple[Any, ...]


# ----- random programs


def program(seed: int, size: int) -> list[tuple[int, Event]]:
    """Return what all ranks do, in one order in which nobody receives what was not sent before."""
    rng = random.Random(seed)
    events: list[tuple[int, Event]] = []
    names = {rank: ["x0", "x1"] for rank in range(size)}
    on_the_way: dict[tuple[int, int, int], int] = defaultdict(int)
    for number in range(rng.randrange(10, 40)):
        rank = rng.randrange(size)
        a, b = rng.choices(names[rank], k=2)
        kind = rng.choice(("work", "work", "work", "send", "send", "recv", "force", "draw", "buffer"))
        if kind == "send":
            peer, tag = rng.randrange(size), rng.randrange(2)
            on_the_way[rank, peer, tag] += 1
            events.append((rank, ("send", a, peer, tag)))
            continue
        event: Event = (kind, f"v{number}", a, b, rng.randrange(len(WORK)))
        if kind == "recv":
            ways = [way for way, count in on_the_way.items() if count and way[1] == rank]
            if not ways:
                continue
            peer, _, tag = rng.choice(ways)
            on_the_way[peer, rank, tag] -= 1
            event = ("recv", f"v{number}", peer, tag)
        names[rank].append(f"v{number}")
        events.append((rank, event))
    for (peer, rank, tag), count in on_the_way.items():
        events += [(rank, ("recv", f"rest{peer}{tag}{each}", peer, tag)) for each in range(count)]
    return events


WORK: tuple[Callable[[Any, Any], Any], ...] = (
    lambda a, b: a + b,
    lambda a, b: 0.3 * a @ b.T - 1,
    lambda a, b: np.concatenate([a[:2], b[2:]]),
    lambda a, b: np.where(a > b, a, -b),
    lambda a, b: np.tanh(a).cumsum(axis=1) / (1 + abs(b).max()),
    lambda a, b: np.linalg.solve(np.eye(4) * 9 + np.cos(a), b),
    lambda a, b: np.add.reduce([a, b, a]),
    lambda a, b: (lambda whole, part: whole + part)(*np.divmod(a, 1 + abs(b))),
    lambda a, b: a.reshape(2, 8).T.copy().reshape(4, 4)[::-1] ** 2 % 3,
)


def act(event: Event, values: dict[str, Any], send: Any, recv: Any, rng: np.random.Generator) -> None:
    """Do what an event says, by whatever arrays and messages there are."""
    match event:
        case ("work", name, a, b, which):
            values[name] = WORK[which](values[a], values[b])
        case ("send", a, peer, tag):
            send(values[a], peer, tag)
        case ("recv", name, peer, tag):
            values[name] = recv(peer, tag)
        case ("force", name, a, b, which):
            values[name] = values[a] if float(values[b].sum()) > which else values[b] * 2
        case ("draw", name, a, _, _):
            values[name] = values[a] + rng.random((4, 4))
        case ("buffer", name, a, b, _):  # the program's own array, which it goes on to use
            buffer = np.zeros((4, 4))
            values[name] = values[a] + buffer
            buffer[:] = values[b]
            values[name] = values[name] - 0.5 * buffer


def start(rank: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(rank)
    return {"x0": rng.normal(size=(4, 4)), "x1": rng.normal(size=(4, 4))}


def plain(events: list[tuple[int, Event]], size: int) -> list[dict[str, np.ndarray]]:
    """Run a program in this process, in its own order."""
    boxes: dict[tuple[int, int, int], deque[np.ndarray]] = defaultdict(deque)
    values = [start(rank) for rank in range(size)]
    rngs = [np.random.default_rng(9) for _ in range(size)]
    for rank, event in events:

        def send(array: np.ndarray, peer: int, tag: int, rank: int = rank) -> None:
            boxes[rank, peer, tag].append(array.copy())

        def recv(peer: int, tag: int, rank: int = rank) -> np.ndarray:
            return boxes[peer, rank, tag].popleft()

        act(event, values[rank], send, recv, rngs[rank])
    return values


@pytest.mark.parametrize("size", [1, 3])
def test_random_programs_have_the_bits_of_plain_numpy(shared_runtimes: Any, size: int) -> None:
    programs = [program(seed, size) for seed in range(30)]

    @flow
    def step(own: list[Event], values: dict[str, Any]) -> dict[str, Any]:
        rng = np.random.default_rng(9)
        for event in own:
            act(event, values, send, recv, rng)
        return values

    def run(x: np.ndarray) -> list[dict[str, np.ndarray]]:
        rank = synk.comm.rank
        return [step([event for who, event in events if who == rank], start(rank)) for events in programs]

    f = shared_runtimes[size].function(lambda x: pickle.dumps(run(x)), outputs=None)
    results = f(np.zeros(size))
    for rank, found in enumerate(pickle.loads(each) for each in results):
        for events, values in zip(programs, found, strict=True):
            expected = plain(events, size)[rank]
            assert values.keys() == expected.keys()
            for name, value in values.items():
                assert type(value) is np.ndarray
                assert value.dtype == expected[name].dtype
                np.testing.assert_array_equal(value, expected[name])


# ----- values that are needed, and what is refused


def test_what_needs_a_value_computes_it_and_what_it_hangs_on() -> None:
    x = np.arange(12.0).reshape(3, 4)
    names: list[str] = []

    def asked(total: Any, y: Any) -> list[Any]:
        return [
            float(total), bool(total > 0), len(y), y.shape, y.dtype, list(y[0]), y.tolist(), np.asarray(y),
            repr(y), range(9)[np.argmin(y)], *np.linalg.qr(y), tuple(np.shape(y)),
        ]  # fmt: skip

    @flow
    def step(x: Any) -> Any:
        unused = np.sort(x)
        y = x.T @ x
        total = y.sum()
        found = asked(total, y)
        names[:] = [each.name for each in step.trace][:3]
        return unused, total if total > 3 else None, found

    y = x.T @ x
    unused, total, found = step(x)
    assert names == ["T", "matmul", "sum"]  # the sort was not needed
    for each, value in zip(found, asked(y.sum(), y), strict=True):
        assert type(each) in (type(value), Deferred)
        np.testing.assert_array_equal(each, value)
    np.testing.assert_array_equal(unused, x)
    assert total == y.sum()


def add_in_place(x: Any) -> None:
    x += 1


def assign(x: Any) -> None:
    x[0] = 1


REFUSED: dict[str, Callable[[Any], Any]] = {
    "operator": add_in_place,
    "part of a result": lambda x: assign(x * 2),
    "out": lambda x: np.add(x, 1, out=np.zeros(3)),
    "out of a method": lambda x: x.cumsum(out=np.zeros(3)),
    "at": lambda x: np.add.at(x, [0], 1),
    "method": lambda x: x.sort(),
    "shuffle": lambda x: np.random.default_rng(0).shuffle(x),
}
READ_ONLY: dict[str, Callable[[Any], Any]] = {
    "positional out": lambda x: np.cumsum(x, None, None, np.zeros(3)),
    "as an array": lambda x: assign(np.asarray(x * 2)),
    "of a called function": lambda x: dataflow.call(lambda y: y.fill(0), x),
}


@pytest.mark.filterwarnings("ignore:you are shuffling")
def test_writes_are_refused(subtests: pytest.Subtests) -> None:
    expected = "cannot write into an array of a flow: got .*, expected operations with results of their own. Write x ="
    for how, write in {**REFUSED, **READ_ONLY}.items():
        x = np.array([3.0, np.nan, 1.0])
        error, text = (TypeError, expected) if how in REFUSED else (ValueError, "read-only")
        with subtests.test(how=how):
            with pytest.raises(error, match=text):
                flow(write)(x)
            np.testing.assert_array_equal(x, [3.0, np.nan, 1.0])


def test_what_a_step_is_given_and_returns() -> None:
    """Nested arguments; an input comes back as it is."""

    @flow
    def step(pair: tuple[Any, Any], *, scale: Any) -> dict[str, Any]:
        """Add."""
        return {"sum": pair[0] + pair[1] * scale, "whole": [dataflow.call(sorted, [3, 1]), None], "same": pair[0]}

    x = np.zeros(2)
    found = step((x, np.ones(2)), scale=np.full(2, 3.0))
    assert (found["sum"].tolist(), found["whole"]) == ([3, 3], [[1, 3], None])
    assert [each.name for each in step.trace] == ["multiply", "add", "sorted"]  # type: ignore[attr-defined]
    assert step.__doc__ == "Add." and found["same"] is x


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
