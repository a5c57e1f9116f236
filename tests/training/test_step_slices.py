"""``rep.function(on_oom="slices")``: a step in slices is the step."""

from __future__ import annotations

from typing import Any

import pytest
from trainings import (
    LOSSES,
    MODELS,
    PLAIN_SUMS,
    SCHEDULERS,
    adversarial_step,
    batches,
    body,
    closure_step,
    differences,
    generator_and_judge,
    rank_states,
    state_of,
    with_lbfgs,
)

torch = pytest.importorskip("torch")

import synk.torch  # noqa: E402


def with_adam() -> tuple[Any, ...]:
    model = MODELS["shared, frozen, unused and rarely used parameters"]().double()
    optimizer = torch.optim.Adam([each for each in model.parameters() if each.requires_grad], lr=0.01)
    return model, optimizer, SCHEDULERS["steps"](optimizer)


CASES = (
    (generator_and_judge, adversarial_step, adversarial_step),
    (with_lbfgs, closure_step, closure_step),
    *(
        (with_adam, *(body(LOSSES[loss], way, sums) for sums in (synk.torch, PLAIN_SUMS)))
        for loss, way in (("mean", "clipped"), ("mean over some", "accumulated"))
    ),
)


def test_a_step_in_slices_is_the_step(subtests: Any, shared_runtimes: Any) -> None:
    """In three slices, of rows that do not divide evenly, or of one row."""
    for number, (build, step, plain) in enumerate(CASES):
        with subtests.test(build=build.__name__, number=number):
            serial, objects = ((torch.manual_seed(2), build())[1] for _ in range(2))
            data = batches(3, (11, 8, 3))
            expected = [float(plain(*serial, *rows).detach()) for rows in data]
            rep = synk.torch.replicate(*objects, runtime=shared_runtimes[(3, 1, 2)[number % 3]])
            f = rep.function(step, outputs="avg", on_oom="slices")
            assert differences(expected, [float(f(*rows, num_slices=3)) for rows in data], 1e-9) == []
            assert all(differences(state_of(serial), state, 1e-8) == [] for state in rank_states(rep))
            assert rep.num_steps == len(data)
