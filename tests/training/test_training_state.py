"""The whole state of replicated objects: what a step that did not count has changed, what comes back to the program,
and what a worker gets that takes the place of another one.
"""

from __future__ import annotations

import copy
import random
import sys
from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from stateful_models import ALL, Everything, act, body_of, is_alike, rank_states, state_of
from support.harness import kill_and_wait, pids
from support.models import batches

import synk
from synk._wire.cell import cell

torch = pytest.importorskip("torch")
from synk.torch import _state  # noqa: E402
from synk.torch._phases import Phases  # noqa: E402
from synk.torch._reduction import GradientSum, Options  # noqa: E402
from synk.torch._undo import Undo  # noqa: E402

F = torch.nn.functional

pytestmark = pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")


def build(*features: str) -> tuple[Any, ...]:
    torch.manual_seed(1)
    model = Everything(features or ALL).double()
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def run(rt: synk.Runtime, where: str = "", action: str = "", rank: int = 1, at: int = 3) -> tuple[Any, ...]:
    """Train with a fault in one step, which is repeated unless it counted; return losses, states, counted or not."""
    objects = build()
    rep = synk.torch.replicate(*objects, sync_batchnorm=True, runtime=rt)
    step = rep.function(body_of(act), bcast_inputs=("where", "action", "rank"))
    losses, counted = [], None
    for number, (x, y) in enumerate(batches(7, (8, 6))):
        fault = (where, action, rank) if number == at else ("", "", 0)
        try:
            losses.append(float(step(x, y, *fault, timeout=1.5 if fault[1] == "hang" else None)))
        except (synk.errors.SynkError, ArithmeticError, KeyboardInterrupt) as error:
            counted = error.step_counted  # type: ignore[union-attr]
            losses.append(None if counted else float(step(x, y, "", "", 0)))
    assert rep.num_steps == 7
    states = rank_states(rep)
    assert all(is_alike(states[0], other) for other in states[1:])
    rep.pull()
    assert is_alike(states[0], state_of(objects))
    return losses, states[0], counted


@pytest.mark.parametrize(
    ("where", "action"),
    [
        (where, action)
        for where in ("forward", "backward", "reduction")
        for action in ("kill", "raise", "hang", "interrupt")
    ],
)
@pytest.mark.sampled(20)
def test_a_step_that_did_not_count_leaves_no_trace(reused: Callable[..., Any], where: str, action: str) -> None:
    """Spectral norm, batch norm, counters that are buffers, tensors, numbers, lists and generators of the module."""
    rt = reused(2)
    expected, clean, _ = run(rt)
    losses, state, counted = run(rt, where, action)
    assert counted is False
    assert losses == expected
    assert is_alike(clean, state)


def test_the_number_of_forward_passes_is_that_of_plain_torch(reused: Callable[..., Any]) -> None:
    rt = reused(2)
    _, state, _ = run(rt, "forward", "raise")
    plain = build()
    for x, y in batches(7, (8, 6)):
        body_of(act)(*plain, x, y, "", "", 0)
    assert state["model"]["count"] == plain[0].count == 7
    assert int(state["model"]["table"][0]) == int(plain[0].table[0]) == 7
    assert state["model"]["notes"] == plain[0].notes


@pytest.mark.parametrize("action", ["raise", pytest.param("kill", marks=pytest.mark.storm)])
def test_accumulated_gradients_are_put_back(reused: Callable[..., Any], action: str) -> None:
    """A call that only adds to the gradients of the one before."""
    rt = reused(2)
    found = []
    for has_fault in (False, True):
        torch.manual_seed(1)
        model = torch.nn.Linear(5, 2).double()
        rep = synk.torch.replicate(model, runtime=rt)

        @rep.function(bcast_inputs=("where", "action", "rank"))
        def gather(model: Any, x: Any, y: Any, where: str, action: str, rank: int) -> Any:
            loss = F.mse_loss(model(x), y)
            loss.backward()
            if where and synk.comm.rank == rank:
                act(action)
            synk.comm.barrier()
            return loss

        for number, (x, y) in enumerate(batches(4, (8,))):
            if has_fault and number == 2:
                with pytest.raises((synk.errors.WorkerDied, ArithmeticError)):
                    gather(x, y, "here", action, 1)
            gather(x, y, "", "", 0)
        found.append(model.weight.grad.clone())
    assert torch.equal(*found)


