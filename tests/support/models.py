"""Small models, and batches for them, that the tests of training share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

SIZES = (8, 7, 1, 2, 5)
NUM_STEPS = 50


def batches(count: int = NUM_STEPS, sizes: Sequence[int] = SIZES, *, dtype: Any = None) -> list[tuple[Any, Any]]:
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
