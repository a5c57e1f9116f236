"""A step of ``replicate`` on all workers is the step of plain torch on all rows, whatever is trained and how.

Losses, parameters, buffers, gradients and the optimizers' states are compared after some steps, and all ranks hold the
same bits. Combinations of models, optimizers, schedulers, losses, workers and batches are drawn at random, by a seed.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from trainings import (
    HAVE_NORMS,
    LOSSES,
    MODELS,
    OPTIMIZERS,
    PLAIN_SUMS,
    SCHEDULERS,
    SIZES,
    WAYS,
    F,
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


def compare(
    rt: synk.Runtime,
    build: Callable[[], tuple[Any, ...]],
    step: Callable[..., Any],
    data: Sequence[tuple[Any, ...]],
    *,
    plain: Callable[..., Any] | None = None,
    bound: float = 1e-11,
    outputs: Any = "avg",
    **options: Any,
) -> tuple[Any, ...]:
    """Train in plain torch and replicated, compare losses and states, and return the replicated objects."""
    serial, objects = build(), build()
    expected = [float((plain or step)(*serial, *rows).detach()) for rows in data]
    rep = synk.torch.replicate(*objects, runtime=rt, **options)
    run = rep.function(step, outputs=outputs)
    assert differences(expected, [float(run(*rows)) for rows in data], bound) == []
    states = rank_states(rep)
    assert all(differences(states[0], other) == [] for other in states[1:])
    rep.pull()
    assert differences(states[0], state_of(objects)) == []
    assert differences(state_of(serial), states[0], bound) == []
    assert rep.num_steps == len(data)
    return objects


def sample(num_of_each_model: int) -> list[tuple[Any, ...]]:
    """Return combinations in which each model meets the values of all other dimensions in turn."""
    draw = random.Random(23)
    cases = []
    for model in MODELS:
        for _ in range(num_of_each_model):
            # A parameter before a norm can have no gradient but rounding, which Adam would make as large as any other.
            optimizer = "sgd" if model in HAVE_NORMS else draw.choice([*OPTIMIZERS])
            losses = ["mean", "sum"] if model in HAVE_NORMS | {"checkpointed and left out layers"} else [*LOSSES]
            sizes = (8, 7, 5, 3, 6) if model in HAVE_NORMS else draw.choice([SIZES, (9, 10), (3,)])
            chosen = [draw.choice(values) for values in ([*SCHEDULERS], losses, WAYS, (2, 2, 3, 1, 0))]
            cases.append((model, optimizer, *chosen, sizes, draw.choice((True, False)), draw.choice((25.0, 2e-4))))
    return cases


@pytest.mark.parametrize("num_of_each_model", [2, pytest.param(12, marks=pytest.mark.storm)])
def test_steps_are_those_of_plain_torch(subtests: Any, shared_runtimes: Any, num_of_each_model: int) -> None:
    for model, optimizer, scheduler, loss, way, workers, sizes, overlap, bucket_mb in sample(num_of_each_model):

        def build(model: str = model, optimizer: str = optimizer, scheduler: str = scheduler) -> tuple[Any, ...]:
            torch.manual_seed(2)
            made = MODELS[model]().double()
            trained = OPTIMIZERS[optimizer]([each for each in made.parameters() if each.requires_grad])
            return made, trained, SCHEDULERS[scheduler](trained)

        case = f"{model}; {optimizer}, {scheduler}; {loss}, {way}; {workers} workers, {sizes}, {overlap}, {bucket_mb}"
        options = {"overlap": overlap, "bucket_mb": bucket_mb, "sync_batchnorm": model in HAVE_NORMS}
        with subtests.test(case=case):
            step, plain = (body(LOSSES[loss], way, sums) for sums in (synk.torch, PLAIN_SUMS))
            compare(shared_runtimes[workers], build, step, batches(6, sizes), plain=plain, bound=1e-9, **options)


def with_groups() -> tuple[Any, Any]:
    """Two groups, and a hook of the optimizer."""
    model = mlp()
    groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.5)
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: torch.nn.init.zeros_(model[0].bias))
    return model, optimizer


def test_other_optimizers_and_the_default_output(subtests: Any, shared_runtimes: Any) -> None:
    """Several of them, closures, groups, and steps that are checked before the first one."""
    cases: list[tuple[str, Any, Any, Any, float]] = [
        ("a generator and a discriminator", generator_and_judge, adversarial_step, SIZES, 1e-11),
        ("lbfgs with a line search", lambda: with_lbfgs("strong_wolfe"), closure_step, (9, 7), 1e-7),
        ("groups", with_groups, plain_step, SIZES, 1e-11),
    ]
    for name, build, step, sizes, bound in cases:
        for workers in (2, 3):
            with subtests.test(case=name, workers=workers):
                rt, outputs = shared_runtimes[workers], "avg" if workers == 3 else synk._pure.output_ops.DEFAULT_OP
                compare(rt, build, step, batches(5, sizes), bound=bound, outputs=outputs)


def with_a_frozen_layer() -> tuple[Any, Any]:
    model = mlp()
    model[0].requires_grad_(False)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def thawing_step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    model[0].requires_grad_(bool(optimizer.state))  # from the second step on
    return plain_step(model, optimizer, x, y)


def test_a_layer_that_the_body_thaws(subtests: Any, shared_runtimes: Any) -> None:
    for overlap in (False, True):
        with subtests.test(overlap=overlap):
            options: dict[str, Any] = {"overlap": overlap, "bucket_mb": 2e-4}
            compare(shared_runtimes[2], with_a_frozen_layer, thawing_step, batches(3, (8, 7)), **options)


def test_scaled_gradients_of_half_precision(subtests: Any, shared_runtimes: Any) -> None:
    """bfloat16 autocast with a GradScaler: the loss stays near that of plain torch, and the same steps are skipped."""

    def build() -> tuple[Any, ...]:
        model = mlp().float()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
        return model, optimizer, torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=5)

    def step(model: Any, optimizer: Any, scaler: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.mse_loss(model(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        return loss

    data = batches(20, (8, 6), dtype=torch.float32)
    data[11][1][5, 0] = float("inf")  # one row, on the last rank: all ranks must skip the step
    plain = build()
    expected = np.array([float(step(*plain, *rows).detach()) for rows in data])
    for workers in (1, 2):
        with subtests.test(workers=workers):
            rep = synk.torch.replicate(*build(), runtime=shared_runtimes[workers])
            run = rep.function(step)
            losses = np.array([float(run(*rows)) for rows in data])
            assert np.isinf(losses).nonzero()[0].tolist() == [11]
            np.testing.assert_allclose(losses, expected, rtol=0.02)
            assert all(state[2]["scale"] == plain[2].get_scale() for state in rank_states(rep))


# ----- calls


def test_each_way_to_call_a_step(shared_runtimes: Any) -> None:
    def made() -> tuple[Any, Any]:
        model = mlp()
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    plain, data = made(), batches(12)
    rep = synk.torch.replicate(*made(), runtime=shared_runtimes[2])
    step = rep.function(plain_step)
    losses = [float(call.result()) for call in [step.submit(x, y) for x, y in data[:4]]]
    losses += [float(step.serial(x, y)) for x, y in data[4:6]]
    losses += [float(step(x, y, batch=slice(0, len(x)))) for x, y in data[6:8]]
    assert step.verify(*data[8])
    losses += [float(step(*rows)) for rows in data[8:10]]
    expected = [float(plain_step(*plain, *rows).detach()) for rows in data[:10]]
    assert differences(expected, losses, 1e-12) == []
    for _ in range(3):
        step(*data[10])
        plain_step(*plain, *data[10])
    assert rep.num_steps == 13
    assert all(differences(state_of(plain), state, 1e-12) == [] for state in rank_states(rep))

    @rep.function(trains=False, outputs="gather")
    def predict(model: Any, optimizer: Any, x: Any) -> Any:
        assert not torch.is_grad_enabled()
        model.eval()
        return model(x)

    with torch.no_grad():
        assert torch.allclose(predict(data[0][0]), plain[0](data[0][0]), rtol=0, atol=1e-12)
    assert rep.num_steps == 13 and all(state[0]["training 0"] for state in rank_states(rep))


def test_random_numbers_are_the_same_in_each_run_and_others_on_each_rank(shared_runtimes: Any) -> None:
    """They depend on seed, step and rank, not on what was drawn before, nor on who takes part."""
    rt = shared_runtimes[3]
    rows = rt.shared(np.arange(3.0, dtype="f4"), sharded=True)
    found = []
    for seed in (5, 5, 6):
        model = mlp(1, torch.nn.Dropout(0.5))
        rep = synk.torch.replicate(model, torch.optim.SGD(model.parameters(), lr=0.01), seed=seed, runtime=rt)
        step = rep.function(plain_step)
        draw = rep.function(lambda model, optimizer, x: float(torch.rand(())), outputs=None, trains=False)
        whole = draw(rows)
        assert len(set(whole)) == 3
        for ranks in ((2,), (0, 2), (1, 2)):
            assert draw(rows, batch=list(ranks)) == [whole[rank] if rank in ranks else None for rank in range(3)]
        found.append(([float(step(x, y)) for x, y in batches(6)], whole))
    assert found[0] == found[1] and found[0][0] != found[2][0] and found[0][1] != found[2][1]


# ----- what is refused


def test_what_is_refused(subtests: Any, rt: Any) -> None:
    model, other = mlp(), mlp()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    sparse = torch.nn.Sequential(torch.nn.EmbeddingBag(9, 4, sparse=True, mode="sum"), torch.nn.Linear(4, 2))
    x, ids = torch.ones(4, 5, dtype=torch.float64), torch.ones(6, 3, dtype=torch.long)
    masked, pruned = mlp(), mlp()
    masked[0].weight.register_hook(lambda gradient: gradient * 0)
    shifted = mlp()
    shifted[0].shift = torch.zeros(2, requires_grad=True)
    of_pruned = synk.torch.replicate(pruned, runtime=rt)
    pruned[2].bias.register_post_accumulate_grad_hook(lambda parameter: None)
    rep, of_sparse = synk.torch.replicate(model, runtime=rt), synk.torch.replicate(sparse, runtime=rt)

    def autocast() -> None:
        with torch.autocast("cpu", torch.bfloat16):
            rep.function(lambda model, x: model(x).mean())(x)

    cases: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
        "4 of the 8 parameters of its group 0 belong to no module": (
            ValueError, lambda: synk.torch.replicate(model, optimizer, runtime=rt)
        ),
        "got no objects": (TypeError, lambda: synk.torch.replicate(runtime=rt)),
        "lazy parameters": (ValueError, lambda: synk.torch.replicate(torch.nn.LazyLinear(3), runtime=rt)),
        r"its parameter '0\.weight' has a hook.*in the body, after backward\(\)": (
            ValueError, lambda: synk.torch.replicate(masked, runtime=rt)
        ),
        r"'shift' of Linear requires a gradient.*a torch\.nn\.Parameter": (
            ValueError, lambda: synk.torch.replicate(shifted, runtime=rt)
        ),
        r"its parameter '2\.bias' has a hook": (ValueError, of_pruned.push),
        "it has 0 parameters, expected one for each of the 1 replicated objects": (
            TypeError, lambda: rep.function(lambda: None)
        ),
        r"cannot pickle what replicate\(\) has returned": (
            synk.errors.SerializationError, lambda: rep.function(lambda model, x: x * rep.num_steps)
        ),
        "create_graph=True": (
            ValueError, lambda: rep.function(lambda model, x: model(x).sum().backward(create_graph=True))(x)
        ),
        r"inside of torch\.autocast": (ValueError, autocast),
        "got a sparse one, expected dense ones": (
            TypeError, lambda: of_sparse.function(lambda model, ids: model(ids).sum().backward())(ids)
        ),
    }  # fmt: skip
    for text, (error, call) in cases.items():
        with subtests.test(text=text), pytest.raises(error, match=text):
            call()
    assert float(rep.function(lambda model, x: model(x).mean() * 0 + 2)(x)) == 2.0
