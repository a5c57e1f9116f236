"""The protocols in shared memory, in every order that a processor may choose: no stale value, no lost wake-up.

Also that a mistake in them would be found, and that the protocols of ``memory_model.py`` are those of the source.
"""

from __future__ import annotations

import ast
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import pytest
from support import memory_model
from support.harness import PACKAGE_FOLDER
from support.source_outline import outline, tree
from support.weak_memory import (
    FENCE,
    Block,
    Change,
    Memory,
    Origin,
    Protocol,
    Step,
    await_,
    block,
    expect,
    explore,
    fences,
    load,
    ordered_stores,
    store,
    swapped,
    without,
)

from synk._engine import engine, lanes, variables, workers
from synk._processes import worker_process
from synk._rank import call as _call
from synk._rank import peers, rank
from synk._rank import variables as _variables
from synk._wire import orders
from synk._wire.orders import Down, Up
from synk.communicators import (
    _exchange,
    _mailbox,
    _meetings,
    _messages,
    _rendezvous,
    _shm,
    _shm_collectives,
)

PROTOCOLS = memory_model.protocols()


class TestTheMemory:
    """Litmus tests whose outcomes on AArch64 are in the literature: the memory is as weak, and fences are fences."""

    @staticmethod
    def message_passing(*, writer_fence: bool, reader_fence: bool) -> Protocol:
        """One process writes data and then a flag, the other waits for the flag and reads the data (MP)."""
        between = (FENCE,) if writer_fence else ()
        after = (FENCE,) if reader_fence else ()
        writer = block("", store("data", 1), *between, store("flag", 1))
        return Protocol((writer, block("", await_("flag", bool), *after, expect("data", 1))), {})

    @pytest.mark.parametrize("writer_fence", (True, False))
    @pytest.mark.parametrize("reader_fence", (True, False))
    def test_message_passing_needs_a_fence_on_both_sides(self, writer_fence: bool, reader_fence: bool) -> None:
        problem = explore(self.message_passing(writer_fence=writer_fence, reader_fence=reader_fence))
        assert (problem is None) == (writer_fence and reader_fence)

    @pytest.mark.parametrize("num_fences", (0, 1, 2))
    def test_store_buffering_needs_a_fence_on_both_sides(self, num_fences: int) -> None:
        """Each process stores to its own word, then loads the other's: both see nothing (SB)."""
        processes = [
            block("", store(mine, 1), *((FENCE,) if k < num_fences else ()), load(other, mine))
            for k, (mine, other) in enumerate((("x", "y"), ("y", "x")))
        ]

        def check(registers: Memory) -> str | None:
            return None if registers["x"] or registers["y"] else "neither has seen the other"

        assert (explore(Protocol(tuple(processes), {}, check)) is None) == (num_fences == 2)

    @pytest.mark.parametrize("num_fences", (0, 1, 2))
    def test_load_buffering_needs_a_fence_on_both_sides(self, num_fences: int) -> None:
        """Each process loads the other's word, then stores to its own: both see the other's store (LB)."""
        processes = [
            block("", load(other, mine), *((FENCE,) if k < num_fences else ()), store(mine, 1))
            for k, (mine, other) in enumerate((("x", "y"), ("y", "x")))
        ]

        def check(registers: Memory) -> str | None:
            return "each has seen what the other did later" if registers["x"] and registers["y"] else None

        assert (explore(Protocol(tuple(processes), {}, check)) is None) == (num_fences == 2)

    def test_accesses_to_one_word_keep_their_order(self) -> None:
        writer = block("", store("x", 1), store("x", 2))
        reader = block("", load("x", "first"), load("x", "second"))

        def check(registers: Memory) -> str | None:
            return "the word went back" if registers["second"] < registers["first"] else None

        assert explore(Protocol((writer, reader), {}, check)) is None


def test_no_order_of_the_steps_does_harm(subtests: Any) -> None:
    for name, protocol in PROTOCOLS.items():
        with subtests.test(case=name):
            assert explore(protocol) is None


def test_an_array_that_others_read_needs_a_second_meeting() -> None:
    """Without it a rank goes on and changes its array before another one has read it."""

    def program(rank: int) -> Block:
        rounds: list[Step | Block] = []
        for tick in (1, 2):
            *beginning, rest = memory_model.copy_from_memory(rank, 1 - rank, tick, False)
            reading = next(part for part in rest.blocks() if part.name == "ShmCollectives._read")
            rounds += [*beginning, reading]
        return block("", memory_model.begin(rank), *rounds)

    problem = explore(Protocol((program(0), program(1)), {}))
    assert problem is not None and "in arrays[" in problem


