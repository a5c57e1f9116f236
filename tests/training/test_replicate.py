"""``synk.torch.replicate`` against the same loop in plain torch: losses, parameters and states after many steps."""

# ruff: noqa: RUF059  (a fixture-like helper returns more than each test needs)
from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from support.harness import kill_and_wait, pids
from support.models import NUM_STEPS, Shared, batches, mlp

import synk

torch = pytest.importorskip("torch")
checkpoint = pytest.importorskip("torch.utils.checkpoint").checkpoint

F = torch.nn.functional

EACH_NUMBER = [1, 2, 3]
WORKERS = [2, *(pytest.param(number, marks=pytest.mark.storm) for number in (1, 3))]
"""What does not depend on their number has the others in the storm."""


def plain_step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def tensors(value: Any) -> list[Any]:
    """Return all tensors of a nesting of state dicts, in an order that does not depend on which came first."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [tensor for key in sorted(value, key=str) for tensor in tensors(value[key])]
    return [tensor for item in value for tensor in tensors(item)] if isinstance(value, (list, tuple)) else []


def largest_difference(one: Sequence[Any], other: Sequence[Any]) -> float:
    """Return how far the states of two lists of objects are apart."""
    worst = 0.0
    for first, second in zip(one, other):
        if not hasattr(first, "state_dict"):
            continue
        pairs = list(zip(tensors(first.state_dict()), tensors(second.state_dict()), strict=True))
        worst = max([worst, *(float((a.double() - b.double()).abs().max()) for a, b in pairs if a.numel())])
    return worst


def ranks_are_alike(rep: Any) -> bool:
    """Whether all ranks hold the same state, bit for bit."""
    copies = [rep._resident.get(rank).objects for rank in range(rep._runtime.world_size)]
    return all(largest_difference(copies[0], other) == 0.0 for other in copies[1:])


def compare(
    rt: synk.Runtime,
    build: Callable[[], tuple[Any, ...]],
    step: Callable[..., Any],
    data: Sequence[tuple[Any, ...]],
    *,
    bound: float = 1e-12,
    **options: Any,
) -> tuple[Any, tuple[Any, ...]]:
    """Run a loop in plain torch and replicated, compare losses and states, and return the replicated objects."""
    serial = build()
    expected = [float(step(*serial, *rows).detach()) for rows in data]
    objects = build()
    rep = synk.torch.replicate(*objects, runtime=rt, **options)
    run = rep.function(step)
    losses = [float(run(*rows)) for rows in data]
    scale = max(1.0, *map(abs, expected))
    assert max(abs(a - b) for a, b in zip(losses, expected)) <= bound * scale
    assert ranks_are_alike(rep)
    assert largest_difference(objects, serial) <= bound
    assert rep.num_steps == len(data)
    return rep, objects


# ----- the same numbers as in plain torch


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
}


@pytest.mark.parametrize("workers", EACH_NUMBER)
@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.sampled(20)
def test_optimizers(shared_runtimes: Any, kind: str, workers: int) -> None:
    def build() -> tuple[Any, ...]:
        model = mlp()
        return model, OPTIMIZERS[kind](model.parameters())

    compare(shared_runtimes[workers], build, plain_step, batches())


@pytest.mark.parametrize("workers", WORKERS)
def test_clipping_groups_and_a_scheduler(shared_runtimes: Any, workers: int) -> None:
    def build() -> tuple[Any, ...]:
        model = mlp()
        groups = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[2].parameters()}]
        optimizer = torch.optim.SGD(groups, lr=0.01, momentum=0.5)
        return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)

    def step(model: Any, optimizer: Any, scheduler: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        return loss

    rep, (_, optimizer, scheduler) = compare(shared_runtimes[workers], build, step, batches())
    assert [group["lr"] for group in optimizer.param_groups] == [0.1 / 32, 0.01 / 32]
    assert scheduler.last_epoch == NUM_STEPS
    assert scheduler.get_last_lr() == [0.1 / 32, 0.01 / 32]


@pytest.mark.parametrize("workers", WORKERS)
def test_two_modules_with_two_optimizers(shared_runtimes: Any, workers: int) -> None:
    """A generator and a discriminator: each backward pass leaves gradients in both, and each step uses its own."""

    def build() -> tuple[Any, ...]:
        torch.manual_seed(3)
        first, second = (
            torch.nn.Linear(5, 2).double(),
            torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double(),
        )
        return first, second, torch.optim.Adam(first.parameters(), 0.01), torch.optim.Adam(second.parameters(), 0.01)

    def step(made: Any, judge: Any, of_made: Any, of_judge: Any, x: Any, y: Any) -> Any:
        of_judge.zero_grad()
        loss = F.softplus(judge(made(x).detach())).mean() + F.softplus(-judge(y)).mean()
        loss.backward()
        of_judge.step()
        of_made.zero_grad()
        other = F.softplus(-judge(made(x))).mean()
        other.backward()
        of_made.step()
        return loss.detach() + other

    compare(shared_runtimes[workers], build, step, batches())


@pytest.mark.parametrize("workers", WORKERS)
def test_shared_frozen_unused_and_rarely_used_parameters(shared_runtimes: Any, workers: int) -> None:
    def build() -> tuple[Any, ...]:
        torch.manual_seed(2)
        model = Shared().double()
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    rep, (model, optimizer) = compare(shared_runtimes[workers], build, plain_step, batches())
    assert model.unused.grad is None
    assert model.unused not in optimizer.state
    assert torch.equal(model.unused, torch.ones(3, dtype=torch.float64))
    steps = [int(optimizer.state[p]["step"]) for p in (model.inner.weight, model.rare)]
    assert steps[0] == NUM_STEPS
    assert 0 < steps[1] < NUM_STEPS  # as in plain torch, where a batch without such rows leaves it alone


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return 2 * ctx.saved_tensors[0] * grad


@pytest.mark.parametrize("workers", WORKERS)
def test_a_gradient_of_the_users_own_and_a_penalty(shared_runtimes: Any, workers: int) -> None:
    def build() -> tuple[Any, ...]:
        model = mlp()
        return model, torch.optim.SGD(model.parameters(), lr=0.01)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        x = x.clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = Square.apply(out - y).mean() + 0.1 * slope.square().mean()
        loss.backward()
        optimizer.step()
        return loss

    compare(shared_runtimes[workers], build, step, batches())


@pytest.mark.parametrize("workers", WORKERS)
@pytest.mark.parametrize("search", [None, "strong_wolfe"])
@pytest.mark.sampled(3)
def test_lbfgs_with_its_closure(shared_runtimes: Any, search: Any, workers: int) -> None:
    """The closure runs as often on every rank, because each sees the loss of all rows."""

    def build() -> tuple[Any, ...]:
        model = torch.nn.Linear(5, 2).double()
        with torch.no_grad():
            model.weight.fill_(0.1)
            model.bias.zero_()
        return model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn=search)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        def closure() -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    compare(shared_runtimes[workers], build, step, batches(12, (9, 7)), bound=1e-7)


@pytest.mark.parametrize("workers", EACH_NUMBER)
def test_batch_norm_over_all_rows(shared_runtimes: Any, workers: int) -> None:
    def build() -> tuple[Any, ...]:
        model = mlp(1, torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.BatchNorm1d(8, affine=False, momentum=None))
        # Not Adam: a bias before a norm has no gradient but rounding, which Adam would make as large as any other.
        return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    data = batches(NUM_STEPS, (8, 7, 5, 3, 6))
    rep, (model, _) = compare(shared_runtimes[workers], build, plain_step, data, bound=1e-9, sync_batchnorm=True)
    assert int(model[1].num_batches_tracked) == NUM_STEPS
    evaluate = rep.function(lambda model, optimizer, x: model(x), trains=False, outputs="gather")
    model.eval()
    x = data[0][0]
    assert torch.allclose(evaluate(x), model(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("workers", WORKERS)
def test_batch_norm_over_images(shared_runtimes: Any, workers: int) -> None:
    def build() -> tuple[Any, ...]:
        torch.manual_seed(1)
        layers = torch.nn.Conv2d(1, 3, 2), torch.nn.BatchNorm2d(3), torch.nn.ReLU(), torch.nn.Flatten()
        model = torch.nn.Sequential(*layers, torch.nn.Linear(12, 2)).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    data = [(torch.randn(n, 1, 3, 3, dtype=torch.float64), torch.randn(n, 2, dtype=torch.float64)) for n in (6, 5) * 5]
    compare(shared_runtimes[workers], build, plain_step, data, bound=1e-9, sync_batchnorm=True)


@pytest.mark.parametrize("workers", WORKERS)
def test_a_mean_over_tokens(shared_runtimes: Any, workers: int) -> None:
    """Rows of unequal length: the mean of the ranks' means would weigh tokens differently."""

    def build() -> tuple[Any, ...]:
        torch.manual_seed(1)
        model = torch.nn.Linear(3, 4).double()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def serial(model: Any, optimizer: Any, x: Any, mask: Any) -> Any:
        optimizer.zero_grad()
        loss = (model(x).square().sum(2) * mask).sum() / mask.sum()
        loss.backward()
        optimizer.step()
        return loss

    def step(model: Any, optimizer: Any, x: Any, mask: Any) -> Any:
        optimizer.zero_grad()
        loss = synk.torch.mean((model(x).square().sum(2) * mask).sum(), mask.sum())
        loss.backward()
        optimizer.step()
        return loss

    generator = torch.Generator().manual_seed(3)
    data = [
        (torch.randn(n, 6, 3, generator=generator).double(), (torch.rand(n, 6, generator=generator) < 0.4).double())
        for n in (8, 7, 5, 3) * 5
    ]
    plain, objects = build(), build()
    expected = [float(serial(*plain, *rows).detach()) for rows in data]
    rep = synk.torch.replicate(*objects, runtime=shared_runtimes[workers])
    run = rep.function(step)
    losses = [float(run(*rows)) for rows in data]
    assert np.allclose(losses, expected, rtol=1e-12, atol=0)
    assert largest_difference(objects, plain) <= 1e-12


