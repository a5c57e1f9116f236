"""What the tests of training share: models, batches, steps in which something happens to a rank, and comparisons."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

import synk

F = torch.nn.functional
lr_scheduler = torch.optim.lr_scheduler
SIZES = (8, 7, 1, 2, 5)
"""Rows of batches: some cannot be divided evenly, some have fewer rows than there are workers."""


def batches(count: int, sizes: Sequence[int] = SIZES, *, dtype: Any = None) -> list[tuple[Any, Any]]:
    """Return batches of inputs with 5 columns and targets with 2, the same at every call."""
    generator = torch.Generator().manual_seed(7)
    made = []
    for number in range(count):
        x = torch.randn(sizes[number % len(sizes)], 5, generator=generator, dtype=torch.float64)
        y = torch.stack([x.sum(1), (x[:, 0] * x[:, 1])], 1)
        made.append((x.to(dtype or torch.float64), y.to(dtype or torch.float64)))
    return made


def mlp(seed: int = 1, *layers: Any) -> Any:
    torch.manual_seed(seed)
    between = layers or (torch.nn.Tanh(),)
    return torch.nn.Sequential(torch.nn.Linear(5, 8), *between, torch.nn.Linear(8, 2)).double()


def plain_step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def step_and_schedule(model: Any, optimizer: Any, scheduler: Any, x: Any, y: Any) -> Any:
    """Take a step in the model's own dtype."""
    dtype = next(model.parameters()).dtype
    loss = plain_step(model, optimizer, x.to(dtype), y.to(dtype))
    scheduler.step()
    return loss


class Kept(dict[int, Any]):  # not synk.Runtime: each worker would import the program's half of synk for it
    """Runtimes of one kind, for the tests of one file alone, by their numbers of workers."""

    def __init__(self, reuse: Callable[..., synk.Runtime], kind: str, make: Callable[..., synk.Runtime]) -> None:
        self._take = lambda num_workers: reuse((kind, num_workers), lambda: make(num_workers, max_restarts=10**9))

    def __missing__(self, num_workers: int) -> synk.Runtime:
        self[num_workers] = self._take(num_workers)
        return self[num_workers]


class Shared(torch.nn.Module):
    """Uses one layer twice and its weight in another one, has a frozen parameter, one that no row uses, and one that
    only some rows use.
    """

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(5, 5, bias=False)
        self.other = torch.nn.Linear(5, 5, bias=False)
        self.other.weight = self.inner.weight
        self.outer = torch.nn.Linear(5, 2)
        self.frozen = torch.nn.Parameter(torch.ones(5), requires_grad=False)
        self.unused = torch.nn.Parameter(torch.ones(3))
        self.rare = torch.nn.Parameter(torch.zeros(2))

    def forward(self, x: Any) -> Any:
        y = torch.tanh(self.inner(torch.tanh(self.other(torch.tanh(self.inner(x))))))
        y = self.outer(y * self.frozen)
        positive = x[:, 0] > 1.0
        if positive.any():  # only then the graph reaches it
            y = y + positive[:, None] * self.rare
        return y


ALL = ("spectral", "batch norm", "counter", "number", "shared", "frozen", "conv")


