"""An existing scipy.optimize program, made parallel by one line.

A network with one hidden layer learns the digits by full-batch L-BFGS. Only two lines are new: the
optimiser calls the same function, each worker computes a share of the rows.

Run: python demos/11_scipy_minimize.py
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import OptimizeResult, minimize
from sklearn.datasets import load_digits

import synk

NUM_HIDDEN, PENALTY = 64, 1e-3


def loss_and_grad(theta: np.ndarray, x: np.ndarray, y: np.ndarray) -> tuple[float, np.ndarray]:
    """Mean cross-entropy with a weight penalty, and the gradient with respect to the flat parameters."""
    w1, w2 = theta[: 64 * NUM_HIDDEN].reshape(64, NUM_HIDDEN), theta[64 * NUM_HIDDEN :].reshape(NUM_HIDDEN, 10)
    hidden = np.tanh(x @ w1)
    scores = hidden @ w2
    scores -= scores.max(axis=1, keepdims=True)
    errors = np.exp(scores)
    errors /= errors.sum(axis=1, keepdims=True)
    rows = np.arange(len(y))
    loss = -np.log(errors[rows, y]).mean() + 0.5 * PENALTY * theta @ theta
    errors[rows, y] -= 1
    errors /= len(y)
    grad_w2 = hidden.T @ errors
    grad_w1 = x.T @ ((errors @ w2.T) * (1 - hidden**2))
    return loss, np.concatenate([grad_w1.ravel(), grad_w2.ravel()]) + PENALTY * theta


def fit() -> OptimizeResult:
    return minimize(
        loss_and_grad, theta_start, args=(pixels, labels), jac=True, method="L-BFGS-B", options={"maxiter": 40}
    )


pixels, labels = load_digits(return_X_y=True)
pixels = pixels / 16.0
theta_start = 0.1 * np.random.default_rng(0).standard_normal(64 * NUM_HIDDEN + NUM_HIDDEN * 10)

serial = fit()
synk.fork()  # the first line that is new, and the second one
loss_and_grad = synk.function(loss_and_grad, bcast_inputs="theta")
parallel = fit()

print(f"serial:   loss {serial.fun:.6f} after {serial.nfev} calls")
print(f"parallel: loss {parallel.fun:.6f} after {parallel.nfev} calls on {synk.current().world_size} workers")

# One call agrees to the last digits; an optimiser magnifies those from step to step, so its end agrees to fewer.
start_loss, start_grad = loss_and_grad(theta_start, pixels, labels)
serial_loss, serial_grad = loss_and_grad.serial(theta_start, pixels, labels)
assert np.isclose(start_loss, serial_loss, rtol=1e-12)
assert np.allclose(start_grad, serial_grad, rtol=1e-9, atol=1e-14)
assert serial.fun < 0.15
assert np.isclose(parallel.fun, serial.fun, rtol=1e-3)

synk.close()
print("All assertions passed.")
