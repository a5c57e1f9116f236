"""A call is a transaction on shared variables: whatever makes it fail, all ranks hold the old values afterwards.

The values live in shared memory that outlives the workers, so nothing is lost with one either: replicas, shards, and
values that differ between ranks.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support import saboteurs
from support.harness import failpoint, kill_and_wait, kill_in, pids, same_workers, wait_until_dead
from support.rank_arrays import assert_same, everywhere, from_all_ranks, numbers

import synk
from synk._wire.memory import Segment
from synk.errors import CallTimeout, CollectiveMismatch, SerializationError, SharedMemoryError, WorkerDied

Fork = Callable[..., Any]
WHERE = (2, "1+1")
"""Workers of one machine, and of two nodes."""

BIG = 700_000
"""Elements of a variable that workers move: 5.6 MB."""


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
            rt.set_value(self.replicated, np.full(3, 100.0 * rank), rank=rank)
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

    def function(self, then: Callable[[int], Any] = lambda rank: None, **options: Any) -> Any:
        """Return a function that assigns everything and then does ``then(rank)``."""
        body, output = self.body, self.output

        def assign_all(x: np.ndarray) -> Any:
            body(x)
            then(synk.comm.rank)
            return np.full(output, x.sum())

        options.setdefault("outputs", "sum")
        return self.rt.function(assign_all, **options)

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


# ----- deaths


CALL_STEPS = (
    "call.received",
    "call.before_function",
    "call.after_function",
    "call.published",
    "call.before_reply",
)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(("step", "rank"), [(step, k % 2) for k, step in enumerate(CALL_STEPS)])
@pytest.mark.sampled(90)
def test_a_death_inside_a_call_changes_nothing(reused: Fork, where: Any, step: str, rank: int) -> None:
    """The calls of a rank before the one that fails: pids, one step, four reads of the values."""
    rt = reused(where, failpoint(step, rank, nth=7))
    state = State(rt)
    before = pids(rt)
    with state.unchanged(), pytest.raises(WorkerDied) as died:
        state.step(state.rows)
    assert died.value.ranks == (rank,)
    after = pids(rt)
    assert [old != new for old, new in zip(before, after, strict=True)] == [rank == 0, rank == 1]


@pytest.mark.parametrize(("step", "rank"), [("reduce.before", 1), ("reduce.after", 0)])
def test_a_death_while_large_outputs_are_reduced_changes_nothing(reused: Fork, step: str, rank: int) -> None:
    """The new values lie in the second buffers already; the call has not succeeded."""
    rt = reused(2, failpoint(step, rank, nth=2))
    state = State(rt, output=BIG)
    with state.unchanged(), pytest.raises(WorkerDied):
        state.step(state.rows)


def test_a_death_while_new_buffers_are_handed_out_changes_nothing(reused: Fork) -> None:
    """The first assignment of a variable takes a second exchange: a rank dies in between."""
    rt = reused(2, failpoint("call.after_reply", rank=1, nth=2))
    pids(rt)
    state = State(rt)
    values = [[rt.get_value(variable, rank) for rank in range(2)] for variable in state.variables]
    with pytest.raises(WorkerDied):
        state.step(state.rows)
    state.check_steps(values)


@pytest.mark.parametrize("rank", [0, 2])
def test_a_death_after_the_reply_loses_nothing(reused: Fork, rank: int) -> None:
    """The call has succeeded on all ranks, those included that died before they could see it."""
    rt = reused(3, failpoint("call.after_reply", rank, nth=8))
    state = State(rt)
    before = pids(rt)
    for _ in range(2):  # then each rank has two buffers of its own, and the reply is the end of a call
        assert_same(state.step(state.rows), np.array([state.rows.sum()]))
    expected = state.after_a_step(state.values())
    assert_same(state.step(state.rows), np.array([state.rows.sum()]))
    assert wait_until_dead(before[rank])
    with pytest.warns(RuntimeWarning, match=rf"rank {rank}.*SIGKILL"):
        assert_same(state.replicated.value, expected[0][0])
    state.check_steps(expected)


@pytest.mark.parametrize("victims", [(1,), (0, 1)])
def test_a_death_while_idle_loses_nothing(reused: Fork, victims: tuple[int, ...]) -> None:
    """All of the ranks may die: no worker is needed to bring a value back."""
    rt = reused(2)
    state = State(rt)
    state.step(state.rows)
    values = state.values()
    before = pids(rt)
    kill_and_wait(*[before[rank] for rank in victims])
    with pytest.warns(RuntimeWarning, match="started again"):
        assert_same(rt.get_value(state.nested, 1), values[2][1])
    state.check_steps(values)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.sampled(90, together=0)
def test_a_worker_that_dies_again_and_again_never_takes_a_value_with_it(reused: Fork, where: Any) -> None:
    rt = reused(where)
    state = State(rt)
    dying = state.function(lambda rank: saboteurs.kill_self() if rank else None)
    for _ in range(2):
        with state.unchanged(), pytest.raises(WorkerDied):
            dying(state.rows)


VERBS: dict[str, Callable[[Any, Any], Any]] = {
    "all_reduce": lambda rt, w: rt.all_reduce(w, "sum"),
    "reduce": lambda rt, w: rt.reduce(w, "sum"),
    "reduce to the master": lambda rt, w: rt.reduce(w, "sum", in_place=False),
    "all_gather": lambda rt, w: rt.all_gather(w),
}


@pytest.mark.parametrize(
    ("verb", "step"), [(verb, f"collective.{'before' if k % 2 else 'after'}") for k, verb in enumerate(VERBS)]
)
def test_a_death_inside_a_collective_changes_nothing(reused: Fork, verb: str, step: str) -> None:
    rt = reused(2, (step, 1, 1, "kill"))
    w = rt.shared(np.zeros(BIG))
    values = [np.full(BIG, 1.0), np.full(BIG, 2.0)]
    for rank, value in enumerate(values):
        rt.set_value(w, value, rank=rank)
    with pytest.raises(WorkerDied) as died:
        VERBS[verb](rt, w)
    assert died.value.ranks == (1,)
    assert_same(everywhere(rt, w), values)
    got = VERBS[verb](rt, w)
    total, both = np.full(BIG, 3.0), np.concatenate(values)
    expected = {
        "all_reduce": [total, total],
        "reduce": [total, values[1]],
        "reduce to the master": values,
        "all_gather": [both, both],
    }[verb]
    assert_same(everywhere(rt, w), expected)
    if got is not None:
        assert_same(got, total)


def test_a_death_inside_a_collective_of_a_function_changes_nothing(reused: Fork) -> None:
    rt = reused(3)
    state = State(rt)

    def meet(rank: int) -> None:
        synk.comm.all_reduce(np.ones(4))
        if rank == 1:
            saboteurs.kill_self()
        synk.comm.all_reduce(np.ones(4))

    with state.unchanged(), pytest.raises(WorkerDied) as died:
        state.function(meet)(state.rows)
    assert died.value.ranks == (1,)


# ----- errors, in functions and after them


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("output", [1, BIG])
@pytest.mark.sampled(90)
def test_an_exception_on_one_rank_changes_nothing_on_any(
    shared_runtimes: Any, where: Any, rank: int, output: int
) -> None:
    rt = shared_runtimes[where]
    state = State(rt, output)

    def fail(here: int) -> None:
        if here == rank:
            raise LookupError("nothing found")

    failing = state.function(fail)
    with same_workers(rt), state.unchanged(), pytest.raises(LookupError, match="nothing found"):
        failing(state.rows)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.sampled(90, together=0)
def test_an_exception_after_the_new_values_were_written_changes_nothing(reused: Fork, where: Any) -> None:
    rt = reused(where, failpoint("call.published", rank=1, nth=6, action="raise"))
    state = State(rt)
    with state.unchanged(), pytest.raises(RuntimeError, match=r"failpoint call\.published"):
        state.step(state.rows)


def fold_and_fail(left: Any, right: Any) -> Any:
    """Combine two ranks' values, or rather not."""
    raise ArithmeticError("the fold failed in the master")


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize(
    ("options", "then", "error"),
    [
        ({"outputs": fold_and_fail}, lambda rank: None, ArithmeticError),
        ({"outputs": ("sum", "sum")}, lambda rank: None, ValueError),
        ({"outputs": "sum"}, "shapes", CollectiveMismatch),
        ({"outputs": None}, "unpicklable", SerializationError),
        ({"outputs": None}, "unloadable", SerializationError),
    ],
)
@pytest.mark.sampled(90)
def test_an_error_on_the_way_to_the_result_changes_nothing(
    shared_runtimes: Any, where: Any, options: dict[str, Any], then: Any, error: type[Exception]
) -> None:
    """In the master's own part of the call too: the user's fold, the ranks' agreement, the loading of results."""
    rt = shared_runtimes[where]
    state = State(rt)
    body, master = state.body, os.getpid()

    def returning(x: np.ndarray) -> Any:
        body(x)
        if then == "shapes":
            return np.zeros(2 + synk.comm.rank)
        if then == "unpicklable":
            return saboteurs.AtPickle(saboteurs.raise_value_error)
        if then == "unloadable":
            return AtLoadInMaster(master)
        return x.sum()

    with same_workers(rt), state.unchanged(), pytest.raises(error):
        rt.function(returning, **options)(state.rows)


