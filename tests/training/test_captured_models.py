"""Models and their classes between the program and the ranks: what is captured, and which methods a pass runs.

What the body of a step, or the program in ``here()``, makes of the objects beyond the numbers in them.
"""

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

pytestmark = pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")


def test_an_optimizer_is_refused(shared_runtimes: Any) -> None:
    """Where a function is built; ``replicate`` is named."""
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for build in (shared_runtimes[2].function, synk.function):
        for fn in (lambda x: optimizer.zero_grad(), lambda x: scheduler.get_last_lr()[0]):
            with pytest.raises(TypeError, match=r"refers to a torch optimizer \(SGD\).*replicate\(model, optimizer\)"):
                build(fn, framework="torch")


def test_a_module_may_be_read_and_differentiated_and_follows_the_programs(shared_runtimes: Any) -> None:
    layers = torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)
    model, x = torch.nn.Sequential(*layers).double().eval(), torch.randn(5, 3, dtype=torch.float64)

    def gradient(x: Any) -> Any:
        model.zero_grad()
        model(x).mean().backward()
        return model[0].weight.grad.clone()

    for workers in (1, 2, 0):
        predict = shared_runtimes[workers].function(lambda x: model(x), framework="torch", outputs="gather")
        find = shared_runtimes[workers].function(gradient, framework="torch")
        for _ in range(3):
            found = find(x)
            assert torch.allclose(found, gradient(x), rtol=0, atol=1e-14)
            with torch.no_grad():
                assert torch.allclose(predict(x).detach(), model(x), rtol=0, atol=1e-12)
                model[0].weight.mul_(0.5)  # is sent


def test_a_call_that_changes_a_captured_module_ends_with_an_error(rt: Any) -> None:
    """Other functions, and the same one built anew, go on."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))

    def step(x: Any, is_changing: bool) -> Any:
        if is_changing:
            model(torch.ones(4, 3))  # the statistics of the batch norm
        return x.sum()

    build = lambda: rt.function(step, bcast_inputs="is_changing", outputs="sum", framework="torch")  # noqa: E731
    f = build()
    assert float(f(torch.ones(4), False)) == 4.0
    with pytest.raises(TypeError, match=r"of a torch module that it captured.*synk\.torch\.replicate"):
        f(torch.ones(4), True)
    assert rt.function(lambda x: x.sum(), outputs="sum")(np.ones(4)) == 4.0
    assert float(build()(torch.ones(4), False)) == 4.0


# ----- the classes of models

X = torch.ones(4, 2)


def by_replicate(model: Any, runtime: Any, settings: dict[str, float]) -> Callable[[], float]:
    def step(model: Any, x: Any) -> Any:
        loss = model(x).mean() + settings["shift"]
        loss.backward()
        return loss

    run = synk.torch.replicate(model, runtime=runtime).function(step)
    return lambda: run(X).item()


def by_data_parallel(model: Any, runtime: Any, settings: dict[str, float]) -> Callable[[], float]:
    parallel = synk.torch.DataParallel(model, runtime=runtime)
    return lambda: parallel(X).mean().item() + settings["shift"]


@pytest.mark.parametrize("way", [by_replicate, by_data_parallel])
def test_a_pass_runs_the_methods_of_now(subtests: Any, reused: Any, shared_runtimes: Any, way: Any) -> None:
    """Of the class of a part, with what they and the body read; also on a worker that was started again."""
    settings = {"scale": 1.0, "shift": 0.0}

    class Part(torch.nn.Module):
        offset = 0.0

        def forward(self, x: Any) -> Any:
            return x * settings["scale"] + self.offset

    for runtime in (reused(2), shared_runtimes[0]):
        with subtests.test(workers=runtime.world_size):
            layer = torch.nn.Linear(2, 2)
            torch.nn.init.ones_(layer.weight)
            torch.nn.init.zeros_(layer.bias)
            run, own = way(torch.nn.Sequential(layer, Part()), runtime, settings), Part.forward
            for settings["scale"] in (1.0, 2.0):
                for settings["shift"] in (1.0, 0.0):
                    assert run() == 2 * settings["scale"] + settings["shift"]
            Part.offset = 10.0
            assert run() == 14.0
            if runtime.world_size == 2:
                kill_and_wait(pids(runtime)[1])
            Part.forward = lambda self, x: x * 0 + settings["scale"] + 5
            assert run() == 7.0
            Part.forward, Part.offset = own, 0.0
            assert run() == 4.0


# ----- memory that several tensors share


def test_tensors_that_overlap_are_refused_by_name(rt: Any) -> None:
    x = torch.randn(5, 4)
    made = lambda: torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))  # noqa: E731
    model = made()
    model[1].weight.data = model[0].weight.data.t()
    with pytest.raises(ValueError, match=r"got '.*' and '.*' that share memory .* the same Parameter"):
        synk.torch.replicate(model, runtime=rt)
    expected = model(x).detach()
    assert torch.allclose(synk.torch.DataParallel(model, runtime=rt)(x), expected, atol=1e-6)  # keeps no copies
    model, table = made(), torch.randn(4, 8)
    model[0].weight.data, model[1].weight.data = table[:, :4], table[:, 4:]  # lie between each other, share nothing
    expected = model(x).detach()
    run = synk.torch.replicate(model, runtime=rt).function(lambda model, x: model(x), trains=False, outputs="gather")
    assert torch.allclose(run(x), expected, atol=1e-6)
    assert torch.allclose(synk.torch.DataParallel(torch.nn.Sequential(*model), runtime=rt)(x), expected, atol=1e-6)


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
def test_what_a_body_makes_travels(rt: Any) -> None:
    """To a rank without rows, to one that was started again, and to the program."""
    model, plain = Growing(), Growing()
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
