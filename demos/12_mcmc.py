"""An existing emcee program: the log-probability of all walkers in one call, shared among the workers.

Bayesian logistic regression on scikit-learn's breast cancer data. With ``vectorize=True`` emcee passes a block of
walkers, one a row; synk scatters the rows and gathers the log-probabilities.

Run: python demos/12_mcmc.py
"""

from __future__ import annotations

import emcee
import numpy as np
from sklearn.datasets import load_breast_cancer

import synk

NUM_WALKERS, NUM_STEPS = 64, 200

measurements, is_benign = load_breast_cancer(return_X_y=True)
measurements = measurements[:, :5]
measurements = (measurements - measurements.mean(axis=0)) / measurements.std(axis=0)
design = np.column_stack([np.ones(len(measurements)), measurements])
signs = np.where(is_benign == 1, 1.0, -1.0)


def log_probability(walkers: np.ndarray, design: np.ndarray, signs: np.ndarray) -> np.ndarray:
    """Log-posterior of each walker, ``(walkers, parameters) -> (walkers,)``, with all of the data."""
    margins = signs * (walkers @ design.T)
    return -np.logaddexp(0, -margins).sum(axis=1) - 0.5 * (walkers**2).sum(axis=1) / 10**2


def sample() -> emcee.EnsembleSampler:
    data = (design, signs)
    sampler = emcee.EnsembleSampler(NUM_WALKERS, design.shape[1], log_probability, args=data, vectorize=True)
    sampler.random_state = np.random.RandomState(0).get_state()
    sampler.run_mcmc(np.random.default_rng(0).normal(scale=0.1, size=(NUM_WALKERS, design.shape[1])), NUM_STEPS)
    return sampler


serial = sample()
synk.fork()  # the first line that is new, and the second one
log_probability = synk.function(log_probability, outputs="gather", bcast_inputs=("design", "signs"))
parallel = sample()

names = ("intercept", "radius", "texture", "perimeter", "area", "smoothness")
print(f"posterior after {NUM_STEPS} steps of {NUM_WALKERS} walkers, {synk.current().world_size} workers")
for name, values in zip(names, parallel.get_chain(discard=NUM_STEPS // 2, flat=True).T, strict=True):
    print(f"{name:<11}{values.mean():+7.2f} +- {values.std():.2f}")
difference = abs(parallel.get_chain() - serial.get_chain()).max()
print(f"largest difference of the two chains: {difference:.1e}")
assert difference < 1e-6
assert np.allclose(parallel.get_log_prob(), serial.get_log_prob())
assert 0.1 < parallel.acceptance_fraction.mean() < 0.9

synk.close()
print("All assertions passed.")
