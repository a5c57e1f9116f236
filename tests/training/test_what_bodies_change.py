"""What the body of a step, or the program in ``here()``, makes of the objects beyond the numbers in them."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import kill_and_wait, pids
from trainings import F, batches, differences, mlp, plain_step, rank_states, state_of

import synk

torch = pytest.importorskip("torch")


class Growing(torch.nn.Module):
    """Makes a buffer and numbers in its first pass, and drops a buffer; all later passes count on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.register_buffer("passes", None)
        self.register_buffer("dropped", torch.ones(2))

    def forward(self, x: Any) -> Any:
        self.passes = torch.ones(1) if self.passes is None else self.passes + 1
        self.dropped = None
        self.count = getattr(self, "count", 0) + 1
        self.scale = np.float64(0.5) * getattr(self, "scale", 1.0) + 0.5
        return self.inner(x) * (1 + 0.01 * self.count + 0.02 * self.passes) * float(self.scale)


class Wrapping(torch.optim.Optimizer):
    """Has numbers and tensors beside its slots, a slot that belongs to no parameter, and an optimizer in it."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.inner = torch.optim.SGD(self.param_groups, momentum=0.9)
        self.param_groups = self.inner.param_groups
        self.count, self.state["count"] = 0, 0
        self.slow = {each: each.detach().clone() for group in self.param_groups for each in group["params"]}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count, self.state["count"] = self.count + 1, self.state["count"] + 2
        self.param_groups[0]["lr"] = 0.05 / self.count
        self.inner.step()
        for parameter, slow in self.slow.items():
            slow.lerp_(parameter, 0.5)
            parameter.lerp_(slow, 0.02 * self.state["count"])


@pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")
def test_what_a_body_makes_travels(reused: Callable[..., Any]) -> None:
    """To a rank without rows, to one that was started again, and to the program."""
    rt, model, plain = reused(2), Growing(), Growing()
    optimizer, plain_optimizer = (Wrapping(each.parameters()) for each in (model, plain))
    rep = synk.torch.replicate(model, optimizer, runtime=rt)
    step = rep.function(plain_step, outputs="avg")
    for number, (x, y) in enumerate(batches(6, (1, 8, 7))):
        if number == 4:
            kill_and_wait(pids(rt)[1])
        loss = float(step(x, y))
        assert abs(loss - float(plain_step(plain, plain_optimizer, x, y).detach())) < 1e-12
    one, other = rank_states(rep)
    assert differences(one, other) == []
    rep.pull()
    assert differences(state_of([plain, plain_optimizer]), state_of([model, optimizer]), 1e-12) == []
    assert model.passes.tolist() == [6] and model.dropped is None and model.count == 6


STRUCTURE: dict[str, Callable[[Any], Any]] = {
    "a layer more": lambda model: model.insert(1, torch.nn.Tanh()),
    "a norm more": lambda model: model.append(torch.nn.BatchNorm1d(2).double()),
    "a parameter more": lambda model: setattr(model, "bias", torch.nn.Parameter(torch.zeros(2))),
    "a layer less": lambda model: model.__delitem__(1),
}


def test_a_body_that_changes_the_structure_is_refused(shared_runtimes: Any, subtests: Any) -> None:
    for name, change in STRUCTURE.items():
        with subtests.test(change=name):
            model, plain = mlp(), mlp()
            optimizer, plain_optimizer = (torch.optim.SGD(each.parameters(), lr=0.05) for each in (model, plain))
            rep = synk.torch.replicate(model, optimizer, runtime=shared_runtimes[2])

            def body(model: Any, optimizer: Any, x: Any, y: Any, is_changed: Any, change: Any = change) -> Any:
                if is_changed:
                    change(model)
                return plain_step(model, optimizer, x, y)

            step = rep.function(body, outputs="avg", bcast_inputs=("is_changed", "change"))
            for x, y in batches(3, (8, 7)):
                with pytest.raises(ValueError, match=r"its body has added, removed or replaced .*rep\.here\(\)"):
                    step(x, y, True)
                step(x, y, False)
                plain_step(plain, plain_optimizer, x, y)
            rep.pull()
            assert differences(state_of([plain]), state_of([model]), 1e-12) == []


def test_copies_of_which_one_is_no_number_are_apart(subtests: Any, shared_runtimes: Any) -> None:
    """Also after so many steps that the rounding of 16 bits allows for any number."""
    nan, inf = float("nan"), float("inf")
    cases = (
        (torch.bfloat16, ([nan, 1.0], [inf, 1.0])),
        (torch.bfloat16, ([nan, 1.0], [0.0, 1.0])),
        (torch.float32, ([nan, 1.0], [nan, 1.5])),
    )

    def body(model: Any, x: Any, values: Any) -> Any:
        with torch.no_grad():
            model.bias.copy_(torch.tensor(values[synk.comm.rank]))
        return x.sum()

    (x, _), *_ = batches(1)
    for dtype, values in cases:
        with subtests.test(dtype=dtype, values=values):
            rep = synk.torch.replicate(torch.nn.Linear(5, 2).to(dtype), runtime=shared_runtimes[2])
            step = rep.function(body, bcast_inputs="values", outputs="sum")
            for _ in range(31):
                step(x, ([1.0, 1.0], [1.0, 1.0]))
            step(x, values)
            with pytest.raises(ValueError, match="workers' copies differ in 'bias' of Linear"):
                step(x, values)


def test_what_follows_the_rows_of_one_worker_is_told(subtests: Any, shared_runtimes: Any) -> None:
    """Unless it was averaged."""

    def follow(model: Any, scheduler: Any, x: Any, of: str, is_averaged: bool) -> None:
        mean = synk.comm.all_reduce(x.mean(), "avg") if is_averaged else x.mean()
        model.mean.lerp_(mean, 0.5) if of == "'mean' of Linear" else scheduler.step(mean)

    for of, is_averaged in itertools.product(("'mean' of Linear", "the state of ReduceLROnPlateau"), (True, False)):
        with subtests.test(of=of, is_averaged=is_averaged):
            model = torch.nn.Linear(5, 2)
            model.register_buffer("mean", torch.zeros((), dtype=torch.float64))
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(torch.optim.SGD(model.parameters(), lr=0.1))
            rep = synk.torch.replicate(model, scheduler, runtime=shared_runtimes[2])
            step = rep.function(follow, bcast_inputs=("of", "is_averaged"), outputs=None)
            told = contextlib.nullcontext() if is_averaged else pytest.raises(ValueError, match=f"differ in {of}")
            step(batches(1)[0][0], of, is_averaged)
            with told:
                step(batches(1)[0][0], of, is_averaged)


def test_odd_parameters_and_a_call_that_was_not_sent(shared_runtimes: Any) -> None:
    model, plain = mlp(), mlp()
    model.register_parameter("places", torch.nn.Parameter(torch.arange(3), requires_grad=False))
    model.register_parameter("nothing", torch.nn.Parameter(torch.zeros(0, 3, dtype=torch.float64)))
    rep = synk.torch.replicate(model, runtime=shared_runtimes[2])

    @rep.function(outputs="avg")
    def step(model: Any, x: Any, y: Any) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    (x, y), *_ = batches(1)
    for call in (step, step.submit):
        with pytest.raises(TypeError, match="missing a required argument"):
            call(x)
        model(x)  # it is not behind
    for _ in range(3):  # before some of which parameters are compared
        step(x, y)
        F.mse_loss(plain(x), y).backward()
    rep.pull()
    assert torch.allclose(model[0].weight.grad, plain[0].weight.grad, rtol=0, atol=1e-14)