def test_gradients_that_were_kept_back_on_a_worker_that_died_are_not_made_up(reused: Callable[..., Any]) -> None:
    rt = reused(2)
    model = torch.nn.Linear(5, 2).double()
    rep = synk.torch.replicate(model, runtime=rt)

    @rep.function(bcast_inputs="is_last")
    def gather(model: Any, x: Any, y: Any, is_last: bool) -> Any:
        if is_last:
            F.mse_loss(model(x), y).backward()
        else:
            with rep.no_sync():
                F.mse_loss(model(x), y).backward()
        return 0.0

    x, y = batches(1)[0]
    gather(x, y, False)
    kill_and_wait(pids(rt)[1])
    with pytest.raises(ValueError, match="ended with a worker"):
        gather(x, y, True)
    model.zero_grad()
    gather(x, y, True)
    own = copy.deepcopy(model)
    own.zero_grad()
    F.mse_loss(own(x), y).backward()
    assert torch.allclose(model.weight.grad, own.weight.grad, rtol=0, atol=1e-12)


def test_a_step_that_was_broken_off_inside_of_no_grad(shared_runtimes: Any) -> None:
    """An interrupt can come between the lines of torch's own ``__exit__``."""
    model = torch.nn.Linear(5, 2).double()
    rep = synk.torch.replicate(model, runtime=shared_runtimes[2])

    @rep.function(bcast_inputs="is_broken_off")
    def step(model: Any, x: Any, y: Any, is_broken_off: bool) -> Any:
        if is_broken_off:
            torch.set_grad_enabled(False)
            raise ArithmeticError("on purpose")
        model.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    x, y = batches(1)[0]
    with pytest.raises(ArithmeticError):
        step(x, y, True)
    step(x, y, False)
    assert model.weight.grad is not None


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
    return synk.comm.all_reduce(loss.detach(), "avg") if synk.comm else loss


def lbfgs(model: Any, optimizer: Any, x: Any, y: Any, fault: str) -> Any:
    count = []

    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        count.append(1)
        if fault and synk.comm.rank == 1 and len(count) == 3:
            act(fault)
        loss.backward()
        return loss

    return optimizer.step(closure)


def linear() -> Any:
    return torch.nn.Linear(5, 2).double()


def made_for(body: Any) -> tuple[Any, ...]:
    torch.manual_seed(1)
    model, other = linear(), linear()
    adam, second = torch.optim.Adam(model.parameters(), 0.01), torch.optim.Adam(other.parameters(), 0.01)
    if body is two_optimizers:
        return model, other, adam, second
    if body is follow:
        return model, other.requires_grad_(False), adam
    return (model, torch.optim.LBFGS(model.parameters(), max_iter=4)) if body is lbfgs else (model, adam)


@pytest.mark.parametrize("body", [two_optimizers, follow, reduce_after_the_step, lbfgs])
@pytest.mark.parametrize("fault", ["raise", pytest.param("kill", marks=pytest.mark.storm)])
def test_parameters_that_change_before_the_ranks_communicate_are_put_back(
    reused: Callable[..., Any], body: Any, fault: str
) -> None:
    """What steps change when is noticed in the first one."""
    rt = reused(2)
    outcomes = []
    for has_fault in (False, True):
        objects = made_for(body)
        rep = synk.torch.replicate(*objects, runtime=rt)
        step = rep.function(body, bcast_inputs="fault")
        losses = []
        for number, (x, y) in enumerate(batches(6, (8, 6))):
            if has_fault and number == 3:
                with pytest.raises((synk.errors.WorkerDied, ArithmeticError)) as caught:
                    step(x, y, fault)
                assert caught.value.step_counted is False  # type: ignore[attr-defined]
            losses.append(float(step(x, y, "")))
        states = rank_states(rep)
        assert is_alike(*states)
        outcomes.append((losses, states[0]))
    assert outcomes[0][0] == outcomes[1][0]
    assert is_alike(outcomes[0][1], outcomes[1][1])


