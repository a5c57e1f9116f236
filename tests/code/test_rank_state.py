"""What functions change on their rank stays the rank's own, until the program changes the same part; and memory.

Each test has one object with a part for each side: ``mine`` is changed by functions on the ranks, ``yours`` by the
program. The expected values follow from the rule alone: a part that both sides have changed is the program's.
"""

from __future__ import annotations

import copyreg
import gc
import itertools
import re
import time
from collections import Counter, OrderedDict, UserDict, defaultdict, deque  # noqa: F401
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from contents import text
from support import harness

X = np.arange(4.0)
MB = 1024 * 1024


CONTAINERS: dict[str, tuple[str, str]] = {
    "dict": ("dict(mine=0, yours=0)", "held['{}']"),
    "dict of 300": ("{**dict.fromkeys(range(300)), 'mine': 0, 'yours': 0}", "held['{}']"),
    "OrderedDict": ("OrderedDict(mine=0, yours=0)", "held['{}']"),
    "defaultdict": ("defaultdict(int, mine=0, yours=0)", "held['{}']"),
    "Counter": ("Counter(mine=0, yours=0)", "held['{}']"),
    "UserDict": ("UserDict(mine=0, yours=0)", "held['{}']"),
    "list": ("[0, 0]", "held['{}' == 'yours']"),
    "list of 300": ("[0] * 300", "held['{}' == 'yours']"),
    "deque": ("deque([0, 0])", "held['{}' == 'yours']"),
    "array": ("np.zeros(2)", "held[int('{}' == 'yours')]"),
}
"""How a container is made, which is one part: whoever changes an element decides about all."""

FIELDS: dict[str, tuple[str, str]] = {
    "namespace": ("SimpleNamespace(mine=0, yours=0)", "held.{}"),
    "instance": ("made(mine=0, yours=0)()", "held.{}"),
    "slots": ("made(__slots__=('mine', 'yours'))()", "held.{}"),
    "class": ("made(mine=0, yours=0)", "held.{}"),
    "function": ("lambda: 0", "held.{}"),
    "lists in a dict": ("dict(mine=[0], yours=[0])", "held['{}'][0]"),
    "lists in a list": ("[[0], [0]]", "held['{}' == 'yours'][0]"),
    "lists in a tuple": ("([0], [0])", "held['{}' == 'yours'][0]"),
    "arrays in a dict": ("dict(mine=np.zeros(3), yours=np.zeros(3))", "held['{}'][0]"),
    "arrays in a list": ("[np.zeros(3), np.zeros(3)]", "held['{}' == 'yours'][0]"),
    "arrays of an instance": ("SimpleNamespace(mine=np.zeros(3), yours=np.zeros(3))", "held.{}[0]"),
    "large arrays": ("SimpleNamespace(mine=np.zeros(20_000), yours=np.zeros(20_000))", "held.{}[0]"),
    "lists of a class": ("made(mine=[0], yours=[0])", "held.{}[0]"),
}
"""How an object is made, and the expression of a side's place in it; both places hold 0."""

STEP = """
def made(**attributes): return type("Model", (), {{"__module__": "__main__", **attributes}})
held = {make}
{mine} = {yours} = 0
def step(x):
    {mine} += 1
    return int({mine}), int({yours})
"""


def test_one_object_with_a_field_for_each_side(subtests: Any, shared_runtimes: Any) -> None:
    for name in (*FIELDS, *CONTAINERS):
        with subtests.test(kind=name):
            check_fields(shared_runtimes[2], name)


def check_fields(rt: Any, name: str) -> None:
    make, place = {**FIELDS, **CONTAINERS}[name]
    names: dict[str, Any] = {**globals(), "__name__": "__main__"}
    exec(STEP.format(make=make, mine=place.format("mine"), yours=place.format("yours")), names)
    f = rt.function(names["step"], outputs="first")

    calls = itertools.cycle([f, lambda x: f.submit(x).result()])

    def call() -> tuple[int, int]:
        return next(calls)(X)

    def change(side: str, value: float) -> None:
        exec(f"{place.format(side)} = {value}", names)

    assert [call(), call()] == [(1, 0), (2, 0)]
    change("yours", 5)
    if name in CONTAINERS:
        assert [call(), call()] == [(1, 5), (2, 5)], "the program has changed the container: its contents count"
        change("yours", 6)
        assert call() == (1, 6)
    else:
        assert [call(), call()] == [(3, 5), (4, 5)], "the program has changed its own field only"
        change("yours", 6)
        assert call() == (5, 6)
    change("mine", 100)
    assert [call(), call()] == [(101, 6), (102, 6)], "both have changed the field: the program's value counts"
    change("mine", 100.0 if "array" in name else 100)
    assert call() == (103, 6), "equal to what was sent: still the rank's"


