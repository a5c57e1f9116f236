"""A step counts on all ranks or on none, whatever befalls a rank in it: its repetition changes no bit."""

from __future__ import annotations

import contextlib
import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import kill_and_wait, pids
from trainings import (
    ALL,
    BEFORE,
    BEHIND,
    Everything,
    F,
    Halfway,
    act,
    batches,
    differences,
    disturbed_step,
    mlp,
    plain_step,
    rank_states,
    state_of,
)

import synk

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")
EXPECTED = {
    "raise": ArithmeticError,
    "hang": synk.errors.CallTimeout,
    "interrupt": KeyboardInterrupt,
    "kill": synk.errors.WorkerDied,
}
LIMIT_S = 3.0
"""For a step of milliseconds that hangs."""


def build() -> tuple[Any, ...]:
    """Return objects with state of every kind, which the forward pass changes, and an optimizer of two groups."""
    torch.manual_seed(1)
    model = Everything(ALL).double()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = Halfway([{"params": parameters[:2]}, {"params": parameters[2:]}], lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def run(rt: synk.Runtime, where: str = "", action: str = "", rank: int = 1) -> tuple[list[Any], Any]:
    """Train with a fault in one step, which is repeated unless it counted. Return the losses and the state."""
    objects = build()
    rep = synk.torch.replicate(*objects, sync_batchnorm=True, runtime=rt)
    step = rep.function(disturbed_step, outputs="avg", bcast_inputs=("where", "action", "rank"))
    losses: list[Any] = []
    for number, (x, y) in enumerate(batches(4, (8, 6))):
        if action and number == 2:
            with pytest.raises(EXPECTED[action]) as caught:
                step(x, y, where, action, rank, timeout=LIMIT_S if action == "hang" else None)
            assert caught.value.step_counted == (where in BEHIND)
            assert rep.num_steps == 2 + caught.value.step_counted
            if caught.value.step_counted:
                losses.append(None)
                continue
        losses.append(float(step(x, y, "", "", 0)))
    states = rank_states(rep)
    assert all(differences(states[0], other) == [] for other in states[1:])
    rep.pull()
    assert rep.num_steps == 4 and differences(states[0], state_of(objects)) == []
    return losses, states[0]


@pytest.mark.parametrize("action", EXPECTED)
def test_a_fault_anywhere_changes_no_bit(subtests: Any, rt: Any, action: str) -> None:
    """Of spectral norms, batch norms, buffers and numbers, beside parameters and rates."""
    plain = build()
    expected, clean = run(rt)
    assert differences([float(disturbed_step(*plain, x, y)) for x, y in batches(4, (8, 6))], expected, 1e-9) == []
    assert differences(state_of(plain), clean, 1e-9) == []
    # What is inside of an optimizer's step is not interrupted: a worker that hangs there would be killed.
    places = [place for place in (*BEFORE, *BEHIND) if (place, action) != ("inside", "hang")]
    for number, where in enumerate(places[::2] if action == "hang" else places):
        with subtests.test(where=where):
            losses, state = run(rt, where, action, rank=(1, 1, 0)[number % 3])
            assert [one for one, other in zip(expected, losses) if other is not None] == [
                loss for loss in losses if loss is not None
            ]
            assert differences(clean, state) == []


def two_optimizers(first: Any, second: Any, opt_first: Any, opt_second: Any, x: Any, y: Any, fault: str) -> Any:
    for model, optimizer in ((first, opt_first), (second, opt_second)):
        optimizer.zero_grad()
        loss = F.mse_loss(first(x) + second(x), y)
        if fault and model is second and synk.comm.rank == 1:
            act(fault)
        loss.backward()
        optimizer.step()
    return loss


def follow(model: Any, follower: Any, optimizer: Any, x: Any, y: Any, fault: str) -> Any:
    """Momentum encoder: parameters that the forward pass moves."""
    optimizer.zero_grad()
    with torch.no_grad():
        for own, other in zip(follower.parameters(), model.parameters()):
            own.data = 0.9 * own.data + 0.1 * other.data
    loss = F.mse_loss(model(x) + follower(x), y)
    if fault and synk.comm.rank == 1:
        act(fault)
    loss.backward()
    optimizer.step()
    return loss


def reduce_after_the_step(model: Any, optimizer: Any, x: Any, y: Any, fault: str) -> Any:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    if fault and synk.comm.rank == 1:
        act(fault)
    return synk.comm.all_reduce(loss.detach(), "avg")


def accumulate(model: Any, x: Any, y: Any, fault: str) -> Any:
    """Only adds to the gradients of the calls before."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    if fault and synk.comm.rank == 1:
        act(fault)
    synk.comm.barrier()
    return loss


def objects_for(body: Any) -> tuple[Any, ...]:
    model, other = mlp(1), mlp(2)
    adam, second = torch.optim.Adam(model.parameters(), 0.01), torch.optim.Adam(other.parameters(), 0.01)
    if body is two_optimizers:
        return model, other, adam, second
    if body is follow:
        return model, other.requires_grad_(False), adam
    return (model, adam) if body is reduce_after_the_step else (model,)


def test_what_changes_before_the_ranks_communicate_is_put_back(subtests: Any, rt: Any) -> None:
    """What steps change when is noticed in the first one."""
    for body in (two_optimizers, follow, reduce_after_the_step, accumulate):
        with subtests.test(body=body.__name__):
            outcomes = []
            for fault in ("", "raise", "kill"):
                rep = synk.torch.replicate(*objects_for(body), runtime=rt)
                step = rep.function(body, outputs="avg", bcast_inputs="fault")
                losses = []
                for number, (x, y) in enumerate(batches(5, (8, 6))):
                    if fault and number == 3:
                        with pytest.raises((synk.errors.WorkerDied, ArithmeticError)) as caught:
                            step(x, y, fault)
                        assert caught.value.step_counted is False  # type: ignore[attr-defined]
                    losses.append(float(step(x, y, "")))
                states = rank_states(rep)
                assert differences(*states) == []
                outcomes.append((losses, states[0]))
            assert all(differences(outcomes[0], other) == [] for other in outcomes[1:])


def test_a_repeated_step_draws_what_it_drew(rt: Any) -> None:
    """From the process's generators, also if it is among the first steps that draw from them."""

    def seed() -> None:
        random.seed(3)
        np.random.seed(3)

    def body(model: Any, optimizer: Any, x: Any, y: Any, number: int, is_failing: bool) -> Any:
        noise = random.random() + np.random.random() if number > 4 else 0.0
        if is_failing and synk.comm.rank == 1:
            raise ArithmeticError
        return plain_step(model, optimizer, x * (1 + noise), y)

    found = []
    for failing in (None, 5, 6):
        rt.function(seed, per_rank=True, outputs=None)()
        model = mlp()
        rep = synk.torch.replicate(model, torch.optim.SGD(model.parameters(), 0.05), runtime=rt)
        step = rep.function(body, outputs="avg", bcast_inputs=("number", "is_failing"))
        losses = []
        for number, (x, y) in enumerate(batches(8, (8,))):
            if number == failing:
                with pytest.raises(ArithmeticError):
                    step(x, y, number, True)
            losses.append(float(step(x, y, number, False)))
        found.append(losses)
    assert found[0] == found[1] == found[2]


class Mortal(torch.nn.Module):
    """One worker dies where it reads or sets the state of this module, if there is a file that says so."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.inner, self.folder, self.home = mlp(), str(folder), os.getpid()

    def forward(self, x: Any) -> Any:
        return self.inner(x)

    def get_extra_state(self) -> Any:
        self._reach("reads")
        return torch.zeros(())

    def set_extra_state(self, state: Any) -> None:
        self._reach("sets")

    def _reach(self, what: str) -> None:
        if os.getpid() != self.home:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(self.folder, what))  # by one worker
                act("kill")


def test_deaths_while_objects_move(subtests: Any, rt: Any, tmp_path: Path) -> None:
    """In pull, push and a checkpoint, which are made once more, and before them."""
    plain, model = mlp(), Mortal(tmp_path)
    objects = model, torch.optim.Adam(model.parameters(), 0.01)
    optimizer = torch.optim.Adam(plain.parameters(), 0.01)
    rep = synk.torch.replicate(*objects, runtime=rt)
    step = rep.function(plain_step, outputs="avg")

    def change() -> None:
        for each in (objects[1], optimizer):
            each.param_groups[0]["lr"] *= 0.9

    load = lambda: rep.load_state_dict(rep.state_dict())  # noqa: E731
    moves = [(rep.pull, "reads", 1), (change, "", -9), (rep.push, "sets", 3), (load, "reads", 5)]
    for number, (x, y) in enumerate(batches(7, (8, 7))):
        with subtests.test(step=number):
            expected = float(plain_step(plain, optimizer, x, y).detach())
            assert abs(float(step(x, y)) - expected) < 1e-12
            for move, what, first in moves:
                if number == first:
                    kill_and_wait(pids(rt)[first // 2 % 2])
                if number == first + 1:
                    (tmp_path / what).touch()
                    with pytest.raises(synk.errors.WorkerDied):
                        move()
                    assert not (tmp_path / what).exists()
                move()
    states = rank_states(rep)
    assert differences(*states) == [] and rep.num_steps == 7
    own = {name.removeprefix("inner."): each for name, each in model.named_parameters()}
    assert differences(dict(plain.named_parameters()), own, 1e-12) == []
