"""A map that is killed again and again, and goes on each time where it was: with the results of plain Python.

The program starts itself as a child and kills it at a random moment, workers and all, until a child comes to the end.
Each child finds in the journal what the ones before it have computed. One item in fifty fails; the rest goes on.

Run: python demos/14_overnight.py
"""

from __future__ import annotations

import argparse
import os
import pickle
import random
import subprocess
import sys
import tempfile

os.environ.update(OMP_NUM_THREADS="1")

import numpy as np

import synk

parser = argparse.ArgumentParser()
parser.add_argument("--size", choices=("small", "full"), default="full", help="small: one kill, for tests")
parser.add_argument("path", nargs="?", help="the journal of a child")
options = parser.parse_args()
NUM_ITEMS, NUM_KILLS = {"small": (60, 1), "full": (400, 5)}[options.size]


def mean_of_walks(seed: int) -> float:
    """Return the mean distance that 2000 random walkers get in 100 steps."""
    if seed % 50 == 7:
        raise ValueError(f"no walkers for seed {seed}")
    steps = np.random.default_rng(seed).standard_normal((2000, 100))
    return float(np.abs(steps.sum(1)).mean())


def outcome(seed: int) -> float | str:
    try:
        return mean_of_walks(seed)
    except ValueError as error:
        return str(error)


if options.path:
    with synk.fork(2, backend="numpy"):
        results = list(synk.map(mean_of_walks, range(NUM_ITEMS), journal=options.path, on_error="return"))
    found = [str(each.exception) if isinstance(each, synk.ItemError) else each for each in results]
    sys.stdout.buffer.write(pickle.dumps(found))
    sys.exit()

expected = [outcome(seed) for seed in range(NUM_ITEMS)]
with tempfile.TemporaryDirectory() as folder:
    command = [sys.executable, __file__, "--size", options.size, os.path.join(folder, "walks.journal")]
    for kill in range(NUM_KILLS + 1):
        program = subprocess.Popen(command, stdout=subprocess.PIPE)
        if kill < NUM_KILLS:
            try:
                program.wait(0.3 + random.random())
            except subprocess.TimeoutExpired:
                program.kill()
                print("killed", flush=True)
        printed = program.communicate()[0]

assert pickle.loads(printed) == expected
failed = sum(isinstance(each, str) for each in expected)
print(f"{len(expected) - failed} results and {failed} named failures, bit for bit those of plain Python")