# -- mistakes are found -----------------------------------------------------------------------------------------------


PROGRAMS = [program for protocol in PROTOCOLS.values() for program in protocol.programs()]
FENCES = sorted({fence for program in PROGRAMS for fence in fences(program)})
PAIRS = sorted({pair for program in PROGRAMS for pair in ordered_stores(program)})


def is_found(change: Change, concerns: Callable[[list[Step]], bool]) -> bool:
    """Whether some protocol goes wrong if a program that it concerns is changed; small ones are tried first."""
    return any(
        explore(protocol.mutated(process, change)) is not None
        for protocol in PROTOCOLS.values()
        for process, program in enumerate(protocol.programs())
        if concerns(program)
    )


# Pairs of stores that may change places: what the second tells of is not what the first wrote.
UNORDERED = {
    # That a rank has begun tells of what it wrote before.
    ("Rendezvous.begin store sequences", "Rendezvous.arrive store ticks"),
    ("Rendezvous.begin store sequences", "Rendezvous.rouse store sleeps"),
    ("Rendezvous.begin store sequences", "ShortPath.send_now store rings"),
    # A rank has said that it is awake when it found what it waited for; at the end of the wait it says so again.
    ("Rendezvous.rouse store sleeps", "Rendezvous._doze store places"),
    # Requests are compared, and data read, when a rank has arrived; requests are told of when all sleep for good.
    ("Rendezvous.rouse store sleeps", "Meeting.show store halves"),
    ("Rendezvous.rouse store sleeps", "ShmCollectives.read_steps store halves"),
    ("Rendezvous.rouse store sleeps", "function store arrays"),
    # Who arrives later than the others keeps them waiting, and was awake all the time.
    ("Rendezvous.arrive store ticks", "Rendezvous.rouse store sleeps"),
    # Who wakes up must say so before it changes what others would judge it by, and they judge by ``written``.
    ("Rendezvous.rouse store sleeps", "Mailbox._write store rings"),
    # The array of an offer is told of by ``written``.
    ("function store arrays", "Rendezvous.rouse store sleeps"),
}


def describe(origin: Origin) -> str:
    return next(f"{origin[0]} {step.name}" for program in PROGRAMS for step in program if step.origin == origin)


def test_a_fence_that_is_dropped_is_missed(subtests: Any) -> None:
    for fence in FENCES:
        with subtests.test(case=f"{fence[0]} {fence[1]}"):
            assert is_found(without(fence), lambda program, fence=fence: fence in fences(program))


def test_stores_that_change_places_are_noticed(subtests: Any) -> None:
    for pair in PAIRS:
        names = tuple(map(describe, pair))
        with subtests.test(case=" before ".join(names)):
            if names not in UNORDERED:
                assert is_found(swapped(*pair), lambda program, pair=pair: pair in ordered_stores(program))


def test_every_pair_that_may_change_places_exists() -> None:
    assert {tuple(map(describe, pair)) for pair in PAIRS} >= UNORDERED


# -- the source -------------------------------------------------------------------------------------------------------

MODULES = {
    "Rendezvous": _rendezvous,
    "set_abort": _rendezvous,
    "Mailbox": _mailbox,
    "MessageBox": _messages,
    "ShortPath": _shm,
    "ShmCommunicator": _shm,
    "ShmCollectives": _shm_collectives,
    "Meeting": _meetings,
    "Peers": peers,
    "Link": orders,
    "Call": engine,
    "Engine": engine,
    "Lane": lanes,
    "Workers": workers,
    "Variable": variables,
    "WorkerProcess": worker_process,
    "Rank": rank,
    "RankPlan": _call,
    "Replica": _variables,
}
# No functions of the source: what a call of ``is_ready`` or ``action`` does, and what Outputs and functions of the user
# do with arrays.
ABSTRACT = ("", "is_ready", "action", "function", "yield", "publish", "stage", "reduction")


def collapsed(steps: Iterable[str]) -> tuple[str, ...]:
    """Return ``steps`` with equal loads and equal calls in a row as one: the model unrolls what the source repeats."""
    groups = ((step, list(group)) for step, group in itertools.groupby(steps))
    return tuple(each for step, group in groups for each in (group[:1] if step.startswith(("load", "call")) else group))


MODEL: dict[str, set[tuple[str, ...]]] = defaultdict(set)
for each in PROTOCOLS.values():
    for part in each.blocks():
        if part.items and part.name not in ABSTRACT:
            MODEL[part.name].add(collapsed(part.outline()))
