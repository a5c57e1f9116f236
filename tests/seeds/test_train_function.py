"""The training recipe trains as torch does alone on the whole batch, whatever rows each worker has."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from synk.extensions.train_function import make_train_function
from synk.extensions.updates import adam

START = {"w": np.array([0.5, -1.0, 0.2]), "b": np.array(0.1)}
SIZES = [9, 7, 1, 8, 2, 6]  # of batches; three workers do not all have rows of each


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
        torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach().numpy() for name, value in params.items()}


@pytest.mark.parametrize(("framework", "num_slices"), [(None, 2), ("torch", 1)])
def test_training_is_that_of_torch(shared_runtimes: Any, tmp_path: Path, framework: Any, num_slices: int) -> None:
    """By all kinds of calls. A step that fails changes nothing, and a run goes on from its file."""
    rt = shared_runtimes[3]

    def make() -> Any:
        rule, options = adam(0.05), {"clip_norm": 1.0, "framework": framework, "num_slices": num_slices}
        return make_train_function(loss_and_grad, START, rule, runtime=rt, **options)

    train, losses = make(), []
    for number, num_rows in enumerate(SIZES):
        call = (train, train.submit, train.serial)[number % 3](*batch(num_rows))
        losses.append(float(call.result() if number % 3 == 1 else call))
        if number == 2:
            x, y = batch(6)
            x[-2:] = math.nan  # the rows of the last rank
            with pytest.raises(ArithmeticError, match="not a number"):
                train(x, y)
            train.save(tmp_path / "run.npz")
            train = make()
            train.load(tmp_path / "run.npz")
    expected_losses, expected = trained_by_torch()
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-10)
    for rank in range(3):
        found = train.params[rank]
        assert train.state[rank]["step"] == len(SIZES)
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-10)
    with pytest.raises(TypeError, match="cannot take a training step: got num_slices="):
        train(*batch(4), num_slices=2)
