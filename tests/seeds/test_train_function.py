"""The training recipe trains as torch does alone on the whole batch, whatever rows each worker has."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from rules import adam
from train_function import make_train_function

import synk

START = {"w": np.array([0.5, -1.0, 0.2]), "b": np.array(0.1)}
SIZES = [9, 7, 1, 8, 2, 6]  # of batches; three workers do not all have rows of each


@pytest.fixture
def three_workers(kept_open: Any) -> Iterator[None]:
    with synk.fork(3, backend="numpy"):
        yield


def batch(num_rows: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(num_rows)
    return random.normal(size=(num_rows, 3)), random.normal(size=num_rows)


def loss_and_grad(params: Any, x: Any, y: Any) -> Any:
    if math.isnan(x[0, 0]):
        raise ArithmeticError("not a number")
    error = x @ params["w"] + params["b"] - y
    return (error**2).mean(), {"w": 2 * x.T @ error / len(x), "b": 2 * error.mean()}


def trained_by_torch() -> tuple[list[float], dict[str, np.ndarray]]:
    """Return the loss before each step, and the parameters at the end."""
    params = {name: torch.tensor(value, requires_grad=True) for name, value in START.items()}
    optimizer, losses = torch.optim.Adam(params.values(), lr=0.05), []
    for num_rows in SIZES:
        x, y = map(torch.tensor, batch(num_rows))
        optimizer.zero_grad()
        loss = ((x @ params["w"] + params["b"] - y) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach().numpy() for name, value in params.items()}


def test_training_is_that_of_torch(three_workers: None) -> None:
    """A step that fails changes nothing."""
    train, losses = make_train_function(loss_and_grad, START, adam(0.05)), []
    for number, num_rows in enumerate(SIZES):
        losses.append(float(train(*batch(num_rows))))
        if number == 2:
            x, y = batch(6)
            x[-2:] = math.nan  # the rows of the last rank
            with pytest.raises(ArithmeticError, match="not a number"):
                train(x, y)
    expected_losses, expected = trained_by_torch()
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-10)
    for rank in range(3):
        assert train.state[rank]["step"] == len(SIZES)
        for name, value in expected.items():
            np.testing.assert_allclose(train.params[rank][name], value, rtol=1e-10)
