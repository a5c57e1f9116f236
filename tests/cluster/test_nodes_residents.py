"""Resident objects over nodes: alike on all ranks of all nodes, whatever happens to calls, workers and agents.

What they are is tested on one machine (tests/master/objects/test_residents.py). Here their orders go through agents.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import arm, failpoint, kill_and_wait, pids, wait_for

import synk
from synk.cluster.ranks import NodeRanks
from synk.errors import CallTimeout, SerializationError, WorkerDied

KINDS = ("1+3", "2+2")
Reused = Callable[..., synk.Runtime]


class Log:
    """Remembers what calls bring, and adds it up."""

    def __init__(self) -> None:
        self.total = 0.0
        self.calls: list[float] = []

    def add(self, amount: float) -> None:
        self.calls.append(amount)
        self.total += amount


def make_step(rt: synk.Runtime, log: synk.Resident, **options: Any) -> Any:
    """Return a function by which every rank with rows adds the same amount to its log."""

    def step(x: np.ndarray, amount: float) -> float:
        log.value.add(amount)
        return float(x.sum())

    return rt.function(step, outputs="sum", bcast_inputs="amount", changes=[log], name="step", **options)


def logs(rt: synk.Runtime, log: synk.Resident) -> list[list[float]]:
    found = [log.get(rank) for rank in range(rt.world_size)]
    for each in found:
        assert each.total == sum(each.calls)
    return [each.calls for each in found]


def agents(rt: synk.Runtime) -> list[int]:
    return [worker.process.pid for worker in rt._session.workers.by_rank]


X = np.ones(4)


# ----- the object itself


@pytest.mark.parametrize("kind", KINDS)
def test_every_rank_has_one_that_all_functions_mean(shared_runtimes: Any, kind: str) -> None:
    rt = shared_runtimes[kind]
    original = Log()
    log, other = rt.resident(original), rt.resident(original, name="other")
    step = make_step(rt, log)
    for k in range(5):
        assert step(np.ones(8), float(k)) == 8.0
    assert logs(rt, log) == [[0.0, 1.0, 2.0, 3.0, 4.0]] * 4
    assert logs(rt, other) == [[]] * 4
    assert original.calls == []
    is_log = rt.function(lambda x, passed: passed is log.value, bcast_inputs="passed", outputs=None)
    for _ in range(2):
        assert [is_log(X, log), is_log(X, other)] == [[True] * 4, [False] * 4]
    log.set(Log())
    assert is_log(X, log) == [True] * 4
    assert logs(rt, log) == [[]] * 4
    with pytest.raises(IndexError, match="got rank 4, expected 0 to 3"):
        log.get(4)


@pytest.mark.parametrize("kind", KINDS)
def test_any_sequence_of_calls_is_that_of_one_object(shared_runtimes: Any, kind: str) -> None:
    """Also with fewer rows than ranks, which leaves whole nodes behind."""
    rng = random.Random(kind)
    rt = shared_runtimes[kind]
    resident, models = [rt.resident(Log(), name=f"log{k}") for k in range(2)], [Log(), Log()]
    steps = [make_step(rt, log) for log in resident]
    pending: list[Any] = []
    for number in range(80):
        which, x = rng.randrange(2), np.arange(float(rng.randrange(1, 6)))
        action = rng.choice(["call", "call", "submit", "serial", "get", "set", "result"])
        if action in ("call", "submit", "serial"):
            models[which].add(float(number))
        if action == "call":
            assert steps[which](x, float(number)) == x.sum()
        elif action == "serial":
            assert steps[which].serial(x, float(number)) == x.sum()
        elif action == "submit":
            pending.append((steps[which].submit(x, float(number)), x.sum()))
        elif action == "get":
            assert resident[which].get(rng.randrange(4)).calls == models[which].calls
        elif action == "set":
            models[which] = Log()
            resident[which].set(models[which])
        elif pending:
            call, value = pending.pop(0)
            assert call.result() == value
    for call, value in pending:
        assert call.result() == value
    for log, model in zip(resident, models):
        assert logs(rt, log) == [model.calls] * 4


def test_it_is_dropped_on_the_workers_with_the_last_that_refers_to_it(reused: Reused) -> None:
    rt = reused("1+3")

    def held(x: np.ndarray) -> int:
        from synk._wire.cell import cell

        return len(cell.worker.residents._objects)

    count = rt.function(held, outputs=None)
    before = count(X)
    log = rt.resident(Log())
    step = make_step(rt, log)
    step(X, 1.0)
    assert count(X) == [each + 1 for each in before]
    del log, step
    count(X)  # its order tells the nodes
    assert count(X) == before


def test_objects_that_do_not_load_leave_the_runtime_as_it_was(reused: Reused) -> None:
    rt = reused("1+3")

    class Unloadable:
        def __reduce__(self) -> Any:
            return divmod, (1, 0)

    with pytest.raises(ZeroDivisionError):
        rt.resident(Unloadable())
    with pytest.raises(SerializationError, match="cannot send resident object 'generator'"):
        rt.resident(each for each in ())
    log = rt.resident(Log())
    make_step(rt, log)(X, 1.0)
    assert logs(rt, log) == [[1.0]] * 4


def test_its_own_dump_and_load_and_files(shared_runtimes: Any, tmp_path: Any) -> None:
    rt = shared_runtimes["2+2"]
    log = rt.resident(Log(), dump=lambda log: list(log.calls), load=_load_calls)
    step = make_step(rt, log)
    step(X, 1.0)
    step(np.ones(1), 2.0)  # the other ranks get it by dump and load
    assert logs(rt, log) == [[1.0, 2.0]] * 4
    log.save(tmp_path / "log")
    step(X, 3.0)
    log.load(tmp_path / "log")
    assert logs(rt, log) == [[1.0, 2.0]] * 4
    local = shared_runtimes[2].resident(Log(), dump=lambda log: list(log.calls), load=_load_calls)
    local.load(tmp_path / "log")
    assert logs(shared_runtimes[2], local) == [[1.0, 2.0]] * 2


def _load_calls(log: Log, calls: list[float]) -> None:
    log.__init__()  # type: ignore[misc]
    for amount in calls:
        log.add(amount)


# ----- faults

STEPS = ["call.received", "call.before_function", "call.after_function", "call.published", "call.before_reply"]


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("where", STEPS)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.sampled(4)
def test_a_step_counts_once_wherever_a_worker_dies(reused: Reused, where: str, rank: int) -> None:
    """``step_counted`` says whether to repeat it, and is right."""
    rt = reused("2+2")
    log = rt.resident(Log())
    step = make_step(rt, log)
    step(X, 1.0)
    arm(rt, failpoint(where, rank))
    for amount in (2.0, 3.0):
        while True:
            try:
                step(X, amount)
                break
            except WorkerDied as error:
                if error.step_counted:
                    break
    assert logs(rt, log) == [[1.0, 2.0, 3.0]] * 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("kind", KINDS)
def test_workers_and_agents_that_die_while_idle_catch_up(reused: Reused, kind: str) -> None:
    rt = reused(kind)
    log = rt.resident(Log())
    step = make_step(rt, log)
    expected = []
    for amount, victims in enumerate(((0,), (3,), (0, 3), (1, 2))):
        kill_and_wait(*(pids(rt)[rank] for rank in victims))
        step(X, float(amount))
        expected.append(float(amount))
    for node in (1, 0):
        kill_and_wait(agents(rt)[node])
        step(X, 9.0)
        expected.append(9.0)
    assert logs(rt, log) == [expected] * 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("node", [0, 1])
def test_an_agent_that_dies_in_a_step(reused: Reused, node: int, tmp_path: Any) -> None:
    rt = reused("2+2")
    log = rt.resident(Log())
    step = make_step(rt, log)
    step(X, 1.0)

    def stuck(x: np.ndarray) -> None:
        log.value.add(2.0)
        (tmp_path / str(synk.comm.rank)).touch()
        while True:
            pass

    call = rt.function(stuck, outputs=None, changes=[log]).submit(X)
    wait_for(lambda: all((tmp_path / str(rank)).exists() for rank in range(4)))
    kill_and_wait(agents(rt)[node])
    with pytest.raises(WorkerDied) as caught:
        call.result()
    assert caught.value.step_counted is False  # type: ignore[attr-defined]
    found = logs(rt, log)
    assert found in ([[1.0]] * 4, [[1.0, 2.0]] * 4)  # a part of what the call was to change, on all ranks
    step(X, 3.0)
    assert logs(rt, log) == [[*found[0], 3.0]] * 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_where_no_rank_has_the_state_it_is_lost_and_said_so(reused: Reused) -> None:
    rt = reused("1+3")
    log, unchanged = rt.resident(Log(), name="log"), rt.resident([1, 2], name="unchanged")
    step = make_step(rt, log)
    read = rt.function(lambda x: log.value.total, outputs="first")
    step(X, 1.0)
    step(np.ones(1), 2.0)  # rank 0 alone, which is a node of its own
    kill_and_wait(agents(rt)[0])
    for call in (lambda: step(X, 1.0), lambda: read(X), log.get):
        with pytest.raises(WorkerDied, match="the state of resident object 'log' is lost"):
            call()
    assert unchanged.get(3) == [1, 2]
    log.set(Log())
    step(X, 3.0)
    assert logs(rt, log) == [[3.0]] * 4


def test_exceptions_and_time_limits_leave_all_ranks_alike(reused: Reused) -> None:
    rt = reused("1+3")
    log = rt.resident(Log(), name="log")

    def half(x: np.ndarray) -> float:
        if synk.comm.rank == 2:
            raise ArithmeticError("on purpose")
        log.value.add(1.0)
        return 0.0

    with pytest.raises(ArithmeticError) as caught:
        rt.function(half, changes=[log])(X)
    assert caught.value.step_counted is True  # type: ignore[attr-defined]
    assert logs(rt, log) == [[1.0]] * 4

    def stuck(x: np.ndarray) -> None:
        log.value.add(5.0)
        while synk.comm.rank == 3:
            pass

    with pytest.raises(CallTimeout):
        rt.function(stuck, outputs=None, changes=[log])(X, timeout=0.5)
    assert logs(rt, log) == [[1.0, 5.0]] * 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_object_is_made_after_workers_were_replaced_while_there_was_none(reused: Reused) -> None:
    """What the head knew of the nodes then is out of date."""
    rt = reused("1+3")
    rt.function(len, outputs=None)(X)
    log = rt.resident(Log())
    make_step(rt, log)(X, 1.0)
    del log
    gc.collect()
    rt.function(len, outputs=None)(X)
    kill_and_wait(pids(rt)[3])
    rt.function(len, outputs=None)(X)
    assert logs(rt, rt.resident(Log())) == [[]] * 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_worker_that_dies_just_before_it_gets_a_function(reused: Reused, monkeypatch: pytest.MonkeyPatch) -> None:
    """The one that takes its place cannot load functions that refer to objects which it does not have yet."""
    rt = reused("1+3")
    log = rt.resident(Log())
    make_step(rt, log)(X, 1.0)
    victims = [pids(rt)[3]]
    asked = NodeRanks.prepare

    def ask_and_kill(self: NodeRanks, deadline: float | None) -> bool:
        is_changed = asked(self, deadline)
        while victims:
            kill_and_wait(victims.pop())
        return is_changed

    monkeypatch.setattr(NodeRanks, "prepare", ask_and_kill)
    new = make_step(rt, log)
    with pytest.raises(WorkerDied, match="ended while idle") as caught:
        new(X, 2.0)
    assert new(X, 3.0) == 4.0
    # the other node may have come to the end of the step before it was told
    assert logs(rt, log) == [[1.0, 2.0, 3.0] if caught.value.step_counted else [1.0, 3.0]] * 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_restart_keeps_the_state(reused: Reused) -> None:
    rt = reused("1+3")
    log, unchanged = rt.resident(Log()), rt.resident([1], name="unchanged")
    step = make_step(rt, log)
    step(X, 1.0)
    rt.restart()
    assert unchanged.get(1) == [1]
    step(X, 2.0)
    assert logs(rt, log) == [[1.0, 2.0]] * 4
