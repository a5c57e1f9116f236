"""The training steps that the benchmarks measure: the same models and batches in every peer."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import torch

F = torch.nn.functional


class Block(torch.nn.Module):
    """One block of a small transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.attend = torch.nn.MultiheadAttention(width, 4, batch_first=True)
        self.first, self.second = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
        self.inner = torch.nn.Sequential(
            torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
        )

    def forward(self, x: Any) -> Any:
        y = self.first(x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        return x + self.inner(self.second(x))


def make(job: str) -> tuple[Any, Any, Any, Any]:
    """Return ``(model, optimizer, inputs, targets)`` of a job; the batch is that of all ranks."""
    torch.manual_seed(0)
    model: Any
    if job == "cnn":
        model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 16, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.Conv2d(16, 32, 3, padding=1),
            torch.nn.ReLU(),
            torch.nn.MaxPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(512, 10),
        )
        x, y = torch.randn(256, 1, 8, 8), torch.randint(10, (256,))
    elif job == "transformer":
        model = torch.nn.Sequential(Block(64), Block(64), torch.nn.Flatten(), torch.nn.Linear(32 * 64, 10))
        x, y = torch.randn(32, 32, 64), torch.randint(10, (32,))
    elif job == "large":  # 18 MB of gradients
        model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 64))
        x, y = torch.randn(128, 1024), torch.randint(64, (128,))
    elif job == "small":  # about 0.6 ms
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
        x, y = torch.randn(128, 64), torch.randint(10, (128,))
    else:  # a model of one number
        model = torch.nn.Linear(1, 1, bias=False)
        x, y = torch.zeros(2, 1), torch.zeros(2, dtype=torch.long)
    return model, torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9), x, y


def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    """Take one step of training and return the loss."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def resident_nbytes() -> float:
    """Return the memory of this process; of what it shares with others, its share."""
    rollup = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    return 1024.0 * int(rollup.partition("\nPss:")[2].split()[0])


_own = functools.cache(make)


def own_step(x: Any, y: Any) -> Any:
    """Take one step with a model of one number that is this process's own."""
    model, optimizer, _, _ = _own("empty")
    return step(model, optimizer, x, y).detach()