class AtLoadInMaster:
    """Fails when the master loads it."""

    def __init__(self, master: int) -> None:
        self.master = master

    def __reduce__(self) -> Any:
        return saboteurs.act_unless, (-1, saboteurs.raise_value_error)


# ----- time limits and interrupts


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.sampled(90, together=0)
def test_a_timeout_changes_nothing(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    state = State(rt)
    slow = state.function(lambda rank: saboteurs.loop_for_ever() if rank else None)
    with same_workers(rt), state.unchanged(), pytest.raises(CallTimeout):
        slow(state.rows, timeout=0.3)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.sampled(90, together=0)
def test_a_timeout_that_ends_in_a_kill_changes_nothing(reused: Fork, where: Any) -> None:
    rt = reused(where)
    state = State(rt)
    stuck = state.function(lambda rank: saboteurs.loop_in_c() if rank else None)
    with state.unchanged(), pytest.raises(CallTimeout):
        stuck(state.rows, timeout=0.3)


@pytest.mark.parametrize("output", [1, BIG])
def test_ctrl_c_changes_nothing(shared_runtimes: Any, output: int) -> None:
    rt = shared_runtimes[2]
    state = State(rt, output)

    def interrupt(rank: int) -> None:
        if rank:
            os.kill(os.getppid(), signal.SIGINT)
            saboteurs.loop_for_ever()

    with same_workers(rt), state.unchanged(), pytest.raises(KeyboardInterrupt):
        state.function(interrupt)(state.rows)


@pytest.mark.parametrize(
    ("name", "nth"),
    [(name, nth) for name in ("call", "call of one rank", "scatter") for nth in (0, 1)]
    + [("set_value", 0), ("all_gather", 0)],  # where all ranks get the same, there is one buffer for them
)
def test_no_memory_for_a_new_value_changes_nothing(
    shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch, name: str, nth: int
) -> None:
    """The second buffer of the first rank cannot be had, or that of the next."""
    rt = shared_runtimes[2]
    values = [np.full(600, 1.0), np.full(600, 2.0)]
    w = rt.shared(values[0])
    rt.set_value(w, values[1], rank=1)

    def grow(x: np.ndarray) -> float:
        w.value = np.full(5000, x.sum())
        return 0.0

    f = rt.function(grow)
    operations: dict[str, Callable[[Any, Any, Any], Any]] = {
        "call": lambda rt, w, f: f(np.ones(4)),
        "call of one rank": lambda rt, w, f: f(np.ones(1)),
        "all_gather": lambda rt, w, f: rt.all_gather(w),
        "set_value": lambda rt, w, f: rt.set_value(w, np.zeros(5000)),
        "scatter": lambda rt, w, f: rt.scatter(w, np.zeros(9000)),
    }
    create, large = rt._session.memory.arenas.create, iter(range(100))

    def refuse(nbytes: int, **options: Any) -> Segment:
        if nbytes > 9000 and next(large) == nth:
            raise SharedMemoryError("no memory is left")
        return create(nbytes, **options)

    with monkeypatch.context() as patch:
        patch.setattr(rt._session.memory.arenas, "create", refuse)
        with pytest.raises(SharedMemoryError, match="no memory is left"):
            operations[name](rt, w, f)
    assert_same(everywhere(rt, w), values)
    operations[name](rt, w, f)
    assert min(rt.get_lengths(w)) > 1000


# ----- what a replacement sees


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.sampled(90, together=0)
def test_a_replacement_sees_every_way_a_value_came_to_be(reused: Fork, where: Any) -> None:
    """Set by the master, assigned, resized, reduced, scattered, made after the death, dropped before it."""
    rt = reused(where)
    state = State(rt)
    state.step(state.rows)
    rt.all_reduce(state.replicated, "sum")
    rt.set_value(state.growing, np.full((3, 2), 5.0), rank=1)
    rt.scatter(state.sharded, numbers("f8", (4, 2), 3))
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


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.sampled(90, together=0)
def test_a_function_whose_update_failed_updates_again_after_a_death(reused: Fork, where: Any) -> None:
    rt = reused(where)
    w = rt.shared(np.zeros(2))

    def update(kill: bool, x: np.ndarray) -> Any:
        if kill and x[0]:
            saboteurs.kill_self()
        return x.sum(), w.value + len(x)

    f = rt.function(update, updates=[(w, "sum")], bcast_inputs="kill", outputs="sum")
    assert f(False, np.arange(8.0), num_slices=2) == 28
    with pytest.raises(WorkerDied):
        f(True, np.arange(8.0), num_slices=2)
    assert_same(everywhere(rt, w), [np.full(2, 4.0)] * 2)
    assert f(False, np.arange(8.0), num_slices=2) == 28
    assert_same(everywhere(rt, w), [np.full(2, 12.0)] * 2)


@pytest.mark.storm
@pytest.mark.filterwarnings("ignore:rank:RuntimeWarning")  # of a death while idle
def test_random_kills_never_tear_a_value(reused: Fork, storm_count: Callable[[int], int]) -> None:
    """A counter on every rank: after each call all ranks count the calls that succeeded, and no other."""
    rt = reused(3)
    count, big = rt.shared(0), rt.shared(np.zeros(BIG // 10))

    def add(x: np.ndarray) -> np.ndarray:
        count.value = count.value + 1
        big.value = big.value + 1
        return big.value

    f = rt.function(add, outputs="max")
    chance = random.Random(0)
    succeeded = 0
    workers = pids(rt)
    for _ in range(storm_count(100)):
        victim = chance.choice(workers)
        timer = kill_in(chance.uniform(0, 0.004), victim)
        timer.start()
        try:
            f(np.ones(3))
            succeeded += 1
        except WorkerDied:
            pass
        finally:
            timer.join()
        assert wait_until_dead(victim)
        workers = pids(rt)
        assert_same(everywhere(rt, count), [np.asarray(succeeded)] * 3)
        assert_same(everywhere(rt, big), [np.full(BIG // 10, float(succeeded))] * 3)