@pytest.mark.storm  # workers of its own that import torch
def test_an_interrupt_of_the_first_step_breaks_off_no_import_of_torch(runtime: Callable[..., Any]) -> None:
    """What optimizers import when they are first used is there before any step."""
    rt = runtime(1)
    model = torch.nn.Linear(5, 2)
    synk.torch.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), runtime=rt)
    loaded = rt.function(lambda x: sorted(sys.modules), outputs=None)
    before = loaded(np.zeros(1))
    rep = synk.torch.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), runtime=rt)
    rep.function(lambda model, optimizer, x: optimizer.zero_grad() or model(x).sum())(torch.ones(1, 5))
    new = {name.partition(".")[0] for (name,) in zip(set(loaded(np.zeros(1))[0]) - set(before[0]))}
    assert "torch" not in new
    assert "sympy" not in new


def test_what_is_kept_before_a_step_is_whole_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while it is looked at what the objects are made of: no workers needed."""
    monkeypatch.setattr(cell, "worker", SimpleNamespace(rng=np.random.default_rng(1), num_collectives=0))
    model, optimizer, scheduler = objects = build()
    options = Options(0, sync_batchnorm=False, bucket_nbytes=1 << 20, overlap=False)
    undo, replica = Undo(objects, GradientSum(objects, options, Phases())), SimpleNamespace(num_steps=0)
    broken_off = monkeypatch.context()
    with broken_off as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(_state, "parameters_of", lambda objects: (_ for _ in ()).throw(KeyboardInterrupt))
        undo.keep(replica)
    before = copy.deepcopy(state_of(objects))
    put_back = undo.keep(replica)
    model(batches(1)[0][0])
    model.scale, model.other_table = 5.0, torch.ones(2)
    optimizer.param_groups[0]["lr"] = 7.0
    scheduler.last_epoch = 5
    model.eval()
    assert not is_alike(before, state_of(objects))
    assert put_back() == b""
    assert is_alike(before, state_of(objects))
    assert not hasattr(model, "other_table")


# ----- pull keeps what the program has changed


CHANGES: dict[str, Callable[..., None]] = {
    "lr": lambda model, optimizer: optimizer.param_groups[0].update(lr=0.5),
    "checkpoint": lambda model, optimizer: model.load_state_dict({k: v + 1 for k, v in model.state_dict().items()}),
    "eval": lambda model, optimizer: model.eval(),
    "attribute": lambda model, optimizer: setattr(model, "scale", 3.0),
    "in place": lambda model, optimizer: model.table.add_(7),
}


@pytest.mark.parametrize("change", CHANGES)
def test_pull_throws_away_nothing_that_the_program_has_changed(shared_runtimes: Any, change: str) -> None:
    model, optimizer, _ = build(*(feature for feature in ALL if feature != "batch norm"))
    rep = synk.torch.replicate(model, optimizer, runtime=shared_runtimes[2])

    @rep.function
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        return body_of(act)(model, optimizer, None, x, y, "", "", 0)

    (x, y), *_ = batches(1)
    step(x, y)
    CHANGES[change](model, optimizer)
    expected = copy.deepcopy(state_of((model, optimizer)))
    rep.pull()
    assert is_alike(expected, state_of((model, optimizer)))
    rep.function(lambda model, optimizer, x: x.sum(), trains=False, outputs="sum")(x)
    assert all(is_alike(expected, state) for state in rank_states(rep))


# ----- plain attributes


def test_a_worker_that_takes_the_place_of_another_has_the_plain_attributes_too(reused: Callable[..., Any]) -> None:
    rt = reused(2)
    objects = build()
    rep = synk.torch.replicate(*objects, sync_batchnorm=True, runtime=rt)
    step = rep.function(body_of(act), bcast_inputs=("where", "action", "rank"))
    for x, y in batches(3, (8, 6)):
        step(x, y, "", "", 0)
    before = rank_states(rep)
    kill_and_wait(pids(rt)[1])
    after = rank_states(rep)
    assert is_alike(before[0], after[1])
    rep.pull()
    assert is_alike(before[0], state_of(objects))


class Holder(torch.nn.Module):
    """Attributes of many kinds, which refer to parts of the model and to one another."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(5, 2)
        self.rnn = torch.nn.LSTM(5, 5)  # has a list of its parameters
        self.values: dict[str, Any] = {
            "array": np.arange(3.0), "deque": deque([1]), "nested": [{"tensor": torch.zeros(2)}], "set": {1},
            "numpy": np.random.default_rng(1), "python": random.Random(1), "torch": torch.Generator(),
        }  # fmt: skip
        self.alias = self.values["nested"]
        self.parts = [self.linear.weight, self.linear]
        self.activation = torch.tanh
        self.own = lambda x: x + 1

    def advance(self) -> None:
        self.values["array"] += 1
        self.values["deque"].append(len(self.values["deque"]))
        self.values["set"].add(len(self.values["set"]) + 1)
        self.alias[0]["tensor"] += 1
        self.drawn = [
            float(self.values["numpy"].random()), self.values["python"].random(),
            float(torch.rand(1, generator=self.values["torch"])),
        ]  # fmt: skip

    def summary(self) -> list[Any]:
        values = self.values
        return [
            values["array"].tolist(), list(values["deque"]), values["set"], values["nested"][0]["tensor"].tolist(),
            values["numpy"].bit_generator.state, values["python"].getstate(), values["torch"].get_state().tolist(),
            self.alias is values["nested"], self.parts[0] is self.linear.weight, self.parts[1] is self.linear,
            self.rnn._flat_weights[0] is self.rnn.weight_ih_l0, self.own(1), getattr(self, "drawn", None),
        ]  # fmt: skip