@pytest.mark.parametrize("workers", [1, 2])
def test_scaled_gradients_of_half_precision(shared_runtimes: Any, workers: int) -> None:
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

    data = batches(40, (8, 6), dtype=torch.float32)
    data[11][1][5, 0] = float("inf")  # one row, on the last rank: all ranks must skip the step
    plain, objects = build(), build()
    expected = [float(step(*plain, *rows).detach()) for rows in data]
    rep = synk.torch.replicate(*objects, runtime=shared_runtimes[workers])
    run = rep.function(step)
    losses = [float(run(*rows)) for rows in data]
    finite = [k for k in range(len(data)) if np.isfinite(expected[k])]
    assert len(finite) == len(data) - 1
    assert [k for k in range(len(data)) if np.isfinite(losses[k])] == finite
    assert max(abs(losses[k] - expected[k]) / expected[k] for k in finite) < 0.02
    assert objects[2].get_scale() == plain[2].get_scale()
    assert ranks_are_alike(rep)


# ----- accumulation


@pytest.mark.parametrize("workers", WORKERS)
def test_accumulation_inside_one_call(shared_runtimes: Any, workers: int) -> None:
    def build() -> tuple[Any, ...]:
        model = mlp()
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        total = 0.0
        for weight in (0.25, 0.75):
            loss = weight * F.mse_loss(model(x), y)
            loss.backward()  # reduced each time
            total = total + loss.detach()
        optimizer.step()
        return total

    compare(shared_runtimes[workers], build, step, batches())


