"""``synk.torch.DataParallel`` against the same loop in plain torch, and what else a program does with its model."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import os
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.harness import kill_and_wait, pids
from support.models import NUM_STEPS, Shared, batches, mlp

import synk

torch = pytest.importorskip("torch")
F = torch.nn.functional

EACH_NUMBER = [2, 3, 1]
WORKERS = [2, *(pytest.param(number, marks=pytest.mark.storm) for number in (3, 1))]
"""What does not depend on their number has the others in the storm."""


def distance(one: Any, other: Any) -> float:
    """Return how far two modules' states are apart."""
    first, second = one.state_dict(), other.state_dict()
    assert list(first) == list(second)
    return max(float((first[name].double() - second[name].double()).abs().max()) for name in first)


def compare(
    rt: synk.Runtime,
    build: Callable[[], Any],
    train: Callable[..., list[float]],
    bound: float = 1e-12,
    **options: Any,
) -> tuple[Any, Any]:
    """Run a loop over plain and parallel modules; compare losses and parameters; return both lists of modules."""
    plain, wrapped = build(), build()
    plain = plain if isinstance(plain, tuple) else (plain,)
    wrapped = wrapped if isinstance(wrapped, tuple) else (wrapped,)
    parallel = tuple(synk.torch.DataParallel(module, runtime=rt, **options) for module in wrapped)
    expected, losses = train(*plain), train(*parallel)
    scale = max(1.0, *map(abs, expected))
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) <= bound * scale
    assert max(map(distance, plain, parallel)) <= bound
    return plain, parallel


def descend(model: Any, optimizer: Any, x: Any, y: Any) -> float:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


# ----- the same numbers as in plain torch


@pytest.mark.parametrize("workers", EACH_NUMBER)
def test_clipping_a_scheduler_and_accumulation(shared_runtimes: Any, workers: int) -> None:
    def train(model: Any) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, 0.5)
        losses = []
        for number, (x, y) in enumerate(batches()):
            loss = F.mse_loss(model(x), y)
            loss.backward()
            losses.append(float(loss.detach()))
            if number % 3 == 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad(set_to_none=bool(number % 2))
                scheduler.step()
        return losses

    compare(shared_runtimes[workers], mlp, train)


@pytest.mark.parametrize("workers", WORKERS)
def test_shared_frozen_unused_and_rarely_used_parameters(shared_runtimes: Any, workers: int) -> None:
    def build() -> Any:
        torch.manual_seed(2)
        return Shared().double()

    steps = []

    def train(model: Any) -> list[float]:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        losses = [descend(model, optimizer, x, y) for x, y in batches()]
        assert model.unused.grad is None
        assert model.unused not in optimizer.state
        steps.append([int(optimizer.state[each]["step"]) for each in (model.inner.weight, model.rare)])
        return losses

    compare(shared_runtimes[workers], build, train)
    assert steps[0] == steps[1]
    assert steps[0][1] < steps[0][0] == NUM_STEPS


class WithLoss(torch.nn.Module):
    """Returns its loss beside outputs with rows, as the models of Hugging Face do."""

    def __init__(self, reduction: str = "mean") -> None:
        super().__init__()
        torch.manual_seed(2)
        self.inner = mlp()
        self.reduction = reduction

    def forward(self, x: Any, labels: Any = None) -> dict[str, Any]:
        outputs = self.inner(x)
        loss = None if labels is None else F.mse_loss(outputs, labels, reduction=self.reduction)
        return {"loss": loss, "logits": outputs}


@pytest.mark.parametrize("workers", WORKERS)
def test_a_loss_from_forward_is_the_mean_over_all_rows(shared_runtimes: Any, workers: int) -> None:
    """Beside a loss of the program's, and for batches that cannot be divided evenly or have fewer rows than workers."""

    def train(model: Any) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
        losses = []
        for x, y in batches():
            optimizer.zero_grad()
            output = model(x, labels=y)
            loss = output["loss"] + 0.1 * output["logits"].square().mean()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    compare(shared_runtimes[workers], WithLoss, train)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_keeps_its_dtype_and_carries_no_gradient_without_one(reused: Any, dtype: Any) -> None:
    model = synk.torch.DataParallel(WithLoss().to(dtype), runtime=reused(2))
    x, y = torch.ones(7, 5, dtype=dtype), torch.ones(7, 2, dtype=dtype)
    with torch.no_grad():
        loss = model(x, labels=y)["loss"]
    assert loss.shape == () and loss.dtype == dtype and not loss.requires_grad
    assert torch.allclose(loss, model.module(x, labels=y)["loss"].detach(), rtol=torch.finfo(dtype).eps * 4)
    assert model(x)["loss"] is None


