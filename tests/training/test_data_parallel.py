"""``synk.torch.DataParallel`` against the same loop in plain torch, and what else a program does with its model.

``test_data_parallel_devices.py`` runs most of it with workers on devices.
"""

from __future__ import annotations

import copy
import dataclasses
import io
import itertools
import pickle
import random
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from support.harness import kill_and_wait, pids
from trainings import (
    LOSSES,
    MODELS,
    OPTIMIZERS,
    PLAIN_SUMS,
    SCHEDULERS,
    WAYS,
    F,
    adversarial_step,
    assert_steps_keep_nothing,
    batches,
    body,
    differences,
    generator_and_judge,
    mlp,
)

import synk

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")


def descend(model: Any, optimizer: Any, x: Any, y: Any) -> float:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return float(loss.detach())


# ----- the same numbers as in plain torch


def like_any_module(way: str, optimizer: str) -> Callable[[Any], list[float]]:
    """Return the training that ``replicate`` is tested with."""

    def train(model: Any) -> list[float]:
        made = OPTIMIZERS[optimizer]([each for each in model.parameters() if each.requires_grad])
        objects = model, made, SCHEDULERS["steps"](made)
        losses = [float(body(LOSSES["mean"], way, PLAIN_SUMS)(*objects, x, y).detach()) for x, y in batches(6)]
        return [*losses, *(float(slots.get("step", 0)) for slots in made.state.values())]  # of rarely used ones fewer

    return train


