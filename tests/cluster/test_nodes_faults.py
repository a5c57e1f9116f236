"""What goes wrong over nodes: what the user sees, that the next call is right, and that nothing is left."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import threading
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import (
    Scenario,
    armed,
    failpoint,
    kill_and_wait,
    pids,
    process_stat,
    same_workers,
    script,
    wait_for,
    wait_until_dead,
)
from support.nodes import agents, assert_maps, assert_talks, hear_of, kill_and_hear, total
from support.tables import WHOLE_OR_SAMPLE

import synk
from synk.errors import CallCancelled, CallTimeout, ClosedError, RemoteError, WorkerDied

# ----- a table: what the ranks are doing, what happens on one of them


class Refused(ValueError):
    """An exception of the user's own."""


@dataclass(frozen=True)
class Fault:
    """What happens on one rank, while the others go on for minutes.

    An exception ends the call of the other node. For its own node, and for the items of a map that come before, it
    waits: so the others, or all but one rank of the other node, end when it has been raised.
    """

    name: str
    victim: int
    master: int
    flag: str

    def happen(self, is_item: bool = False) -> None:
        rank = synk.comm.rank
        if rank != self.victim:
            while self.name == "exception" and (is_item or rank != 3 - self.victim):
                if os.path.exists(self.flag):
                    return
                time.sleep(0.005)
            time.sleep(600)
        if self.name == "exception":
            Path(self.flag).touch()
            raise Refused("no data")
        number = signal.SIGSTOP if "freezes" in self.name else signal.SIGKILL
        if self.name == "Ctrl-C":
            os.kill(self.master, signal.SIGINT)
        else:
            os.kill(os.getppid() if "agent" in self.name else os.getpid(), number)
        time.sleep(600)


def compute(runtime: synk.Runtime, fault: Fault) -> Any:
    return runtime.function(lambda x: fault.happen(), outputs=None)(np.zeros(4))


def talk(runtime: synk.Runtime, fault: Fault) -> Any:
    """All ranks wait for one by wire, or by way of one that does."""

    def step(x: np.ndarray) -> Any:
        if synk.comm.rank == fault.victim:
            fault.happen()
        return synk.comm.all_reduce(np.ones(300_000), "sum")[0]

    return runtime.function(step, outputs=None)(np.zeros(4))


def take_items(runtime: synk.Runtime, fault: Fault) -> Any:
    """Each rank is at an item."""
    return list(runtime.map(lambda n: fault.happen(is_item=True), range(9), batch_size=1))


def change_an_object(runtime: synk.Runtime, fault: Fault) -> Any:
    """A part of what the call was to change has been changed, on some ranks. It is on all of them, or on none."""
    log = runtime.resident([])

    def step(x: np.ndarray) -> None:
        log.value.append(1.0)
        fault.happen()

    try:
        runtime.function(step, outputs=None, updates=[log])(np.zeros(4))
    except WorkerDied as error:
        assert error.step_counted is False  # type: ignore[attr-defined]
        raise
    finally:
        found = [log.get(rank) for rank in range(4)]
        assert found in ([[]] * 4, [[1.0]] * 4)
        runtime.function(lambda x: log.value.append(2.0), outputs=None, updates=[log])(np.zeros(4))
        assert [log.get(rank) for rank in range(4)] == [[*found[0], 2.0]] * 4


DOING = {each.__name__: each for each in (compute, talk, take_items, change_an_object)}
FAULTS: dict[str, type[BaseException]] = {
    "worker dies": WorkerDied,
    "agent dies": WorkerDied,
    "worker freezes": CallCancelled,
    "agent freezes": CallCancelled,
    "exception": Refused,
    "Ctrl-C": KeyboardInterrupt,
}
CASES = [
    (doing, fault, (0, 3)[number % 2])
    for number, (doing, fault) in enumerate(itertools.product(DOING, FAULTS))
    if "freezes" not in fault or (doing, fault) in (("talk", "worker freezes"), ("take_items", "agent freezes"))
]