def test_a_loss_that_is_no_mean_over_rows_is_told_once(reused: Any) -> None:
    model = synk.torch.DataParallel(WithLoss("sum"), runtime=reused(2))
    x, y = torch.randn(9, 5, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64)
    model(x[:2], labels=y[:2])  # too few rows to tell
    with pytest.warns(UserWarning, match=r"no mean over rows.*'sum' fits") as told:
        model(x, labels=y)
    assert told[0].filename == __file__
    model(x, labels=y)
    model.train()
    assert model.module.training


def test_a_single_number_that_is_no_float_is_refused(reused: Any) -> None:
    class Counts(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return (x > 0).sum()

    with pytest.raises(TypeError, match=r"got a single number of dtype torch\.int64, expected floats"):
        synk.torch.DataParallel(Counts(), runtime=reused(2))(torch.ones(4, 2))


@pytest.mark.parametrize("workers", WORKERS)
def test_a_generator_and_a_discriminator(shared_runtimes: Any, workers: int) -> None:
    """One is frozen while the other learns, and gradients flow through both."""

    def build() -> Any:
        torch.manual_seed(3)
        judge = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1))
        return torch.nn.Linear(5, 2).double(), judge.double()

    def train(made: Any, judge: Any) -> list[float]:
        of_made = torch.optim.Adam(made.parameters(), 0.01)
        of_judge = torch.optim.Adam(judge.parameters(), 0.01)
        losses = []
        for x, y in batches(30):
            judge.requires_grad_(True)
            of_judge.zero_grad()
            loss = F.softplus(judge(made(x).detach())).mean() + F.softplus(-judge(y)).mean()
            loss.backward()
            of_judge.step()
            judge.requires_grad_(False)
            of_made.zero_grad()
            other = F.softplus(-judge(made(x))).mean()
            other.backward()
            of_made.step()
            losses += [float(loss.detach()), float(other.detach())]
        return losses

    compare(shared_runtimes[workers], build, train)


