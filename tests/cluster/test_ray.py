"""Nodes on the machines of a real Ray cluster: raylets on this machine, in a network namespace of their own.

``make test EXTRA=ray`` runs these tests. What calls over nodes compute is tested with ``cluster="here"``, where the
head and the agents are the same; here it is what lies between them that may go wrong.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import harness
from support.harness import Scenario, wait_until_dead
from support.nodes import agents, kill_and_hear

import synk
from benchmarks.cluster_faults import QUIET, RayCluster
from synk.errors import CallTimeout, ClosedError, StartupError, WorkerDied

pytestmark = [pytest.mark.ray, pytest.mark.own_start, pytest.mark.timeout(300)]

TOKEN = "synk-test-" + "0123456789abcdef" * 2


@pytest.fixture(autouse=True)
def is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """These clusters ask for no token."""
    monkeypatch.setenv("SYNK_INSECURE_CLUSTER", "1")


@pytest.fixture(autouse=True)
def actors_have_ended(nothing_is_left: None) -> Iterator[None]:
    """Ray tells of an actor's end as its connections close, and then the process ends, which Ray awaits."""
    before = harness.census()
    yield
    harness.wait_for(lambda: not any("ray::NodeActor" in each for each in harness.census().leftovers(before)))


@pytest.fixture(scope="module", autouse=True)
def alone() -> None:
    lines = Path("/proc/net/dev").read_text(encoding="ascii").splitlines()
    devices = {line.split(":")[0].strip() for line in lines if ":" in line}
    assert devices == {"lo"}, "run these tests by `make test EXTRA=ray`, which gives them a network of their own"


@pytest.fixture(scope="module")
def cluster(alone: None) -> Iterator[RayCluster]:
    cluster = RayCluster(4)
    yield cluster
    cluster.close()


@pytest.fixture
def nodes(cluster: RayCluster) -> Iterator[synk.Runtime]:
    """Two nodes with two workers each. Two machines are free."""
    with synk.Runtime(2, cluster=cluster.address, nodes=2, max_restarts=100) as runtime:
        yield runtime


def worker_pids(runtime: synk.Runtime) -> list[int]:
    return list(runtime.function(lambda x: os.getpid(), outputs=None)(np.arange(runtime.world_size)))


# ----- calls


def test_calls_equal_one_machine(nodes: synk.Runtime, shared_runtimes: Any) -> None:
    """Also large arguments and results, which travel in pieces."""
    for shape in ((7, 3), (1001, 200)):
        x = np.random.default_rng(1).normal(1.0, 0.001, shape)
        for op in ("avg", "sum", "min", "prod", "gather", "first", None):
            fn = (lambda x: x * 2) if op == "gather" else (lambda x: x.mean(axis=0))
            here, there = (rt.function(fn, outputs=op)(x) for rt in (shared_runtimes[4], nodes))
            np.testing.assert_array_equal(here, there)
    table, settings = np.arange(4.0), {"scale": 1.0}
    f = nodes.function(lambda x: (x + table[0]).sum() * settings["scale"], outputs="sum")
    assert f(np.ones(4)) == 4.0
    table[0], settings["scale"] = 10.0, 2.0
    assert f(np.ones(4)) == 88.0


def test_time_limits_and_interrupts(nodes: synk.Runtime) -> None:
    before = worker_pids(nodes)

    def stuck(x: np.ndarray) -> None:
        while True:
            pass

    f = nodes.function(stuck, outputs=None)
    with pytest.raises(CallTimeout):
        f(np.arange(4.0), timeout=1.0)
    assert worker_pids(nodes) == before
    call = f.submit(np.arange(4.0))
    nodes.interrupt()
    with pytest.raises(synk.errors.CallCancelled):
        call.result()
    assert worker_pids(nodes) == before


def test_ranks_of_all_machines_communicate(nodes: synk.Runtime) -> None:
    """By TCP, and with keys."""

    def talk(x: np.ndarray) -> tuple[Any, ...]:
        rank, size = synk.comm.rank, synk.comm.world_size
        synk.comm.send(np.full(1 << 18, rank), (rank + 1) % size)
        got = synk.comm.recv((rank - 1) % size)
        return synk.comm.all_reduce(x, "sum"), got[-1], synk.comm.all_gather(np.full(1 << 16, float(rank)))[:, -1]

    for sums, neighbour, ranks in nodes.function(talk, outputs=None)(np.arange(4.0)):
        assert (sums.tolist(), ranks.tolist()) == ([6.0], [0.0, 1.0, 2.0, 3.0])
        assert 0 <= neighbour < 4