@pytest.mark.parametrize("action", [pytest.param("kill", marks=pytest.mark.storm), "raise", "restart"])
@pytest.mark.sampled(2)
def test_attributes_of_many_kinds(reused: Callable[..., Any], action: str) -> None:
    rt = reused(2)
    model, plain = Holder().double(), Holder().double()
    held, own = model.values["array"], model.own
    rep = synk.torch.replicate(model, runtime=rt)

    @rep.function(bcast_inputs="fault")
    def step(model: Any, x: Any, fault: str) -> Any:
        model.advance()
        if fault and synk.comm.rank == 1:
            act(fault)
        loss = model.linear(x).mean()
        loss.backward()
        return loss

    x = torch.ones(4, 5, dtype=torch.float64)
    for number in range(4):
        if number == 2 and action != "restart":
            with pytest.raises((synk.errors.WorkerDied, ArithmeticError)):
                step(x, action)
        elif number == 2:
            kill_and_wait(pids(rt)[0])
        step(x, "")
        plain.advance()
    see = rep.function(lambda model, x: repr(model.summary()), trains=False, outputs=None)
    assert see(x) == [repr(plain.summary())] * 2
    assert model.summary() == plain.summary()
    assert model.values["array"] is held  # objects of the program stay what they were
    assert model.own is own


