"""What goes wrong over nodes: what the user sees, that the next call is right, and that nothing is left."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import (
    Scenario,
    armed,
    assert_right,
    ctrl_c_when,
    descendants,
    failpoint,
    kill_and_wait,
    pids,
    same_workers,
    script,
    wait_for,
    wait_until_dead,
)

import synk
from synk.cluster.agent_process import AgentProcess
from synk.errors import CallCancelled, CallTimeout, ClosedError, RemoteError, SerializationError, WorkerDied

pytestmark = pytest.mark.sampled(90, together=0)  # each test over one division of the ranks among nodes
NODES = ("1+3", "2+2")
FIRST = {"1+3": [0, 1], "2+2": [0, 2]}
"""The first rank of each node."""


def agents(runtime: Any) -> list[int]:
    """Return the pid of each node's agent."""
    return [worker.process.pid for worker in runtime._session.workers.by_rank]


def in_flight(runtime: Any) -> bool:
    return any(
        request.pending and request.phase == "call" for request in list(runtime._session.workers.requests.values())
    )


class Refused(ValueError):
    """An exception of the user's own."""


@pytest.fixture(params=NODES)
def nodes(request: pytest.FixtureRequest, reused: Any) -> synk.Runtime:
    runtime: synk.Runtime = reused(request.param)
    return runtime


def test_an_exception_has_its_type_and_names_rank_and_node(nodes: synk.Runtime) -> None:
    def refuse(x: np.ndarray) -> np.ndarray:
        if 6.0 in x:
            raise Refused("six")
        return x

    with same_workers(nodes):
        f = nodes.function(refuse, outputs="gather")
        with pytest.raises(Refused, match="six") as caught:
            f(np.arange(8.0))
        cause = caught.value.__cause__
        assert isinstance(cause, RemoteError)
        position = 3 - FIRST["1+3" if nodes.devices[1] == "node1:cpu:0" else "2+2"][1]
        assert (cause.rank, cause.device) == (3, f"node1:cpu:{position}")
        assert "rank 3 of 4" in str(cause)