# ----- faults


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_workers_and_agents_are_replaced(nodes: synk.Runtime, capfd: pytest.CaptureFixture[str]) -> None:
    """And tunnels."""
    log = nodes.resident([])
    step = nodes.function(lambda x, log: log.append(1), outputs=None, bcast_inputs="log", updates=[log])
    step(np.ones(4), log)
    for find in (
        lambda: worker_pids(nodes)[1],
        lambda: lineage(worker_pids(nodes)[1])[1],
        lambda: agents(nodes)[0],
    ):
        victim, tunnel = find(), agents(nodes)[0]
        is_agent = victim in lineage(worker_pids(nodes)[1])[1:]
        kill_and_hear(nodes, victim)
        if is_agent:
            assert wait_until_dead(tunnel)
        step(np.ones(4), log)
    assert [log.get(rank) for rank in range(4)] == [[1, 1, 1, 1]] * 4
    assert "ended with SIGKILL" in capfd.readouterr().err


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_spare_machine_takes_over(cluster: RayCluster, nodes: synk.Runtime) -> None:
    """In a step: the survivors' state is everybody's, and the step says whether it counted."""
    log = nodes.resident([])

    def slow(x: np.ndarray, log: list[int], is_slow: bool) -> None:
        log.append(1)
        while is_slow:
            pass

    step = nodes.function(slow, outputs=None, bcast_inputs=("log", "is_slow"), updates=[log])
    step(np.ones(4), log, False)
    pids = worker_pids(nodes)
    call = step.submit(np.ones(4), log, True)
    cluster.tell(f"lose {pids[0]}")
    with pytest.raises(WorkerDied) as caught:
        call.result()
    assert caught.value.nodes
    assert caught.value.step_counted is False  # type: ignore[attr-defined]
    assert all(map(wait_until_dead, pids[:2])), "the machine's own processes end with it"
    wait_for_step(lambda: step(np.ones(4), log, False))
    found = [log.get(rank) for rank in range(4)]
    assert found == [found[0]] * 4


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_frozen_machine_is_replaced_and_what_ran_there_ends_once_it_is_back(nodes: synk.Runtime) -> None:
    """A time limit notices it. A spare machine takes over; nothing that the frozen one does later is heard."""
    log = nodes.resident([])

    def note(x: np.ndarray, log: list[int]) -> int:
        log.append(1)
        return os.getpid()

    step = nodes.function(note, outputs=None, bcast_inputs="log", updates=[log])
    pids = step(np.ones(4), log)
    machine = [*pids[2:], *lineage(pids[2])[1:]]
    for pid in reversed(machine):
        os.kill(pid, signal.SIGSTOP)
    try:
        with pytest.raises(CallTimeout):
            step(np.ones(4), log, timeout=1.0)
        again = step(np.ones(4), log)
        assert again[:2] == pids[:2]
        assert not set(again) & set(machine)
    finally:
        for pid in machine:
            os.kill(pid, signal.SIGCONT)
    assert all(map(wait_until_dead, pids[2:]))
    step(np.ones(4), log)
    assert [log.get(rank) for rank in range(4)] == [log.get(0)] * 4


def lose(cluster: RayCluster, pids: list[int]) -> None:
    """Kill the machine on which processes run, and wait for their ends."""
    cluster.tell(f"lose {pids[0]}")
    assert all(map(wait_until_dead, pids))


def wait_for_step(step: Callable[[], object]) -> None:
    """Take a step once Ray knows that the machine is lost: until then the agent's replacement may be sent there."""
    for _ in range(20):
        try:
            step()
            return
        except WorkerDied as error:
            if getattr(error, "step_counted", False):
                return
    raise AssertionError("no machine took over")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_machines_that_are_left_take_over(capfd: pytest.CaptureFixture[str]) -> None:
    """Without a spare one the lost node moves beside another: the ranks and their rows stay the same."""
    cluster = RayCluster(2)
    try:
        with synk.Runtime(2, cluster=cluster.address, nodes=(1, 2), max_restarts=100) as rt:
            rows = np.random.default_rng(1).normal(size=(7, 3))
            held = rt.resident([np.zeros(3)])

            def add(x: np.ndarray, held: list[np.ndarray]) -> None:
                held[0] = held[0] + synk.comm.all_reduce(x.sum(axis=0), "sum")

            step = rt.function(add, outputs=None, bcast_inputs="held", updates=[held])
            step(rows, held)
            assert not are_on_one_machine(worker_pids(rt))
            lose(cluster, worker_pids(rt)[2:])
            wait_for_step(lambda: step(rows, held))
            assert are_on_one_machine(worker_pids(rt))
            assert "beside another node" in capfd.readouterr().err
            step(rows, held)
            once = np.array(held.get(0)) / 3
            assert [np.array(held.get(rank)).tobytes() for rank in range(4)] == [np.array(held.get(0)).tobytes()] * 4
            np.testing.assert_allclose(once[0], rows.sum(axis=0), rtol=1e-12)
            cluster.tell("add")
            rt.restart()
            assert not are_on_one_machine(worker_pids(rt))
            step(rows, held)
            np.testing.assert_allclose(held.get(3)[0], 4 * rows.sum(axis=0), rtol=1e-12)
    finally:
        cluster.close()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_fewer_machines_than_the_least_number_are_not_enough() -> None:
    cluster = RayCluster(2)
    try:
        with synk.Runtime(1, cluster=cluster.address, nodes=2, max_restarts=2) as rt:
            lose(cluster, worker_pids(rt)[1:])
            with pytest.raises(ClosedError) as caught:
                for _ in range(10):
                    with contextlib.suppress(WorkerDied):
                        worker_pids(rt)
            assert "the cluster has only 1 of at least 2 machines left" in str(caught.value.__cause__)
    finally:
        cluster.close()