def test_groups_that_the_body_has_added_come_along(reused: Callable[..., Any]) -> None:
    rt = reused(2)
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(5, 5), torch.nn.Linear(5, 2)).double()
    plain = copy.deepcopy(model)

    def step(model: Any, optimizer: Any, x: Any, y: Any, grows: bool) -> Any:
        if grows:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.1})
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    optimizers = [torch.optim.SGD(each[1].parameters(), lr=0.01) for each in (model, plain)]
    rep = synk.torch.replicate(model, optimizers[0], runtime=rt)
    run = rep.function(step, bcast_inputs="grows")
    for number, (x, y) in enumerate(batches(6)):
        loss = run(x, y, number == 2)
        assert abs(float(loss) - float(step(plain, optimizers[1], x, y, number == 2))) < 1e-12
        if number == 3:
            kill_and_wait(pids(rt)[1])
    assert is_alike(*rank_states(rep))
    assert [group["lr"] for group in optimizers[0].param_groups] == [0.01, 0.1]
    assert optimizers[0].param_groups[1]["params"][0] is model[0].weight


def test_what_changes_in_place_in_the_program_reaches_the_ranks(shared_runtimes: Any) -> None:
    """Objects that were taken from the module before, so that nobody looks at the module."""
    model = Holder().double()
    values = model.values
    tensor, listed = values["nested"][0]["tensor"], values["deque"]
    rep = synk.torch.replicate(model, runtime=shared_runtimes[2])
    see = rep.function(lambda model, x: repr(model.summary()[:4]), trains=False, outputs=None)
    x = torch.ones(4, 5, dtype=torch.float64)
    for change in (
        lambda: tensor.add_(3),
        lambda: tensor.data.add_(4),
        lambda: listed.append(5),
        lambda: values["array"].fill(9.0),
    ):
        see(x)
        change()
        expected = [values["array"].tolist(), list(listed), values["set"], tensor.tolist()]
        assert see(x) == [repr(expected)] * 2


def test_what_cannot_be_pickled_is_told(shared_runtimes: Any) -> None:
    import threading

    model = torch.nn.Linear(5, 2).double()
    rep = synk.torch.replicate(model, runtime=shared_runtimes[2])

    @rep.function
    def step(model: Any, x: Any) -> Any:
        model.lock, model.number = threading.Lock(), 3
        return model(x).mean()

    step(torch.ones(4, 5, dtype=torch.float64))
    with pytest.warns(RuntimeWarning, match=r"Linear.lock stays .* own"):
        rep.pull()
    assert model.number == 3


def test_a_runtime_is_closed_although_a_warning_about_lost_objects_is_an_error(runtime: Callable[..., Any]) -> None:
    rt = runtime(1)
    model = torch.nn.Linear(5, 1)
    step = synk.torch.replicate(model, runtime=rt).function(lambda model, x: model(x).mean().backward())
    step(torch.ones(4, 5))
    kill_and_wait(*pids(rt))
    with pytest.raises(RuntimeWarning, match="Linear could not be brought up to date before the runtime was closed"):
        rt.close()
    assert rt.is_closed
    assert type(model) is torch.nn.Linear
    assert "weight" in model.state_dict()


# ----- DataParallel


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(5, 2)
        self.scale = torch.ones(2, dtype=torch.float64)
        self.options = {"shift": [1.0], "array": np.zeros(2)}

    def forward(self, x: Any) -> Any:
        options = self.options
        return self.linear(x) * self.scale + options["shift"][0] + torch.from_numpy(options["array"])


@pytest.mark.parametrize("change", [
    lambda model: model.scale.mul_(3), lambda model: model.options["shift"].__setitem__(0, 2.0),
    lambda model: model.options["array"].fill(4.0), lambda model: model.options.update(shift=[7.0]),
    lambda model: model.scale.__setitem__(0, -1.0), lambda model: model.scale.data.mul_(3),
    lambda model: model.scale.numpy().fill(5.0),
])  # fmt: skip
def test_data_parallel_sees_what_changes_in_place(shared_runtimes: Any, change: Callable[..., Any]) -> None:
    model = synk.torch.DataParallel(Scaled().double(), runtime=shared_runtimes[2])
    (x, _), *_ = batches(1)
    model(x)
    change(model)
    assert torch.allclose(model(x), model.module(x), rtol=0, atol=1e-12)
    placed = model._synk_passes._placed
    model(x)
    assert model._synk_passes._placed is placed
