"""Any sequence of collectives and calls on any variables gives what NumPy gives on a list of one array per rank."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.rank_arrays import OPS, assert_same, is_reducible, numbers, picked, reduced

import synk

EVERYWHERE = (1, 2, 3, 4, 0, "1+3")
DTYPES = ("f2", "f4", "f8", "i1", "i8", "c16", "?", "S2", "U2", "i4,f8", "M8[s]")
MAX_ROWS = 40

seeds = st.integers(0, 99)
rows = st.integers(0, 7)
batches = st.one_of(
    st.none(),
    st.integers(0, 3),
    st.builds(slice, st.integers(-4, 4), st.none() | st.integers(-4, 4), st.sampled_from([1, 2, -1])),
    st.lists(st.integers(-4, 3), max_size=9),
)


def rows_picked(batch: Any, rows: np.ndarray) -> np.ndarray | None:
    """Return the rows that a batch picks, None where it picks one that is not there."""
    try:
        return None if isinstance(batch, int) and batch > len(rows) else picked(batch, rows)
    except IndexError:
        return None


class Variable:
    """A shared variable and what each rank must hold."""

    def __init__(self, shared: Any, values: list[np.ndarray]) -> None:
        self.shared = shared
        self.values = values

    @property
    def dtype(self) -> np.dtype:
        return self.values[0].dtype

    @property
    def is_even(self) -> bool:
        return len({value.shape for value in self.values}) == 1

    @property
    def num_rows(self) -> int:
        return sum(len(value) for value in self.values)


def renewed(value: np.ndarray, x: np.ndarray, kind: str) -> np.ndarray:
    """Return what a function assigns: a view, and arrays of other lengths, which may need other memory."""
    if kind == "repeat":
        return np.concatenate([value, value[: len(x)]])
    if kind == "large":
        return np.resize(value, (700 * len(x), *value.shape[1:]))
    if kind == "refill":
        return np.zeros((len(x), *value.shape[1:]), value.dtype)
    return value[:-1] if kind == "cut" else value[::-1]


class Sequences(RuleBasedStateMachine):
    """Two replicated and two sharded variables, on each of which every operation may happen at any time."""

    runtime: Any

    @initialize(data=st.data())
    def make_variables(self, data: st.DataObject) -> None:
        self.variables: list[Variable] = []
        for is_sharded in (False, False, True, True):
            self._make(is_sharded, data.draw(st.sampled_from(DTYPES)), data.draw(rows), data.draw(st.integers(0, 2)))
        self.is_rounded = False
        self.looked_at: list[Any] = []
        self.functions: dict[Any, Any] = {}

    def _make(self, is_sharded: bool, dtype: str, num_rows: int, columns: int) -> None:
        value = numbers(dtype, (num_rows, columns), num_rows)
        shared = self.runtime.shared(value, sharded=is_sharded)
        size = self.runtime.world_size
        self.variables.append(Variable(shared, np.array_split(value, size) if is_sharded else [value] * size))

    def _new_rows(self, variable: Variable, num_rows: int, seed: int) -> np.ndarray:
        return numbers(variable.dtype, (num_rows, variable.values[0].shape[1]), seed)

    def _expect(self, error: Any, call: Callable[[], Any]) -> None:
        with pytest.raises(error):
            call()

    # -- what the master does

    @rule(which=st.integers(0, 3), is_sharded=st.booleans(), dtype=st.sampled_from(DTYPES), count=rows, columns=rows)
    def replace(self, which: int, is_sharded: bool, dtype: str, count: int, columns: int) -> None:
        self._make(is_sharded, dtype, count, columns % 3)
        self.variables[which] = self.variables.pop()
        self.functions = {key: f for key, f in self.functions.items() if key == "shards"}

    @rule(which=st.integers(0, 3), rank=st.integers(0, 3), count=rows, seed=seeds)
    def set_value(self, which: int, rank: int, count: int, seed: int) -> None:
        variable, rank = self.variables[which], rank % self.runtime.world_size
        variable.shared[rank] = variable.values[rank] = self._new_rows(variable, count, seed)

    @rule(which=st.lists(st.integers(0, 3), min_size=1, max_size=3, unique=True), seed=st.none() | seeds)
    def broadcast(self, which: list[int], seed: int | None) -> None:
        variables = [self.variables[k] for k in which]
        values = None if seed is None else [self._new_rows(v, (seed + k) % 8, seed) for k, v in enumerate(variables)]
        synk.broadcast([variable.shared for variable in variables], values)
        for k, variable in enumerate(variables):
            value = variable.values[0] if values is None else values[k]
            variable.values = [value] * self.runtime.world_size

    @rule(which=st.integers(0, 3), count=rows, seed=seeds, batch=batches, is_data=st.booleans())
    def scatter(self, which: int, count: int, seed: int, batch: Any, is_data: bool) -> None:
        variable, rt = self.variables[which], self.runtime
        value = self._new_rows(variable, count, seed)
        source, rows = rt.data(value) if is_data else value, rows_picked(batch, value)
        if rows is None:
            self._expect(IndexError, lambda: synk.scatter(variable.shared, source, batch))
            return
        synk.scatter(variable.shared, source, batch)
        variable.values = np.array_split(rows, rt.world_size)

    @rule(which=st.integers(0, 3))
    def gather(self, which: int) -> None:
        variable = self.variables[which]
        assert_same(synk.gather(variable.shared, nd_up=0), np.concatenate(variable.values))
        if variable.is_even:
            assert_same(synk.gather(variable.shared), np.stack(variable.values))
        else:
            self._expect(ValueError, lambda: synk.gather(variable.shared))
        assert variable.shared.lengths == [len(value) for value in variable.values]

    @rule(which=st.integers(0, 3))
    def all_gather(self, which: int) -> None:
        variable, rt = self.variables[which], self.runtime
        if variable.num_rows > MAX_ROWS:
            return
        synk.all_gather(variable.shared)
        variable.values = [np.concatenate(variable.values)] * rt.world_size

    @rule(which=st.integers(0, 3), op=st.sampled_from(OPS), kind=st.sampled_from(["all", "root", "master"]))
    def reduce(self, which: int, op: str, kind: str) -> None:
        variable, rt = self.variables[which], self.runtime
        verbs: dict[str, Callable[[], Any]] = {
            "all": lambda: synk.all_reduce(variable.shared, op),
            "root": lambda: synk.reduce(variable.shared, op),
            "master": lambda: synk.reduce(variable.shared, op, in_place=False),
        }
        if not is_reducible(op, variable.dtype) or not variable.is_even:
            self._expect((TypeError, ValueError), verbs[kind])
            return
        result = verbs[kind]()
        expected = reduced(op, variable.values)
        self.is_rounded = True
        if kind == "master":
            assert_same(result, expected, is_rounded=True)
        elif kind == "all":
            variable.values = [expected] * rt.world_size
        else:
            variable.values = [expected, *variable.values[1:]]

    # -- what calls do

    def _parts(self, num_rows: int) -> list[np.ndarray]:
        return np.array_split(np.arange(float(num_rows)), self.runtime.world_size)

    def _follow(self, variable: Variable, parts: Sequence[np.ndarray]) -> None:
        """Replicas of ranks without rows follow the lowest rank that ran."""
        if not variable.shared.is_sharded:
            ran = [rank for rank, part in enumerate(parts) if len(part)]
            lowest = variable.values[ran[0]]
            variable.values = [
                value if len(part) else lowest for part, value in zip(parts, variable.values, strict=True)
            ]

    def _function(self, key: Any, build: Callable[[], Any]) -> Any:
        """Return a function that was used before, if there is one: calls of it find a plan, and what it learnt."""
        if key not in self.functions:
            self.functions[key] = build()
        return self.functions[key]

    @rule(
        which=st.sampled_from([(0,), (2,), (0, 2), (1, 3), (0, 1, 2, 3)]),
        num_rows=st.integers(1, 9),
        kind=st.sampled_from(["reverse", "repeat", "large", "cut", "refill", "some ranks"]),
        output=st.sampled_from([1, 30, 70_000]),
        failing=st.none() | st.integers(0, 3),
    )
    def assign(self, which: tuple[int, ...], num_rows: int, kind: str, output: int, failing: int | None) -> None:
        """A function assigns several variables, with small or large outputs; on one rank it may raise afterwards."""
        variables, size = [self.variables[k] for k in which], self.runtime.world_size
        if kind == "repeat" and any(variable.num_rows > MAX_ROWS for variable in variables):
            kind = "cut"
        shared = [variable.shared for variable in variables]

        def body(kind: str, output: int, failing: int | None, x: np.ndarray) -> np.ndarray:
            if kind != "some ranks" or synk.comm.rank % 2 == 0:
                for each in shared:
                    each.value = renewed(each.value, x, kind)
            if failing == synk.comm.rank:
                raise ArithmeticError
            return np.full(output, x.sum())

        f = self._function(
            ("assign", which),
            lambda: self.runtime.function(body, bcast_inputs=["kind", "output", "failing"], outputs="sum"),
        )
        x, parts = np.arange(float(num_rows)), self._parts(num_rows)
        failing = None if failing is None else failing % size
        if failing is not None and len(parts[failing]):
            self._expect(ArithmeticError, lambda: f(kind, output, failing, x))
            return
        assert_same(f(kind, output, failing, x), np.full(output, x.sum()))
        for variable in variables:
            variable.values = [
                renewed(value, part, kind) if len(part) and (kind != "some ranks" or rank % 2 == 0) else value
                for rank, (value, part) in enumerate(zip(variable.values, parts, strict=True))
            ]
            self._follow(variable, parts)

    @rule(which=st.integers(0, 3), num_rows=st.integers(1, 9), op=st.sampled_from(OPS), num_slices=st.integers(1, 4))
    def update(self, which: int, num_rows: int, op: str, num_slices: int) -> None:
        variable, shared = self.variables[which], self.variables[which].shared

        def new(value: np.ndarray, x: np.ndarray) -> np.ndarray:
            if value.dtype.kind in "SU?VM":
                return value[::-1]
            return np.clip(value.real, -9, 9).astype(value.dtype) + value.dtype.type(len(x))

        f = self._function(
            ("update", which, op),
            lambda: self.runtime.function(
                lambda x: (x.sum(), new(shared.value, x)), updates=[(shared, op)], outputs="sum"
            ),
        )
        parts = self._parts(num_rows)
        slices = [[piece for piece in np.array_split(part, num_slices) if len(piece)] for part in parts]
        if not is_reducible(op, variable.dtype) and any(len(pieces) > 1 for pieces in slices):
            self._expect(TypeError, lambda: f(np.arange(float(num_rows)), num_slices=num_slices))
            return
        assert f(np.arange(float(num_rows)), num_slices=num_slices) == np.arange(float(num_rows)).sum()
        values = []
        for value, pieces in zip(variable.values, slices, strict=True):
            news = [new(value, piece) for piece in pieces]
            lengths = [len(piece) for piece in pieces]
            values.append(value if not news else news[0] if len(news) == 1 else reduced(op, news, lengths))
        self.is_rounded = True
        variable.values = values
        self._follow(variable, parts)

    @precondition(lambda self: any(variable.shared.is_sharded and variable.num_rows for variable in self.variables))
    @rule(data=st.data(), num_slices=st.integers(1, 3))
    def call_on_shards(self, data: st.DataObject, num_slices: int) -> None:
        sharded = [variable for variable in self.variables if variable.shared.is_sharded and variable.num_rows]
        variable = data.draw(st.sampled_from(sharded))
        shards = variable.values
        f = self._function("shards", lambda: self.runtime.function(lambda x: (len(x), x), outputs=("sum", "gather")))
        batch = data.draw(st.lists(st.integers(-variable.num_rows, variable.num_rows - 1), max_size=6))
        expected = np.concatenate(shards)[np.array(batch, int)]
        count, got = f(variable.shared, num_slices=num_slices, batch=batch)
        assert count == len(expected)
        assert_same(got, expected)

    # -- what must hold after each

    @invariant()
    def all_ranks_hold_what_numpy_says(self) -> None:
        rt, shared = self.runtime, [variable.shared for variable in self.variables]
        if shared != self.looked_at:
            self.look = rt.function(lambda: deque(each.value for each in shared), outputs=None)
            self.looked_at = shared
        on_workers = self.look()
        for position, variable in enumerate(self.variables):
            got = [variable.shared[rank] for rank in range(rt.world_size)]
            assert variable.shared.dtype == variable.dtype
            assert variable.shared.shapes == [value.shape for value in variable.values]
            assert_same([values[position] for values in on_workers], got)
            assert_same(got, variable.values, is_rounded=self.is_rounded)
            variable.values = got  # rounding errors must not add up over a sequence
        self.is_rounded = False


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("num_sequences", [3, pytest.param(12, marks=pytest.mark.storm)])
def test_any_sequence_of_operations_equals_numpy(shared_runtimes: Any, where: Any, num_sequences: int) -> None:
    runtime = shared_runtimes[where]

    class OnThis(Sequences):
        pass

    OnThis.runtime = runtime
    try:
        run_state_machine_as_test(
            OnThis,
            settings=settings(
                max_examples=num_sequences,
                stateful_step_count=15,
                deadline=None,
                phases=[Phase.reuse, Phase.generate],  # a sequence is short: shrinking it takes minutes
                suppress_health_check=list(HealthCheck),
            ),
        )
    finally:
        del OnThis.runtime  # hypothesis keeps the class
