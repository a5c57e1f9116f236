"""A call is a transaction on shared variables: whatever makes it fail, all ranks hold the old values afterwards.

The values live in shared memory that outlives the workers, so nothing is lost with one either: replicas, shards, and
values that differ between ranks.
"""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support import saboteurs
from support.harness import arm, failpoint, kill_and_wait, pids, wait_until_dead
from support.rank_arrays import assert_same, everywhere, from_all_ranks, numbers
from support.tables import WHOLE_OR_SAMPLE, drawn

import synk
from synk.errors import CallTimeout, CollectiveMismatch, SerializationError, WorkerDied

Fork = Callable[..., Any]
WHERE = (2, "1+1")
"""Workers of one machine, and of two nodes."""

BIG = 150_000
"""Elements of a variable that workers move: 1.2 MB."""


class State:
    """Variables of every kind with other values on each rank, and a function that assigns all of them.

    Parameters
    ----------
    output : int
        Elements that the function returns; many of them take a second message.
    """

    def __init__(self, rt: Any, output: int = 1) -> None:
        self.rt = rt
        self.replicated = rt.shared(np.zeros(3), name="replicated")
        self.sharded = rt.shared(numbers("f8", (5, 2), 0), sharded=True, name="sharded")
        self.nested = rt.shared({"w": numbers("f4", (2, 2), 0), "step": np.int64(0)}, name="nested")
        self.growing = rt.shared(np.zeros((1, 2)), name="growing")
        self.variables = [self.replicated, self.sharded, self.nested, self.growing]
        for rank in range(rt.world_size):
            self.replicated[rank] = np.full(3, 100.0 * rank)
        replicated, sharded, nested, growing = self.variables

        def body(x: np.ndarray) -> None:
            replicated.value = replicated.value + x.sum()
            sharded.value = np.concatenate([sharded.value * 2, sharded.value[:1]])
            nested.value = {"w": nested.value["w"] + np.float32(1), "step": nested.value["step"] + 1}
            growing.value = np.concatenate([growing.value, growing.value + 1])

        self.body = body
        self.rows = np.arange(2.0 * rt.world_size)
        self.output = output
        self.step = self.function()

    def function(self) -> Any:
        """Return a function that assigns everything."""
        body, output = self.body, self.output

        def assign_all(x: np.ndarray) -> Any:
            body(x)
            return np.full(output, x.sum())

        return self.rt.function(assign_all, outputs="sum")

    def values(self) -> list[Any]:
        """Return all values of all ranks, after checking that master and workers agree."""
        return [everywhere(self.rt, variable) for variable in self.variables]

    def after_a_step(self, values: list[Any]) -> list[Any]:
        """Return the values that a call leaves, by NumPy."""
        replicated, sharded, nested, growing = values
        sums = [part.sum() for part in np.array_split(self.rows, self.rt.world_size)]
        return [
            [value + total for value, total in zip(replicated, sums, strict=True)],
            [np.concatenate([value * 2, value[:1]]) for value in sharded],
            [{"w": value["w"] + np.float32(1), "step": np.asarray(value["step"] + 1)} for value in nested],
            [np.concatenate([value, value + 1]) for value in growing],
        ]

    def check_steps(self, values: list[Any]) -> None:
        """Assert that ``values`` are there, and that the next calls are right."""
        for _ in range(2):
            assert_same(self.values(), values)
            assert_same(self.step(self.rows), np.full(self.output, self.rows.sum()))
            values = self.after_a_step(values)
        assert_same(self.values(), values)

    @contextmanager
    def unchanged(self) -> Iterator[None]:
        """Assert that the body changes nothing on any rank, and that the next calls are right."""
        assert_same(self.step(self.rows), np.full(self.output, self.rows.sum()))
        values = self.values()
        yield
        self.check_steps(values)


# ----- whatever makes a call fail


def fail(how: str, rank: int, master: int) -> Any:
    """Do on ``rank`` what makes a call fail; return what the call is to return there, or nothing special."""
    if synk.comm.rank != rank:
        return None
    if how == "kill":
        saboteurs.kill_self()
    if how == "raise":
        raise LookupError("nothing found")
    if how == "Ctrl-C":
        os.kill(master, signal.SIGINT)
    if how in ("loop", "Ctrl-C"):
        saboteurs.loop_for_ever()
    if how == "loop in C":
        saboteurs.loop_in_c()
    if how == "die in a collective":
        synk.comm.all_reduce(np.ones(4))
        saboteurs.kill_self()
    if how == "shapes":
        return np.zeros(2)
    if how == "unpicklable":
        return saboteurs.AtPickle(saboteurs.raise_value_error)
    return saboteurs.AtLoad(saboteurs.raise_value_error, spared_pid=os.getpid()) if how == "unloadable" else None


def fold_and_fail(left: Any, right: Any) -> Any:
    """Combine two ranks' values, or rather not."""
    raise ArithmeticError("the fold failed in the master")


