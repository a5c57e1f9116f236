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
from support.seeds import seeds
from support.stateful import KINDS, LARGE, METHODS, SMALL, Box, Model, stepper

BATCHES: list[Any] = [None, None, 3, slice(None, None, -1), [2, 0, 2]]


def serial(method: str, num_calls: int) -> list[Any]:
    model = Model(LARGE)
    return [copy.deepcopy(getattr(model, method)(None)) for _ in range(num_calls)]


def combined(value: Any, op: str, num_ranks: int) -> Any:
    """Return what ``op`` makes of equal values on all ranks."""
    if isinstance(value, tuple):
        return tuple(combined(part, op, num_ranks) for part in value)
    if op == "sum":
        return value * num_ranks
    return np.concatenate([value] * num_ranks) if op == "gather" else value


def assert_equal(got: Any, expected: Any) -> None:
    if isinstance(expected, tuple):
        assert len(got) == len(expected)
        for mine, right in zip(got, expected):
            assert_equal(mine, right)
    else:
        np.testing.assert_array_equal(got, expected)


def test_submitted_calls_return_what_each_of_them_computed(subtests: Any, reused: Any) -> None:
    num_workers, num_calls = 3, 6
    rt = reused(num_workers)
    for method, op in itertools.product(METHODS, ("avg", "sum", "max", "first", "gather")):
        if op == "gather" and method == "twice":  # a number has no rows
            continue
        with subtests.test(method=method, op=op):
            f = rt.function(getattr(Model(LARGE), method), outputs=op)
            pending = [f.submit(np.ones(num_workers)) for _ in range(num_calls)]
            for call, right in zip(pending, serial(method, num_calls), strict=True):
                assert_equal(call.result(), combined(right, op, num_workers))


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


class Reference:
    """The functions in plain Python: what each rank returns for its rows, slice by slice."""

    def __init__(self, num_ranks: int, size: int) -> None:
        self.steps = [{kind: stepper(size, kind) for kind in KINDS} for _ in range(num_ranks)]

    def __call__(self, kind: str, x: np.ndarray, batch: Any, num_slices: int) -> list[Any]:
        rows = x if batch is None else x[:batch] if isinstance(batch, int) else x[batch]
        found: list[Any] = []
        for steps, part in zip(self.steps, np.array_split(rows, len(self.steps)), strict=True):
            pieces = np.array_split(part, min(num_slices, len(part)))
            values = [copy.deepcopy(steps[kind](piece)) for piece in pieces]
            found.append(values if num_slices > 1 else values[0])
        return found


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("seed", seeds(2, 20))
def test_any_sequence_of_calls_equals_plain_python(
    subtests: Any, shared_runtimes: Any, num_ranks: int, seed: int
) -> None:
    """Of functions that return their buffers, views, inputs and objects in all ways; results are kept to the end."""
    rt, rng = shared_runtimes[num_ranks], random.Random(f"{num_ranks} {seed}")
    size = rng.choice([SMALL, LARGE // 2, LARGE])
    functions = {kind: rt.function(named(kind, stepper(size, kind)), outputs=None) for kind in KINDS}
    reference, results = Reference(num_ranks, size), list[tuple[str, Any, Any]]()
    for _ in range(40):
        kind, batch, num_slices = rng.choice(KINDS), rng.choice(BATCHES), rng.choice([1, 1, 2, 3])
        x = np.array([float(rng.randrange(9)) for _ in range(4)])
        source = rt.data(x) if rng.random() < 0.5 else x
        is_submitted = rng.random() < 0.6
        call = functions[kind].submit if is_submitted else functions[kind]
        got = call(source, batch=batch, num_slices=num_slices)
        results.append(
            (kind, got.result if is_submitted else functools.partial(list, got), reference(kind, x, batch, num_slices))
        )
    for number, (kind, result, expected) in enumerate(results):
        with subtests.test(kind, number=number):
            np.testing.assert_equal(result(), expected)