@pytest.mark.parametrize("workers", WORKERS)
def test_lbfgs_with_its_closure(shared_runtimes: Any, workers: int) -> None:
    def build() -> Any:
        model = torch.nn.Linear(5, 2).double()
        torch.nn.init.constant_(model.weight, 0.1)
        torch.nn.init.zeros_(model.bias)
        return model

    def train(model: Any) -> list[float]:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn="strong_wolfe")

        def closure(x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        return [float(optimizer.step(lambda x=x, y=y: closure(x, y)).detach()) for x, y in batches(8, (9, 7))]

    compare(shared_runtimes[workers], build, train, bound=1e-7)


@pytest.mark.parametrize("workers", WORKERS)
def test_several_forward_passes_a_kept_graph_and_a_loss_over_pairs_of_rows(shared_runtimes: Any, workers: int) -> None:
    """A loss that is no mean over rows: each row meets all others, of two batches."""

    def train(model: Any) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        losses = []
        for x, y in batches(20):
            optimizer.zero_grad()
            first, second = model(x), model(x.flip(0) * 0.5)
            loss = (first @ second.T).logsumexp(1).mean() + F.mse_loss(first, y)
            loss.backward(retain_graph=True)
            (0.1 * loss).backward()
            optimizer.step()
            losses.append(float(loss.detach()))
        return losses

    compare(shared_runtimes[workers], mlp, train)


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Result:
    value: Any
    others: Any
    label: str


class Nested(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(5, 2)
        self.register_buffer("offset", torch.ones(2), persistent=False)

    def forward(self, batch: Any, pair: Any = None, *, scale: Any, label: str = "", table: Any = None) -> Any:
        out = self.linear(batch["x"]) * scale + self.offset
        if table is not None:
            out = out + table.sum(0)
        extra = [pair.left * 2, {"count": batch["ids"][0] + 1}] if pair is not None else []
        return Result(out, (extra, None), label)


@pytest.mark.parametrize("workers", WORKERS)
def test_nested_inputs_and_outputs_with_gradients_for_all_that_want_them(shared_runtimes: Any, workers: int) -> None:
    torch.manual_seed(1)
    plain = Nested().double()
    parallel = synk.torch.DataParallel(copy.deepcopy(plain), bcast_inputs="table", runtime=shared_runtimes[workers])
    found = []
    for model in (plain, parallel):
        generator = torch.Generator().manual_seed(1)
        x, left = (torch.randn(7, 5, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(2))
        scale = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
        table = torch.randn(3, 2, generator=generator, dtype=torch.float64, requires_grad=True)
        upstream = x * 2  # not a leaf itself
        batch = {"x": upstream, "ids": (torch.arange(7), "a text")}
        result = model(batch, Pair(left, None), scale=scale, label="here", table=table)
        assert type(result) is Result
        assert result.label == "here"
        (doubled, counts), nothing = result.others
        assert nothing is None
        assert torch.equal(counts["count"], torch.arange(1, 8))
        assert not counts["count"].requires_grad
        (result.value.square().sum() + doubled.sum()).backward()
        found.append([each.grad for each in (x, left, scale, table, model.linear.weight)])
    for one, other in zip(*found):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_other_dtypes_and_autocast(shared_runtimes: Any, dtype: str) -> None:
    wanted = getattr(torch, dtype)
    plain = mlp().to(wanted)
    parallel = synk.torch.DataParallel(copy.deepcopy(plain), runtime=shared_runtimes[2])
    x = batches(1)[0][0].to(wanted)
    for model in (plain, parallel):
        model(x).float().square().mean().backward()
    assert all(p.grad.dtype == wanted for p in parallel.parameters())
    for one, other in zip(plain.parameters(), parallel.parameters()):
        assert torch.allclose(one.grad, other.grad, rtol=3e-2 if dtype == "bfloat16" else 1e-5, atol=1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert parallel.float()(x.float()).dtype == plain.float()(x.float()).dtype == torch.bfloat16


def test_channels_last_weights_keep_their_strides(shared_runtimes: Any) -> None:
    plain = torch.nn.Conv2d(3, 4, 3).double().to(memory_format=torch.channels_last)
    parallel = synk.torch.DataParallel(copy.deepcopy(plain), runtime=shared_runtimes[2])
    x = torch.randn(5, 3, 6, 6, dtype=torch.float64)
    assert torch.allclose(parallel(x), plain(x), rtol=0, atol=1e-12)
    assert parallel.weight.is_contiguous(memory_format=torch.channels_last)


# ----- what the program does to the module


def trained(rt: synk.Runtime, build: Callable[[], Any] = mlp, steps: int = 2) -> tuple[Any, Any]:
    model = synk.torch.DataParallel(build(), runtime=rt)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in batches(steps):
        descend(model, optimizer, x, y)
    return model, optimizer


def agrees(model: Any, x: Any = None) -> bool:
    """Whether the workers compute what the same module computes here."""
    x = batches(1)[0][0] if x is None else x
    return torch.allclose(model(x), model.module(x), rtol=0, atol=1e-12)


def test_it_is_the_module_in_all_but_its_calls(shared_runtimes: Any) -> None:
    class Net(torch.nn.Sequential):
        def size(self, x: Any) -> Any:
            return self(x).shape

    plain = Net(torch.nn.Linear(5, 2)).double()
    plain.note = "a text"
    model = synk.torch.DataParallel(plain, runtime=shared_runtimes[2])
    assert isinstance(model, Net)
    assert isinstance(model, synk.torch.DataParallel)
    assert list(model.state_dict()) == ["0.weight", "0.bias"]
    assert model[0] is plain[0]
    assert model.module is plain
    assert model.note == "a text"
    model.note = "another"
    assert plain.note == "another"
    assert model.size(batches(1)[0][0]) == (8, 2)
    with pytest.raises(AttributeError):
        model.nothing  # noqa: B018
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(mlp_in(shared_runtimes)))):
        assert not isinstance(copied, synk.torch.DataParallel)
    assert type(copy.deepcopy(model)) is Net


def mlp_in(runtimes: Any) -> Any:
    return synk.torch.DataParallel(mlp(), runtime=runtimes[2])


def test_checkpoints_go_both_ways_and_are_no_larger_than_plain_ones(shared_runtimes: Any) -> None:
    model, _ = trained(shared_runtimes[2])
    plain = mlp(5)
    file, one = io.BytesIO(), io.BytesIO()
    torch.save(model.state_dict(), file)
    torch.save(model[0].bias, one)
    assert len(one.getvalue()) < len(file.getvalue())
    file.seek(0)
    plain.load_state_dict(torch.load(file))
    assert distance(plain, model) == 0.0
    model.load_state_dict(mlp(9).state_dict())
    assert distance(model, mlp(9)) == 0.0
    assert agrees(model)
    model.load_state_dict(mlp(8).state_dict(), assign=True)
    assert agrees(model)


def test_new_dtypes_parameters_attributes_and_hooks_are_seen(shared_runtimes: Any) -> None:
    model, optimizer = trained(shared_runtimes[2])
    x, y = batches(1)[0]
    model.float()
    assert model(x.float()).dtype == torch.float32
    model.double()
    before = descend(model, optimizer, x, y)
    assert descend(model, optimizer, x, y) < before
    assert agrees(model)
    model[0].weight = torch.nn.Parameter(torch.ones_like(model[0].weight))
    assert agrees(model)
    model[2] = torch.nn.Linear(8, 3).double()
    assert agrees(model)
    model[1] = torch.nn.Dropout(1.0)
    assert float(model(x).detach().std(0).max()) < 1e-12
    model[1].p = 0.0
    assert agrees(model)
    torch.nn.utils.vector_to_parameters(torch.zeros(8 * 5 + 8 + 8 * 3 + 3, dtype=torch.float64), model.parameters())
    assert not model(x).any()
    model[2].register_forward_hook(lambda module, args, out: out + 1)
    assert torch.equal(model(x), torch.ones(8, 3, dtype=torch.float64))
    model.append(torch.nn.Identity())
    model[2].bias.data = torch.ones(3, dtype=torch.float64)
    assert torch.equal(model(x), torch.full((8, 3), 2.0, dtype=torch.float64))
    model.weight_of_all = torch.nn.Parameter(torch.ones(1))  # a forward pass that ignores it
    assert agrees(model)


def test_hooks_of_the_module_itself_run_here_on_all_rows(shared_runtimes: Any) -> None:
    model, _ = trained(shared_runtimes[2])
    seen = []
    model.register_forward_hook(lambda module, args, out: seen.append((len(args[0]), len(out))))
    model(batches(1)[0][0])
    assert seen == [(8, 8)]


def test_modes_and_flags_hold_from_the_next_call_on(shared_runtimes: Any) -> None:
    model = synk.torch.DataParallel(
        torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(5, 5)), runtime=shared_runtimes[2]
    )
    x = torch.ones(64, 5)
    first, second = model(x), model(x)
    assert not torch.equal(first, second)
    assert not torch.equal(first[:32], first[32:])  # each rank draws its own
    model.eval()
    assert torch.equal(model(x), model(x))
    model.train()
    assert not torch.equal(model(x), model(x))
    model[1].weight.requires_grad_(False)
    model(x).sum().backward()
    assert model[1].weight.grad is None
    assert model[1].bias.grad is not None
    model.requires_grad_(False)
    assert not model(x).requires_grad
    placed = model._synk_passes._placed
    model.eval()(x)
    assert model._synk_passes._placed is placed


@pytest.mark.parametrize("workers", WORKERS)
def test_what_was_frozen_since_an_earlier_pass_stays_frozen_after_its_backward_pass(
    shared_runtimes: Any, workers: int
) -> None:
    def train(model: Any) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x, y = batches(1)[0]
        early = F.mse_loss(model(x), y)
        model[0].weight.requires_grad_(False)
        late = F.mse_loss(model(x), y)
        early.backward()
        late.backward()
        assert model[0].weight.grad is None
        optimizer.step()
        return [float(early.detach()), float(late.detach()), *(descend(model, optimizer, x, y) for _ in range(2))]

    compare(shared_runtimes[workers], mlp, train)


def test_generators_of_the_program_are_left_alone_and_runs_repeat(shared_runtimes: Any) -> None:
    drawn = []
    for _ in range(2):
        torch.manual_seed(3)
        model = synk.torch.DataParallel(torch.nn.Dropout(0.5), runtime=shared_runtimes[2])
        drawn.append((model(torch.ones(20, 5)), torch.rand(3)))
    torch.manual_seed(3)
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], torch.rand(3))


