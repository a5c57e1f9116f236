"""Handwritten digits: a serial training program, and the same one on 1, 2, ... workers.

Softmax regression on random cosine features of scikit-learn's digits, trained with momentum on mini-batches that are
drawn by index list. The function is written for one process and is used unchanged by both. Every process, the serial
one as well, computes with one BLAS thread, so that a speed-up is one of processes.

A linear model does little with each number that it reads: a step moves 55 MB of features between the cores and the
memory, which all workers share. So it gains less than a program that computes in the caches (00_bootstrap.py).

Run: python demos/10_digits_softmax.py
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable

import numpy as np
from limits import SMALL, Watch, explain
from sklearn.datasets import load_digits
from threadpoolctl import threadpool_limits

import synk

threadpool_limits(1)  # this process; the workers read the environment
os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--size", choices=("small", "full"), default="full", help="small: a tenth of the work, for tests")
parser.add_argument("--picture", metavar="FILE", help="draw the speed-up there; needs matplotlib")
options = parser.parse_args()
NUM_FEATURES, NUM_EPOCHS = {"small": (512, 15), "full": (2048, 30)}[options.size]
NUM_TRAIN, BATCH_ROWS, LEARNING_RATE, MOMENTUM = 1437, 479, 0.0125, 0.9
STEP_NBYTES = 7 * BATCH_ROWS * NUM_FEATURES * 8  # the features are written three times and read four times

rng = np.random.default_rng(0)
pixels, labels = load_digits(return_X_y=True)
order = rng.permutation(len(pixels))
pixels, labels = pixels[order] / 16.0, labels[order]
FREQUENCIES = rng.normal(scale=0.35, size=(64, NUM_FEATURES))
PHASES = rng.uniform(0, 2 * np.pi, size=NUM_FEATURES)


def cosine_features(x: np.ndarray) -> np.ndarray:
    return np.cos(x @ FREQUENCIES + PHASES)


def loss_and_grad(weights: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean cross-entropy of the rows and its gradient; the features are made anew, as an augmentation would be."""
    features = cosine_features(x)
    scores = features @ weights
    scores -= scores.max(axis=1, keepdims=True)
    errors = np.exp(scores)
    errors /= errors.sum(axis=1, keepdims=True)
    rows = np.arange(len(y))
    loss = -np.log(errors[rows, y]).mean()
    errors[rows, y] -= 1
    return loss, features.T @ errors / len(y)


def train(step: Callable[[np.ndarray, np.ndarray], tuple[float, np.ndarray]]) -> tuple[np.ndarray, float]:
    """Return the final weights and the seconds they took; ``step(weights, rows)`` gives loss and gradient."""
    weights = np.zeros((NUM_FEATURES, 10))
    velocity = np.zeros_like(weights)
    shuffle = np.random.default_rng(1)
    step(weights, np.arange(BATCH_ROWS))  # start-up is not training
    start = time.perf_counter()
    for _ in range(NUM_EPOCHS):
        for rows in shuffle.permutation(NUM_TRAIN).reshape(-1, BATCH_ROWS):
            _, gradient = step(weights, rows)
            velocity = MOMENTUM * velocity - LEARNING_RATE * gradient
            weights = weights + velocity
    return weights, time.perf_counter() - start


def accuracy(weights: np.ndarray) -> float:
    predicted = (cosine_features(pixels[NUM_TRAIN:]) @ weights).argmax(axis=1)
    return float((predicted == labels[NUM_TRAIN:]).mean())


train_pixels, train_labels = pixels[:NUM_TRAIN], labels[:NUM_TRAIN]
reference, serial_s = train(lambda weights, rows: loss_and_grad(weights, train_pixels[rows], train_labels[rows]))
table = [("serial", serial_s, "", accuracy(reference))]

num_cores = len(os.sched_getaffinity(0))
limits = ""
for num_workers in sorted({1, 2, *(n for n in (4, 8, 16, 32) if n < num_cores), num_cores}):
    with synk.fork(num_workers, backend="numpy") as runtime:
        parallel = synk.function(loss_and_grad, bcast_inputs="weights")
        x, y = synk.data(train_pixels), synk.data(train_labels)
        with Watch() as watch:
            weights, seconds = train(lambda weights, rows: parallel(weights, x, y, batch=rows))  # noqa: B023
        if num_workers == num_cores > 1 and serial_s / seconds < SMALL:
            job_rate = STEP_NBYTES * NUM_EPOCHS * (NUM_TRAIN // BATCH_ROWS) / seconds / 1e9
            limits = explain(serial_s / seconds, runtime, watch.other_cores, job_rate)
    difference = abs(weights - reference).max()
    assert difference < 1e-8, f"{num_workers} workers: the weights differ by {difference}"
    assert accuracy(weights) >= 0.95
    table.append((f"{num_workers} worker{'s' * (num_workers > 1)}", seconds, f"{difference:.1e}", accuracy(weights)))

print(f"digits: {NUM_TRAIN} training and {len(pixels) - NUM_TRAIN} test images, {NUM_FEATURES} features,")
print(f"{NUM_EPOCHS} epochs of mini-batches of {BATCH_ROWS}, one BLAS thread per process, {num_cores} cores")
print(f"A step moves {STEP_NBYTES / 1e6:.0f} MB, so this program gains less than one that computes in the caches.")
print()
print(f"{'program':<12}{'time [s]':>10}{'speed-up':>10}{'largest difference':>20}{'test accuracy':>15}")
for program, seconds, difference, score in table:
    print(f"{program:<12}{seconds:>10.2f}{serial_s / seconds:>10.2f}{difference:>20}{score:>15.1%}")
if limits:
    print()
    print(limits)


def draw(file: str) -> None:
    """Draw the speed-up of the parallel programs over the number of workers, and write it to a file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    numbers = [int(program.split()[0]) for program, *_ in table[1:]]
    speed_ups = [serial_s / seconds for _, seconds, *_ in table[1:]]
    _, axes = pyplot.subplots(figsize=(5, 3.5), layout="constrained")
    limit = [min(number, num_cores) for number in numbers]
    axes.plot(numbers, limit, color="0.6", linestyle="--", label="one for each core")
    axes.plot(numbers, speed_ups, marker="o", label="measured")
    axes.set(xlabel="workers", ylabel="speed-up over the serial program", xticks=numbers, ylim=(0, None))
    axes.legend(frameon=False)
    pyplot.savefig(file, dpi=150)
    print(f"\nspeed-up drawn in {file}")


if options.picture:
    draw(options.picture)
