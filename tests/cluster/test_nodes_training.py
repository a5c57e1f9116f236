"""``synk.torch.replicate`` over nodes: equal to serial training, alike on all ranks, and the same whatever is lost."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.harness import children, kill_in

import synk
from synk.errors import CallTimeout, WorkerDied

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