class Everything(torch.nn.Module):
    """``features`` says which kinds of state it has; the numbers are row by row, but for a synchronised batch norm."""

    def __init__(self, features: Sequence[str]) -> None:
        super().__init__()
        self.features = tuple(features)
        self.first = torch.nn.Linear(5, 6)
        if "spectral" in features:
            self.first = torch.nn.utils.spectral_norm(self.first)
        self.norm = torch.nn.BatchNorm1d(6) if "batch norm" in features else torch.nn.Identity()
        self.conv = torch.nn.Conv1d(1, 1, 3, padding=1) if "conv" in features else None
        self.inner, self.other = torch.nn.Linear(6, 6), torch.nn.Linear(6, 6)
        if "shared" in features:
            self.other.weight = self.inner.weight
        self.frozen = torch.nn.Parameter(torch.full((6,), 0.5), requires_grad=False)
        self.dropout = torch.nn.Dropout(0.2) if "dropout" in features else torch.nn.Identity()
        self.last = torch.nn.Linear(6, 2)
        self.register_buffer("counter", torch.zeros((), dtype=torch.long), persistent=False)
        self.count, self.scale = 0, 1.0

    def forward(self, x: Any) -> Any:
        factor = 1.0
        if "counter" in self.features:
            self.counter += 1
            factor = factor + 0.01 * float(self.counter)
        if "number" in self.features:
            self.count += 1
            factor = factor + 0.01 * self.count
        x = self.norm(torch.tanh(self.first(x)))
        if self.conv is not None:
            x = self.conv(x[:, None])[:, 0]
        x = torch.tanh(self.other(torch.tanh(self.inner(x))))
        if "frozen" in self.features:
            x = x * self.frozen
        return self.last(self.dropout(x)) * factor * self.scale


class Blocks(torch.nn.Module):
    """Some layers, of which one is left out where no row is large, and one is computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(5, 5) for _ in range(4))
        self.rare, self.out = torch.nn.Linear(5, 5), torch.nn.Linear(5, 2)

    def forward(self, x: Any) -> Any:
        for number, layer in enumerate(self.layers):
            # A backward pass inside of the backward pass.
            x = torch.tanh(checkpoint(layer, x, use_reentrant=True) if number == 2 else layer(x))
        is_large = x[:, 0] > 0.3
        if is_large.any():
            x = x + is_large[:, None] * self.rare(x)
        return self.out(x)


def hooked() -> Any:
    """Hooks of a forward and a backward pass, and a frozen parameter."""
    model = mlp()
    model[0].register_forward_hook(lambda module, args, out: out * 1.5)
    model[2].register_full_backward_hook(lambda module, of_inputs, of_outputs: (of_inputs[0] * 0.5,))
    model[2].bias.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[], Any]] = {
    "mlp": mlp,
    "shared, frozen, unused and rarely used parameters": Shared,
    "checkpointed and left out layers": Blocks,
    "batch norms": lambda: mlp(1, torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.BatchNorm1d(8, momentum=None)),
    "buffers and attributes": lambda: Everything(ALL),
    "hooks": hooked,
}


HAVE_NORMS = {"batch norms", "buffers and attributes"}
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, nesterov=True, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
}
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "steps": lambda optimizer: lr_scheduler.StepLR(optimizer, 2, 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=30, cycle_momentum=False),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch),
}


def mean_over_some(model: Any, x: Any, y: Any, sums: Any) -> Any:
    """A mean over a number of things that differs from row to row, as of tokens."""
    mask = torch.cat([x[:, :1] > -9, x[:, 1:2] > 0], 1)
    return sums.mean(((model(x) - y).square() * mask).sum(), mask.sum())


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return 2 * ctx.saved_tensors[0] * grad


def with_a_penalty(model: Any, x: Any, y: Any, sums: Any) -> Any:
    """A loss with a gradient in it, and with one of the user's own."""
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return Square.apply(out - y).mean() + 0.1 * slope.square().mean()


def of_all_pairs(model: Any, x: Any, y: Any, sums: Any) -> Any:
    """A loss by how alike each row is to the rows of all ranks, and by its derivatives with respect to the rows."""
    x = x.clone().requires_grad_()
    codes = model(x)
    energy = torch.tanh(codes @ sums.all_gather(codes).T).mean(1)
    (slopes,) = torch.autograd.grad(energy.mean(), [x], create_graph=True)
    return energy.mean() + ((len(x) * slopes) ** 2).sum(1).mean()