def over_pairs_of_rows(model: Any) -> list[float]:
    """Two forward passes, a kept graph, and a loss in which each row meets all others."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for x, y in batches(8):
        optimizer.zero_grad()
        first, second = model(x), model(x.flip(0) * 0.5)
        loss = (first @ second.T).logsumexp(1).mean() + F.mse_loss(first, y)
        loss.backward(retain_graph=True)
        (0.1 * loss).backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def two_modules(made: Any, judge: Any) -> list[float]:
    of_both = torch.optim.Adam(made.parameters(), 0.01), torch.optim.Adam(judge.parameters(), 0.01)
    return [float(adversarial_step(made, judge, *of_both, x, y).detach()) for x, y in batches(6)]


ROW_BY_ROW = ("mlp", "shared, frozen, unused and rarely used parameters", "hooks")
PROGRAMS: dict[str, tuple[Callable[[], Any], Callable[..., list[float]]]] = {
    "pairs of rows": (mlp, over_pairs_of_rows),
    "two of them": (lambda: generator_and_judge()[:2], two_modules),
} | {
    f"{name}; {way}; {optimizer}": (MODELS[name], like_any_module(way, optimizer))
    for name in ROW_BY_ROW
    for way, optimizer in random.Random(name).sample([*itertools.product(WAYS, OPTIMIZERS)], 2)
}


def test_training_is_that_of_plain_torch(subtests: Any, shared_runtimes: Any) -> None:
    for number, (name, (build, train)) in enumerate(PROGRAMS.items()):
        workers = (2, 3, 2, 1)[number % 4]
        with subtests.test(program=name, workers=workers):
            plain, wrapped = made(build), made(build)
            parallel = [synk.torch.DataParallel(each, runtime=shared_runtimes[workers]) for each in wrapped]
            assert differences(train(*plain), train(*parallel), 1e-9) == []
            for one, other in zip(plain, parallel):
                assert differences(dict(one.state_dict()), dict(other.state_dict()), 1e-10) == []


def made(build: Callable[[], Any]) -> list[Any]:
    torch.manual_seed(2)
    modules = build()
    return [each.double() for each in (modules if isinstance(modules, tuple) else (modules,))]


class Pair(NamedTuple):
    left: Any
    right: Any


@dataclasses.dataclass
class Outcome:
    value: Any
    others: Any
    label: str


class Cache:
    """No structure to anybody, but it holds a tensor."""

    def __init__(self, keys: Any) -> None:
        self.keys = keys


class Nested(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(5, 2)
        self.register_buffer("offset", torch.ones(2), persistent=False)

    def forward(self, batch: Any, pair: Any, *tables: Any, scale: Any, label: str = "", **more: Any) -> Any:
        out = self.linear(batch["x"].keys) * scale + self.offset
        out = out + sum(table * scale for table in (*tables, *more.values()))
        return Outcome(out, ([pair.left * 2, {"count": batch["ids"][0] + 1}], None, Cache(out * 3)), label)


def test_nested_inputs_and_outputs_with_gradients_for_all_that_want_them(shared_runtimes: Any) -> None:
    plain = Nested().double()
    parallel = synk.torch.DataParallel(copy.deepcopy(plain), runtime=shared_runtimes[2])
    found = []
    for model in (plain, parallel):
        generator = torch.Generator().manual_seed(1)
        shapes = (7, 5), (7, 5), (), (7, 2), (7, 2)
        leaves = [torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_() for shape in shapes]
        x, left, scale, table, other = leaves
        batch = {"x": Cache(x * 2), "ids": (torch.arange(7), "a text")}  # not a leaf itself
        result = model(batch, Pair(left, None), table, scale=scale, label="here", other=other)
        assert type(result) is Outcome and result.label == "here"
        (doubled, counts), nothing, cache = result.others
        assert nothing is None and torch.equal(counts["count"], torch.arange(1, 8))
        (result.value.square().sum() + doubled.sum() + cache.keys.sum()).backward()
        found.append([each.grad for each in (*leaves, model.linear.weight)])
    assert differences(*found, 1e-12) == []


def test_dtypes_autocast_and_strides(shared_runtimes: Any) -> None:
    plain = torch.nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    parallel = synk.torch.DataParallel(copy.deepcopy(plain), runtime=shared_runtimes[2])
    images = torch.randn(5, 3, 6, 6)
    for model in (plain, parallel):
        with torch.autocast("cpu", torch.bfloat16):
            out = model(images)
        assert out.dtype == torch.bfloat16
        out.float().square().mean().backward()
    torch.testing.assert_close(parallel.weight.grad, plain.weight.grad, rtol=3e-2, atol=3e-2)
    assert parallel.weight.is_contiguous(memory_format=torch.channels_last)


class Counting(torch.nn.Module):
    """Has buffers that a forward pass writes into, replaces, makes and lets grow."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.BatchNorm1d(5)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("last", torch.zeros(5))
        self.register_buffer("seen", torch.zeros(0))
        self.register_buffer("whole", torch.ones((), dtype=torch.int64))

    def forward(self, x: Any) -> Any:
        self.calls += 1
        self.last = x[0].detach().clone()
        self.seen = torch.cat([self.seen, x[:1, 0].detach()])
        self.whole = self.whole * 1.5  # of another dtype from here on
        return self.norm(x)


def test_buffers_are_those_of_the_first_worker(shared_runtimes: Any) -> None:
    """A batch norm normalises over the rows of a rank."""
    plain = Counting().double()
    model = synk.torch.DataParallel(copy.deepcopy(plain), runtime=shared_runtimes[2])
    for x, _ in batches(6, (9, 8)):
        half = -(-len(x) // 2)
        others = copy.deepcopy(plain)(x[half:])
        assert torch.allclose(model(x), torch.cat([plain(x[:half]), others]), rtol=0, atol=1e-12)
        assert differences(dict(plain.state_dict()), dict(model.state_dict()), 1e-12) == []
    model.eval()
    with torch.no_grad():
        assert torch.equal(model(x), copy.deepcopy(model)(x))


# ----- what the program does to the module


def trained(rt: synk.Runtime, steps: int = 2) -> tuple[Any, Any]:
    model = synk.torch.DataParallel(mlp(), runtime=rt)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for x, y in batches(steps):
        descend(model, optimizer, x, y)
    return model, optimizer


def agrees(model: Any) -> bool:
    """Whether the workers compute what the same module computes here."""
    x = batches(1)[0][0].to(next(model.parameters()).dtype)
    return torch.allclose(model(x), model.module(x), rtol=1e-6, atol=1e-12)


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(5, 8)
        self.scale, self.options = torch.ones(8, dtype=torch.float64), {"shift": [1.0]}

    def forward(self, x: Any) -> Any:
        return self.linear(x) * self.scale + self.options["shift"][0]


class Tripled(torch.nn.Linear):
    def forward(self, x: Any) -> Any:
        return 3 * super().forward(x)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "nothing": lambda model: None,
    "weights": lambda model: torch.nn.init.ones_(model[1].weight),
    "another parameter": lambda model: setattr(model[1], "weight", torch.nn.Parameter(torch.ones(2, 8).double())),
    "another layer": lambda model: model.__setitem__(1, torch.nn.Linear(8, 3).double()),
    "a parameter that no pass uses": lambda model: setattr(model, "unused", torch.nn.Parameter(torch.ones(1))),
    "another class": lambda model: setattr(model[1], "__class__", Tripled),
    "a hook": lambda model: model[1].register_forward_hook(lambda module, args, out: out + 1),
    "a tensor by data": lambda model: model[0].scale.data.mul_(3),
    "a list": lambda model: model[0].options["shift"].__setitem__(0, 2.0),
    "a mode": lambda model: model[2].eval(),
}


