"""Random programs: any sequence of calls and changes gives what the same Python gives on the whole input.

Plain calls, keywords, batches, slices, subsets, serial and submitted calls of several functions that read globals and
variables, assign, communicate, raise, and return other outputs from one call to the next, large ones among them. The
results of submitted calls are asked for later, in any order, or never.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.rank_arrays import picked
from support.tables import seeds

import synk

WHERE = [1, 2, 3, 0]
X = np.arange(24.0).reshape(8, 3)


class Program:
    """Functions, data and state of one runtime, and what plain Python says that each call returns."""

    def __init__(self, rt: Any, seed: str) -> None:
        self.rt, self.rng = rt, random.Random(seed)
        self.numbers = np.random.default_rng(self.rng.randrange(1 << 32))
        self.scope: dict[str, Any] = {"SCALE": 2.0}
        self.name, self.place = "scaled", 0
        self.ways = [way for way in WAYS if way != "limit" or not seed.startswith("0 ")]  # refused in the program
        self.variable, self.value = rt.shared(np.ones(3)), np.ones(3)
        self.sources: list[Any] = [
            rt.data(X),
            rt.data(X[:5] * 2),
            X * 3,
            X.astype(np.float32),
            np.asfortranarray(X),
            X[:1],
        ]
        self.held: list[tuple[Any, Any, float]] = []
        exec("def scaled(w, x):\n    return (x * SCALE * w).sum(), x.max(axis=0) * SCALE", self.scope)
        variable = self.variable

        def read(w: np.ndarray, x: np.ndarray) -> Any:
            return (x * variable.value * w).sum(), x.max(axis=0) * 1.0

        def assign(w: np.ndarray, x: np.ndarray) -> Any:
            if w[0] > 0:
                variable.value = variable.value + 1
            if w[1] > 1:
                raise LookupError("as told")
            return (x * w).sum(), x.max(axis=0) * 1.0

        options = {"bcast_inputs": "w", "outputs": ("sum", "max")}
        bodies = {"read": read, "assign": assign, "change": change, "times": times, "meet": meet}
        bodies["scaled"] = self.scope["scaled"]
        self.functions = {name: rt.function(body, **options) for name, body in bodies.items()}

    def weights(self, name: str) -> Any:
        """Return what is broadcast: an array, and for one of the functions a number or a list as well."""
        w = self.numbers.normal(size=3)
        kinds = [w, float(w[0]), int(10 * w[0]), np.float64(w[0]), w.tolist(), np.array(w[0])]
        return self.rng.choice(kinds) if name == "times" else w

    def expected(self, name: str, w: Any, x: np.ndarray) -> Any:
        if name == "scaled":
            return self.scope["scaled"](w, x)
        return change(w, x) if name == "change" else times(w * self.value if name == "read" else w, x)

    def calls(self) -> None:
        """Call one function with one source several times, each time in some way; often those of before."""
        if self.rng.random() < 0.5:
            self.name, self.place = self.rng.choice(list(self.functions)), self.rng.randrange(len(self.sources))
        name, source = self.name, self.sources[self.place]
        for _ in range(self.rng.randint(1, 12)):
            w = self.weights(name)
            if name == "assign" and w[1] > 1:
                if self.rng.random() < 0.5:
                    self.held.append((self.functions[name].submit(w, source), None, 0.0))
                    continue
                with pytest.raises(LookupError, match="as told"):
                    self.functions[name](w, source)
                continue
            self.check(name, w, source, self.rng.choice(["plain"] * 12 + ["hold"] * 4 + self.ways))
            if name == "assign" and w[0] > 0:
                self.value = self.value + 1

    def check(self, name: str, w: Any, source: Any, way: str) -> None:
        x = np.array(source)
        if name in ("assign", "meet") and way in ("slices", "serial", "submit several"):  # where it would be not once
            way = "plain"
        batch = some_batch(self.rng, len(x)) if way in ("batch", "keywords", "submit several", "hold") else None
        x = picked(batch, x)
        expected, rtol = self.expected(name, w, x), 1e-4 if x.dtype == np.float32 else 1e-9
        if way != "hold":
            got = WAYS.get(way, plain)(self.functions[name], w, source, batch)
            assert_near(got, expected[:1] if way == "subset" else expected, rtol)
            return
        own = source.copy() if isinstance(source, np.ndarray) else source
        self.held.append((self.functions[name].submit(w, own, batch=batch), expected, rtol))
        if own is not source:
            own[:] = np.nan

    def look(self, count: int) -> None:
        """Compare the results of some submitted calls, after a look at whether they are done; drop another one."""
        for call, *_ in self.held:
            call.done()
        for _ in range(min(count, len(self.held))):
            call, expected, rtol = self.held.pop(self.rng.randrange(len(self.held)))
            if expected is None:
                with pytest.raises(LookupError, match="as told"):
                    call.result()
            else:
                assert_near(call.result(), expected, rtol)
        if self.held and self.held[-1][1] is not None and self.rng.random() < 0.2:
            self.held.pop()

    def change(self) -> None:
        """Change data, a global, a variable, or what the ranks did last."""
        data = self.sources[self.place % 2]
        what = self.rng.randrange(12)
        if what == 0:
            data.set_value(self.numbers.normal(size=(self.rng.randint(1, 20), 3)))
        elif what == 1:
            data.set_length(self.rng.randint(1, 20))
            data[...] = 1.5
        elif what == 2:
            data[0] = self.numbers.normal()
        elif what == 3:
            self.sources[self.place % 2] = self.rt.data(self.numbers.normal(size=(8, 3)))
        elif what == 4:
            self.scope["SCALE"] = float(self.rng.randint(1, 4))
        elif what == 5:
            self.variable.value = self.value = self.numbers.normal(size=self.rng.choice([1, 3]))
        elif what == 6:
            with pytest.raises(ZeroDivisionError):
                self.rt.function(lambda x: 1 / 0)(X)
        elif what == 7:
            data.free_memory()
            data.set_value(X[:4] + 2)
        elif what == 8:
            np.add(data, 1.0, out=data)
        elif what == 9:
            data.data[0] = 5.0
        elif what == 10:
            self.value = self.value * self.rt.world_size
            synk.all_reduce(self.variable, "sum")
        else:
            self.rt.function(lambda x: x.sum(), outputs="sum")(self.numbers.normal(size=(3, 2)))


def times(w: Any, x: np.ndarray) -> Any:
    return (x * w).sum(), x.max(axis=0) * 1.0


def meet(w: Any, x: np.ndarray) -> Any:
    total = synk.comm.all_reduce((x * w).sum(), "sum")
    return total * (synk.comm.rank == 0), x.max(axis=0) * 1.0


def change(w: np.ndarray, x: np.ndarray) -> Any:
    """Return outputs whose shapes depend on ``w``."""
    total, largest = times(w, x)
    size = 40_000 if w[2] > 1 else 1 + int(4 * abs(w[0]))
    return (np.full(size, total), largest) if w[1] < 0.5 else (total, np.stack([largest] * 2))


def assert_near(got: Any, expected: Any, rtol: float) -> None:
    for one, other in zip(got, expected, strict=True):
        assert np.shape(one) == np.shape(other)
        np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-9)


def plain(f: Any, w: Any, x: Any, batch: Any) -> Any:
    return f(w, x)


WAYS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "limit": lambda f, w, x, batch: f(w, x, timeout=60.0),
    "batch": lambda f, w, x, batch: f(w, x, batch=batch),
    "keywords": lambda f, w, x, batch: f(x=x, batch=batch, w=w),
    "submit": lambda f, w, x, batch: f.submit(w, x).result(),
    "submit several": lambda f, w, x, batch: [f.submit(w, x=x, batch=batch) for _ in range(5)][-1].result(),
    "serial": lambda f, w, x, batch: f.serial(w, x),
    "slices": lambda f, w, x, batch: f(w, x, num_slices=3),
    "subset": lambda f, w, x, batch: f(w, x, output_subset=[0]),
}


def some_batch(rng: random.Random, num_rows: int) -> Any:
    """Return any batch of one row or more."""
    count, start = rng.randint(1, num_rows), rng.randrange(num_rows)
    indices = np.array([rng.randrange(-num_rows, num_rows) for _ in range(count)])
    mask = np.array([row == start or rng.random() < 0.6 for row in range(num_rows)])
    kinds = [count, slice(start, None), slice(None, None, -1), slice(start, None, 2), indices, indices.tolist(), mask]
    return rng.choice(kinds)


@pytest.mark.parametrize("seed", seeds(1, 12))
@pytest.mark.parametrize("where", WHERE)
def test_any_sequence_of_calls_equals_plain_python(shared_runtimes: Any, where: Any, seed: int) -> None:
    program = Program(shared_runtimes[where], f"{where} {seed}")
    for _ in range(45):
        program.calls()
        np.testing.assert_allclose(program.variable.value, program.value, rtol=1e-9)
        if program.rng.random() < 0.4:
            program.change()
        program.look(program.rng.randrange(6))
    program.look(len(program.held))
