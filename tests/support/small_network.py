"""A small network in NumPy alone, for workers to import: a test module would bring its own imports with it."""

from __future__ import annotations

from typing import Any

import numpy as np


def start() -> dict[str, Any]:
    random = np.random.default_rng(5)
    return {"hidden": (random.normal(size=(4, 3)), np.zeros(3)), "out": random.normal(size=3)}


def batch(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(num_rows)
    return random.normal(size=(num_rows, 4)), random.normal(size=num_rows)


def loss_and_grad(params: Any, x: np.ndarray, y: np.ndarray) -> tuple[float, Any]:
    """Return the loss of a small network and its gradient, written out in NumPy."""
    weight, bias = params["hidden"]
    hidden = np.tanh(x @ weight + bias)
    error = hidden @ params["out"] - y
    back = np.outer(error, params["out"]) * (1 - hidden**2) * (2 / len(x))
    return error @ error / len(x), {"hidden": (x.T @ back, back.sum(0)), "out": hidden.T @ error * (2 / len(x))}