def test_what_the_program_changes_holds_from_the_next_call_on(subtests: Any, shared_runtimes: Any) -> None:
    """Also its gradients, and for a worker that has no rows in the first calls after the change."""
    rt = shared_runtimes[3]
    for name, change in CHANGES.items():
        with subtests.test(change=name):
            module = torch.nn.Sequential(Scaled(), torch.nn.Linear(8, 2), torch.nn.Dropout(1.0)).double()
            module[2].training = name == "a mode"
            model = synk.torch.DataParallel(module, runtime=rt)
            before = model(batches(1)[0][0]).detach()
            change(model)
            x = batches(1)[0][0]
            for rows in (x[:1], x[:2], x):  # of 1, 2 and 3 workers
                assert torch.allclose(model(rows), module(rows), rtol=0, atol=1e-12)
            is_same = model(x).shape == before.shape and torch.equal(model(x), before)
            assert is_same == (name in ("nothing", "a parameter that no pass uses"))
            for each in (model, module):
                each.zero_grad()
                each(x).square().mean().backward()
                gradients = [parameter.grad for parameter in module.parameters()]
                if each is model:
                    found = copy.deepcopy(gradients)
            assert differences(gradients, found, 1e-11) == []


def test_dropout_draws_anew_on_each_rank_and_runs_repeat(shared_runtimes: Any) -> None:
    drawn = []
    x = torch.ones(64, 5)
    for _ in range(2):
        torch.manual_seed(3)
        layers = torch.nn.Dropout(0.5), torch.nn.Linear(5, 5)
        model = synk.torch.DataParallel(torch.nn.Sequential(*layers), runtime=shared_runtimes[2])
        drawn.append((model(x), model(x), torch.rand(3)))  # generators of the program are left alone
    assert differences(*drawn) == []
    first, second, _ = drawn[0]
    assert not torch.equal(first, second) and not torch.equal(first[:32], first[32:])
    model.eval()
    assert torch.equal(model(x), model(x))
    model[1].weight.requires_grad_(False)
    model(x).sum().backward()
    assert model[1].weight.grad is None and model[1].bias.grad is not None
    assert not model.requires_grad_(False)(x).requires_grad


class Stateful(torch.nn.Linear):
    """Counts its passes in a plain attribute, which stays on the ranks."""

    passes = 0

    def forward(self, x: Any) -> Any:
        self.passes += 1
        return super().forward(x) * 0 + self.passes


def test_equal_modules_stay_two_on_the_ranks(shared_runtimes: Any) -> None:
    one, other = (synk.torch.DataParallel(Stateful(5, 2), runtime=shared_runtimes[2]) for _ in range(2))
    x = torch.ones(4, 5)
    with torch.no_grad():
        assert [float(each(x)[0, 0]) for each in (one, other, one, other, other)] == [1, 1, 2, 2, 3]


