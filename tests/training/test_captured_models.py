"""Models and their classes between the program and the ranks: what is captured, and which methods a pass runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import kill_and_wait, pids

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


def test_a_call_that_changes_a_captured_module_ends_with_an_error(shared_runtimes: Any) -> None:
    """Other functions, and the same one built anew, go on."""
    rt, model = shared_runtimes[2], torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))

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


def test_tensors_that_overlap_are_refused_by_name(shared_runtimes: Any) -> None:
    rt, x = shared_runtimes[2], torch.randn(5, 4)
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
