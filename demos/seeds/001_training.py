"""Seed 001: the training functions of Synkhronos: each of its update rules, on workers and in one process.

The gradient of a small network is written by hand, for one process. Batches are uneven, and the last has fewer rows
than there are workers; the parameters are those of the serial loop all the same.

Run: python demos/seeds/001_training.py
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import optree
import rules
from train_function import make_train_function

import synk

Params = dict[str, np.ndarray]

rng = np.random.default_rng(0)
x = rng.standard_normal((401, 5))
y = np.sin(x @ rng.standard_normal(5))
start = {"w": rng.standard_normal((5, 8)) / 2, "b": np.zeros(8), "v": rng.standard_normal(8) / 3, "c": np.zeros(())}
batches = [slice(first, first + 50) for first in range(0, 401, 50)] * 4  # the last of each epoch has one row


def loss_and_grad(params: Params, x: np.ndarray, y: np.ndarray) -> tuple[float, Params]:
    hidden = np.tanh(x @ params["w"] + params["b"])
    error = hidden @ params["v"] + params["c"] - y
    back = 2 / len(x) * error[:, None] * params["v"] * (1 - hidden**2)
    grads = {"w": x.T @ back, "b": back.sum(0), "v": 2 / len(x) * hidden.T @ error, "c": 2 * error.mean()}
    return float((error**2).mean()), grads


RULES = {
    "sgd": rules.sgd(0.05),
    "momentum": rules.momentum(0.02),
    "nesterov_momentum": rules.nesterov_momentum(0.02),
    "adagrad": rules.adagrad(0.1),
    "rmsprop": rules.rmsprop(0.01),
    "adadelta": rules.adadelta(1.0, eps=1e-4),
    "adam": rules.adam(0.02),
    "adamax": rules.adamax(0.02),
}

synk.fork(2, backend="numpy")
data = synk.data(x), synk.data(y)
before, _ = loss_and_grad(start, x, y)
print(f"loss of all rows before training: {before:.3f}; after {len(batches)} steps, and the difference to one process:")
for name, rule in RULES.items():
    train = make_train_function(loss_and_grad, start, rule)
    params, state = start, rule.init(start)
    for rows in batches:
        loss = train(*data, batch=rows)
        expected, grads = loss_and_grad(params, x[rows], y[rows])
        params, state = rule.step(params, grads, state)
        assert abs(float(loss) - expected) < 1e-9
    after, _ = loss_and_grad(train.params.value, x, y)
    differences = optree.tree_map(lambda one, other: float(np.abs(one - other).max()), dict(train.params.value), params)
    print(f"  {name:18} {after:.3f}  {max(differences.values()):.0e}")
    assert max(differences.values()) < 1e-9
    assert after < 0.9 * before
synk.close()