def test_it_is_the_module_in_all_but_its_calls(shared_runtimes: Any) -> None:
    class Net(torch.nn.Sequential):
        def size(self, x: Any) -> Any:
            return self(x).shape

    plain, x = Net(torch.nn.Linear(5, 2)).double(), batches(1)[0][0]
    model = synk.torch.DataParallel(plain, runtime=shared_runtimes[2])
    assert isinstance(model, Net) and isinstance(model, synk.torch.DataParallel)
    assert model[0] is plain[0] and model.module is plain and list(model.state_dict()) == ["0.weight", "0.bias"]
    model.note = "a text"
    assert plain.note == "a text" and model.size(x) == (8, 2)
    seen = []
    model.register_forward_hook(lambda module, args, out: seen.append((len(args[0]), len(out))))
    model(x)
    assert seen == [(8, 8)]  # its own hooks run here, on all rows
    assert type(copy.deepcopy(model)) is Net
    other = synk.torch.DataParallel(mlp(), runtime=shared_runtimes[2])
    assert type(pickle.loads(pickle.dumps(other))) is torch.nn.Sequential
    file = io.BytesIO()
    torch.save(other.state_dict(), file)
    file.seek(0)
    assert differences(dict(torch.load(file)), dict(other.state_dict())) == []


# ----- refused


class Fragile(torch.nn.Linear):
    def forward(self, x: Any) -> Any:
        if (x > 1e6).any():
            raise OverflowError("too large")
        return super().forward(x)


class Applied(torch.nn.Module):
    def __init__(self, fn: Callable[..., Any]) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, x: Any, other: Any = None) -> Any:
        return self.fn(x, other)


