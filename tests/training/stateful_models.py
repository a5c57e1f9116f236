"""A model whose forward pass advances state of every kind, bodies with faults, and the whole state of objects."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

import synk

F = torch.nn.functional

ALL = ("spectral", "batch norm", "counter", "tensor", "number", "list", "generator", "shared", "frozen", "conv")


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
        self.table = torch.zeros(3, dtype=torch.float64)
        self.count, self.scale = 0, 1.0
        self.notes: list[Any] = []
        self.rng = np.random.default_rng(5)

    def forward(self, x: Any) -> Any:
        factor = 1.0
        if "counter" in self.features:
            self.counter += 1
            factor = factor + 0.01 * float(self.counter)
        if "tensor" in self.features:
            self.table += torch.arange(1, 4, dtype=torch.float64)
            factor = factor + 1e-3 * float(self.table.sum())
        if "number" in self.features:
            self.count += 1
            factor = factor + 0.01 * self.count
        if "list" in self.features:
            self.notes.append({"number": len(self.notes)})
            factor = factor + 1e-3 * len(self.notes)
        if "generator" in self.features:
            factor = factor + 0.1 * float(self.rng.random())
        x = self.norm(torch.tanh(self.first(x)))
        if self.conv is not None:
            x = self.conv(x[:, None])[:, 0]
        x = torch.tanh(self.other(torch.tanh(self.inner(x))))
        if "frozen" in self.features:
            x = x * self.frozen
        return self.last(self.dropout(x)) * factor * self.scale


def body_of(reach: Callable[[str], None]) -> Callable[..., Any]:
    """Return a step in which ``reach(action)`` befalls a rank at a place."""

    def step(model: Any, optimizer: Any, scheduler: Any, x: Any, y: Any, where: str, action: str, rank: int) -> Any:
        def at(place: str) -> None:
            if place == where and synk.comm.rank == rank:
                reach(action)

        optimizer.zero_grad()
        out = model(x)
        at("forward")
        loss = F.mse_loss(out, y)
        handles = []
        if where == "backward":
            handles.append(model.last.weight.register_hook(lambda grad: at("backward")))
        if where == "reduction":  # the gradient that comes last
            handles.append(next(p for p in model.parameters() if p.requires_grad).register_hook(lambda g: at(where)))
        try:
            loss.backward()
        finally:
            for handle in handles:
                handle.remove()
        at("step")
        optimizer.step()
        at("scheduler")
        if scheduler is not None:
            scheduler.step()
        at("end")
        return loss.detach()

    return step


def act(action: str) -> None:
    if action == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif action == "raise":
        raise ArithmeticError("on purpose")
    elif action == "kill soon":  # while the step ends, or behind it
        threading.Timer(random.random() * 0.003, os.kill, (os.getpid(), signal.SIGKILL)).start()
        return
    elif action == "interrupt":
        os.kill(os.getppid(), signal.SIGINT)
    while True:  # "hang", or until the interrupt comes
        time.sleep(0.01)


def state_of(objects: Sequence[Any]) -> dict[str, Any]:
    """Return all that was trained: states of modules and optimizers, flags, buffers, and a module's own attributes."""
    state: dict[str, Any] = {}
    for number, obj in enumerate(objects):
        name = "model" if number == 0 else str(number)
        if isinstance(obj, torch.nn.Module):
            state[name] = {key: value.detach().clone() for key, value in obj.state_dict().items()}
            state[name] |= {f"buffer {key}": value.clone() for key, value in obj.named_buffers()}
            state[name] |= {f"training {key}": part.training for key, part in obj.named_modules()}
            state[name] |= {f"trains {key}": each.requires_grad for key, each in obj.named_parameters()}
            for key in ("count", "scale", "notes", "table", "rng"):
                if hasattr(obj, key):
                    state[name][key] = getattr(obj, key)
        else:
            state[name] = obj.state_dict()
    return state


def rank_states(rep: Any) -> list[dict[str, Any]]:
    return [state_of(rep._resident.get(rank).objects) for rank in range(rep._runtime.world_size)]


def is_alike(one: Any, other: Any, atol: float = 0.0) -> bool:
    """Whether two nestings are equal, tensors and numbers within ``atol``: bit for bit by default."""
    if isinstance(one, np.random.Generator):
        return bool(one.bit_generator.state == other.bit_generator.state)
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and one.shape == other.shape
            and bool(torch.allclose(one.double(), other.double(), rtol=0, atol=atol))
        )
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(is_alike(one[key], other[key], atol) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(is_alike(*pair, atol) for pair in zip(one, other))
    return bool(abs(one - other) <= atol) if isinstance(one, float) else bool(one == other)
