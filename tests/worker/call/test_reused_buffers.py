"""Functions that return memory which they use again: each call has the values that its own run computed.

What a rank keeps of a call beyond its end must not change when the next one runs. The expected values come from the
same Python code run serially, with a copy of each result.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.harness import wait_for
from support.seeds import examples
from support.stateful import KINDS, LARGE, METHODS, SMALL, Box, Model, stepper

import synk


@pytest.fixture(params=["0", "60000000"], ids=["is asked", "meets"])
def patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How long a rank waits awake for the others; see ``test_large_outputs``."""
    monkeypatch.setenv("SYNK_SPIN_US", request.param)
    return str(request.param)


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


@pytest.mark.parametrize("num_workers", [1, 3])
def test_submitted_calls_return_what_each_of_them_computed(
    subtests: Any, reused: Any, patience: str, num_workers: int
) -> None:
    rt = reused(num_workers)
    for method, op in itertools.product(METHODS, ("avg", "sum", "max", "first", "gather")):
        if op == "gather" and method == "twice":  # a number has no rows
            continue
        with subtests.test(method=method, op=op):
            f = rt.function(getattr(Model(LARGE), method), outputs=op)
            pending = [f.submit(np.ones(num_workers)) for _ in range(8)]
            for call, right in zip(pending, serial(method, 8), strict=True):
                assert_equal(call.result(), combined(right, op, num_workers))


def test_a_torch_parameter_that_is_trained_in_place(shared_runtimes: Any, tmp_path: Path) -> None:
    """All calls have run before the outputs of the first one are asked for."""
    torch = pytest.importorskip("torch")
    rt = shared_runtimes[2]
    weight = torch.ones(LARGE)

    def step(x: Any) -> Any:
        weight.add_(1.0)
        (tmp_path / f"{synk.comm.rank} {weight[0]}").touch()
        return weight, weight.view(-1, 1)[::2]

    f = rt.function(step, outputs="avg", framework="torch")
    pending = [f.submit(np.ones(2)) for _ in range(3)]
    assert wait_for(lambda: len(os.listdir(tmp_path)) == 6)
    for k, call in enumerate(pending):
        whole, part = call.result()
        assert (whole == k + 2).all() and (part == k + 2).all()


def test_each_rank_has_its_own_step(reused: Any, patience: str) -> None:
    """Each rank's values, and not those of a rank that is ahead by a call or two."""
    rt = reused(2)
    state = np.zeros(LARGE)

    def step(x: Any) -> Any:
        state[:] = x[0]
        return state, state

    f = rt.function(step, outputs=("gather", None))
    pending = [f.submit(np.array([k, 10.0 + k])) for k in range(9)]
    for k, call in enumerate(pending):
        rows, each = call.result()
        np.testing.assert_array_equal(rows, np.repeat([k, 10.0 + k], LARGE))
        assert [(part[0], part[-1]) for part in each] == [(k, k), (10.0 + k, 10.0 + k)]


def test_an_object_that_a_function_changes_and_returns_again(reused: Any) -> None:
    rt = reused(2)
    seen: deque[float] = deque()

    def note(x: Any) -> Any:
        seen.append(float(x[0]))
        return seen

    f = rt.function(note, outputs=None)
    pending = [f.submit(np.full(2, float(k))) for k in range(6)]
    for k, call in enumerate(pending):
        assert call.result() == [deque(map(float, range(k + 1)))] * 2


def filler(op: Any) -> Callable[[Any], Any]:
    """Return a function that changes one array in each slice, and returns it or an object that holds it."""
    box = Box(np.zeros(2))

    def work(x: Any) -> Any:
        box.value[:] = x[0]
        return box.value if op == "sum" else box

    return work


def test_each_slice_counts_with_what_it_returned(subtests: Any, shared_runtimes: Any) -> None:
    x = np.arange(6.0)[::-1]
    for where, op in itertools.product(("inline", 2), (None, "first", "sum", lambda a, b: a + b)):
        with subtests.test(where=where, op=str(op)):
            got = shared_runtimes[where].function(filler(op), outputs=op)(x, num_slices=6)
            if op is None:
                assert [part for rank in got for part in rank] == [Box(np.full(2, value)) for value in x]
            else:
                value = np.full(2, 5.0 if op == "first" else x.sum())
                np.testing.assert_array_equal(got if op == "sum" else got.value, value)


