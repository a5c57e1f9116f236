"""Functions that return memory which they use again: each call has the values that its own run computed.

What a rank keeps of a call beyond its end must not change when the next one runs. The expected values come from the
same Python code run serially, with a copy of each result.
"""

from __future__ import annotations

import copy
import functools
import itertools
import random
from typing import Any

import numpy as np
import pytest
from support.names import named
from support.rank_arrays import picked
from support.seeds import seeds
from support.stateful import ARRAYS, KINDS, LARGE, SMALL, Box, stepper


def test_each_rank_has_its_own_step(subtests: Any, reused: Any) -> None:
    """Each rank's values, of arrays and of tensors, and not those of a rank that is ahead by a call or two."""
    torch = pytest.importorskip("torch")
    rt = reused(2)
    for framework, state in ((None, np.zeros(LARGE)), ("torch", torch.zeros(LARGE))):

        def step(x: Any, state: Any = state) -> Any:
            state[:] = x[0]
            return state, state

        with subtests.test(framework=framework):
            f = rt.function(functools.partial(step, state=state), outputs=("gather", None), framework=framework)
            pending = [f.submit(np.array([k, 10.0 + k])) for k in range(9)]
            for k, call in enumerate(pending):
                rows, each = call.result()
                np.testing.assert_array_equal(rows, np.repeat([k, 10.0 + k], LARGE))
                assert [(part[0], part[-1]) for part in each] == [(k, k), (10.0 + k, 10.0 + k)]


def test_each_slice_counts_with_what_it_returned(subtests: Any, shared_runtimes: Any) -> None:
    """It changes one array in each slice, and returns it or an object that holds it."""
    x = np.arange(6.0)[::-1]
    for where, op in itertools.product((0, 2), (None, "first", "sum", lambda a, b: a + b)):
        box = Box(np.zeros(2))

        def work(x: Any, box: Any = box, op: Any = op) -> Any:
            box.value[:] = x[0]
            return box.value if op == "sum" else box

        with subtests.test(where=where, op=str(op)):
            got = shared_runtimes[where].function(lambda x, work=work: work(x), outputs=op)(x, num_slices=6)
            if op is None:
                assert [part for rank in got for part in rank] == [Box(np.full(2, value)) for value in x]
            else:
                value = np.full(2, 5.0 if op == "first" else x.sum())
                np.testing.assert_array_equal(got if op == "sum" else got.value, value)


# ----- any sequence

BATCHES: list[Any] = [None, None, 3, slice(None, None, -1), [2, 0, 2]]
OPS = ("avg", "sum", "max", "first", "gather")


def expected(steps: list[Any], op: str | None, rows: np.ndarray, num_slices: int) -> Any:
    """Return what a call gives whose ranks run ``steps``, in plain Python."""
    parts = [np.array_split(part, min(num_slices, len(part))) for part in np.array_split(rows, len(steps))]
    values = [[copy.deepcopy(step(piece)) for piece in pieces] for step, pieces in zip(steps, parts, strict=True)]
    if op is None:
        return values if num_slices > 1 else [value for (value,) in values]
    return combined(op, [*itertools.chain(*values)], [len(piece) for piece in itertools.chain(*parts)])


def combined(op: str, values: list[Any], rows: list[int]) -> Any:
    if isinstance(values[0], tuple):
        return tuple(combined(op, list(outputs), rows) for outputs in zip(*values))
    if op == "gather":
        return np.concatenate(values)
    if op == "avg":
        return np.average(values, axis=0, weights=rows)
    return values[0] if op == "first" else getattr(np, op)(values, axis=0)


@pytest.mark.parametrize("num_ranks", [1, 3])
@pytest.mark.parametrize("seed", seeds(2, 20))
def test_any_sequence_of_calls_equals_plain_python(
    subtests: Any, shared_runtimes: Any, num_ranks: int, seed: int
) -> None:
    """Of functions that return their buffers, views, inputs and objects in all ways; results are kept to the end."""
    rt, rng = shared_runtimes[num_ranks], random.Random(f"{num_ranks} {seed}")
    size, results = rng.choice([SMALL, LARGE // 2, LARGE]), list[Any]()
    cases = [*((kind, None) for kind in KINDS), *((kind, op) for kind in ARRAYS for op in rng.sample(OPS, 2))]
    functions = [rt.function(named(kind, stepper(size, kind)), outputs=op) for kind, op in cases]
    on_ranks = [[stepper(size, kind) for _ in range(num_ranks)] for kind, _ in cases]
    for _ in range(60):
        number, batch, num_slices = rng.randrange(len(cases)), rng.choice(BATCHES), rng.choice([1, 1, 2, 3])
        x = np.array([float(rng.randrange(9)) for _ in range(4)])
        rows, source = picked(batch, x), rt.data(x) if rng.random() < 0.5 else x
        is_submitted = rng.random() < 0.6
        call = functions[number].submit if is_submitted else functions[number]
        got = call(source, batch=batch, num_slices=num_slices)
        results.append((cases[number], got, expected(on_ranks[number], cases[number][1], rows, num_slices)))
    for number, (case, got, right) in enumerate(results):
        with subtests.test(case=case, number=number):
            np.testing.assert_equal(got.result() if hasattr(got, "result") else got, right)
