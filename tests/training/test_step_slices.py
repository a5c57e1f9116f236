"""``rep.function(on_oom="slices")``: a step in slices is the step, also where it runs out of memory in one piece."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from trainings import (
    LOSSES,
    MODELS,
    PLAIN_SUMS,
    adversarial_step,
    batches,
    body,
    closure_step,
    differences,
    generator_and_judge,
    mlp,
    plain_step,
    rank_states,
    state_of,
    with_lbfgs,
)

import synk

torch = pytest.importorskip("torch")

ROOM_NBYTES = 60_000_000
NUM_ROWS = 6_401


def with_adam(model: Any) -> tuple[Any, ...]:
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def test_a_step_in_slices_is_the_step(subtests: Any, shared_runtimes: Any) -> None:
    """In as many slices as were asked for: 3, of rows that do not divide evenly, or of one row."""
    shared = MODELS["shared, frozen, unused and rarely used parameters"]
    cases: list[tuple[str, Any, Any, Any]] = [
        ("a generator and a discriminator", generator_and_judge, adversarial_step, adversarial_step),
        ("a closure", with_lbfgs, closure_step, closure_step),
    ]
    for loss, way in (("mean", "clipped"), ("mean", "accumulated"), ("mean over some", "plain"), ("sum", "two passes")):
        build = lambda loss=loss: with_adam((mlp if loss == "sum" else shared)().double())  # noqa: E731
        cases.append((f"{loss}, {way}", build, *(body(LOSSES[loss], way, sums) for sums in (synk.torch, PLAIN_SUMS))))
    for number, (name, build, step, plain) in enumerate(cases):
        with subtests.test(case=name):
            serial, objects = ((torch.manual_seed(2), build())[1] for _ in range(2))
            data = batches(4, (11, 8, 3))
            expected = [float(plain(*serial, *rows).detach()) for rows in data]
            rep = synk.torch.replicate(*objects, runtime=shared_runtimes[(3, 1, 2)[number % 3]])
            f = rep.function(step, outputs="avg", on_oom="slices")
            found = [float(f(*rows, num_slices=1 if count == 2 else 3)) for count, rows in enumerate(data)]
            assert differences(expected, found, 1e-9) == []
            assert all(differences(state_of(serial), state, 1e-8) == [] for state in rank_states(rep))
            assert rep.num_steps == len(data)


def limit_memory(x: Any) -> None:
    """Let this process have little more memory than it has now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        nbytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (nbytes + ROOM_NBYTES, resource.RLIM_INFINITY))


def test_a_step_that_does_not_fit_is_taken_in_slices(runtime: Callable[..., Any], caplog: Any) -> None:
    def wide() -> tuple[Any, Any]:
        """Return a small model whose activations take 16 KB for each row."""
        torch.manual_seed(3)
        model = torch.nn.Sequential(torch.nn.Linear(5, 1000), torch.nn.Tanh(), torch.nn.Linear(1000, 2)).double()
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    rt, objects, serial, data = runtime(2), wide(), wide(), batches(3, (6, NUM_ROWS))
    expected = [float(plain_step(*serial, *rows).detach()) for rows in data]
    rep = synk.torch.replicate(*objects, runtime=rt)
    plain, f = rep.function(plain_step), rep.function(plain_step, on_oom="slices", name="in slices")
    found = [float(f(*data[0]))]
    rt.function(limit_memory, outputs=None)(np.zeros(2))
    with pytest.raises(MemoryError) as caught:
        plain(*data[1])
    assert caught.value.step_counted is False  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING, "synk"):
        found += [float(f(*rows)) for rows in data[1:]]
    told = [each.getMessage().partition(" (")[0] for each in caplog.records]
    assert told == ["'in slices' ran out of memory on a rank"]
    lift = lambda x: resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)  # noqa: E731
    rt.function(lift, outputs=None)(np.zeros(2))  # the allocator may have left nothing below it
    assert differences(expected, found, 1e-9) == []
    states = rank_states(rep)
    assert differences(*states) == [] and differences(state_of(serial), states[0], 1e-8) == []