CALLS = {
    step.removeprefix("call ")
    for outlines in MODEL.values()
    for steps in outlines
    for step in steps
    if step.startswith("call ")
}


def source_outline(name: str) -> tuple[str, ...]:
    return collapsed(outline(MODULES[name.split(".")[0]], name, CALLS))


def test_the_source_takes_the_steps_of_the_model(subtests: Any) -> None:
    for name in sorted(MODEL):
        with subtests.test(case=name):
            assert MODEL[name] == {source_outline(name)}


# What else touches shared words, and why no protocol has it.
OTHERS = {
    _rendezvous: {
        # What is said in a verdict: all sleep, and nobody will do anything any more.
        "Rendezvous._request": ("load places", "load requests"),
        "Rendezvous.check_abort": ("load abort",),
        "Rendezvous.is_aborted": ("load abort",),
        # Numbers that tell of nothing else: the answer of a process is the same as long as it lives.
        "Rendezvous.__init__": ("store pids",),
        "Rendezvous._may_read_others": ("load pids",),
        "Rendezvous.is_reader": ("load readers",),
    },
    _shm: {},
    _mailbox: {
        # By a rank that has left, and reads nothing because of what it finds.
        "Mailbox._is_taken_in": ("call has_left", "call has_begun", "load read", "load written", "call fail"),
    },
}


@pytest.mark.parametrize("module", (_rendezvous, _mailbox, _shm), ids=lambda module: module.__name__)
def test_nothing_else_touches_the_words(module: ModuleType) -> None:
    body = tree(module).body
    names = [node.name for node in body if isinstance(node, ast.FunctionDef)]
    for node in body:
        if isinstance(node, ast.ClassDef):
            names += [f"{node.name}.{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)]
    outlines = {name: collapsed(outline(module, name, CALLS)) for name in names if name not in MODEL}
    touching = {name: steps for name, steps in outlines.items() if not all(step.startswith("call") for step in steps)}
    assert touching == OTHERS[module]


# A collective writes into the half of the next meeting, meets, and reads the others' data: as _meet_once in the model.
COLLECTIVES = {
    "ShmCollectives._reduce_blocks": ("call _publish_shares", "call meet_steps", "call _fold_share"),
    # the result goes into the rank's other half, which the next meeting shows
    "ShmCollectives._reduce_shares": (
        *("call _publish_shares", "call meet_steps", "load halves", "call _fold_share", "load halves"),
    ),
    "ShmCollectives._publish_shares": ("store halves",),
    "ShmCollectives._fold_share": ("load halves",),
    "ShmCollectives._broadcast": ("call copy_steps",),
    "ShmCollectives._all_gather": ("call copy_steps",),
    "ShmCollectives.copy_steps": ("call show", "call meet_steps", "call read_steps"),
    "ShmCollectives._read_pieces": ("call show", "call meet_steps", "load halves"),
    "ShmCollectives.agree_steps": ("call meet_steps",),
    "Exchange.steps": ("call show", "store halves", "call meet_steps", "call rest_steps"),
    "Exchange.rest_steps": ("call _read_head", "call read_steps"),
    "Exchange._read_head": ("load halves",),
    "ShmCommunicator._go_on": ("call rest_steps",),
}


def test_every_collective_meets_between_writing_and_reading(subtests: Any) -> None:
    calls = (
        *("meet_steps", "_publish_shares", "_fold_share", "copy_steps", "show", "read_steps", "_read_pieces"),
        *("_read_head", "rest_steps"),
    )
    for name, steps in COLLECTIVES.items():
        module = {"ShmCollectives": _shm_collectives, "Exchange": _exchange}.get(name.split(".")[0], _shm)
        with subtests.test(case=name):
            assert collapsed(outline(module, name, calls)) == steps


# -- the documents ----------------------------------------------------------------------------------------------------


def test_the_design_names_every_shared_word() -> None:
    text = (PACKAGE_FOLDER / "docs" / "design.md").read_text(encoding="utf-8")
    section = text.split("### The memory model", 1)[1].split("\n### ", 1)[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("| `")]
    named = {word.strip(" `") for row in rows for word in row.split(",")}
    columns = {"abort", "sequences", "ticks", "left", "sleeps", "places", "verdicts", "requests"}
    columns |= {"pids", "readers", "written", "read", "unsent"}
    assert named >= columns | {word.name for word in Down} | {word.name for word in Up}
