"""Seed 001: a program for Synkhronos and Theano with its imports changed: digits by softmax regression and adam.

The graph has the loss, its gradient by ``T.grad`` and the update of each variable. The gradients are outputs, which are
averaged over the rows of all workers, and go back to all of them. So the parameters equal those of the same graph in
one process, also for uneven batches.

Run: python demos/seeds/001_theano.py
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
import pytensor as theano
import pytensor.tensor as T
from sklearn.datasets import load_digits

import synk.extensions.synkhronos as synk

NUM_TRAIN, BATCH_ROWS, NUM_EPOCHS, RATE = 1437, 97, 4, 0.02  # 97 rows: uneven on two workers

order = np.random.default_rng(0).permutation(1797)
pixels, labels = load_digits(return_X_y=True)
pixels, labels = pixels[order] / 16.0, labels[order]

x, y = T.matrix("x"), T.lvector("y")
w = theano.shared(np.zeros((64, 10)), name="w")
b = theano.shared(np.zeros(10), name="b")
scores = x @ w + b
logs = scores - T.log(T.exp(scores - scores.max(axis=1, keepdims=True)).sum(axis=1, keepdims=True))
logs = logs - scores.max(axis=1, keepdims=True)
loss = -T.mean(logs[T.arange(y.shape[0]), y])

# The gradient of all rows comes first, then adam on each worker: the same numbers everywhere.
gradients = [theano.shared(np.zeros_like(each.get_value()), name=f"gradient of {each.name}") for each in (w, b)]
steps = theano.shared(np.array(0.0), name="steps")
updates = [(steps, steps + 1)]
for parameter, gradient in zip((w, b), gradients):
    first, second = (theano.shared(np.zeros_like(parameter.get_value())) for _ in range(2))
    m, v = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
    rate = RATE * T.sqrt(1 - 0.999 ** (steps + 1)) / (1 - 0.9 ** (steps + 1))
    updates += [(first, m), (second, v), (parameter, parameter - rate * m / (T.sqrt(v) + 1e-8))]
variables = [variable for variable, _ in updates]
start_values = [variable.get_value() for variable in variables]
batches = [slice(start, min(start + BATCH_ROWS, NUM_TRAIN)) for start in range(0, NUM_TRAIN, BATCH_ROWS)] * NUM_EPOCHS

synk.fork(2, use_gpu=False)
take_gradient = synk.function([x, y], outputs=[loss, *T.grad(loss, [w, b])], name="gradient")
take_step = synk.function([], updates=updates, name="adam")
predict = synk.function([x], outputs=(scores.argmax(axis=1), "gather"), name="predict")
synk.distribute()

losses = []
for rows in batches:
    found, *values = take_gradient(pixels[rows], labels[rows])
    synk.broadcast(gradients, values)
    take_step()
    losses.append(float(found))
found = predict(pixels[NUM_TRAIN:])
values_of_workers = [variable.get_value() for variable in variables]

# The same in this process alone.
for variable, value in zip(variables, start_values):
    variable.set_value(value)
for rows, on_workers in zip(batches, losses):
    expected, *values = take_gradient.as_theano(pixels[rows], labels[rows])
    for gradient, value in zip(gradients, values):
        gradient.set_value(value)
    take_step.as_theano()
    assert abs(on_workers - expected) < 1e-6
difference = max(float(np.abs(one - other.get_value()).max()) for one, other in zip(values_of_workers, variables))
synk.close()

accuracy = float((found == labels[NUM_TRAIN:]).mean())
print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {accuracy:.1%} of {len(found)} digits that it has not seen are right")
print(f"two workers against one process after {NUM_EPOCHS} epochs: the variables differ by {difference:.1e} at most")
assert accuracy > 0.9
assert difference < 1e-6