LOSSES: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "mean": lambda model, x, y, sums: F.mse_loss(model(x), y),
    "mean over some": mean_over_some,
    "sum": lambda model, x, y, sums: 0.1 * sums.total(F.mse_loss(model(x), y, reduction="sum")),
    "with a penalty": with_a_penalty,
    "of all pairs": of_all_pairs,
}
PLAIN_SUMS = SimpleNamespace(mean=lambda total, count: total / count, total=lambda value: value, all_gather=lambda x: x)
"""What a program without synk writes in the place of ``synk.torch.mean``, ``total`` and ``all_gather``."""

WAYS = ("plain", "clipped", "two passes", "accumulated")
"""What a body does with the gradients."""


def body(loss_of: Callable[..., Any], way: str, sums: Any) -> Callable[..., Any]:
    def step(model: Any, optimizer: Any, scheduler: Any, x: Any, y: Any) -> Any:
        if way != "accumulated":  # otherwise those of all calls add up
            optimizer.zero_grad()
        loss = loss_of(model, x, y, sums)
        loss.backward()
        if way == "two passes":
            (0.5 * loss_of(model, x, y, sums)).backward()
        if way == "clipped":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        scheduler.step()
        return loss

    return step


def generator_and_judge() -> tuple[Any, ...]:
    torch.manual_seed(3)
    made = torch.nn.Linear(5, 2).double()
    judge = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.Tanh(), torch.nn.Linear(4, 1)).double()
    return made, judge, torch.optim.Adam(made.parameters(), 0.01), torch.optim.Adam(judge.parameters(), 0.01)


def adversarial_step(made: Any, judge: Any, of_made: Any, of_judge: Any, x: Any, y: Any) -> Any:
    """Each backward pass leaves gradients in both models, and each optimizer uses its own."""
    of_judge.zero_grad()
    loss = F.softplus(judge(made(x).detach())).mean() + F.softplus(-judge(y)).mean()
    loss.backward()
    of_judge.step()
    of_made.zero_grad()
    other = F.softplus(-judge(made(x))).mean()
    other.backward()
    of_made.step()
    return loss.detach() + other


def closure_step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    """The closure runs as often on every rank, because each sees the loss of all rows."""

    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    return optimizer.step(closure)


def with_lbfgs(search: str | None = None) -> tuple[Any, Any]:
    model = torch.nn.Linear(5, 2).double()
    torch.nn.init.constant_(model.weight, 0.1)
    torch.nn.init.zeros_(model.bias)
    return model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=5, line_search_fn=search)


# ----- what happens to a rank in a step

BEFORE, BEHIND = ("forward", "backward", "reduction"), ("step", "inside", "scheduler", "end")
"""Places in a step: before the gradients of all rows are there, and behind, where the others can finish alone."""


class Halfway(torch.optim.Adam):
    """Calls ``reach`` in its step, when the first group's parameters are changed and the second one's are not."""

    @staticmethod
    def reach() -> None:
        pass

    def _init_group(self, group: Any, *args: Any, **kwargs: Any) -> Any:
        if group is self.param_groups[-1]:
            self.reach()
        return super()._init_group(group, *args, **kwargs)


def disturbed_step(
    model: Any, optimizer: Any, scheduler: Any, x: Any, y: Any, where: str = "", action: str = "", rank: int = 1
) -> Any:
    """A training step in which ``action`` befalls a rank at a place."""

    def at(place: str) -> None:
        if place != where:
            return
        if action == "interrupt" and place in BEHIND:
            # The other rank must have left the reduction: until then the interrupt ends its step, which does not count.
            synk.comm.barrier()
        if synk.comm.rank == rank:
            act(action, is_interruptible=place != "inside")

    optimizer.zero_grad()
    optimizer.count = getattr(optimizer, "count", 0) + 1
    out = model(x) * (1 + 0.01 * optimizer.count)
    at("forward")
    loss = F.mse_loss(out, y)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    hooked = {"reduction": trained[0], "backward": trained[-1]}  # in a backward pass the first layer comes last
    hooks = [hooked[where].register_hook(lambda gradient: at(where))] if where in hooked else []
    try:
        loss.backward()
    finally:
        for hook in hooks:
            hook.remove()
    at("step")
    if where == "inside":
        optimizer.reach = lambda: at("inside")
    try:
        optimizer.step()
    finally:
        vars(optimizer).pop("reach", None)
    at("scheduler")
    scheduler.step()
    at("end")
    return loss.detach()