class Counting(torch.nn.Module):
    """Has buffers that a forward pass writes into, replaces, makes and lets grow."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(5))
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("constant", torch.arange(3.0))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.last = x[0].detach().clone()
        self.seen = torch.cat([self.seen, x[:1, 0].detach()])
        return self.norm(x)


@pytest.mark.parametrize("workers", WORKERS)
def test_buffers_that_a_forward_pass_changes_come_back(shared_runtimes: Any, workers: int) -> None:
    plain = Counting().double()
    model = synk.torch.DataParallel(copy.deepcopy(plain), runtime=shared_runtimes[workers])
    for x, _ in batches(6, (9, 8)):
        rows = x[: -(-len(x) // workers)]  # rank 0's
        plain(rows)
        out = model(x)
        assert out.shape == x.shape
        plain.norm.load_state_dict(model.norm.state_dict())
        assert torch.equal(model.last, plain.last)
        assert torch.equal(model.seen, plain.seen)
        assert int(model.calls) == int(plain.calls)
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x), copy.deepcopy(model)(x))  # all ranks have rank 0's statistics


def test_batch_norm_normalises_over_the_rows_of_a_rank(shared_runtimes: Any) -> None:
    model = synk.torch.DataParallel(torch.nn.BatchNorm1d(5).double(), runtime=shared_runtimes[2])
    x = batches(1)[0][0]
    expected = torch.nn.BatchNorm1d(5).double()
    first, second = expected(x[:4]), None
    statistics = copy.deepcopy(expected.state_dict())
    second = expected(x[4:])
    assert torch.allclose(model(x), torch.cat([first, second]), rtol=0, atol=1e-12)
    assert all(torch.allclose(model.state_dict()[name], statistics[name]) for name in statistics)


# ----- refused


def test_what_cannot_work_is_refused(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    model = synk.torch.DataParallel(mlp(), runtime=rt)
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module that is not parallel yet"):
        synk.torch.DataParallel(model, runtime=rt)
    with pytest.raises(TypeError, match="got int"):
        synk.torch.DataParallel(3, runtime=rt)
    with pytest.raises(ValueError, match="lazy parameters"):
        synk.torch.DataParallel(torch.nn.LazyLinear(2), runtime=rt)
    with pytest.raises(ValueError, match=r"got 'mask' in bcast_inputs.*\(input\)"):
        synk.torch.DataParallel(mlp(), bcast_inputs="mask", runtime=rt)
    with pytest.raises(synk.errors.UnsupportedError, match=r"synk\.torch\.replicate"):
        synk.torch.DataParallel(mlp().to("meta"), runtime=rt)
    locked = torch.nn.Linear(5, 2)
    locked.lock = threading.Lock()
    with pytest.raises(synk.errors.SerializationError, match="cannot send module 'Linear'"):
        synk.torch.DataParallel(locked, runtime=rt)


class Moments(torch.nn.Linear):
    def forward(self, x: Any, other: Any = None) -> Any:
        return super().forward(x).mean(0)


@pytest.mark.parametrize("workers", WORKERS)
def test_outputs_without_rows_and_unequal_inputs(shared_runtimes: Any, workers: int) -> None:
    model = synk.torch.DataParallel(Moments(5, 2), runtime=shared_runtimes[workers])
    with pytest.raises(ValueError, match=r"shape \(2,\) for \d rows of inputs.*a loss too.*synk\.torch\.replicate"):
        model(torch.ones(8, 5))
    with pytest.raises(ValueError, match="tensors with 8, 3 rows, expected equal axis-0 lengths"):
        model(torch.ones(8, 5), torch.ones(3))


def test_gradients_of_gradients_are_refused(shared_runtimes: Any) -> None:
    model, _ = trained(shared_runtimes[2])
    x = batches(1)[0][0].requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(model(x).sum(), x, create_graph=True)
    assert torch.autograd.grad(model(x).sum(), x)[0].shape == x.shape


def test_torchs_own_errors_about_graphs_are_raised(shared_runtimes: Any) -> None:
    model, optimizer = trained(shared_runtimes[2])
    x, y = batches(1)[0]
    loss = F.mse_loss(model(x), y)
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()
    old = F.mse_loss(model(x), y)
    optimizer.step()
    new = F.mse_loss(model(x), y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()
    new.backward()


def test_sparse_gradients_are_refused(shared_runtimes: Any) -> None:
    model = synk.torch.DataParallel(torch.nn.Embedding(4, 3, sparse=True), runtime=shared_runtimes[2])
    with pytest.raises(TypeError, match="sparse=False"):
        model(torch.tensor([0, 1, 2])).sum().backward()


# ----- life


def num_graphs(model: Any) -> list[int]:
    """Return how many graphs each rank keeps."""
    placed = model._synk_passes._placed
    resident = placed._resident

    def count(x: Any) -> Any:
        return len(resident.value._graphs)

    rt = model._synk_passes._runtime
    return list(rt.function(count, outputs=None)(np.zeros(rt.world_size)))


def test_workers_keep_only_graphs_that_can_be_asked_for(shared_runtimes: Any) -> None:
    model, _ = trained(shared_runtimes[2])
    x, y = batches(1)[0]
    assert num_graphs(model) == [0, 0]
    with torch.no_grad():
        assert not model(x).requires_grad
    assert num_graphs(model) == [0, 0]
    loss = F.mse_loss(model(x), y)
    assert num_graphs(model) == [1, 1]
    del loss
    with torch.no_grad():  # the next call tells them
        model(x)
    assert num_graphs(model) == [0, 0]
    model(x)
    with pytest.raises(synk.errors.SerializationError, match="cannot send the inputs"):  # no rank hears of this call
        model(x, threading.Lock())
    with torch.no_grad():
        model(x)
    assert num_graphs(model) == [0, 0]
    loss = F.mse_loss(model(x), y)
    loss.backward(retain_graph=True)
    assert num_graphs(model) == [1, 1]
    loss.backward()
    assert num_graphs(model) == [0, 0]


class Fragile(torch.nn.Linear):
    def forward(self, x: Any) -> Any:
        if (x > 1e6).any():
            raise OverflowError("too large")
        return super().forward(x)


def test_an_exception_in_a_forward_pass_is_the_users_and_leaves_nothing(shared_runtimes: Any) -> None:
    model = synk.torch.DataParallel(Fragile(5, 2).double(), runtime=shared_runtimes[2])
    x = batches(1)[0][0]
    bad = x.clone()
    bad[7] = 1e7  # of the last rank
    with pytest.raises(OverflowError, match="too large"):
        model(bad)
    model(x).sum().backward()
    assert num_graphs(model) == [0, 0]
    assert agrees(model)


@pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")
def test_a_worker_killed_between_forward_and_backward(reused: Callable[..., Any]) -> None:
    rt = reused(2)
    model, optimizer = trained(rt)
    plain = copy.deepcopy(model)
    of_plain = torch.optim.Adam(plain.parameters(), lr=0.01)
    of_plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    x, y = batches(1)[0]
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    kill_and_wait(pids(rt)[1])
    with pytest.raises(synk.errors.WorkerDied, match=r"rank 1 of 2 .* Run the forward pass of this batch again"):
        loss.backward()
    descend(model, optimizer, x, y)
    descend(plain, of_plain, x, y)
    assert distance(model, plain) <= 1e-12
    kill_and_wait(*pids(rt))
    descend(model, optimizer, x, y)
    descend(plain, of_plain, x, y)
    assert distance(model, plain) <= 1e-12
    assert num_graphs(model) == [0, 0]


@pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")
@pytest.mark.parametrize("how", ["close", pytest.param("lost", marks=pytest.mark.storm)])
def test_after_the_runtime_it_is_an_ordinary_module(runtime: Any, how: str) -> None:
    rt = runtime(1, max_restarts=0)
    model, optimizer = trained(rt)
    plain = copy.deepcopy(model)
    x, y = batches(1)[0]
    loss = F.mse_loss(model(x), y)
    if how == "close":
        rt.close()
    else:
        kill_and_wait(pids(rt)[0])
        with pytest.raises(synk.errors.ClosedError) as caught:
            model(x)
        caught.value.with_traceback(None)  # the runtime keeps why it was closed, and with it this frame
    with pytest.raises(synk.errors.ClosedError, match="Run the forward pass"):
        loss.backward()
    assert distance(model, plain) == 0.0
    before = descend(model, optimizer, x, y)
    assert descend(model, optimizer, x, y) < before
    assert torch.equal(model(x), copy.deepcopy(model)(x))


def test_a_forked_copy_of_the_program_has_a_module_of_its_own(shared_runtimes: Any) -> None:
    model, optimizer = trained(shared_runtimes[2])
    x, y = batches(1)[0]
    before = copy.deepcopy(model)
    child = os.fork()
    if child == 0:  # it must not return into pytest
        code = 1
        try:
            same = torch.equal(model(x), before(x))
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            code = 0 if same and not model(x).any() else 2
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert distance(model, before) == 0.0
    descend(model, optimizer, x, y)
    assert agrees(model)


def test_inline_and_calls_without_rows_run_here(shared_runtimes: Any) -> None:
    model, _ = trained(shared_runtimes["inline"], steps=3)
    plain = mlp()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    for x, y in batches(3):
        descend(plain, optimizer, x, y)
    assert distance(model, plain) == 0.0
    parallel, _ = trained(shared_runtimes[2])
    assert parallel(torch.zeros(0, 5, dtype=torch.float64)).shape == (0, 2)


def test_what_is_dropped_is_freed(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    model, optimizer = trained(rt)
    gone = weakref.ref(model._synk_passes._placed)
    del model, optimizer
    gc.collect()
    assert gone() is None


def test_many_steps_take_no_more_memory_and_no_descriptors(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    model, optimizer = trained(rt)

    def held(x: Any) -> Any:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]), len(os.listdir("/proc/self/fd"))

    measure = rt.function(held, outputs=None)
    x, y = batches(1)[0]
    for _ in range(60):
        descend(model, optimizer, x, y)
    before = measure(np.zeros(2)), len(os.listdir("/proc/self/fd"))
    for _ in range(300):
        model(x)  # dropped
        descend(model, optimizer, x, y)
    after = measure(np.zeros(2)), len(os.listdir("/proc/self/fd"))
    assert after[1] == before[1]
    assert [descriptors for _, descriptors in after[0]] == [descriptors for _, descriptors in before[0]]
    for (pages, _), (pages_before, _) in zip(after[0], before[0]):
        assert pages - pages_before < 512  # 2 MB


class Look(torch.nn.Module):  # type: ignore[misc,name-defined]
    """Says for each row whether its rank knows the call that runs its pass."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(5, 1)

    def forward(self, x: Any) -> Any:
        from support.compiled import is_compiled

        return self.inner(x), torch.full((len(x),), is_compiled())


