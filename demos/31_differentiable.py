"""A regression whose loss adds up over the ranks, fitted by LBFGS on all of them: torch differentiates through the sums.

The parabola, its curvature and the standard errors are those of one process. Every rank has its own rows and runs the
same optimizer; first derivatives go through two collectives, and second ones too, for the errors of the parameters.

Run: python demos/31_differentiable.py
"""

from __future__ import annotations

from typing import Any

import torch

import synk

torch.set_num_threads(1)
TRUTH = torch.tensor([0.1, 1.0, -2.0], dtype=torch.float64)

generator = torch.Generator().manual_seed(42)
inputs = 2 * torch.rand(10_001, generator=generator, dtype=torch.float64)
noise = 0.05 * torch.randn(10_001, generator=generator, dtype=torch.float64)
outputs = TRUTH[0] + TRUTH[1] * inputs + TRUTH[2] * inputs**2 + noise


def residuals(parameters: Any, x: Any, y: Any) -> Any:
    return ((parameters[2] * x + parameters[1]) * x + parameters[0] - y).square().sum()


def fit(loss_of: Any) -> tuple[Any, Any]:
    """Return the parameters with the least loss, and the second derivatives of the loss there."""
    parameters = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([parameters], line_search_fn="strong_wolfe", max_iter=30, tolerance_grad=1e-9)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = loss_of(parameters)
        loss.backward()
        return loss

    optimizer.step(closure)
    found = parameters.detach()
    return found, torch.autograd.functional.hessian(loss_of, found)


def fit_on_ranks(x: Any, y: Any) -> tuple[Any, Any]:
    """Fit all rows, of which this rank has some."""

    def loss_of(parameters: Any) -> Any:
        # Every rank has parameters of its own, which are equal. Their mean is what all of them are responsible for.
        shared = synk.torch.all_reduce(parameters, "sum") / len(synk.comm.ranks)
        return synk.torch.all_reduce(residuals(shared, x, y), "sum")

    return fit(loss_of)


expected, expected_hessian = fit(lambda parameters: residuals(parameters, inputs, outputs))
with synk.fork(2):
    parallel_fit = synk.function(fit_on_ranks, outputs=("first", "first"), framework="torch")
    parameters, hessian = parallel_fit(inputs, outputs)

variance = residuals(parameters, inputs, outputs) / (len(inputs) - 3)
errors = (2 * variance * torch.linalg.inv(hessian).diagonal()).sqrt()
for truth, value, error in zip(TRUTH, parameters, errors):
    print(f"{float(truth):+.1f}: fitted {float(value):+.4f} +- {float(error):.4f}")
    assert abs(value - truth) < 4 * error
assert (parameters - expected).abs().max() < 1e-9
assert ((hessian - expected_hessian) / expected_hessian).abs().max() < 1e-9
print(f"largest difference to one process: {float((parameters - expected).abs().max()):.0e}")
