"""The digits again, with the data set on the workers: scattered once, then chosen by index at every call.

On CPU workers both ways read the rows from shared memory and cost about the same; on GPUs the rows of a ``Data`` cross
to the device at every call, those of a sharded variable are there.

Run: python demos/13_digits_resident.py
"""

from __future__ import annotations

import time

import numpy as np
from sklearn.datasets import load_digits

import synk

NUM_EPOCHS, NUM_TRAIN, BATCH_ROWS, LEARNING_RATE = 200, 1437, 479, 0.5

pixels, labels = load_digits(return_X_y=True)
order = np.random.default_rng(0).permutation(len(pixels))
pixels, labels = pixels[order] / 16.0, labels[order]


def loss_and_grad(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean cross-entropy of softmax regression over the rows, and its gradient."""
    scores = x @ weights
    scores -= scores.max(axis=1, keepdims=True)
    errors = np.exp(scores)
    errors /= errors.sum(axis=1, keepdims=True)
    rows = np.arange(len(y))
    loss = -np.log(errors[rows, y]).mean()
    errors[rows, y] -= 1
    return loss, x.T @ errors / len(y)


def train(x: synk.Data | synk.Shared, y: synk.Data | synk.Shared) -> tuple[np.ndarray, float]:
    """Return the final weights and the seconds they took."""
    weights = np.zeros((64, 10))
    shuffle = np.random.default_rng(1)
    step(weights, x, y, batch=np.arange(BATCH_ROWS))  # start-up is not training
    start = time.perf_counter()
    for _ in range(NUM_EPOCHS):
        for rows in shuffle.permutation(NUM_TRAIN).reshape(-1, BATCH_ROWS):
            weights = weights - LEARNING_RATE * step(weights, x, y, batch=rows)[1]
    return weights, time.perf_counter() - start


synk.fork()
step = synk.function(loss_and_grad, bcast_inputs="weights")
train_pixels, train_labels = pixels[:NUM_TRAIN], labels[:NUM_TRAIN]
from_host, host_s = train(synk.data(train_pixels), synk.data(train_labels))
resident, resident_s = train(synk.shared(train_pixels, sharded=True), synk.shared(train_labels, sharded=True))

difference = abs(resident - from_host).max()
accuracy = float(((pixels[NUM_TRAIN:] @ resident).argmax(axis=1) == labels[NUM_TRAIN:]).mean())
assert difference < 1e-10  # each rank sums other rows, so the last digits may differ
assert accuracy >= 0.95
print(f"{NUM_EPOCHS} epochs, {synk.current().world_size} workers, test accuracy {accuracy:.1%}")
print(f"data set in shared memory:   {host_s:.2f} s")
print(f"data set on the workers:     {resident_s:.2f} s")
print(f"largest difference of the weights: {difference:.1e}")
synk.close()
