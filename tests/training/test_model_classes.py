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
