"""What does not work over nodes is refused at once, in the program; ``synk.torch.replicate`` over nodes.

The training equals a serial one, is alike on all ranks, and the same whatever is lost.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.harness import PACKAGE_FOLDER, children, kill_in, script

import synk
import synk.profiler
from synk.cluster.split import counts_of
from synk.errors import CallTimeout, StartupError, UnsupportedError, WorkerDied

OPTIONS = {"backend": "torch", "devices": [0]}


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"cluster": "nowhere", "nodes": 2}, "got cluster='nowhere', expected None, 'here'"),
    ({"cluster": "10.0.0.1:6379", "nodes": 0}, "got nodes=0"),
    ({"cluster": "here"}, "got nodes=None, expected how many nodes"),
    ({"cluster": "here", "nodes": (2, 1)}, r"got nodes=\(2, 1\)"),
    ({"cluster": "here", "nodes": (1, 2.5)}, r"got nodes=\(1, 2.5\).*such as \(2, 4\)"),
    ({"nodes": 2}, "got nodes=2 and no cluster="),
]


def test_arguments_and_options_of_fork(subtests: Any) -> None:
    for options, text in ARGUMENTS:
        with subtests.test(case=text), pytest.raises(ValueError, match=text):
            synk.Runtime(1, **options)
    for name, value in OPTIONS.items():
        text = f"cannot fork with cluster='here': got {name}="
        with subtests.test(case=text), pytest.raises(UnsupportedError, match=text):
            synk.Runtime(1, cluster="here", nodes=2, **{name: value})
    with pytest.raises(TypeError, match=r"got num_workers=\(1, 3\), expected an integer or None"):
        synk.Runtime((1, 3))


def test_the_number_of_workers() -> None:
    assert [counts_of(2, 3), counts_of((1, 3), 2), counts_of(np.int64(1), 2)] == [(2, 2, 2), (1, 3), (1, 1)]
    wrong: list[tuple[Any, type[Exception]]] = [
        *(((1, 2, 3), ValueError), (0, ValueError), ((2, 0), ValueError), (1.5, TypeError), ("22", TypeError))
    ]
    for num_workers, error in wrong:
        with pytest.raises(error, match="cannot fork: got num_workers="):
            counts_of(num_workers, 2)


MACHINES: list[tuple[Any, Any]] = [
    *((None, (4, 2, 1)), (2, (4, 2)), ((1, 2), (4, 2)), ((2, 9), (4, 2, 1)), ((4, 9), None), (4, None)),
]
"""How many nodes are asked for, and the ranks of those that are used; None: too few."""


def test_how_many_machines_of_a_cluster_are_used(monkeypatch: pytest.MonkeyPatch, subtests: Any) -> None:
    class Opened(Exception):
        pass

    def opened(placement: Any, **options: Any) -> None:
        raise Opened(placement.topology.counts)

    monkeypatch.setattr("synk.cluster.forking.machines_of", lambda address: [4, 2, 1])
    monkeypatch.setattr("synk.cluster.forking.NodeSession", opened)
    for nodes, counts in MACHINES:
        with subtests.test(case=f"nodes={nodes}"):
            with pytest.raises(StartupError if counts is None else Opened) as caught:
                synk.Runtime(cluster="10.0.0.1:6379", nodes=nodes)
            if counts is None:
                assert str(caught.value).startswith("cannot fork on 4 nodes: ")
            else:
                assert caught.value.args == (counts,)


def test_a_cluster_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 1, "", "ModuleNotFoundError: No module named 'ray'")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(StartupError, match=r"got no Ray in this environment.*synkhronos\[ray\]"):
        synk.Runtime(1, cluster="10.0.0.1:6379")


def test_process_groups_and_data_parallel_modules_of_torch(nodes: synk.Runtime) -> None:
    torch = pytest.importorskip("torch")
    import synk.torch

    f = nodes.function(lambda: synk.torch.process_group(), outputs=None, per_rank=True)
    with pytest.raises(UnsupportedError, match="cannot make a process group over several nodes"):
        f()
    with pytest.raises(UnsupportedError, match=r"wrap a Linear in DataParallel over nodes.*synk\.torch\.replicate"):
        synk.torch.DataParallel(torch.nn.Linear(2, 1), runtime=nodes)


def test_traces() -> None:
    """They act on the current runtime."""
    with synk.fork(1, cluster="here", nodes=2), pytest.raises(UnsupportedError, match="over nodes"):
        synk.profiler.trace("run.json").__enter__()


def test_the_page_lists_what_is_refused() -> None:
    page = (Path(PACKAGE_FOLDER) / "docs" / "cluster.md").read_text(encoding="utf-8")
    table = page.split("## What does not work yet")[1]
    verbs = ("synk.torch.DataParallel", "synk.profiler.trace", "item_timeout")
    missing = [name for name in (*verbs, *OPTIONS) if not re.search(rf"`[^`]*{re.escape(name)}\b", table)]
    assert not missing, f"add to the table of docs/cluster.md: {missing}"


def test_a_fork_without_cluster_imports_none_of_it() -> None:
    script(
        """
        rt = synk.fork(2)
        f = synk.function(lambda x: (x.sum(), os.getpid()), outputs=("sum", None))
        seen = synk.function(
            lambda x: [name for name in sys.modules if name.startswith(("synk.cluster", "ray", "zmq"))], outputs="first"
        )
        assert f(np.arange(4.0))[0] == 6.0
        assert seen(np.arange(2)) == []
        assert not [name for name in sys.modules if name.startswith(("synk.cluster", "ray", "zmq"))]
        """
    ).check("")


Reused = Callable[..., Any]
NUM_STEPS = 8
F = torch.nn.functional


def make(dropout: float = 0.0) -> tuple[Any, Any]:
    torch.manual_seed(3)
    layers = [torch.nn.Linear(5, 16), torch.nn.Tanh(), torch.nn.Dropout(dropout), torch.nn.Linear(16, 1)]
    model = torch.nn.Sequential(*layers).double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def batches() -> list[torch.Tensor]:
    """Return batches of uneven lengths, some with fewer rows than ranks."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(rows, 5, generator=generator, dtype=torch.float64) for rows in (7, 4, 9, 1, 3, 8, 2, 11)]