def act(action: str, *, is_interruptible: bool = True) -> None:
    """End, leave or stop this rank's step; ``"interrupt"`` presses Ctrl-C in the program and waits until it is here."""
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "raise":
        raise ArithmeticError("on purpose")
    elif action == "kill soon":  # while the step ends, or behind it
        threading.Timer(random.random() * 0.003, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return
    elif action == "interrupt":
        arrived: list[int] = []
        handler: Any = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, lambda *args: (arrived.append(1), handler(*args)))
        try:
            os.kill(os.getppid(), signal.SIGINT)
            while not arrived:
                time.sleep(0.001)
        finally:
            signal.signal(signal.SIGINT, handler)
    while is_interruptible:  # "hang", or until the interrupt ends this
        time.sleep(0.01)


# ----- states


def state_of(objects: Sequence[Any]) -> list[Any]:
    """Return all that was trained: states of modules and optimizers, flags, gradients, and a module's numbers."""
    return [_of_module(each) if isinstance(each, torch.nn.Module) else each.state_dict() for each in objects]


def _of_module(module: Any) -> dict[str, Any]:
    state = {key: value.detach().clone() for key, value in module.state_dict().items()}
    state |= {f"buffer {key}": value.clone() for key, value in module.named_buffers()}
    state |= {f"training {key}": part.training for key, part in module.named_modules()}
    state |= {f"trains {key}": each.requires_grad for key, each in module.named_parameters()}
    state |= {f"gradient of {key}": each.grad for key, each in module.named_parameters()}
    return state | {key: getattr(module, key) for key in ("count", "scale") if hasattr(module, key)}


def rank_states(rep: Any) -> list[Any]:
    """Return the state of the objects of each rank."""
    look = rep.function(lambda *args: state_of(args[:-1]), trains=False, outputs=None)
    return [state for state in look(torch.zeros(12)) if state is not None]


def differences(one: Any, other: Any, atol: float = 0.0, at: str = "") -> list[str]:
    """Return where two nestings differ, tensors and numbers by more than ``atol``: bit for bit by default."""
    if isinstance(one, dict) and isinstance(other, dict) and one.keys() == other.keys():
        return [place for key in one for place in differences(one[key], other[key], atol, f"{at}/{key}")]
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        pairs = enumerate(zip(one, other))
        return [place for number, pair in pairs for place in differences(*pair, atol, f"{at}/{number}")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor) and one.shape == other.shape:
        dense = [each.detach().to_dense().double() for each in (one, other)]
        return [] if torch.allclose(*dense, rtol=0, atol=atol) else [at]
    if isinstance(one, float) and isinstance(other, float):
        return [] if abs(one - other) <= atol * max(1.0, abs(one)) else [at]
    return [] if type(one) is type(other) and not isinstance(one, torch.Tensor) and one == other else [at]


def assert_steps_keep_nothing(rt: synk.Runtime, step: Callable[[], Any]) -> None:
    """Assert that dozens of steps on thousands of rows take no more memory on the ranks, nor descriptors."""

    def held(x: Any) -> Any:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]), len(os.listdir("/proc/self/fd"))

    measure = rt.function(held, outputs=None)
    for _ in range(20):
        step()
    before = measure(np.zeros(2)), len(os.listdir("/proc/self/fd"))
    for _ in range(60):
        step()
    after = measure(np.zeros(2)), len(os.listdir("/proc/self/fd"))
    assert after[1] == before[1]
    for (pages, descriptors), (pages_before, descriptors_before) in zip(after[0], before[0]):
        assert descriptors == descriptors_before and pages - pages_before < 512, "2 MB more"