@pytest.mark.parametrize("workers", WORKERS)
def test_no_sync_keeps_gradients_back_until_a_pass_outside(shared_runtimes: Any, workers: int) -> None:
    rt = shared_runtimes[workers]
    data = batches(24, (8, 8, 8))
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    plain = copy.deepcopy(model)
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    rep = synk.torch.replicate(model, optimizer, runtime=rt)

    @rep.function
    def gather(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        with rep.no_sync():
            loss = F.mse_loss(model(x), y)
            loss.backward()
        return loss

    @rep.function
    def finish(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    for number, (x, y) in enumerate(data):
        loss = F.mse_loss(plain(x), y)
        loss.backward()
        is_last = number % 3 == 2
        if is_last:
            plain_optimizer.step()
            plain_optimizer.zero_grad()
        own = (finish if is_last else gather)(x, y)
        assert abs(float(own) - float(loss.detach())) < 1e-12
    assert largest_difference([model, optimizer], [plain, plain_optimizer]) <= 1e-12


@pytest.mark.parametrize("overlap", (True, False))
def test_a_gradient_that_only_the_call_in_no_sync_brings_is_reduced(shared_runtimes: Any, overlap: bool) -> None:
    data = batches(4, (7,))
    model = torch.nn.ModuleList([mlp(), mlp()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = copy.deepcopy(model)
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    rep = synk.torch.replicate(model, optimizer, runtime=shared_runtimes[2], overlap=overlap)

    @rep.function
    def gather(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        with rep.no_sync():
            F.mse_loss(model[0](x), y).backward()

    @rep.function
    def finish(model: Any, optimizer: Any, x: Any, y: Any) -> None:
        F.mse_loss(model[1](x), y).backward()
        optimizer.step()
        optimizer.zero_grad()

    for number, (x, y) in enumerate(data):
        part = number % 2
        F.mse_loss(plain[part](x), y).backward()
        (gather, finish)[part](x, y)
        if part:
            plain_optimizer.step()
            plain_optimizer.zero_grad()
    assert largest_difference([model, optimizer], [plain, plain_optimizer]) <= 1e-12


def test_no_sync_with_other_shares_of_rows_is_refused(shared_runtimes: Any) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rep = synk.torch.replicate(model, optimizer, runtime=shared_runtimes[2])

    @rep.function
    def gather(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        with rep.no_sync():
            loss = F.mse_loss(model(x), y)
            loss.backward()
        return loss

    step = rep.function(plain_step)
    (x, y), *_ = batches(1)
    gather(x[:4], y[:4])
    with pytest.raises(ValueError, match="kept back by no_sync"):
        step(x[:3], y[:3])
    with pytest.raises(synk.errors.ReentrancyError, match="no_sync"):
        rep.no_sync()


# ----- reducing while the backward pass goes on


class Blocks(torch.nn.Module):
    """Some layers, of which one is left out where no row is large, and one may be computed again in the backward."""

    def __init__(self, is_checkpointed: bool) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(4))
        self.rare, self.out = torch.nn.Linear(5, 5), torch.nn.Linear(5, 2)
        self.is_checkpointed = is_checkpointed

    def forward(self, x: Any) -> Any:
        for number, layer in enumerate(self.layers):
            if number == 2 and self.is_checkpointed:  # a backward pass inside of the backward pass
                x = checkpoint(layer, x, use_reentrant=True)
            else:
                x = torch.tanh(layer(x))
        is_large = x[:, 0] > 0.3
        if is_large.any():
            x = x + is_large[:, None] * self.rare(x)
        return self.out(x)


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.sampled(4)
def test_overlap_changes_no_number(shared_runtimes: Any, workers: int, is_checkpointed: bool, overlap: bool) -> None:
    """Many small buckets, some of which only some ranks fill; two passes in a step."""

    def build() -> tuple[Any, ...]:
        torch.manual_seed(4)
        model = Blocks(is_checkpointed).double()
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        total = 0.0
        for weight in (0.25, 0.75):
            loss = weight * F.mse_loss(model(x), y)
            loss.backward()
            total = total + loss.detach()
        optimizer.step()
        return total

    compare(shared_runtimes[workers], build, step, batches(10), overlap=overlap, bucket_mb=2e-4)


def test_buckets_start_before_the_backward_pass_ends(shared_runtimes: Any) -> None:
    """By the order of events on each rank, with a communicator that is slow to end what it has started."""
    model = mlp(1, torch.nn.Tanh(), torch.nn.Linear(8, 8), torch.nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = copy.deepcopy(model)
    rep = synk.torch.replicate(model, optimizer, overlap=True, bucket_mb=1e-5, runtime=shared_runtimes[2])

    class Slow:
        def __init__(self, request: Any, events: list[str]) -> None:
            self.request, self.events = request, events

        def test(self) -> bool:
            return False

        def wait(self) -> Any:
            time.sleep(0.05)
            self.events.append("end")
            return self.request.wait()

    def body(model: Any, optimizer: Any, x: Any, y: Any) -> tuple[Any, str]:
        events: list[str] = []
        start, cls = synk.comm.iall_reduce, type(synk.comm)

        def slow(comm: Any, *args: Any, **options: Any) -> Any:
            events.append("start")
            return Slow(start(*args, **options), events)

        handle = model[0].weight.register_hook(lambda grad: events.append("last gradient"))
        original, cls.iall_reduce = cls.iall_reduce, slow  # type: ignore[method-assign]
        try:
            loss = F.mse_loss(model(x), y)
            loss.backward()
        finally:
            cls.iall_reduce = original  # type: ignore[method-assign]
            handle.remove()
        return loss, ", ".join(events)

    (x, y), *_ = batches(1)
    loss, seen = rep.function(body, outputs=("avg", None))(x, y)
    expected = F.mse_loss(plain(x), y)
    expected.backward()
    assert abs(float(loss) - float(expected.detach())) < 1e-12
    for parameter, own in zip(plain.parameters(), model.parameters()):
        assert torch.allclose(own.grad, parameter.grad, rtol=0, atol=1e-12)
    for text in seen:
        events = text.split(", ")
        num_buckets = events.count("start")
        assert num_buckets >= 4
        before = events[: events.index("last gradient")]
        assert before.count("start") >= num_buckets - 2  # all but those of the first layer's own two parameters
        assert "end" not in before  # nothing waits while there is something to compute
        assert events[-num_buckets:] == ["end"] * num_buckets


# ----- the master's objects


def trained(rt: synk.Runtime, count: int = 3) -> tuple[Any, Any, Any, Any]:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    rep = synk.torch.replicate(model, optimizer, runtime=rt)
    step = rep.function(plain_step)
    for x, y in batches(count):
        step(x, y)
    return rep, step, model, optimizer


def reference(count: int = 3) -> tuple[Any, Any]:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in batches(count):
        plain_step(model, optimizer, x, y)
    return model, optimizer


LOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "state_dict": lambda model, optimizer: tensors(model.state_dict()),
    "optimizer": lambda model, optimizer: tensors(optimizer.state_dict()),
    "parameters": lambda model, optimizer: list(model.parameters()),
    "attribute": lambda model, optimizer: [getattr(model, "0").weight],
    "index": lambda model, optimizer: [model[2].bias],
    "forward": lambda model, optimizer: [model(torch.ones(2, 5, dtype=torch.float64))],
    "deepcopy": lambda model, optimizer: tensors(copy.deepcopy(model).state_dict()),
    "copy": lambda model, optimizer: tensors(copy.copy(model).state_dict()),
    "pickle": lambda model, optimizer: tensors(pickle.loads(pickle.dumps(model)).state_dict()),
    "pickle optimizer": lambda model, optimizer: tensors(pickle.loads(pickle.dumps(optimizer)).state_dict()),
    "save": lambda model, optimizer: tensors(_saved(model).state_dict()),
    "save state_dict": lambda model, optimizer: tensors(_saved(model.state_dict())),
    "vector": lambda model, optimizer: [torch.nn.utils.parameters_to_vector(model.parameters())],
    "norm": lambda model, optimizer: [sum(p.norm() for p in model.parameters())],
    "gradient": lambda model, optimizer: [p.grad for p in model.parameters()],
}


def _saved(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("look", LOOKS)
def test_whoever_looks_finds_it_up_to_date(shared_runtimes: Any, look: str) -> None:
    rep, step, model, optimizer = trained(shared_runtimes[2])
    found, expected = LOOKS[look](model, optimizer), LOOKS[look](*reference())
    assert len(found) == len(expected) > 0
    for one, other in zip(found, expected):
        assert torch.allclose(one, other, rtol=0, atol=1e-12)


def test_copies_and_pickles_are_of_the_users_class(shared_runtimes: Any) -> None:
    rep, step, model, optimizer = trained(shared_runtimes[2])
    for each in (copy.deepcopy(model), copy.copy(model), pickle.loads(pickle.dumps(model)), _saved(model)):
        assert type(each) is torch.nn.Sequential
    assert type(copy.deepcopy(optimizer)) is torch.optim.Adam
    assert isinstance(model, torch.nn.Sequential)
    assert model.__class__ is torch.nn.Sequential
    assert repr(model) == repr(mlp())
    assert list(model.state_dict()) == list(mlp().state_dict())


def change_rate(model: Any, optimizer: Any) -> None:
    optimizer.param_groups[0]["lr"] *= 0.1


def change_weights(model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        model[0].weight.mul_(0.5)


def change_data(model: Any, optimizer: Any) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.2, 0.2)  # leaves no trace but the numbers


def change_state_data(model: Any, optimizer: Any) -> None:
    for slots in optimizer.state.values():
        slots["exp_avg"].data.mul_(0.5)  # neither does this
        slots["exp_avg_sq"].numpy()[:] *= 2.0


def load_weights(model: Any, optimizer: Any) -> None:
    model.load_state_dict({name: tensor.flip(0) for name, tensor in model.state_dict().items()})


def load_optimizer(model: Any, optimizer: Any) -> None:
    state = optimizer.state_dict()
    for slots in state["state"].values():
        slots["exp_avg"] = slots["exp_avg"] * 3
    optimizer.load_state_dict(state)


def freeze(model: Any, optimizer: Any) -> None:
    model[0].requires_grad_(False)


def to_eval(model: Any, optimizer: Any) -> None:
    model.eval()


@pytest.mark.parametrize(
    "change",
    [change_rate, change_weights, change_data, change_state_data, load_weights, load_optimizer, freeze, to_eval],
)
@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.sampled(20)
def test_what_the_program_changes_between_calls_holds_on_all_ranks(
    shared_runtimes: Any, change: Callable[..., None], workers: int
) -> None:
    def build() -> tuple[Any, Any]:
        model = mlp(1, torch.nn.Tanh(), torch.nn.LayerNorm(8))
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    plain, objects = build(), build()
    rep = synk.torch.replicate(*objects, runtime=shared_runtimes[workers])
    step = rep.function(plain_step)
    for number, (x, y) in enumerate(batches(12)):
        if number in (0, 4, 5, 9):
            change(*plain)
            change(*objects)
        assert abs(float(step(x, y)) - float(plain_step(*plain, x, y).detach())) < 1e-12
    assert ranks_are_alike(rep)
    assert largest_difference(objects, plain) <= 1e-12
    assert objects[0].training == plain[0].training
    on_rank = rep._resident.get(workers - 1).objects[0]
    assert on_rank.training == plain[0].training
    assert [p.requires_grad for p in on_rank.parameters()] == [p.requires_grad for p in plain[0].parameters()]


@pytest.mark.parametrize("kind", ["step", "cosine", "plateau", "lambda"])
def test_a_scheduler_that_steps_outside_of_the_body(shared_runtimes: Any, kind: str) -> None:
    makers = {
        "step": lambda o: torch.optim.lr_scheduler.StepLR(o, 2, 0.5),
        "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
        "plateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=1),
        "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
    }

    def build() -> tuple[Any, ...]:
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, optimizer, makers[kind](optimizer)

    def run(objects: tuple[Any, ...], step: Callable[..., Any]) -> list[float]:
        losses = []
        for number, (x, y) in enumerate(batches(20)):
            losses.append(float(step(x, y).detach()))
            if number % 3 == 2:
                objects[2].step(losses[-1]) if kind == "plateau" else objects[2].step()
        return losses

    plain, objects = build(), build()
    expected = run(plain, lambda x, y: plain_step(plain[0], plain[1], x, y))
    rep = synk.torch.replicate(*objects, runtime=shared_runtimes[2])
    step = rep.function(lambda model, optimizer, scheduler, x, y: plain_step(model, optimizer, x, y))
    assert np.allclose(run(objects, step), expected, rtol=1e-9, atol=0)
    assert objects[1].param_groups[0]["lr"] == plain[1].param_groups[0]["lr"]
    assert rep._resident.get(1).objects[1].param_groups[0]["lr"] == plain[1].param_groups[0]["lr"]


def test_a_change_through_an_old_reference_is_refused_and_pull_is_the_way(shared_runtimes: Any) -> None:
    """The tensor was taken before the ranks took steps: nobody could tell which of both changes counts."""
    rep, step, model, optimizer = trained(shared_runtimes[2], 0)
    (x, y), *_ = batches(1)
    weight = model[0].weight
    step(x, y)
    with torch.no_grad():
        weight.zero_()
    with pytest.raises(ValueError, match="cannot bring Sequential up to date: it was changed in the master"):
        step(x, y)
    with pytest.raises(ValueError, match="cannot bring Sequential up to date"):
        model.state_dict()
    rep.push()  # says which one counts
    assert not model[0].weight.any()
    step(x, y)
    rep.pull()
    with torch.no_grad():
        weight.fill_(0.25)
    step(x, y)
    assert ranks_are_alike(rep)


def test_a_checkpoint_goes_into_a_plain_model_and_back(shared_runtimes: Any) -> None:
    rep, step, model, optimizer = trained(shared_runtimes[2], 5)
    kept = _saved({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    plain = mlp(4)
    plain_optimizer = torch.optim.Adam(plain.parameters(), lr=1.0)
    plain.load_state_dict(kept["model"])
    plain_optimizer.load_state_dict(copy.deepcopy(kept["optimizer"]))  # it would step in these very tensors
    data = batches(10)[5:]
    expected = [float(plain_step(plain, plain_optimizer, x, y).detach()) for x, y in data]
    assert np.allclose([float(step(x, y)) for x, y in data], expected, rtol=1e-12)
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    assert np.allclose([float(step(x, y)) for x, y in data], expected, rtol=1e-12)


def test_another_dtype_and_new_parameters_are_sent_anew(shared_runtimes: Any) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rep = synk.torch.replicate(model, optimizer, runtime=shared_runtimes[2])
    step = rep.function(plain_step)
    step(*batches(1)[0])
    model.float()
    x, y = batches(1, dtype=torch.float32)[0]
    step(x, y)
    assert rep._resident.get(1).objects[0][0].weight.dtype == torch.float32
    assert model[0].weight.dtype == torch.float32
    model[0].weight = torch.nn.Parameter(torch.zeros(8, 5))
    with pytest.raises(ValueError, match="belong to no module that was given"):
        step(x, y)  # the optimizer still has the old one


@pytest.mark.storm  # a runtime with torch for itself; test_data_parallel.py closes one, too
def test_life_after_the_runtime(reused: Callable[..., Any]) -> None:
    rt = reused(2)
    rep, step, model, optimizer = trained(rt, 4)
    rt.close()
    expected = reference(4)
    assert type(model) is torch.nn.Sequential
    assert largest_difference([model, optimizer], expected) <= 1e-12
    x, y = batches(1)[0]
    plain_step(model, optimizer, x, y)  # an ordinary model again
    with pytest.raises(synk.errors.ClosedError):
        step(x, y)


# ----- calls


def test_evaluation_gathers_and_is_no_step(shared_runtimes: Any) -> None:
    rep, step, model, optimizer = trained(shared_runtimes[2])

    @rep.function(trains=False, outputs="gather")
    def predict(model: Any, optimizer: Any, x: Any) -> Any:
        assert not torch.is_grad_enabled()
        return model(x)

    x = torch.randn(7, 5, dtype=torch.float64)
    out = predict(x)
    assert isinstance(out, torch.Tensor)
    with torch.no_grad():
        assert torch.allclose(out, model(x), rtol=0, atol=1e-12)
    assert rep.num_steps == 3


def test_submitted_serial_batch_and_verified_steps(shared_runtimes: Any) -> None:
    rep, step, model, optimizer = trained(shared_runtimes[2], 0)
    plain = mlp(), None
    plain = plain[0], torch.optim.Adam(plain[0].parameters(), lr=0.01)
    data = batches(9)
    calls = [step.submit(x, y) for x, y in data[:4]]
    losses = [float(call.result()) for call in calls]
    losses += [float(step.serial(x, y)) for x, y in data[4:6]]
    losses += [float(step(x, y, batch=slice(0, len(x)))) for x, y in data[6:8]]
    assert step.verify(*data[8])
    losses.append(float(step(*data[8])))
    expected = [float(plain_step(*plain, x, y).detach()) for x, y in data]
    assert np.allclose(losses, expected, rtol=1e-12)
    assert rep.num_steps == 9
    assert largest_difference([model, optimizer], plain) <= 1e-12


def test_the_body_defined_again_and_a_global_it_uses(shared_runtimes: Any) -> None:
    rep, _, model, optimizer = trained(shared_runtimes[2], 0)
    settings = {"factor": 1.0}

    @rep.function
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        return settings["factor"] * F.mse_loss(model(x), y)

    x, y = batches(1)[0]
    first = float(step(x, y))
    settings["factor"] = 2.0
    assert abs(float(step(x, y)) - 2 * first) < 1e-12

    @rep.function
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        return 3 * F.mse_loss(model(x), y)

    assert abs(float(step(x, y)) - 3 * first) < 1e-12


def test_objects_replicated_once_more_go_on(shared_runtimes: Any) -> None:
    """A cell of a notebook that is run again; a function of the first ones would train what no object follows."""
    objects = mlp(), None
    objects = objects[0], torch.optim.SGD(objects[0].parameters(), lr=0.05)
    serial = copy.deepcopy(objects[0])
    serial = serial, torch.optim.SGD(serial.parameters(), lr=0.05)
    data = batches(6)
    expected = [float(plain_step(*serial, *rows).detach()) for rows in data]
    losses = []
    for start in (0, 2, 4):
        rep = synk.torch.replicate(*objects, runtime=shared_runtimes[2])
        run = rep.function(plain_step)
        if start:
            with pytest.raises(ValueError, match="got objects that were replicated once more"):
                before(*data[0])  # noqa: F821
        losses += [float(run(*rows)) for rows in data[start : start + 2]]
        before = run  # noqa: F841
    assert losses == pytest.approx(expected, abs=1e-12)
    assert largest_difference(objects, serial) <= 1e-12
    assert type(copy.deepcopy(objects[0])) is torch.nn.Sequential


def test_random_numbers_are_the_same_in_each_run(shared_runtimes: Any) -> None:
    """They depend on seed, step and rank, and not on what was drawn before."""
    found = []
    for seed in (5, 5, 6):
        model = mlp(1, torch.nn.Dropout(0.5))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        rep = synk.torch.replicate(model, optimizer, seed=seed, runtime=shared_runtimes[2])
        step = rep.function(plain_step)
        draws = rep.function(lambda model, optimizer, x: torch.rand(1), trains=False, outputs="gather")
        losses = [float(step(x, y)) for x, y in batches(6)]
        values = draws(torch.zeros(2, 1))
        assert values[0] != values[1]
        found.append((losses, values.tolist()))
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_other_objects_that_can_be_pickled(shared_runtimes: Any) -> None:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen = {"rows": 0}
    rep = synk.torch.replicate(model, optimizer, seen, runtime=shared_runtimes[2])

    @rep.function
    def step(model: Any, optimizer: Any, seen: Any, x: Any, y: Any) -> Any:
        seen["rows"] += synk.comm.total_rows
        return plain_step(model, optimizer, x, y)

    for x, y in batches(5):
        step(x, y)
    rep.pull()  # a dict has no class of its own that could look
    assert seen == {"rows": 23}


# ----- wrong uses


def test_wrong_uses(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    model, other = mlp(), mlp()
    optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
    with pytest.raises(ValueError, match="4 of the 8 parameters of its group 0 belong to no module"):
        synk.torch.replicate(model, optimizer, runtime=rt)
    with pytest.raises(TypeError, match="got no objects"):
        synk.torch.replicate(runtime=rt)
    with pytest.raises(ValueError, match="bucket_mb=0"):
        synk.torch.replicate(model, bucket_mb=0, runtime=rt)
    with pytest.raises(ValueError, match="overlap='yes', expected 'auto', True or False"):
        synk.torch.replicate(model, overlap="yes", runtime=rt)
    with pytest.raises(ValueError, match="lazy parameters"):
        synk.torch.replicate(torch.nn.LazyLinear(3), runtime=rt)
    rep = synk.torch.replicate(model, runtime=rt)
    with pytest.raises(TypeError, match="it has 0 parameters, expected one for each of the 1 replicated objects"):
        rep.function(lambda: None)
    with pytest.raises(TypeError, match="expected a callable"):
        rep.function(3)

    @rep.function
    def twice(model: Any, x: Any) -> Any:
        model(x).sum().backward(create_graph=True)
        return 0.0

    with pytest.raises(ValueError, match="create_graph=True"):
        twice(torch.ones(4, 5, dtype=torch.float64))
    with pytest.raises(TypeError, match="missing"):
        twice()
    assert repr(rep) == "<synk.torch.Replicated Sequential>"


def test_an_exception_in_the_body_leaves_the_ranks_alike(shared_runtimes: Any) -> None:
    rep, step, model, optimizer = trained(shared_runtimes[2], 2)

    @rep.function
    def failing(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if synk.comm.rank == 1:
            raise ArithmeticError("on purpose")
        optimizer.step()
        return loss

    x, y = batches(1)[0]
    with pytest.raises(ArithmeticError):
        failing(x, y)
    assert ranks_are_alike(rep)
    step(x, y)
    assert ranks_are_alike(rep)


# ----- faults


FAULTS = ["forward", "reduction", "step", "inside", "scheduler", "end"]
COUNTED = FAULTS[2:]  # from here on the other rank can finish by itself
HANG_INSIDE = ("inside", "hang")


class Halfway(torch.optim.Adam):
    """Calls ``reach`` in its step, when the first group's parameters are changed and the second one's are not."""

    @staticmethod
    def reach() -> None:
        pass

    def _init_group(self, group: Any, *args: Any, **kwargs: Any) -> Any:
        if group is self.param_groups[-1]:
            self.reach()
        return super()._init_group(group, *args, **kwargs)


def faulty_step(
    model: Any, optimizer: Any, scheduler: Any, x: Any, y: Any, where: str = "", action: str = "", rank: int = 1
) -> Any:
    """A step in which ``action`` befalls a rank at some place."""

    def reach(place: str) -> None:
        if place == where and action == "interrupt" and where in COUNTED:
            # The other rank must have left the reduction: until then the interrupt ends its step, which does not count.
            synk.comm.barrier()
        if place == where and synk.comm.rank == rank and synk.comm.rows:
            act(action, is_interruptible=place != "inside")

    optimizer.zero_grad()
    out = model(x)
    reach("forward")
    loss = F.mse_loss(out, y)
    if where == "reduction":
        first = next(iter(model.parameters()))
        handle = first.register_hook(lambda grad: reach("reduction"))
    try:
        loss.backward()
    finally:
        if where == "reduction":
            handle.remove()
    reach("step")
    optimizer.reach = lambda: reach("inside")
    try:
        optimizer.step()
    finally:
        del optimizer.reach
    reach("scheduler")
    scheduler.step()
    reach("end")
    return loss


def act(action: str, *, is_interruptible: bool) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "raise":
        raise ArithmeticError("on purpose")
    elif action == "interrupt":
        arrived: list[int] = []
        handler: Any = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, lambda *args: (arrived.append(1), handler(*args)))
        try:
            os.kill(os.getppid(), signal.SIGINT)
            while not arrived:  # the master's interrupt of this rank
                time.sleep(0.001)
        finally:
            signal.signal(signal.SIGINT, handler)
    while action in ("hang", "interrupt") and is_interruptible:
        time.sleep(0.01)


KILLS = ("forward", 1), ("reduction", 0), ("end", 0)


def build_faulty() -> tuple[Any, ...]:
    model = mlp()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = Halfway(groups, lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


# Each takes a worker that imports torch anew; that in the midst of an optimizer's step is the hardest to get right.
@pytest.mark.parametrize(
    ("where", "rank"),
    [("inside", 1), *(pytest.param(*case, marks=pytest.mark.storm) for case in KILLS)],
)
@pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")
def test_a_worker_that_is_killed_anywhere_changes_no_bit(reused: Callable[..., Any], where: str, rank: int) -> None:
    """The step is repeated unless it counted: losses and states are those of a run without deaths, bit for bit."""
    rt = reused(2)
    outcomes = []
    for has_fault in (False, True):
        objects = build_faulty()
        rep = synk.torch.replicate(*objects, runtime=rt)
        step = rep.function(faulty_step, bcast_inputs=("where", "action", "rank"))
        losses = []
        for number, (x, y) in enumerate(batches(8, (8, 6))):
            fault = (where, "kill", rank) if has_fault and number == 3 else ("", "", 0)
            try:
                losses.append(float(step(x, y, *fault)))
            except synk.errors.WorkerDied as error:
                assert error.step_counted == (where in COUNTED)
                losses.append(None if error.step_counted else float(step(x, y)))
        outcomes.append((losses, [copy.deepcopy(each) for each in objects]))
        assert ranks_are_alike(rep)
        assert rep.num_steps == 8
    (expected, clean), (losses, faulty) = outcomes
    assert [loss for loss in losses if loss is not None] == [
        loss for loss, own in zip(expected, losses) if own is not None
    ]
    assert largest_difference(clean, faulty) == 0.0


@pytest.mark.storm  # demo 20 does it, too
@pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")
def test_a_worker_that_is_killed_while_idle_changes_no_bit(reused: Callable[..., Any]) -> None:
    rt = reused(2)
    outcomes = []
    for has_fault in (False, True):
        objects = build_faulty()
        rep = synk.torch.replicate(*objects, runtime=rt)
        step = rep.function(faulty_step, bcast_inputs=("where", "action", "rank"))
        losses = []
        for number, (x, y) in enumerate(batches(8, (8, 6))):
            if has_fault and number == 5:
                kill_and_wait(pids(rt)[1])
            losses.append(float(step(x, y)))
        outcomes.append((losses, [copy.deepcopy(each) for each in objects]))
    assert outcomes[0][0] == outcomes[1][0]
    assert largest_difference(outcomes[0][1], outcomes[1][1]) == 0.0


@pytest.mark.parametrize(
    ("where", "action"),
    # What is inside of an optimizer's step is not interrupted: a worker that hangs there would be killed.
    [
        (where, action)
        for where in FAULTS
        for action in ("raise", "hang", "interrupt")
        if (where, action) != HANG_INSIDE
    ],
)
@pytest.mark.sampled(20)
def test_an_exception_a_timeout_or_ctrl_c_anywhere_leaves_the_ranks_alike(
    reused: Callable[..., Any], where: str, action: str
) -> None:
    rt = reused(2)
    rep = synk.torch.replicate(*build_faulty(), runtime=rt)
    step = rep.function(faulty_step, bcast_inputs=("where", "action", "rank"))
    (x, y), *_ = batches(1)
    step(x, y)
    expected = {"raise": ArithmeticError, "hang": synk.errors.CallTimeout, "interrupt": KeyboardInterrupt}[action]
    with pytest.raises(expected) as caught:
        step(x, y, where, action, timeout=2.0 if action == "hang" else None)
    counted = caught.value.step_counted  # type: ignore[attr-defined]
    assert counted == (where in COUNTED)
    assert ranks_are_alike(rep)
    assert rep.num_steps == 1 + counted
    step(x, y)
    assert ranks_are_alike(rep)


@pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")
@pytest.mark.storm  # test_residents.py does it without torch
def test_the_last_worker_takes_the_state_along_and_push_brings_back_the_masters(reused: Callable[..., Any]) -> None:
    rt = reused(1)
    rep, step, model, optimizer = trained(rt, 2)
    kept = copy.deepcopy(model)
    x, y = batches(1)[0]
    step(x, y)
    kill_and_wait(pids_of(rt)[0])
    with pytest.raises(synk.errors.WorkerDied, match="is lost"):
        step(x, y)
    rep.push()
    assert largest_difference([model], [kept]) == 0.0
    step(x, y)


def pids_of(rt: synk.Runtime) -> list[int]:
    """Return the workers' pids without an operation, which would settle what ranks have."""
    return [each.process.pid for each in rt._session.workers.by_rank]


@pytest.mark.parametrize("num_steps", [300, pytest.param(1000, marks=pytest.mark.storm)])
def test_many_steps_take_no_more_memory_and_no_descriptors(shared_runtimes: Any, num_steps: int) -> None:
    rt = shared_runtimes[2]
    rep, step, model, optimizer = trained(rt)

    def held(x: Any) -> Any:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]), len(os.listdir("/proc/self/fd"))

    measure = rt.function(held, outputs=None)
    (x, y), *_ = batches(1)
    for _ in range(50):
        step(x, y)
    before = measure(np.zeros(2)), len(os.listdir("/proc/self/fd"))
    for _ in range(num_steps):
        step(x, y)
    after = measure(np.zeros(2)), len(os.listdir("/proc/self/fd"))
    assert after[1] == before[1]
    assert after[0][1] == before[0][1]
    for pages, pages_before in zip(after[0][0], before[0][0]):
        assert pages - pages_before < 512, (pages_before, pages)  # 2 MB


def test_a_new_bucket_computes_with_nothing_that_was_in_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    from synk.torch._reduction import Bucket

    signalling = torch.from_numpy(np.array([0x7FF0000000000001], np.uint64).view(np.float64))
    monkeypatch.setattr(torch, "empty", lambda size, **options: signalling.expand(size).clone())
    parameter = torch.ones(3, dtype=torch.float64, requires_grad=True)
    parameter.grad = torch.ones(3, dtype=torch.float64)
    bucket = Bucket([(0, parameter)])
    with np.errstate(all="raise"):
        bucket._fill(0.5, {0})
    assert bucket._memory.tolist() == [0.5, 0.5, 0.5, 1.0]


def test_a_replica_that_is_dropped_is_freed_on_the_ranks(shared_runtimes: Any) -> None:
    """So is the copy on which one rank checks the first step. Hooks of gradients would keep both for ever."""
    rt = shared_runtimes[2]

    def count(x: Any) -> int:
        gc.collect()
        found = [each for each in gc.get_objects() if type(each) is torch.nn.Parameter and each.shape == (7, 41)]
        return len(found)

    num_parameters = rt.function(count, outputs=None)
    model = torch.nn.Linear(41, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rep = synk.torch.replicate(model, optimizer, runtime=rt)
    step = rep.function(plain_step)
    for _ in range(3):
        step(torch.ones(8, 41), torch.ones(8, 7))
    rows = np.zeros(2)
    assert num_parameters(rows) == [1, 1]
    del step, rep, model, optimizer  # the model in the program shows the state of its replicas, so it holds them
    gc.collect()
    assert num_parameters(rows) == [0, 0]
    assert not rt._session.guests  # what is asked to leave when the runtime is closed


class Named(np.ndarray):
    """Has an attribute."""


class Scale:
    """An object without ``state_dict`` that holds what NumPy's and Python's own pickles lose or refuse."""

    def __init__(self) -> None:
        self.factors = np.ones(2).view(Named)
        self.factors.unit = "m"  # type: ignore[attr-defined]
        self.view = memoryview(np.arange(2.0))

    def read(self) -> str:
        return f"{self.factors.unit} {self.view.format} {self.view.tolist()}"  # type: ignore[attr-defined]


def test_views_and_attributes_of_arrays_are_replicated(shared_runtimes: Any) -> None:
    model, scale = mlp(1), Scale()
    rep = synk.torch.replicate(model, scale, runtime=shared_runtimes[2])
    f = rep.function(lambda model, scale, x: scale.read(), outputs=None)
    x = torch.zeros(4, 2)
    assert f(x) == 2 * [scale.read()]
    scale.factors.unit = "km"  # type: ignore[attr-defined]
    assert f(x) == 2 * [scale.read()]
    scale.view[0] = 7.0
    assert f(x) == 2 * [scale.read()]
    (copy,) = synk.Program(f=f).on(shared_runtimes[1])._handles
    assert copy._objects[1].read() == scale.read()
