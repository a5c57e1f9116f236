"""``synk.torch.replicate`` over nodes: equal to serial training, alike on all ranks, and the same whatever is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import synk
from synk.errors import WorkerDied

Reused = Callable[..., synk.Runtime]
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


def loss_of(model: Any, x: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), x.square().sum(1, keepdim=True))


def train(rt: synk.Runtime, victims: dict[int, str], dropout: float = 0.0) -> tuple[list[np.ndarray], list[float]]:
    """Take all steps; ``victims`` says in which step rank 2's worker or agent is killed. Return weights and losses."""
    model, optimizer = make(dropout)
    rep = synk.torch.replicate(model, optimizer, runtime=rt)

    @rep.function(bcast_inputs="victim")
    def step(model: Any, optimizer: Any, x: torch.Tensor, victim: str) -> torch.Tensor:
        if victim and synk.comm.rank == 2:
            os.kill(os.getppid() if victim == "agent" else os.getpid(), signal.SIGKILL)
            signal.pause()
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss

    losses, left = [], dict(victims)
    while rep.num_steps < NUM_STEPS:
        number = rep.num_steps
        try:
            losses.append(float(step(batches()[number], left.pop(number, ""))))
        except WorkerDied as error:
            assert error.step_counted is False
    states = [rep._resident.get(rank).objects[0].state_dict() for rank in range(rt.world_size)]
    for state in states[1:]:
        assert all(torch.equal(state[key], states[0][key]) for key in state), "the ranks are not alike"
    return [parameter.detach().numpy().copy() for parameter in model.parameters()], losses


@pytest.mark.parametrize("kind", ["1+3", "2+2"])
def test_it_equals_serial_training(reused: Reused, kind: str) -> None:
    model, optimizer = make()
    expected = []
    for x in batches():
        optimizer.zero_grad()
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        expected.append(float(loss.detach()))
    weights, losses = train(reused(kind), {})
    np.testing.assert_allclose(losses, expected, rtol=1e-12)
    for own, parameter in zip(weights, model.parameters()):
        np.testing.assert_allclose(own, parameter.detach().numpy(), rtol=1e-10, atol=1e-14)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_run_that_loses_workers_and_nodes_has_the_bits_of_one_that_does_not(reused: Reused) -> None:
    """With dropout, whose random numbers depend on the step and the rank."""
    rt = reused("2+2")
    expected, losses = train(rt, {}, dropout=0.3)
    for victims in ({2: "worker"}, {5: "agent"}, {0: "agent", 2: "agent", 7: "worker"}):
        found, others = train(rt, victims, dropout=0.3)
        assert others == losses
        assert all(map(np.array_equal, found, expected))
