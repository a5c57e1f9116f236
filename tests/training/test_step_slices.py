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
    F,
    batches,
    body,
    closure_step,
    differences,
    mlp,
    plain_step,
    rank_states,
    state_of,
)

import synk

torch = pytest.importorskip("torch")

ROOM_NBYTES = 60_000_000
NUM_ROWS = 6_401


def with_adam(model: Any) -> tuple[Any, ...]:
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def two_optimizers(one: Any, other: Any, first: Any, second: Any, x: Any, y: Any) -> Any:
    """Two backward passes, the second with what the first step has changed."""
    loss = plain_step(one, first, x, y)
    second.zero_grad()
    later = F.mse_loss(other(x) + one(x).detach(), y)
    later.backward()
    second.step()
    return loss + later


def of_two() -> tuple[Any, ...]:
    one, other = mlp(1), mlp(2)
    return one, other, torch.optim.Adam(one.parameters(), lr=0.01), torch.optim.Adam(other.parameters(), lr=0.01)


def of_closure() -> tuple[Any, Any]:
    model = mlp()
    return model, torch.optim.LBFGS(model.parameters(), max_iter=3)


def test_a_step_in_slices_is_the_step(subtests: Any, shared_runtimes: Any) -> None:
    """In as many slices as were asked for: 3, of rows that do not divide evenly, or of one row."""
    shared = MODELS["shared, frozen, unused and rarely used parameters"]
    cases: list[tuple[str, Any, Any, Any]] = [
        ("two optimizers", of_two, two_optimizers, two_optimizers),
        ("a closure", of_closure, closure_step, closure_step),
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


def test_what_slices_cannot_do_is_refused_and_put_back(subtests: Any, shared_runtimes: Any) -> None:
    model = mlp()
    rep = synk.torch.replicate(model, runtime=shared_runtimes[2])

    def uneven(model: Any, x: Any, y: Any) -> Any:
        loss = F.mse_loss(model(x), y)
        for _ in range(1 + int(bool((x[:, 0] == 7.0).any()))):
            loss.backward(retain_graph=True)
        return loss

    def keeping(model: Any, x: Any, y: Any) -> Any:
        with rep.no_sync():
            loss = F.mse_loss(model(x), y)
            loss.backward()
        return loss

    cases: dict[str, Callable[..., Any]] = {
        "more backward passes on some rows than on others": uneven,
        "cannot communicate in 'talking'": lambda model, x, y: (
            F.mse_loss(model(x), y) + float(synk.comm.all_reduce(1.0))
        ),
        r"it ends with gradients that no_sync\(\) keeps back": keeping,
    }
    (x, y), *_ = batches(1)
    x = torch.cat([x[:-1], torch.full((1, 5), 7.0, dtype=torch.float64)])
    before = rank_states(rep)
    for text, wrong in cases.items():
        with subtests.test(text=text), pytest.raises(ValueError, match=text):
            rep.function(wrong, on_oom="slices", name="talking")(x, y, num_slices=2)
        assert differences(before, rank_states(rep)) == [] and rep.num_steps == 0
    synced = synk.torch.replicate(mlp(), runtime=shared_runtimes[2], sync_batchnorm=True)
    with pytest.raises(ValueError, match="got on_oom='slices' and replicate"):
        synced.function(plain_step, on_oom="slices")