def test_repeated_passes_are_quiet_calls(shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On both sides, in both directions, and also where the program writes into the parameters in between."""
    from synk._master.calls import call as way

    begun: list[str] = []
    launch = way.launch

    def count(*args: Any, **options: Any) -> Any:
        begun.append(args[1].name)
        return launch(*args, **options)

    monkeypatch.setattr(way, "launch", count)
    module = Look()
    plain = copy.deepcopy(module)
    model = synk.torch.DataParallel(module, runtime=shared_runtimes[2])
    for number in range(8):
        x = torch.full((6, 5), float(number))
        before = len(begun)
        outputs, is_known = model(x)
        outputs.sum().backward()
        plain(x)[0].sum().backward()
        torch.testing.assert_close(model.inner.weight.grad, plain.inner.weight.grad)
        assert number < 3 or (is_known.tolist() == [1.0] * 6 and len(begun) == before)
        with torch.no_grad():
            for own, parameter in zip(plain.parameters(), model.parameters()):
                own.add_(1.0)
                parameter.add_(1.0)


def test_bcast_inputs_names_variadic_parameters(shared_runtimes: Any) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: torch.Tensor, *tables: torch.Tensor, **more: torch.Tensor) -> torch.Tensor:
            return x + sum(table.sum() for table in (*tables, *more.values()))

    model, x, table = Model(), torch.arange(4.0), torch.ones(4)
    for names in (("tables", "more"), ("tables",), ("more",)):
        parallel = synk.torch.DataParallel(model, bcast_inputs=names, runtime=shared_runtimes[2])
        tables = (table, table + 1) if "tables" in names else ()
        more = {"a": table, "b": table + 2} if "more" in names else {}
        assert torch.equal(parallel(x, *tables, **more), model(x, *tables, **more))