@pytest.mark.parametrize("is_whole", WHOLE_OR_SAMPLE)
@pytest.mark.parametrize("division", ["1+3", "2+2"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_whatever_happens_on_a_rank_is_told_and_the_next_call_is_right(
    reused: Any, division: str, is_whole: bool, subtests: Any, tmp_path: Path
) -> None:
    """Each case in one of the divisions; in the storm in both."""
    runtime = reused(division)
    for number, (doing, name, victim) in list(enumerate(CASES))[division == "2+2" and not is_whole :: 2 - is_whole]:
        victim = 3 - victim if division == "2+2" else victim
        with subtests.test(case=f"{name} while ranks {doing}, rank {victim}"):
            check(runtime, doing, Fault(name, victim, os.getpid(), str(tmp_path / f"{number}")))


def check(runtime: Any, doing: str, happening: Fault) -> None:
    fault, victim = happening.name, happening.victim
    workers, masters = pids(runtime), agents(runtime)
    node = int(runtime.devices[victim][4])
    fellows = {rank for rank in range(4) if runtime.devices[rank].startswith(f"node{node}:")}
    if "freezes" in fault:  # it does not heed the interrupt, so it is replaced
        frozen = workers[victim] if fault == "worker freezes" else masters[node]
        ended = threading.Thread(target=lambda: (wait_for(lambda: state_of(frozen) == "T"), runtime.interrupt()))
        ended.start()
    with pytest.raises(FAULTS[fault]) as caught:
        DOING[doing](runtime, happening)
    error: Any = caught.value
    if fault == "worker dies":
        assert (error.ranks, error.nodes, error.pids) == ((victim,), (), (workers[victim],))
        assert f"rank {victim} of 4" in str(error) and "SIGKILL" in str(error)
    if fault == "agent dies":
        assert (error.nodes, error.pids, error.exits) == ((node,), (masters[node],), ("SIGKILL",))
        assert f"node {node} of 2" in str(error) and "SIGKILL" in str(error)
    if fault == "exception":
        assert isinstance(error.__cause__, RemoteError)
        assert (error.__cause__.rank, error.__cause__.device) == (victim, runtime.devices[victim])
        assert ("for item" in str(error.__cause__)) == (doing == "take_items")
    if "freezes" in fault:
        ended.join()
    assert_talks(runtime)
    assert_maps(runtime)
    replaced = fellows if "agent" in fault else {victim} if "worker" in fault else set()
    assert {rank for rank, pid in enumerate(pids(runtime)) if pid != workers[rank]} == replaced
    assert [mine == his for mine, his in zip(agents(runtime), masters)] == [
        number != node or "agent" not in fault for number in range(2)
    ]
    assert all(wait_until_dead(workers[rank]) for rank in replaced)


def state_of(pid: int) -> str:
    found = process_stat(pid)
    return "" if found is None else found[1]


# ----- while nothing runs


def by_call(runtime: synk.Runtime, box: dict[str, Any]) -> None:
    """A function that was sent before, with what it captures now."""
    assert box["f"](np.arange(4.0)) == 6.0 * box["scale"]


def by_new_function(runtime: synk.Runtime, box: dict[str, Any]) -> None:
    assert runtime.function(lambda x: x.sum() + 1, outputs="sum")(np.arange(4.0)) == 10.0


def by_map(runtime: synk.Runtime, box: dict[str, Any]) -> None:
    """Its items find the resident object also on workers that are new."""
    log = box["log"]
    found = list(runtime.map(lambda n: n + len(log.value), range(20), batch_size=1))
    assert found == [n + len(box["expected"]) for n in range(20)]


def by_step(runtime: synk.Runtime, box: dict[str, Any]) -> None:
    box["step"](np.ones(4), 1.0)
    box["expected"].append(1.0)


def by_talk(runtime: synk.Runtime, box: dict[str, Any]) -> None:
    """All ranks reach those that are new."""
    assert box["talks"](np.arange(4.0)) == 6.0


VICTIMS = {"worker 0": (0,), "worker 3": (3,), "two workers": (0, 3), "node 0": (), "node 1": ()}


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_workers_and_nodes_that_die_while_idle_are_started_again(nodes: synk.Runtime, subtests: Any) -> None:
    """With the functions, what those capture, and the objects that the others have."""
    box: dict[str, Any] = {"scale": 1.0, "log": nodes.resident([]), "expected": []}
    log, scale = box["log"], {"is": 1.0}

    def step(x: np.ndarray, amount: float) -> float:
        log.value.append(amount)
        return float(x.sum())

    box["f"] = nodes.function(lambda x: x.sum() * scale["is"], outputs="sum")
    box["step"] = nodes.function(step, outputs="sum", bcast_inputs="amount", updates=[log])
    box["talks"] = nodes.function(total, outputs="first")
    for act in (by_call, by_step, by_talk):
        act(nodes, box)
    following = itertools.cycle([by_call, by_new_function, by_map, by_step, by_talk])
    for victim in [*VICTIMS, *reversed(VICTIMS)]:
        go_on = next(following)
        with subtests.test(case=f"{victim} dies, {go_on.__name__}"):
            box["scale"] = scale["is"] = scale["is"] + 1
            workers = pids(nodes)
            of_nodes = [agents(nodes)[int(victim[-1])]] if "node" in victim else []
            kill_and_hear(nodes, *of_nodes, *(workers[rank] for rank in VICTIMS[victim]))
            with warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                go_on(nodes, box)
            name = victim if "node" in victim else f"rank {VICTIMS[victim][0]} "
            assert any(name in str(each.message) and "started again" in str(each.message) for each in told)
            assert [log.get(rank) for rank in range(4)] == [box["expected"]] * 4
            by_call(nodes, box)
            by_talk(nodes, box)


# ----- between its own end and the end of the call


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_what_dies_after_its_part_of_a_call_may_take_its_last_word_along(reused: Any, subtests: Any) -> None:
    """Rank 3 has returned, and nothing of it is left on a wire. So rank 0 cannot know that its message was read."""
    runtime = reused("2+2")

    def step(x: np.ndarray, is_rank_2_there: bool) -> None:
        if synk.comm.rank == 0:
            synk.comm.send(np.ones(3), 3)
        if synk.comm.rank == 2 and is_rank_2_there:
            time.sleep(600)
        if synk.comm.rank == 3:
            synk.comm.recv(0)
            synk.communicators._wires.Wires.send = lambda *message: None  # type: ignore[attr-defined]

    f = runtime.function(step, outputs=None, bcast_inputs="is_rank_2_there")
    for is_rank_2_there, victim in ((False, "rank"), (True, "rank"), (False, "node")):
        with subtests.test(case=f"{victim} dies, the rest of the node {'works' if is_rank_2_there else 'has ended'}"):
            pid = pids(runtime)[3] if victim == "rank" else agents(runtime)[1]
            call = f.submit(np.ones(4), is_rank_2_there, timeout=60.0)
            idle = ["1", "3"] if is_rank_2_there else ["1", "2", "3"]
            while re.findall(r"rank (\d) \(.*\): idle", runtime.where()) != idle:
                time.sleep(0.01)
            kill_and_wait(pid)
            with pytest.raises(WorkerDied) as caught:
                call.result()
            error = caught.value
            assert (error.ranks, error.nodes) == (((3,), ()) if victim == "rank" else ((2, 3), (1,)))
            assert_talks(runtime)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_worker_answers_calls_and_dies_in_the_next(tmp_path: Path) -> None:
    """The answer brings memory, of which the agent says that it is gone before the program reads the answer."""

    def answer(x: np.ndarray) -> np.ndarray:
        while not (tmp_path / "all are sent").exists():
            time.sleep(0.005)
        return np.full(3000, x.sum())

    def die(x: np.ndarray) -> None:
        if synk.comm.rank == 3:
            os.kill(os.getpid(), signal.SIGKILL)

    with synk.fork(2, cluster="here", nodes=2) as runtime:
        victim = pids(runtime)[3]
        answers, dies = runtime.function(answer, outputs="sum"), runtime.function(die, outputs=None)
        runtime.distribute()  # or the last call would wait for the others
        *answered, last = [call.submit(np.arange(4.0)) for call in (answers, answers, dies)]
        (tmp_path / "all are sent").touch()
        hear_of(runtime, victim)
        with pytest.raises(WorkerDied, match="rank 3 "):
            last.result()
        for call in answered:
            with contextlib.suppress(WorkerDied):  # unless all ranks had answered by then
                assert call.result().tolist() == [6.0] * 3000
        assert_talks(runtime)


# ----- other ends of calls


def test_time_limits_and_interrupts_from_another_thread(nodes: synk.Runtime) -> None:
    f = nodes.function(lambda x: time.sleep(600 * x[0]), outputs=None)
    wait = nodes.function(lambda x: total(x) if synk.comm.rank != 3 else time.sleep(600), outputs=None)
    f(np.zeros(4))  # so that nothing but the function takes time
    with same_workers(nodes):
        with pytest.raises(CallTimeout, match=r"did not end in time on (node 0, 1 of 2|rank 0, 1, 2, 3 of 4)"):
            f(np.ones(4), timeout=0.5)
        with pytest.raises(CallTimeout):
            wait(np.ones(4), timeout=0.5)
        call = f.submit(np.ones(8))
        nodes.interrupt()
        with pytest.raises(CallCancelled):
            call.result()
    assert_talks(nodes)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_exception_leaves_the_calls_before_it(nodes: synk.Runtime, tmp_path: Path) -> None:
    raised, last = tmp_path / "raised", nodes.world_size - 1

    def total(x: np.ndarray, is_bad: bool) -> Any:
        if is_bad and synk.comm.rank == 0:
            raised.touch()
            raise ValueError("bad")
        if not is_bad and synk.comm.rank == last:
            while not raised.exists():
                time.sleep(0.01)
            time.sleep(0.4)  # longer than the ranks of the other call get
        return x.sum()

    f = nodes.function(total, bcast_inputs="is_bad", outputs="sum")
    before, bad, after = (f.submit(np.ones(8), is_bad) for is_bad in (False, True, True))
    assert before.result(30) == 8.0
    with pytest.raises(ValueError, match="bad"):
        bad.result(30)
    with pytest.raises((ValueError, CallCancelled), match="bad"):
        after.result(30)


def test_an_agent_that_takes_nothing_in_holds_nobody_up() -> None:
    """Its socket is full after two calls. What it has no room for waits, and time limits and interrupts hold."""
    with synk.Runtime(1, cluster="here", nodes=2) as rt:
        f = rt.function(lambda x, y: x.sum() + y.sum(), outputs="sum")
        x, y = np.ones(3900), np.ones(3900)
        assert f(x, y) == 7800.0
        (node,), agent = rt._session.processes.nodes[1:], agents(rt)[1]
        os.kill(agent, signal.SIGSTOP)
        wait_for(lambda: state_of(agent) == "T")
        calls = [f.submit(k * x, y) for k in range(3)]
        assert node.post.unsent
        os.kill(agent, signal.SIGCONT)
        assert [call.result() for call in calls] == [3900.0 + 3900.0 * k for k in range(3)]
        assert not node.post.unsent
        os.kill(agent, signal.SIGSTOP)
        wait_for(lambda: state_of(agent) == "T")
        calls = [f.submit(x, y, timeout=3.0) for _ in range(3)]
        assert node.post.unsent
        with pytest.raises(CallTimeout, match="rank 1 of 2"):
            calls[0].result()
        assert f(x, y) == 7800.0


def test_a_runtime_closes_if_workers_of_a_node_die_too_often() -> None:
    with synk.Runtime(1, cluster="here", nodes=2, max_restarts=1) as rt:
        f = rt.function(lambda x: os.kill(os.getpid(), signal.SIGKILL) if x[0] else None, outputs=None)
        for _ in range(2):
            with pytest.raises(WorkerDied):
                f(np.array([0, 1]))
        with pytest.raises(ClosedError, match="workers died 2 times"):
            f(np.array([0, 1]))
        assert rt.is_closed
        with pytest.raises(ClosedError):
            f(np.array([0, 0]))


def test_a_worker_that_does_not_come_up_is_named() -> None:
    with armed(failpoint("start.ready", 3)):
        rt = synk.Runtime((1, 3), cluster="here", nodes=2)
    with rt, pytest.raises(synk.errors.StartupError, match="rank 3 of 4 did not come up"):
        rt.function(lambda x: x, outputs="gather")(np.arange(4))


# ----- the end of programs

PROGRAM = """
rt = synk.fork(2, cluster="here", nodes=2)
f = synk.function(lambda x: x.sum(), outputs="sum")
assert f(np.arange(8.0)) == 28.0
"""
BUSY = (
    'synk.function(lambda x: time.sleep(600), outputs=None).submit(np.arange(8.0)); print("there", flush=True)',
    'found = rt.map(lambda n: time.sleep(600 * n) or "there", range(9), batch_size=1); print(next(found), flush=True)',
)


def test_programs_that_end_leave_nothing() -> None:
    script(f"{PROGRAM}f.submit(np.arange(8.0)); raise SystemExit(3)").check("", returncode=3)


def test_programs_that_are_killed_leave_nothing(subtests: Any) -> None:
    """The kernel ends the agents, and their ends end the workers."""
    for busy in BUSY:
        with subtests.test(case=busy), Scenario(f"{PROGRAM}{busy}; time.sleep(600)") as scenario:
            scenario.wait_for_line("there")
            os.kill(scenario.process.pid, signal.SIGKILL)
            result = scenario.finish()
            assert result.returncode == -signal.SIGKILL
            assert not result.leftovers


def test_no_socket_has_a_port_or_lies_in_a_folder(nodes: synk.Runtime) -> None:
    """All are ends of pairs that were inherited, but for the inlets of workers, which leave no file."""
    assert_talks(nodes)
    net = Path("/proc/net")
    with_port = {line.split()[9] for kind in ("tcp", "tcp6", "udp", "udp6") for line in _lines_of(net / kind)}
    named = {line.split()[6]: line.split()[7] for line in _lines_of(net / "unix") if len(line.split()) > 7}
    for pid in agents(nodes):
        assert _sockets_of(pid)
        assert not _sockets_of(pid) & (with_port | {*named})
    for pid in pids(nodes):
        assert not _sockets_of(pid) & with_port
        names = {named[each] for each in _sockets_of(pid) & {*named}}
        assert names
        assert all(name.startswith("@synk-") for name in names)


def _lines_of(table: Path) -> list[str]:
    return table.read_text(encoding="utf-8").splitlines()[1:] if table.exists() else []


def _sockets_of(pid: int) -> set[str]:
    links = [os.readlink(f"/proc/{pid}/fd/{fd}") for fd in os.listdir(f"/proc/{pid}/fd")]
    return {link[8:-1] for link in links if link.startswith("socket:[")}


def test_without_pyzmq_all_else_works(tmp_path: Path) -> None:
    (tmp_path / "zmq.py").write_text("raise ImportError('no zmq here')\n", encoding="utf-8")
    script(
        f"""
        sys.path.insert(0, {str(tmp_path)!r})
        rt = synk.Runtime(1, cluster="here", nodes=2)
        f = rt.function(lambda x: x.sum(), outputs="sum")
        assert f(np.arange(4.0)) == 6.0
        talk = rt.function(lambda x: synk.comm.all_reduce(x.sum(), "sum"), outputs="first")
        for _ in range(2):
            try:
                talk(np.arange(4.0))
            except synk.errors.UnsupportedError as error:
                assert "synkhronos[cluster]" in str(error), error
            else:
                raise AssertionError
        assert f(np.arange(4.0)) == 6.0
        assert talk.serial(np.arange(4.0)) == 6.0
        assert "is not used" in rt.info()
        rt.close()
        """
    ).check("")