def are_on_one_machine(pids: list[int]) -> bool:
    return len({lineage(pid)[-1] for pid in pids}) == 1


def lineage(pid: int) -> list[int]:
    """Return the pids of a worker, its agent, the actor and the raylet."""
    from support.ray_cluster import ancestors  # it imports Ray

    return [*ancestors(pid)][:4]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_nothing_outlives_the_program(cluster: RayCluster, number: int) -> None:
    code = f"""
        rt = synk.Runtime(1, cluster={cluster.address!r}, nodes=1)
        f = rt.function(lambda x: os.getpid(), outputs=None)
        print("pids", *f(np.arange(1)), flush=True)
        def stuck(x):
            while True:
                pass
        rt.function(stuck, outputs=None)(np.arange(1))
        """
    with Scenario(code, env=QUIET, timeout=120) as scenario:
        line = scenario.wait_for_line("pids")
        scenario.process.send_signal(number)
        scenario.process.wait(60)
        assert all(wait_until_dead(int(pid)) for pid in line.split()[1:])


# ----- starts


def test_auto_is_the_cluster_of_this_machine(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Ray finds it, and as many of its machines as there are, up to the number that is asked for."""
    monkeypatch.setenv("RAY_ADDRESS", cluster.address)
    with synk.Runtime(1, cluster="auto", nodes=(2, 3)) as rt:
        assert rt.world_size in (2, 3)
        x = np.arange(10.0)
        assert rt.function(lambda x: x.sum(), outputs="sum")(x) == x.sum()
        assert "127.0.0.1" in rt.info()


# ----- refusals


def test_what_is_refused(cluster: RayCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    for options, text in (
        ({"cluster": cluster.address, "nodes": 9}, "cannot fork on 9 nodes: the cluster .* has"),
        ({"cluster": "127.0.0.1:1"}, "cannot fork on the cluster '127.0.0.1:1'"),
    ):
        with pytest.raises(StartupError, match=text):
            synk.Runtime(1, **options)
    monkeypatch.setenv("SYNK_INSECURE_CLUSTER", "0")
    with pytest.raises(StartupError, match=r"neither token authentication nor TLS.*SYNK_INSECURE_CLUSTER=1"):
        synk.Runtime(1, cluster=cluster.address)


def test_a_cluster_with_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SYNK_INSECURE_CLUSTER")
    secret = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    cluster = RayCluster(1, **secret)
    try:
        for name, value in secret.items():
            monkeypatch.setenv(name, value)
        with synk.Runtime(1, cluster=cluster.address) as rt:
            assert rt.function(lambda x: x.sum(), outputs="sum")(np.arange(4.0)) == 6.0
        monkeypatch.setenv("RAY_AUTH_TOKEN", TOKEN[::-1])
        with pytest.raises(StartupError, match="cannot fork on the cluster"):
            synk.Runtime(1, cluster=cluster.address)
    finally:
        cluster.close()


def test_all_that_workers_print_arrives(nodes: synk.Runtime, capfd: pytest.CaptureFixture[str]) -> None:
    def flood(x: np.ndarray) -> None:
        for number in range(20_000):
            print(f"{synk.comm.rank} {number} {'x' * 80}")

    nodes.function(flood, outputs=None)(np.arange(4.0))
    lines = [line.split("] ", 1)[1] for line in capfd.readouterr().out.splitlines() if line.startswith("[rank ")]
    for rank in range(4):
        assert [int(line.split()[1]) for line in lines if line.startswith(f"{rank} ")] == [*range(20_000)]