class Kept(torch.nn.Module):
    """Makes a buffer if it has none, and drops it otherwise."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.register_buffer("kept", kept)

    def forward(self, x: Any) -> Any:
        self.kept = torch.ones(1) if self.kept is None else None
        return x


def test_what_is_refused(subtests: Any, rt: Any) -> None:
    parallel = lambda module, **options: synk.torch.DataParallel(module, runtime=rt, **options)  # noqa: E731
    model, bad = parallel(mlp()), torch.ones(8, 5)
    bad[7] = 1e7  # of the last rank
    fragile, moments = parallel(Fragile(5, 2)), parallel(Applied(lambda x, _: x.mean(0)))
    loss = parallel(Applied(lambda x, _: {"loss": x.square().mean()}))  # as models of Hugging Face that get labels
    sparse = parallel(torch.nn.Embedding(4, 3, sparse=True))
    renormed = parallel(torch.nn.Embedding(4, 3, max_norm=0.5))
    normed = parallel(torch.nn.utils.spectral_norm(torch.nn.Linear(5, 2)))
    biased, counting, forgetting = parallel(mlp()), parallel(Kept(None)), parallel(Kept(torch.ones(1)))
    biased.register_buffer("shift", torch.zeros(2, requires_grad=True))
    x = batches(1)[0][0].requires_grad_()
    cases: dict[str, tuple[type[Exception], Callable[[], Any]]] = {
        r"expected a torch\.nn\.Module that is not parallel yet": (TypeError, lambda: parallel(model)),
        "got tensors on meta, expected a module on the CPU": (
            synk.errors.UnsupportedError, lambda: parallel(mlp().to("meta"))
        ),
        r"shape \(5,\) for \d rows of inputs.*a loss too.*synk\.torch\.replicate": (
            ValueError, lambda: moments(torch.ones(8, 5))
        ),
        r"got a single number.*compute_loss_func.*synk\.torch\.replicate": (ValueError, lambda: loss(torch.ones(8, 5))),
        "create_graph=True": (RuntimeError, lambda: torch.autograd.grad(model(x).sum(), x, create_graph=True)),
        "sparse=False": (TypeError, lambda: sparse(torch.tensor([0, 1, 2])).sum().backward()),
        "writes into the parameter 'weight'": (ValueError, lambda: renormed(torch.tensor([0, 1, 2]))),
        r"cannot send attribute 'weight'.*torch\.nn\.Sequential": (ValueError, lambda: normed(torch.ones(8, 5))),
        "'shift' of Sequential requires a gradient": (ValueError, lambda: biased(torch.ones(8, 5))),
        "makes or drops the buffer 'kept'": (ValueError, lambda: counting(torch.ones(8, 5))),
        "cannot run forward .* the buffer 'kept'": (ValueError, lambda: forgetting(torch.ones(8, 5))),
        "too large": (OverflowError, lambda: fragile(bad)),
        "cannot send the inputs": (synk.errors.SerializationError, lambda: model(threading.Lock())),
        "cannot send the outputs": (
            synk.errors.SerializationError, lambda: parallel(Applied(lambda x, _: (row for row in x)))(bad)
        ),
        "differ between the workers": (ValueError, lambda: parallel(Applied(lambda x, _: (x, float(x.sum()))))(bad)),
        "cannot scatter other of 'Applied': got a module.*a part of the module": (
            TypeError, lambda: parallel(Applied(lambda x, other: other(x)))(bad, mlp())
        ),
    }  # fmt: skip
    for text, (error, call) in cases.items():
        with subtests.test(text=text), pytest.raises(error, match=text):
            call()
    fragile(bad[:7]).sum().backward()
    assert agrees(model) and agrees(fragile)


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


# ----- life


def test_workers_killed_between_forward_and_backward_are_not_missed(rt: Any) -> None:
    """The second pass needs nothing of the first one."""
    model, optimizer = trained(rt)
    plain = copy.deepcopy(model)
    of_plain = torch.optim.Adam(plain.parameters(), lr=0.01)
    of_plain.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for x, y in batches(3):
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        kill_and_wait(*pids(rt))
        loss.backward()
        optimizer.step()
        descend(plain, of_plain, x, y)
        assert differences(dict(plain.state_dict()), dict(model.state_dict()), 1e-12) == []


def test_the_second_pass_begins_where_the_first_one_did(rt: Any) -> None:
    """Draws, buffers that the first pass changes, modes and flags that the program changes in between."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.drop = torch.nn.Linear(5, 5), torch.nn.Dropout(0.5)
            self.register_buffer("calls", torch.ones(()))

        def forward(self, x: Any) -> Any:
            out = self.drop(self.linear(x)) * self.calls
            self.calls = self.calls * 2
            return out

    model = synk.torch.DataParallel(Model().double(), runtime=rt)
    x = batches(1)[0][0].clone()
    first, second = model(x), model(x)
    assert float(model.calls) == 4
    model.eval()
    for out, factor in ((second, 2), (first, 1)):  # the slope of a row by the bias: what dropout kept, doubled
        model.zero_grad()
        out.sum().backward()
        kept = (out.detach() != 0).double() * 2 * factor
        assert torch.allclose(model.linear.bias.grad, kept.sum(0), rtol=0, atol=1e-12)


def test_after_the_runtime_it_is_an_ordinary_module(runtime: Any) -> None:
    rt = runtime(1)
    model, optimizer = trained(rt)
    plain = copy.deepcopy(model)
    x, y = batches(1)[0]
    loss = F.mse_loss(model(x), y)
    rt.close()
    with pytest.raises(synk.errors.ClosedError, match="Run the forward pass"):
        loss.backward()
    assert differences(dict(plain.state_dict()), dict(model.state_dict())) == []
    before = descend(model, optimizer, x, y)
    assert descend(model, optimizer, x, y) < before


def test_a_call_without_rows_runs_here(shared_runtimes: Any) -> None:
    model = synk.torch.DataParallel(mlp(), runtime=shared_runtimes[2])
    assert model(torch.zeros(0, 5, dtype=torch.float64)).shape == (0, 2)


def test_many_steps_take_no_more_memory(shared_runtimes: Any) -> None:
    """Nor do forward passes whose results are dropped."""
    model, optimizer = trained(shared_runtimes[2])
    x, y = batches(1, (3000,))[0]

    def step() -> None:
        model(x)
        descend(model, optimizer, x, y)

    assert_steps_keep_nothing(shared_runtimes[2], step)
