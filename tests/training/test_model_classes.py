"""The classes of models: a step, an evaluation and a forward pass run the methods that the program has now."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.harness import replaced_workers

import synk
from synk.errors import WorkerDied

torch = pytest.importorskip("torch")

X = torch.ones(4, 2)


def script() -> SimpleNamespace:
    """Return the class of a model and of a part of it, whose methods read ``settings``."""
    settings = {"scale": 1.0}

    class Part(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return x * settings["scale"]

    class Model(torch.nn.Module):
        offset = 0.0

        def __init__(self) -> None:
            super().__init__()
            self.part = Part()
            self.weight = torch.nn.Parameter(torch.ones(2))

        def forward(self, x: Any) -> Any:
            return self.part(x * self.weight) + self.offset

    return SimpleNamespace(settings=settings, Part=Part, Model=Model)


def by_replicate(model: Any, runtime: Any) -> Callable[[], float]:
    rep = synk.torch.replicate(model, runtime=runtime)
    step = rep.function(lambda model, x: model(x).mean(), trains=False)
    return lambda: step(X).item()


def by_data_parallel(model: Any, runtime: Any) -> Callable[[], float]:
    parallel = synk.torch.DataParallel(model, runtime=runtime)
    return lambda: parallel(X).mean().item()


@pytest.mark.parametrize("num_workers", [2, "inline"])
@pytest.mark.parametrize("way", [by_replicate, by_data_parallel])
def test_a_pass_runs_the_methods_of_now(shared_runtimes: Any, way: Callable[..., Any], num_workers: Any) -> None:
    s, runtime = script(), shared_runtimes[num_workers]
    model = s.Model()
    captured = runtime.function(lambda x: x * s.Part().forward(1.0), outputs="gather")
    run, own = way(model, runtime), s.Part.forward
    for scale in (1.0, 2.0):
        s.settings["scale"] = scale
        assert run() == model(X).mean().item() == scale
        assert captured(np.ones(2)).tolist() == [scale, scale]
    s.Model.offset = 10.0
    assert run() == 12.0
    s.Part.forward = lambda self, x: x * 0 + s.settings["scale"] + 5
    assert run() == 17.0
    assert captured(np.ones(2)).tolist() == [7.0, 7.0]
    s.Part.forward = own
    assert run() == 12.0
    assert s.Part.forward is own


@pytest.mark.parametrize("way", [by_replicate, by_data_parallel])
def test_a_worker_that_was_started_again_has_the_methods_of_now(runtime: Any, way: Callable[..., Any]) -> None:
    s, rt = script(), runtime(2)
    run = way(s.Model(), rt)
    assert run() == 1.0
    s.settings["scale"], s.Model.offset = 2.0, 3.0
    assert run() == 5.0
    with replaced_workers(rt, [1]) as pids, pytest.raises(WorkerDied):
        rt.function(lambda pid: os.kill(int(pid[0]), signal.SIGKILL), outputs=None)(np.repeat(pids[1], 2))
    assert run() == 5.0
    s.settings["scale"] = 4.0
    assert run() == 7.0


# ----- memory that several tensors share


def _transposed(model: Any) -> None:
    model[1].weight.data = model[0].weight.data.t()


def _one_of_all(model: Any) -> None:
    flat = torch.cat([each.data.reshape(-1) for each in model.parameters()])
    for each, part in zip(model.parameters(), flat.split([each.numel() for each in model.parameters()])):
        each.data = part.view_as(each)
    model.register_buffer("flat", flat)


def _rows(model: Any) -> None:
    model[0].register_buffer("row", model[0].weight.data[1])


def _as_a_whole(model: Any) -> None:
    model[1].bias.data = model[0].bias.data


def _interleaved(model: Any) -> None:
    table = torch.randn(4, 8)
    model[0].weight.data, model[1].weight.data = table[:, :4], table[:, 4:]


@pytest.mark.parametrize("tie", [_transposed, _one_of_all, _rows, _as_a_whole])
@pytest.mark.parametrize("when", ["before", "later"])
def test_tensors_that_share_memory_are_refused_by_name(
    shared_runtimes: Any, tie: Callable[[Any], None], when: str
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    if when == "before":
        tie(model)
        with pytest.raises(ValueError, match=r"got '.*' and '.*' that share memory .* the same Parameter"):
            synk.torch.replicate(model, runtime=shared_runtimes[2])
        return
    rep = synk.torch.replicate(model, runtime=shared_runtimes[2])
    run = rep.function(lambda model, x: model(x), trains=False, outputs="gather")
    run(torch.ones(4, 4))
    tie(model)
    with pytest.raises(ValueError, match="that share memory"):
        run(torch.ones(4, 4))


@pytest.mark.parametrize("tie", [_transposed, _one_of_all, _rows])
def test_data_parallel_refuses_tensors_that_overlap(shared_runtimes: Any, tie: Callable[[Any], None]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    tie(model)
    with pytest.raises(ValueError, match=r"cannot make DataParallel of 'Sequential': got .* that share memory"):
        synk.torch.DataParallel(model, runtime=shared_runtimes[2])


def test_tensors_that_lie_between_each_other_share_nothing(shared_runtimes: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    _interleaved(model)
    x = torch.randn(5, 4)
    expected = model(x).detach()
    run = synk.torch.replicate(model, runtime=shared_runtimes[2]).function(
        lambda model, x: model(x), trains=False, outputs="gather"
    )
    assert torch.allclose(run(x), expected, atol=1e-6)
    assert torch.allclose(
        synk.torch.DataParallel(model.__class__(*model), runtime=shared_runtimes[2])(x), expected, atol=1e-6
    )


# ----- hooks


class Gain:
    def __init__(self) -> None:
        self.gain = 1.0

    def __call__(self, module: Any, inputs: Any, output: Any) -> Any:
        return output * self.gain

    def method(self, module: Any, inputs: Any, output: Any) -> Any:
        return output * self.gain


class Tripled(torch.nn.Linear):
    def forward(self, x: Any) -> Any:
        return 3 * super().forward(x)


HOOKS: dict[str, Callable[[Any, Gain], Any]] = {
    "the object of a hook": lambda model, gain: setattr(gain, "gain", 3.0),
    "a new hook": lambda model, gain: model[1].register_forward_hook(Gain().method),
    "a hook removed": lambda model, gain: model[0]._forward_hooks.clear(),
    "a hook of a parameter": lambda model, gain: model[1].weight.register_hook(lambda gradient: gradient * 0),
}


@pytest.mark.parametrize("is_method", [False, True])
@pytest.mark.parametrize("change", HOOKS)
@pytest.mark.parametrize("way", ["replicate", "DataParallel"])
def test_hooks_are_those_of_now(shared_runtimes: Any, way: str, change: str, is_method: bool) -> None:
    def train(wrap: Callable[..., Any]) -> list[float]:
        torch.manual_seed(0)
        gain, model = Gain(), torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 1)).double()
        gain.gain = 2.0
        model[0].register_forward_hook(gain.method if is_method else gain)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        step, losses = wrap(model, optimizer), []
        for number in range(4):
            if number == 2:
                model[0].weight  # noqa: B018  brings the model up to date, as reading it does
                HOOKS[change](model, gain)
            losses.append(float(step(X.double())))
        return losses

    def body(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def parallel(model: Any, optimizer: Any) -> Any:
        if way == "replicate":
            return synk.torch.replicate(model, optimizer, runtime=shared_runtimes[2]).function(body)
        wrapped = synk.torch.DataParallel(model, runtime=shared_runtimes[2])
        return lambda x: body(wrapped, optimizer, x)

    expected = train(lambda model, optimizer: lambda x: body(model, optimizer, x))
    assert np.allclose(train(parallel), expected, rtol=0, atol=1e-12)


def test_a_hooks_object_that_changes_while_the_ranks_are_ahead_is_an_error(shared_runtimes: Any) -> None:
    gain, model = Gain(), torch.nn.Linear(2, 1)
    model.register_forward_hook(gain)
    rep = synk.torch.replicate(model, runtime=shared_runtimes[2])
    step = rep.function(lambda model, x: model(x).mean())
    step(X)
    gain.gain = 3.0
    with pytest.raises(ValueError, match=r"cannot bring Linear up to date: it was changed in the master, .* pull\(\)"):
        step(X)
    rep.push()  # says which one counts
    assert torch.allclose(step(X), model(X).mean())


def test_a_module_of_another_class_under_data_parallel(shared_runtimes: Any) -> None:
    inner = torch.nn.Sequential(torch.nn.Linear(2, 1))
    model = synk.torch.DataParallel(inner, runtime=shared_runtimes[2])
    model(X)
    inner[0].__class__ = Tripled
    assert torch.allclose(model(X), inner(X), rtol=0, atol=1e-6)
