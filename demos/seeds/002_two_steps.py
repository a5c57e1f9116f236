"""Seed 002: a program in two steps, built on NumPy workers, then moved to other devices, and its state brought back.

PageRank by power iteration. The first steps run where the program was built. Then its pickle, which knows no device, is
put on OpenCL devices if dpnp is installed, and else on another number of NumPy workers; there it runs a hundred times
for one message.

Run: python demos/seeds/002_two_steps.py
"""

from __future__ import annotations

import importlib.util
import os
import pickle

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np

import synk

NUM_PAGES, DAMPING = 200, 0.85

rng = np.random.default_rng(0)
links = (rng.random((NUM_PAGES, NUM_PAGES)) < 0.05) | np.eye(NUM_PAGES, k=1, dtype=bool)
links[-1, 0] = True
matrix = DAMPING * (links / links.sum(axis=1, keepdims=True)).T + (1 - DAMPING) / NUM_PAGES


def target() -> dict[str, object]:
    """Return where the program is moved to: the second step."""
    if importlib.util.find_spec("dpnp") is not None:
        return {"backend": "dpnp", "num_workers": 1}
    return {"backend": "numpy", "num_workers": 3}


# The first step: functions over a variable, on the workers of this machine.
synk.fork(2, backend="numpy")
rank = synk.shared(np.full(NUM_PAGES, 1 / NUM_PAGES))


@synk.function(bcast_inputs="matrix", updates=[rank], outputs="first")
def iterate(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Take a step of the power iteration; return how much it has changed."""
    new = matrix @ rank.value
    return abs(new - rank.value).sum(), new


@synk.function(outputs="gather")
def scores(pages: np.ndarray) -> np.ndarray:
    """Return the scores of some pages, those of each worker in its own process."""
    return rank.value[pages]


program = synk.Program(iterate=iterate, scores=scores, state={"rank": rank})
for _ in range(3):
    change = iterate(matrix)
print(f"built on 2 NumPy workers: after 3 steps the scores change by {float(change):.1e}")

# The second step: the pickle goes anywhere.
data = pickle.dumps(program)
place = target()
with pickle.loads(data).on(**place) as moved:
    print(f"moved to {place['num_workers']} x {place['backend']}, a pickle of {len(data)} bytes")
    change = float(moved.iterate.repeat(100, matrix))
    elsewhere = np.asarray(moved.scores(np.arange(NUM_PAGES)))
    print(f"after 100 more steps there, for one message, they change by {change:.1e}")

assert change < 1e-12
assert not np.allclose(rank.value, elsewhere, rtol=1e-6)  # the parent is where it was

# The same without a pickle: the copy's parent is the program itself, which takes over what the copy has computed.
with program.on(**place) as moved:
    moved.iterate.repeat(100, matrix)
    assert np.allclose(moved.scores(np.arange(NUM_PAGES)), elsewhere, rtol=1e-12, atol=0)
    moved.sync_to_parent()

values, vectors = np.linalg.eig(matrix)
expected = vectors[:, np.argmax(values.real)].real
expected /= expected.sum()
here = scores(np.arange(NUM_PAGES))
assert np.allclose(here, elsewhere, rtol=1e-12, atol=0)
assert np.allclose(here, expected, rtol=1e-9)
print(f"brought back: the scores equal those of numpy.linalg.eig within {np.abs(here / expected - 1).max():.1e}")
synk.close()