FAILURES: dict[str, tuple[type[BaseException], dict[str, Any]]] = {
    **{how: (WorkerDied, {}) for how in ("kill", "die in a collective")},
    "raise": (LookupError, {}),
    "Ctrl-C": (KeyboardInterrupt, {}),
    "loop": (CallTimeout, {"timeout": 0.5}),
    "loop in C": (CallTimeout, {"timeout": 0.5}),
    "fold": (ArithmeticError, {"outputs": fold_and_fail}),
    "structure": (ValueError, {"outputs": ("sum", "sum")}),
    "shapes": (CollectiveMismatch, {}),
    "unpicklable": (SerializationError, {"outputs": None}),
    "unloadable": (SerializationError, {"outputs": None}),
}
STEPS = {
    **dict.fromkeys(("call.received", "call.before_function", "call.after_function", "call.before_reply"), "kill"),
    "call.published": "raise",
    "reduce.before": "kill",
    "reduce.after": "kill",
}
DEADLY = {"kill", "die in a collective", "loop in C"}
FAILING_CALLS = [
    *itertools.product(WHERE, FAILURES, (0, 1), (1, BIG)),
    *((2, step, rank, BIG if step.startswith("reduce") else 1) for step in STEPS for rank in (0, 1)),
]


def fail_in(state: State, how: str, rank: int) -> None:
    """Make a call fail, in its function or at a step of its worker, with all variables assigned."""
    if how in STEPS:
        arm(state.rt, failpoint(how, rank, 1, STEPS[how]))
        with pytest.raises(WorkerDied if STEPS[how] == "kill" else RuntimeError):
            state.step(state.rows)
        return
    error, given = FAILURES[how]
    options = {"outputs": "sum", **given}
    limit = options.pop("timeout", None)
    body, output, master = state.body, state.output, os.getpid()

    def assign_and_fail(x: np.ndarray) -> Any:
        body(x)
        found = fail(how, rank, master)
        if how == "die in a collective":
            synk.comm.all_reduce(np.ones(4))
        return np.full(output, x.sum()) if found is None else found

    failing = state.rt.function(assign_and_fail, **options)
    # The workers import this module now, and not within the limit.
    state.rt.function(lambda: fail("", rank, master), outputs=None, per_rank=True)()
    with pytest.raises(error):
        failing(state.rows, timeout=limit)


@pytest.mark.parametrize("is_whole", WHOLE_OR_SAMPLE)
def test_a_call_that_fails_changes_nothing(reused: Fork, is_whole: bool, subtests: pytest.Subtests) -> None:
    """On any rank, of any variable; the next calls are right, by the same workers but those that died."""
    for where, how, rank, output in drawn(FAILING_CALLS, is_whole, 10):
        with subtests.test(how, rank=rank, output=output, where=where):
            rt = reused(where)
            state = State(rt, output)
            with state.unchanged():
                before = pids(rt)
                fail_in(state, how, rank)
            is_dead = how in DEADLY or STEPS.get(how) == "kill"
            after = pids(rt)
            assert [old != new for old, new in zip(before, after, strict=True)] == [
                is_dead and each == rank for each in range(rt.world_size)
            ]


# ----- deaths at other times


def test_A6_A14_a_death_after_the_reply_loses_nothing(rt: Any) -> None:
    """The call has succeeded on all ranks, those included that died before they could see it."""
    state = State(rt)
    before = pids(rt)
    for _ in range(2):  # then each rank has two buffers of its own, and the reply is the end of a call
        assert_same(state.step(state.rows), np.array([state.rows.sum()]))
    expected = state.after_a_step(state.values())
    arm(rt, failpoint("call.after_reply", 0, action="segv"))
    assert_same(state.step(state.rows), np.array([state.rows.sum()]))
    assert wait_until_dead(before[0])
    with pytest.warns(RuntimeWarning, match=r"rank 0.*SIGSEGV") as caught:
        assert_same(state.replicated.value, expected[0][0])
    assert len(caught) == 1
    state.check_steps(expected)


# ----- what a replacement sees


def test_a_replacement_sees_every_way_a_value_came_to_be(rt: Any) -> None:
    """Set by the master, assigned, resized, reduced, scattered, made after the death, dropped before it."""
    state = State(rt)
    state.step(state.rows)
    synk.all_reduce(state.replicated, "sum")
    state.growing[1] = np.full((3, 2), 5.0)
    synk.scatter(state.sharded, numbers("f8", (4, 2), 3))
    state.nested.value = {"w": np.zeros((5, 2), "f4"), "step": 7}
    values = state.values()
    gone = rt.shared(np.ones(BIG))
    from_all_ranks(rt, gone)
    del gone
    kill_and_wait(pids(rt)[1])
    with pytest.warns(RuntimeWarning, match="started again"):
        later = rt.shared(3.0)
        assert_same(everywhere(rt, later), [np.asarray(3.0)] * 2)
    state.check_steps(values)