def test_a_list_of_another_length_comes_whole_and_its_unchanged_elements_are_the_ranks(rt: Any) -> None:
    layers = [SimpleNamespace(calls=0), SimpleNamespace(calls=0)]

    def step(x: np.ndarray) -> str:
        for layer in layers:
            layer.calls += 1
        return " ".join(str(layer.calls) for layer in layers)

    f = rt.function(step, outputs="first")
    assert [f(X), f(X)] == ["1 1", "2 2"]
    layers.append(SimpleNamespace(calls=10))
    assert f(X) == "3 3 11"
    layers.reverse()
    assert f(X) == "12 4 4"
    del layers[1]
    assert f(X) == "13 5"
    layers.insert(0, layers[1])
    assert f(X) == "7 14 7"
    layers[1].calls = 50
    assert f(X) == "9 51 9"


def test_a_set_that_both_sides_have_changed_is_the_programs(shared_runtimes: Any) -> None:
    held = {0}
    f = shared_runtimes[2].function(lambda x: [held.add(100 + len(held)), sorted(held)][1], outputs=None)
    assert [f(X)[0], f(X)[0]] == [[0, 101], [0, 101, 102]]
    held.add(1)
    assert [f(X)[0], f(X)[0]] == [[0, 1, 102], [0, 1, 102, 103]]


def test_an_attribute_that_the_rank_added_stays_while_the_program_changes_others(shared_runtimes: Any) -> None:
    cache = SimpleNamespace(rate=1)

    def step(x: np.ndarray) -> list[str]:
        setattr(cache, f"by_the_rank_{len(vars(cache))}", cache.rate)
        return [str(sorted(vars(cache).items()))] * len(x)

    f = shared_runtimes[2].function(step, outputs="gather")
    assert f(X)[0] == "[('by_the_rank_1', 1), ('rate', 1)]"
    cache.rate = 2
    assert f(X)[0] == "[('by_the_rank_1', 1), ('by_the_rank_2', 2), ('rate', 2)]"


def test_a_generator_that_the_rank_draws_from_goes_on_until_the_program_draws(shared_runtimes: Any) -> None:
    rng = np.random.default_rng(5)
    f = shared_runtimes[2].function(lambda x: float(rng.random()), outputs=None)
    reference = np.random.default_rng(5).random(9)
    assert f(X) == [reference[0]] * 2
    assert f(X) == [reference[1]] * 2
    for _ in range(3):
        rng.random()
    assert f(X) == [reference[3]] * 2
    assert f(X) == [reference[4]] * 2


class Restless:
    """Its pickle is another one each time, in the maker's arguments or in the state."""

    def __init__(self, part: str, k: int) -> None:
        self.part, self.k = part, k

    def __reduce__(self) -> Any:
        number = time.perf_counter_ns()
        if self.part == "arguments":
            return _restless, (self.part, self.k, number)
        return _restless, (self.part, self.k, 0), {"number": number}


def _restless(part: str, k: int, number: int) -> Restless:
    return Restless(part, k)


@pytest.mark.parametrize("part", ["arguments", "state"])
def test_what_is_pickled_differently_each_time_is_sent_each_time(shared_runtimes: Any, part: str) -> None:
    """One warning names it, because what a rank changes in it is lost."""
    held = {"inner": Restless(part, 1)}

    def step(x: np.ndarray) -> int:
        held["inner"].k += 1
        return held["inner"].k

    f = shared_runtimes[2].function(step, outputs="first")
    with pytest.warns(UserWarning, match=r"captured held\['inner'\], whose pickle is another one each time") as caught:
        first = [f(X) for _ in range(4)]
    assert len(caught) == 1
    assert first == ([2, 2, 2, 2] if part == "arguments" else first)
    held["inner"].k = 10
    assert f(X) >= 11


def test_objects_that_two_functions_capture_are_one_on_each_rank(rt: Any) -> None:
    held = {"table": np.zeros(3), "log": [0], "box": SimpleNamespace(k=0)}
    alone = held["log"]

    def write(x: np.ndarray) -> int:
        held["table"][0] += 1
        held["log"].append(len(held["log"]))
        held["box"].k += 1
        return len(alone)

    def read(x: np.ndarray) -> list[str]:
        return [text((held, alone))] * len(x)

    writes, reads = rt.function(write, outputs="first"), rt.function(read, outputs="gather")
    assert [writes(X), writes(X)] == [2, 3]
    expected = {"table": np.array([2.0, 0, 0]), "log": [0, 1, 2], "box": SimpleNamespace(k=2)}
    assert reads(X)[0] == text((expected, expected["log"]))
    held["box"].k = expected["box"].k = 50
    assert reads(X)[0] == text((expected, expected["log"]))
    held["log"].append(7)
    expected["log"][:] = [0, 7]
    assert reads(X)[0] == text((expected, expected["log"]))
    writes(X)
    expected["table"][0], expected["box"].k = 3, 51
    expected["log"].append(2)
    assert reads(X)[0] == text((expected, expected["log"]))


