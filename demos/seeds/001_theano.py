"""A graph of PyTensor on all workers: softmax regression on handwritten digits, trained by adam, as in Theano's time.

The graph has the loss, its gradient by ``pt.grad`` and the update of each variable. Updates that name "all" are
averaged over the rows of all workers, so the parameters equal those of the same graph in one process, also for uneven
batches.

Run: python demos/51_pytensor.py
"""

from __future__ import annotations

import importlib.util
import os
import sys

if importlib.util.find_spec("pytensor") is None:
    print('PyTensor is not installed, so there is nothing to show: pip install "pytensor>=3.0"')
    sys.exit()

# NumPy computes, nothing is compiled: loops that PyTensor would fuse would be loops of Python.
os.environ.setdefault("PYTENSOR_FLAGS", "cxx=,linker=py,floatX=float64,optimizer_excluding=fusion")
os.environ.update(OMP_NUM_THREADS="1")

import numpy as np
import pytensor
import pytensor.tensor as pt
from sklearn.datasets import load_digits

import synk
from synk.extensions.pytensor import function

NUM_TRAIN, BATCH_ROWS, NUM_EPOCHS, RATE = 1437, 97, 4, 0.02  # 97 rows: uneven on two workers

order = np.random.default_rng(0).permutation(1797)
pixels, labels = load_digits(return_X_y=True)
pixels, labels = pixels[order] / 16.0, labels[order]

x, y = pt.matrix("x"), pt.lvector("y")
w = pytensor.shared(np.zeros((64, 10)), name="w")
b = pytensor.shared(np.zeros(10), name="b")
scores = x @ w + b
logs = scores - pt.log(pt.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
logs = logs - scores.max(axis=1, keepdims=True)
loss = -pt.mean(logs[pt.arange(y.shape[0]), y])

# The gradient of all rows comes first, then adam on each worker: the same numbers everywhere.
gradients = [pytensor.shared(np.zeros_like(each.get_value()), name=f"gradient of {each.name}") for each in (w, b)]
gradient_updates = [(kept, new, "all") for kept, new in zip(gradients, pt.grad(loss, [w, b]))]
steps = pytensor.shared(np.array(0.0), name="steps")
adam_updates = [(steps, steps + 1)]
for parameter, gradient in zip((w, b), gradients):
    first, second = (pytensor.shared(np.zeros_like(parameter.get_value())) for _ in range(2))
    m, v = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
    rate = RATE * pt.sqrt(1 - 0.999 ** (steps + 1)) / (1 - 0.9 ** (steps + 1))
    adam_updates += [(first, m), (second, v), (parameter, parameter - rate * m / (pt.sqrt(v) + 1e-8))]

with synk.fork(2, backend="numpy"):
    take_gradient = function([x, y], loss, updates=gradient_updates, name="gradient")
    take_step = function([], updates=adam_updates, name="adam")
    predict = function([x], (scores.argmax(axis=1), "gather"), name="predict")

    first_loss = last_loss = float("nan")
    for _ in range(NUM_EPOCHS):
        for start in range(0, NUM_TRAIN, BATCH_ROWS):
            rows = slice(start, min(start + BATCH_ROWS, NUM_TRAIN))
            last_loss = float(take_gradient(pixels[rows], labels[rows]))
            take_step()
            expected = float(take_gradient.serial(pixels[rows], labels[rows]))  # the same graph in this process
            take_step.serial()
            assert abs(last_loss - expected) < 1e-6
            first_loss = last_loss if np.isnan(first_loss) else first_loss
    found = predict(pixels[NUM_TRAIN:])
    difference = max(
        float(np.abs(shared.value - each.get_value()).max()) for each, shared in take_step.variables.items()
    )

accuracy = float((found == labels[NUM_TRAIN:]).mean())
print(f"loss {first_loss:.3f} -> {last_loss:.3f}, {accuracy:.1%} of {len(found)} digits that it has not seen are right")
print(f"two workers against one process after {NUM_EPOCHS} epochs: the variables differ by {difference:.1e} at most")
assert accuracy > 0.9
assert difference < 1e-6