def test_the_lowest_rank_of_all_nodes_wins(nodes: synk.Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the nodes fail at about the same time; on a busy machine one of them may be late."""
    monkeypatch.setattr("synk.cluster.head.FELLOWS_S", 60.0)

    def refuse(x: np.ndarray) -> None:
        raise Refused(f"row {x[0]:g}")

    with same_workers(nodes), pytest.raises(Refused, match="row 0") as caught:
        nodes.function(refuse, outputs=None)(np.arange(8.0))
    assert [note[:6] for note in caught.value.__notes__[1:]] == ["rank 1", "rank 2", "rank 3"]


def test_a_call_that_fails_on_one_node_ends_on_the_other(nodes: synk.Runtime) -> None:
    """The first node would go on for minutes."""

    def refuse(x: np.ndarray) -> None:
        if synk.comm.rank == 0:
            time.sleep(600)
        if synk.comm.rank == 3:
            raise Refused("three")

    with same_workers(nodes), pytest.raises(Refused, match="three"):
        nodes.function(refuse, outputs=None)(np.arange(8.0))


@pytest.mark.parametrize("rank", [0, 3])
@pytest.mark.parametrize("step", ["call.before_function", "call.published", "call.after_reply"])
@pytest.mark.sampled(90)
def test_a_worker_dies(nodes: synk.Runtime, reused: Any, rank: int, step: str) -> None:
    before = pids(nodes)
    f = nodes.function(lambda x: (os.getpid(), x.sum()), outputs=(None, "sum"))
    arm = nodes.function(_arm, bcast_inputs=("rank", "step"), outputs=None, per_rank=True)
    arm(rank, step)
    if step == "call.after_reply":  # it has answered, and is missed by the next call only
        f(np.arange(4.0))
        wait_until_dead(before[rank])
        with pytest.warns(RuntimeWarning, match=f"rank {rank} .*was started again"):
            found, total = f(np.arange(4.0))
    else:
        with pytest.raises(WorkerDied, match=f"rank {rank} of 4 .*SIGKILL") as caught:
            f(np.arange(4.0))
        assert (caught.value.ranks, caught.value.nodes) == ((rank,), ())
        assert caught.value.pids == (before[rank],)
        found, total = f(np.arange(4.0))
    assert total == 6.0
    assert [mine == his for mine, his in zip(found, before)] == [each != rank for each in range(4)]
    assert_right(nodes)


def test_a_worker_that_died_while_idle_is_told_of_though_a_function_is_loaded_first(nodes: synk.Runtime) -> None:
    kill_and_wait(pids(nodes)[3])
    with pytest.warns(RuntimeWarning, match="rank 3 .*was started again"):
        assert nodes.function(lambda x: x.sum() + 1, outputs="sum")(np.arange(4.0)) == 10.0


def _arm(rank: int, step: str) -> None:
    """Have the worker of a rank kill itself at a step of its next call."""
    from synk._wire.cell import cell
    from synk._worker import failpoints

    reach, is_over = failpoints.arm([(step, rank, 1, "kill")], cell.worker.number), []

    def reach_after_this_call(name: str) -> None:
        if is_over:
            reach(name)
        elif name == "call.after_reply":
            is_over.append(True)

    cell.worker.failpoint = reach_after_this_call


@pytest.mark.parametrize("node", [0, 1])
@pytest.mark.sampled(90)
def test_an_agent_dies_in_a_call(nodes: synk.Runtime, node: int) -> None:
    """Its workers end with it, the other node's call is ended, and the next call starts another agent."""
    before, workers = agents(nodes), pids(nodes)
    f = nodes.function(lambda x: time.sleep(600 * x[0]), outputs=None)
    f(np.zeros(8))  # so that the call is all that is in flight
    killed = threading.Thread(target=lambda: (wait_for(lambda: in_flight(nodes)), kill_and_wait(before[node])))
    killed.start()
    with pytest.raises(WorkerDied, match=rf"node {node} of 2 .*ended with SIGKILL during") as caught:
        f(np.ones(8))
    killed.join()
    ranks = tuple(nodes._session.nodes.topology.ranks_of(node))
    assert (caught.value.nodes, caught.value.ranks, caught.value.pids) == ((node,), ranks, (before[node],))
    for rank in ranks:
        wait_until_dead(workers[rank])
    assert_right(nodes)
    after = pids(nodes)
    assert [mine == his for mine, his in zip(after, workers)] == [rank not in ranks for rank in range(4)]
    assert agents(nodes)[1 - node] == before[1 - node]


def test_an_agent_dies_between_two_calls(nodes: synk.Runtime) -> None:
    """The new one learns of functions that were sent before, with what they have captured."""
    box = {"scale": 2.0}
    f = nodes.function(lambda x: x * box["scale"], outputs="gather")
    np.testing.assert_array_equal(f(np.arange(5.0)), 2 * np.arange(5.0))
    box["scale"] = 3.0
    kill_and_wait(agents(nodes)[1])
    with pytest.warns(RuntimeWarning, match="node 1 .*was started again"):
        np.testing.assert_array_equal(f(np.arange(5.0)), 3 * np.arange(5.0))
    assert_right(nodes)


def test_a_call_with_retry_is_run_again(nodes: synk.Runtime, tmp_path: Any) -> None:
    flag = tmp_path / "died"

    def die_once(x: np.ndarray) -> Any:
        if 7.0 in x and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return x.sum()

    assert nodes.function(die_once, outputs="sum", retry=1)(np.arange(8.0)) == 28.0


def test_a_time_limit(nodes: synk.Runtime) -> None:
    f = nodes.function(lambda x: time.sleep(600 * x[0]), outputs=None)
    f(np.zeros(4))  # so that nothing but the function takes time
    with same_workers(nodes), pytest.raises(CallTimeout, match=r"did not end in time on node 0, 1 of 2"):
        f(np.ones(4), timeout=0.5)


def test_a_worker_that_does_not_heed_an_interrupt_is_replaced(nodes: synk.Runtime) -> None:
    """Its agent kills it; the agent itself lives on."""
    before, workers = agents(nodes), pids(nodes)

    def stop(x: np.ndarray) -> None:
        if 7.0 in x:
            os.kill(os.getpid(), signal.SIGSTOP)

    f = nodes.function(stop, outputs=None)
    f(np.zeros(8))
    with pytest.raises(CallTimeout):
        f(np.arange(8.0), timeout=0.5)
    assert_right(nodes)
    after = pids(nodes)
    assert [mine == his for mine, his in zip(after, workers)] == [True, True, True, False]
    assert agents(nodes) == before


def test_an_agent_that_is_frozen_is_replaced(nodes: synk.Runtime) -> None:
    before = agents(nodes)
    f = nodes.function(lambda x: x.sum(), outputs="sum")
    f(np.arange(8.0))
    os.kill(before[1], signal.SIGSTOP)
    with pytest.raises(CallTimeout, match="1 of 2"):
        f(np.arange(8.0), timeout=0.5)
    assert f(np.arange(8.0)) == 28.0
    after = agents(nodes)
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_ctrl_c(nodes: synk.Runtime) -> None:
    f = nodes.function(lambda x: time.sleep(600 * x[0]), outputs=None)
    f(np.zeros(8))
    with same_workers(nodes), pytest.raises(KeyboardInterrupt), ctrl_c_when(lambda: in_flight(nodes)):
        f(np.ones(8))


def test_an_interrupt_from_another_thread(nodes: synk.Runtime) -> None:
    f = nodes.function(lambda x: time.sleep(600), outputs=None)
    with same_workers(nodes):
        call = f.submit(np.arange(8.0))
        nodes.interrupt()
        with pytest.raises(CallCancelled):
            call.result()


def test_where_shows_the_ranks_of_all_nodes(nodes: synk.Runtime) -> None:
    call = nodes.function(lambda x: time.sleep(600), outputs=None).submit(np.arange(8.0))
    assert wait_for(lambda: nodes.where().count(": function\n") == 6)  # two nodes, four ranks
    text = nodes.where()
    assert all(f"rank {rank} (pid" in text for rank in range(4))
    assert "node 1 (pid" in text
    nodes.interrupt()
    assert isinstance(call.exception(), CallCancelled)


class NotThere:
    """Cannot be loaded on a worker."""

    def __reduce__(self) -> Any:
        return _load_only_in, (os.getpid(),)


def _load_only_in(pid: int) -> None:
    if os.getpid() != pid:
        raise ImportError("not there")


def test_a_function_that_workers_cannot_load(nodes: synk.Runtime) -> None:
    captured = NotThere()
    with same_workers(nodes):
        f = nodes.function(lambda x: (captured, x)[1], outputs="gather")
        with pytest.raises(SerializationError, match="not there"):
            f(np.arange(4.0))


def test_results_that_cannot_be_pickled_or_loaded(nodes: synk.Runtime) -> None:
    with same_workers(nodes):
        with pytest.raises(SerializationError, match=r"cannot send the result of .* from rank 0"):
            nodes.function(lambda x: (value for value in x), outputs=None)(np.arange(4.0))
        here = os.getpid()
        unloadable = nodes.function(lambda x: _Elsewhere(here), outputs=None)
        with pytest.raises(SerializationError, match=r"cannot load a result of .* from rank 0"):
            unloadable(np.arange(4.0))


class _Elsewhere:
    """Can be loaded anywhere but in the program."""

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def __reduce__(self) -> Any:
        return _load_elsewhere, (self.pid,)


def _load_elsewhere(pid: int) -> _Elsewhere:
    if os.getpid() == pid:
        raise ImportError("not here")
    return _Elsewhere(pid)


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


def test_failpoints_of_workers_that_start() -> None:
    with armed(failpoint("start.ready", 3)):
        rt = synk.Runtime((1, 3), cluster="here", nodes=2)
    with rt, pytest.raises(synk.errors.StartupError, match="rank 3 of 4 did not come up"):
        rt.function(lambda x: x, outputs="gather")(np.arange(4))


# -- the end of programs ----------------------------------------------------------------------------------------------

PROGRAM = """
rt = synk.fork(2, cluster="here", nodes=2)
f = synk.function(lambda x: x.sum(), outputs="sum")
assert f(np.arange(8.0)) == 28.0
"""


@pytest.mark.parametrize(
    "end",
    [
        "synk.close()",
        "pass",
        "f.submit(np.arange(8.0))",
        "rt.close(); rt.close()",
        "del rt",
        "os._exit(0)",
    ],
)
@pytest.mark.sampled(90)
def test_programs_that_end_leave_nothing(end: str) -> None:
    script(PROGRAM + end).check("")


def test_a_program_that_ends_by_an_exception_leaves_nothing() -> None:
    result = script(PROGRAM + "raise SystemExit(3)")
    result.check("", returncode=3)


@pytest.mark.parametrize("is_busy", [False, True], ids=["idle", "in a call"])
@pytest.mark.sampled(90)
def test_a_program_that_is_killed_leaves_nothing(is_busy: bool) -> None:
    """The kernel ends the agents, and their ends end the workers."""
    last = 'synk.function(lambda x: time.sleep(600), outputs=None).submit(np.arange(8.0)); print("there", flush=True)'
    code = PROGRAM + (last if is_busy else 'print("there", flush=True)') + "; time.sleep(600)"
    with Scenario(code) as scenario:
        scenario.wait_for_line("there")
        os.kill(scenario.process.pid, signal.SIGKILL)
        result = scenario.finish()
    assert result.returncode == -signal.SIGKILL
    assert not result.leftovers


def test_nothing_is_left_after_close(runtime: Callable[..., Any]) -> None:
    """The census of descriptors and memory is that of every test."""
    before = {pid for pid, _, _ in descendants(os.getpid())}
    rt = runtime((1, 2), cluster="here", nodes=2, backend="auto")
    assert_right(rt)
    mine = {pid for pid, _, _ in descendants(os.getpid())} - before
    assert len(mine) == 5
    rt.close()
    assert all(wait_until_dead(pid) for pid in mine)
    with pytest.raises(ClosedError):
        rt.function(lambda x: x)(np.arange(3))


def test_no_socket_has_a_port_or_lies_in_a_folder(nodes: synk.Runtime) -> None:
    """All are ends of pairs that were inherited, but for the inlets of workers, which leave no file."""
    assert_right(nodes)
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


def test_an_agent_that_cannot_start_is_named_as_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    started = AgentProcess.start

    def start(self: AgentProcess, setup: dict[str, Any], *others: Any) -> None:
        self._module = "cluster.loop" if self.rank == 0 else "cluster.missing"  # type: ignore[misc]
        started(self, setup, *others)

    monkeypatch.setattr(AgentProcess, "start", start)
    rt = synk.Runtime(2, cluster="here", nodes=2)
    with rt, pytest.raises(synk.errors.StartupError, match=r"^cannot start the workers: node 1 of 2 did not come up"):
        rt.function(lambda x: x, outputs="gather")(np.arange(4))