# ----- memory


def test_a_global_array_bound_anew_leaves_no_copies(runtime: Callable[..., Any]) -> None:
    """The same by the name of a global: neither the program nor a worker keeps more than two."""
    rt = runtime(2)
    names: dict[str, Any] = {"__name__": "__main__"}
    rows = np.arange(2.0)

    def all_nbytes() -> int:
        return sum(smaps(pid, "Private_Dirty") for pid in (*worker_pids, "self"))

    worker_pids = harness.pids(rt)
    gc.disable()
    try:
        for number in range(8):
            names["table"] = np.full(20 * MB // 8, float(number))
            exec("def f(x): return x + table[0]", names)
            f = rt.function(names["f"], outputs="gather")
            np.testing.assert_array_equal(f(rows), rows + number)
            if number == 1:
                before = all_nbytes()
        grown = all_nbytes() - before
    finally:
        gc.enable()
    assert grown < 2 * 20 * MB, f"{grown / MB:.0f} MB more after six definitions"


def test_a_large_captured_array_is_neither_pickled_nor_copied_for_each_worker(runtime: Callable[..., Any]) -> None:
    """It lies once in shared memory; a worker that writes copies the pages that it writes to."""
    rt = runtime(3)
    table = np.ones(100 * MB // 8)
    f = rt.function(lambda x: x + table[0] + table[-1] + table[::512].sum(), outputs="gather")
    g = rt.function(lambda x: table.__setitem__(0, 5.0), outputs=None)
    pids = harness.pids(rt)

    def private() -> np.ndarray:
        return np.array([smaps(pid, "Private_Dirty") for pid in pids]) / MB

    def whole() -> float:
        return sum(smaps(pid, "Pss") for pid in ("self", *pids)) / MB

    private_before, whole_before = private(), whole()
    np.testing.assert_array_equal(f(X), X + 2 + len(table[::512]))
    assert max(private() - private_before) < 10
    g(X)
    assert max(private() - private_before) < 12, "one page was written"
    assert table[0] == 1.0, "a write on a rank is the rank's own"
    np.testing.assert_array_equal(f(X), X + 2 + 4 + 4 + len(table[::512]))
    sent = rt.counters["bytes_down"]
    for _ in range(2):
        table += 1
        np.testing.assert_array_equal(f(X), X + table[0] * (2 + len(table[::512])))
    assert rt.counters["bytes_down"] - sent < 10 * MB, "changed as a whole, and not pickled"
    assert whole() - whole_before < 215, "one copy for all, and what was there before a change"


def smaps(pid: int | str, field: str) -> int:
    with open(f"/proc/{pid}/smaps_rollup", encoding="ascii") as file:
        return 1024 * sum(int(number) for number in re.findall(rf"(?m)^{field}: +(\d+) kB", file.read()))


def test_an_element_beyond_a_list_that_the_rank_has_shortened_is_not_lost(shared_runtimes: Any) -> None:
    """The rank has taken elements away, and the program has bound the last one anew: its value is there."""
    items: list[Any] = [1, 2, 3]

    def step(x: np.ndarray) -> list[Any]:
        while len(items) > 1:
            items.pop(0)
        return [list(items)] * len(x)

    f = shared_runtimes[1].function(step, outputs="gather")
    assert f(np.arange(1)) == [[3]]
    items[2] = 9
    assert f(np.arange(1)) == [[9]]


class Caller(tuple[Any, ...]):
    """A function that no part can bring up to date: nothing that can be bound holds its object."""

    __name__ = "caller"

    def __reduce__(self) -> Any:
        return Caller, (tuple(self),)

    def __call__(self, x: np.ndarray) -> list[Any]:
        return [self[0]["k"]] * len(x)


def test_a_function_that_can_only_be_made_anew(shared_runtimes: Any) -> None:
    caller = Caller(({"k": 1},))
    f = shared_runtimes[2].function(caller, outputs="gather")
    for number in range(4):
        caller[0]["k"] = number
        for _ in range(3):
            assert f(X) == [number] * 4


class Ruled:
    """An object whose pickling rule lies in ``copyreg``."""

    def __init__(self, state: dict[str, Any] | None = None) -> None:
        self.state = state or {}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.state = dict(state)


def test_a_rule_of_copyreg(shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def rule(obj: Ruled) -> Any:
        return Ruled, (), dict(obj.state)

    def read(x: Any) -> list[int]:
        copyreg.pickle(Ruled, rule)  # type: ignore[arg-type]  # a rank has the rules of what it imports
        return [ruled.state["k"]] * len(x)

    monkeypatch.setitem(copyreg.dispatch_table, Ruled, rule)
    ruled = Ruled({"k": 1})
    f = shared_runtimes[1].function(read, outputs="gather")
    for number in range(3):
        ruled.state["k"] = number
        assert f(X) == [number] * 4