def plain_step(model: Any, optimizer: Any, x: torch.Tensor) -> torch.Tensor:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), x.square().sum(1, keepdim=True))
    loss.backward()
    optimizer.step()
    return loss


def check_alike(rep: Any) -> None:
    states = [rep._resident.get(rank).objects[0].state_dict() for rank in range(4)]
    for state in states[1:]:
        assert all(torch.equal(state[key], states[0][key]) for key in state), "the ranks are not alike"


def train(rt: synk.Runtime, victims: dict[int, str], dropout: float = 0.0) -> tuple[list[np.ndarray], list[float]]:
    """Take all steps; ``victims`` says in which step rank 2's worker or agent is killed. Return weights and losses."""
    model, optimizer = make(dropout)
    rep = synk.torch.replicate(model, optimizer, runtime=rt)

    @rep.function(bcast_inputs="victim")
    def step(model: Any, optimizer: Any, x: torch.Tensor, victim: str) -> torch.Tensor:
        if victim and synk.comm.rank == 2:
            os.kill(os.getppid() if victim == "agent" else os.getpid(), signal.SIGKILL)
            signal.pause()
        return plain_step(model, optimizer, x)

    losses, left = [], dict(victims)
    while rep.num_steps < NUM_STEPS:
        number = rep.num_steps
        try:
            losses.append(float(step(batches()[number], left.pop(number, ""))))
        except WorkerDied as error:
            assert error.step_counted is False
    check_alike(rep)
    rep.pull()
    return [parameter.detach().numpy().copy() for parameter in model.parameters()], losses


@pytest.mark.parametrize("kind", ["1+3", "2+2"])
def test_it_equals_serial_training(reused: Reused, kind: str) -> None:
    model, optimizer = make()
    expected = [float(plain_step(model, optimizer, x).detach()) for x in batches()]
    weights, losses = train(reused(kind), {})
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    for own, parameter in zip(weights, model.parameters()):
        np.testing.assert_allclose(own, parameter.detach().numpy(), rtol=1e-10, atol=1e-14)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_run_that_loses_workers_and_nodes_has_the_bits_of_one_that_does_not(reused: Reused) -> None:
    """With dropout, whose random numbers depend on the step and the rank."""
    rt = reused("2+2")
    expected, losses = train(rt, {}, dropout=0.3)
    for victims in ({2: "worker", 5: "agent"}, {0: "agent", 2: "agent", 7: "worker"}):
        found, others = train(rt, victims, dropout=0.3)
        assert others == losses
        assert all(map(np.array_equal, found, expected))


@pytest.mark.storm
@pytest.mark.timeout(1800)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_random_kills_and_freezes_leave_the_weights_as_they_would_be(storm_count: Callable[[int], int]) -> None:
    """At any moment of a step or between two, of any worker or agent. Only the number of steps says how far it is."""
    num_faults = storm_count(40)
    generator = torch.Generator().manual_seed(2)
    data = [torch.randn(1 + k % 9, 5, generator=generator, dtype=torch.float64) for k in range(4 * num_faults)]
    with synk.Runtime([2, 2], cluster="here", nodes=2, timeout=30, max_restarts=10**9) as rt:
        expected, _ = train_among_faults(rt, data, 0)
        found, num_felt = train_among_faults(rt, data, num_faults)
    assert all(map(np.array_equal, found, expected))
    assert num_felt >= num_faults // 4


def train_among_faults(rt: synk.Runtime, data: list[torch.Tensor], num_faults: int) -> tuple[list[np.ndarray], int]:
    """Take a step for each batch. Return the weights, and how many steps and reads were ended by a fault."""
    model, optimizer = make(dropout=0.3)
    rep = synk.torch.replicate(model, optimizer, runtime=rt)

    step, num_felt = rep.function(plain_step), 0

    def read(what: Callable[[], Any]) -> Any:
        nonlocal num_felt
        while True:
            try:
                return what()
            except (WorkerDied, CallTimeout):
                num_felt += 1

    chance, number = random.Random(5), 0
    timer: threading.Timer | None = None
    while number < len(data):
        if num_faults and (timer is None or timer.finished.is_set()):
            num_faults -= 1
            agents = [worker.process.pid for worker in rt._session.by_rank]
            victims = [*agents, *(pid for agent in agents for pid in children(agent))]
            kind = chance.choices([signal.SIGKILL, signal.SIGSTOP], [9, 1])[0]
            timer = kill_in(chance.expovariate(100), chance.choice(victims), kind)
            timer.start()
        is_counted: bool | None = True
        try:
            step(data[number])
        except (WorkerDied, CallTimeout) as error:
            num_felt += 1
            is_counted = error.step_counted
        before, number = number, read(lambda: rep.num_steps)
        assert is_counted is None or number == before + is_counted
    if timer is not None:
        timer.join()
    read(lambda: check_alike(rep))
    read(rep.pull)
    return [parameter.detach().numpy().copy() for parameter in model.parameters()], num_felt