def test_a_tensor_stays_one_over_slices(shared_runtimes: Any) -> None:
    torch = pytest.importorskip("torch")
    f = shared_runtimes[2].function(lambda x: torch.tensor(x.sum()), outputs=None)
    parts = [part for rank in f(np.arange(4.0), num_slices=2) for part in rank]
    assert all(isinstance(part, torch.Tensor) for part in parts) and [float(part) for part in parts] == [0, 1, 2, 3]


# ----- anything between anything


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(["submit", "submit", "call", "collect", "drop", "assign"]),
        st.integers(0, len(KINDS) - 1),
        st.sampled_from([None, None, 3, slice(None, None, -1), [2, 0, 2]]),
        st.sampled_from([1, 1, 2, 3]),
        st.booleans(),
    ),
    min_size=1,
    max_size=14,
)


class Reference:
    """The functions in plain Python: what each rank returns for its rows, slice by slice."""

    def __init__(self, num_ranks: int, sizes: list[int]) -> None:
        self.steps = [[stepper(size, kind) for kind, size in zip(KINDS, sizes)] for _ in range(num_ranks)]

    def __call__(self, which: int, x: np.ndarray, batch: Any, num_slices: int) -> list[list[Any]]:
        rows = x if batch is None else x[:batch] if isinstance(batch, int) else x[batch]
        parts = np.array_split(rows, len(self.steps))
        return [
            [copy.deepcopy(steps[which](piece)) for piece in np.array_split(part, num_slices) if len(piece)]
            for steps, part in zip(self.steps, parts)
        ]


def assert_ranks(got: Any, expected: list[list[Any]], num_slices: int) -> None:
    """Compare a result of op None: by rank what it has returned, by slice if there are any."""
    for own, slices in zip(got, expected):
        for k, right in enumerate(slices):
            assert_part(own[k] if num_slices > 1 else own, right)


def assert_part(got: Any, right: Any) -> None:
    if isinstance(right, dict):
        for key, value in right.items():
            assert_part(got[key], value)
    elif isinstance(right, tuple):
        for mine, value in zip(got, right, strict=True):
            assert_part(mine, value)
    elif isinstance(right, (str, Box)):
        assert got == right
    else:
        np.testing.assert_array_equal(got, right)


@examples(15)
@given(
    operations=OPERATIONS,
    sizes=st.lists(st.sampled_from([SMALL, LARGE // 2, LARGE]), min_size=len(KINDS), max_size=len(KINDS)),
    num_ranks=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_calls_of_all_kinds_between_one_another(
    shared_runtimes: Any, operations: Any, sizes: list[int], num_ranks: int, seed: int
) -> None:
    rt = shared_runtimes[num_ranks]
    rng = np.random.default_rng(seed)
    functions = [rt.function(stepper(size, kind), outputs=None, name=kind) for kind, size in zip(KINDS, sizes)]
    reference = Reference(num_ranks, sizes)
    variable, total = rt.shared(np.zeros(2)), 0.0

    def add(x: Any) -> None:
        variable.value = variable.value + x.mean()

    assign = rt.function(add, outputs=None)
    waiting: deque[tuple[Any, list[list[Any]], int]] = deque()
    kept: list[tuple[Any, list[list[Any]], int]] = []
    for action, which, batch, num_slices, as_data in operations:
        x = rng.integers(0, 9, 4).astype(float)
        source = rt.data(x) if as_data else x
        if action == "submit":
            call = functions[which].submit(source, batch=batch, num_slices=num_slices)
            waiting.append((call, reference(which, x, batch, num_slices), num_slices))
        elif action == "call":
            got = functions[which](source, batch=batch, num_slices=num_slices)
            kept.append((got, reference(which, x, batch, num_slices), num_slices))
        elif action == "collect" and waiting:
            call, expected, slices = waiting.popleft()
            kept.append((call.result(), expected, slices))
        elif action == "drop":
            del kept[: len(kept) // 2]
        elif action == "assign":
            assign(np.full(2, float(which)))
            total += which
    kept += [(call.result(), expected, slices) for call, expected, slices in waiting]
    for got, expected, slices in kept:
        assert_ranks(got, expected, slices)
    np.testing.assert_array_equal(variable.value, np.full(2, total))
