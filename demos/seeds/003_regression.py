"""Seed 003: mpi4torch's example, a regression by LBFGS on all ranks, with a function of synk around it.

Every rank has its own rows and runs the same optimizer. The loss is a sum over the ranks, and torch differentiates
through the sum. First derivatives go through two collectives, and so do second ones, which give the standard errors of
the parameters. The results are those of one process.

Run: python demos/seeds/003_regression.py
"""

from __future__ import annotations

from collections.abc import Callable

import mpi4torch
import torch

import synk

torch.set_num_threads(1)
TRUTH = torch.tensor([0.1, 1.0, -2.0], dtype=torch.float64)

generator = torch.Generator().manual_seed(42)
inputs = 2 * torch.rand(10_001, generator=generator, dtype=torch.float64)
noise = 0.05 * torch.randn(10_001, generator=generator, dtype=torch.float64)
outputs = TRUTH[0] + TRUTH[1] * inputs + TRUTH[2] * inputs**2 + noise


def residuals(parameters: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares."""
    return ((parameters[2] * x + parameters[1]) * x + parameters[0] - y).square().sum()


def fit(loss_of: Callable[[torch.Tensor], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the parameters with the least loss, and the second derivatives of the loss there."""
    parameters = torch.zeros(3, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS([parameters], line_search_fn="strong_wolfe", max_iter=30, tolerance_grad=1e-9)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(parameters)
        loss.backward()
        return loss

    optimizer.step(closure)
    found = parameters.detach()
    return found, torch.autograd.functional.hessian(loss_of, found)


def fit_on_ranks(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Fit all rows, of which this rank has some."""

    comm = mpi4torch.COMM_WORLD

    def lossfunction(params: torch.Tensor) -> torch.Tensor:
        # average initial params to bring all ranks on the same page
        params = comm.Allreduce(params, mpi4torch.MPI_SUM) / comm.size

        # compute local loss
        localloss = residuals(params, x, y)

        # sum up the loss among all ranks
        return comm.Allreduce(localloss, mpi4torch.MPI_SUM)

    return fit(lossfunction)


expected, expected_hessian = fit(lambda parameters: residuals(parameters, inputs, outputs))
with synk.fork(2, backend="numpy"):  # CPU workers, also on a machine with GPUs
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
