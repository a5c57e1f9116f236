"""What functions capture: every call works with what the names in its code mean at that moment.

The expected values come from the same function, run by plain Python in this process.
"""

from __future__ import annotations

import functools
import gc
import random
import textwrap
import weakref
from collections import namedtuple
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.tables import named

import synk

X = np.arange(6.0)


def namespace(source: str, **names: Any) -> dict[str, Any]:
    """Run a program's text in globals of its own, as a script or a notebook does."""
    table: dict[str, Any] = {"__name__": "__main__", "np": np, **names}
    exec(textwrap.dedent(source), table)
    return table


SCRIPTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "a global, a helper and a helper of a helper": (
        """
        rate = 1.0
        def inner(x): return x * rate
        def helper(x): return inner(x) + 1
        def f(x): return helper(x) * 2
        """,
        (
            "rate = 3.0",
            "def inner(x): return x * rate * 10",
            "later = 7.0\ndef helper(x): return inner(x) + later",
            "later = 8.0",
        ),
    ),
    "a name that is a built-in one at first": (
        "def f(x): return x + abs(-1)",
        ("abs = lambda x: 5", "abs = lambda x: 6", "del abs"),
    ),
    "functions with a cache": (
        """
        import functools
        rate = 3.0
        @functools.lru_cache(maxsize=8, typed=True)
        def scaled(k): return k * rate
        class Model:
            @functools.cache
            def offset(self, k): return k + rate
        model = Model()
        f = lambda x: x * scaled(2) + model.offset(1) + (scaled.cache_parameters()["maxsize"] or 100)
        """,
        ("@functools.cache\ndef scaled(k): return k / rate", "rate = 4.0"),  # not seen by what is in a cache
    ),
    "the sign of a zero": (
        """
        rate, table, pair = 0.0, {"k": [0.0]}, (0.0,)
        def f(x): return sum(np.copysign(x + 1, zero) for zero in (rate, table["k"][0], pair[0]))
        """,
        ("rate = -0.0", "table['k'][0] = -0.0", "pair = (-0.0,)", "rate = 0.0"),
    ),
}


def test_what_a_script_binds_anew(subtests: Any, shared_runtimes: Any) -> None:
    for name, (source, changes) in SCRIPTS.items():
        for workers in (2, 0):
            with subtests.test(script=name, workers=workers):
                main = namespace(source)
                f = shared_runtimes[workers].function(main["f"], outputs="gather")
                for change in ("pass", *changes):
                    exec(change, main)
                    for call in (lambda x, f=f: f.submit(x).result(), f, f.serial):
                        np.testing.assert_array_equal(call(X), main["f"](X))


def test_the_variables_of_a_closure(rt: Any) -> None:
    """Functions share them, on the ranks as well."""
    count = 0

    def add(x: np.ndarray) -> int:
        nonlocal count
        count += 1
        return count

    adding, reading = rt.function(add, outputs="first"), rt.function(lambda x: count, outputs="first")
    assert [adding(X), adding(X), reading(X)] == [1, 2, 2]
    count = 10
    assert [reading(X), adding(X), reading(X)] == [10, 11, 11]


class AnswersEveryName(type):
    """The class of classes that have whatever attribute is asked for, as those of mocks and proxies."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return True


class Proxy(metaclass=AnswersEveryName):
    def __init__(self, rows: list[float]) -> None:
        self.rows = rows

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        return np.array(self.rows, dtype)


def test_an_object_with_whatever_attribute_is_asked_for_is_taken_for_itself(rt: Any) -> None:
    captured = Proxy([1.0, 2.0])

    def f(x: np.ndarray, other: Any) -> float:
        return float((x + sum(captured.rows) + sum(other.rows)).sum())

    total = rt.function(f, bcast_inputs="other", outputs="sum")
    assert total(np.array([1.0, 2.0, 3.0]), Proxy([4.0, 5.0])) == 42.0
    with pytest.raises(TypeError, match="got Proxy, which is more than its numbers"):
        total(Proxy([1.0, 2.0, 3.0]), captured)


def test_only_what_has_changed_is_sent(runtime: Callable[..., Any]) -> None:
    rt = runtime(2)
    main = namespace(
        """
        table = np.ones(100_000)
        words = [f"word {n}" for n in range(20_000)]
        rate = 1.0
        def helper(x): return x * rate
        def f(x): return helper(table[0]), len(words)
        """
    )
    f = rt.function(main["f"], outputs="first")

    def sent_after(change: str) -> int:
        exec(change, main)
        before = rt.counters["bytes_down"]
        assert f(X) == main["f"](X)
        return rt.counters["bytes_down"] - before

    whole = sent_after("pass")
    assert whole > 300_000, "the words, to two workers"
    for change in ("rate = 4.0", "def helper(x): return 10 * x * rate", "pass"):
        assert sent_after(change) < whole / 4


def test_a_shared_variable_bound_anew_is_the_one_that_counts(rt: Any) -> None:
    main = namespace("def f(x):\n    w.value = w.value + 1\n    return x * w.value", w=rt.shared(1.0))
    f = rt.function(main["f"], outputs="gather")
    np.testing.assert_array_equal(f(X), 2 * X)
    old, main["w"] = main["w"], rt.shared(10.0)
    np.testing.assert_array_equal(f(X), 11 * X)
    assert (old.value, main["w"].value) == (2.0, 11.0)


class Fitted:
    """An object that keeps synk functions of its own methods, as the error about a decorated method advises."""

    runtime: Any = None

    def __init__(self, rt: Any) -> None:
        self.weights = np.ones(3)
        self.mean = rt.function(self._mean)
        self.twice = rt.function(self._twice, outputs="sum")
        self.nested = rt.function(self._nested, outputs="sum")

    def _mean(self, x: np.ndarray) -> Any:
        return (x[:, None] * self.weights).sum(axis=1).mean()

    def _twice(self, x: np.ndarray) -> Any:
        return 2 * len(x) * self._mean(x)

    def _nested(self, x: np.ndarray) -> Any:
        return self.mean(x)


@pytest.mark.parametrize("rt", [2, 0], indirect=True)
def test_an_object_may_keep_the_functions_of_its_methods(rt: Any) -> None:
    """They stay in the program: on a rank only plain methods can be called."""
    fitted = Fitted(rt)
    assert (fitted.mean(X), fitted.twice(X)) == (7.5, 90.0)
    fitted.weights[0] = 3.0
    assert (fitted.mean(X), fitted.twice(X)) == (12.5, 150.0)
    assert fitted.mean.verify(X)
    assert list(rt.map(fitted._mean, [X, X + 1])) == [12.5, 17.5]
    returned, *_ = rt.function(lambda x: fitted, outputs=None)(X)
    for call in (lambda: fitted.nested(X), lambda: fitted.nested.verify(X), lambda: returned.mean.submit(X)):
        with pytest.raises(synk.errors.ReentrancyError, match=r"cannot call '_mean' inside a function.*plain function"):
            call()
    reading = rt.function(lambda x: fitted.mean.__wrapped__(x))
    for call in (lambda: reading(X), lambda: reading.verify(X), lambda: returned.mean.outputs):
        with pytest.raises(AttributeError, match=r"cannot read '\w+' of '_mean' inside a function.*value = f\.\w+\.$"):
            call()


def test_of_open_files_only_a_text_that_is_read_is_carried(rt: Any, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text("one\ntwo\n")
    for mode in ("r", "rb", "a", "ab"):
        with path.open(mode) as file:
            if mode == "r":
                file.readline()
                assert rt.function(lambda: file.read(), outputs=None)() == ["two\n"] * 2
            else:
                with pytest.raises(synk.errors.SerializationError, match="its variable 'file'"):
                    rt.function(lambda: file.closed, outputs=None)()


def test_an_object_that_keeps_a_runtime_is_told_to_leave_it_out(shared_runtimes: Any) -> None:
    fitted = Fitted(rt := shared_runtimes[2])
    fitted.runtime = rt
    with pytest.raises(
        synk.errors.SerializationError, match=r"'self\.runtime' \(Runtime\) .*Keep it outside of the obj"
    ):
        fitted.mean(X)


def test_objects_are_let_go_of_with_the_last_function_that_needs_them(rt: Any) -> None:
    """By the program and by the workers."""

    class Large(np.ndarray):
        """An array that can be watched."""

    def num_alive(x: np.ndarray) -> int:
        import gc

        gc.collect()
        return sum(type(each).__name__ == "Large" for each in gc.get_objects())

    main = namespace("def f(x): return x + table[0]\ndef g(x): return x - table[0]")
    main["table"] = np.ones(3).view(Large)
    alive = weakref.ref(main["table"])
    f, g, count = (
        rt.function(fn, outputs=how) for fn, how in ((main["f"], "gather"), (main["g"], "gather"), (num_alive, None))
    )
    f(X), g(X)
    del f
    np.testing.assert_array_equal(g(X), X - 1)
    assert count(X) == [1, 1]
    main["table"] = np.full(3, 2.0)
    np.testing.assert_array_equal(g(X), X - 2)
    assert count(X) == [0, 0]
    gc.collect()
    assert alive() is None
    main["table"] = np.ones(3).view(Large)
    g(X)
    assert count(X) == [1, 1]
    del g
    assert count(X) == [0, 0]


@pytest.mark.filterwarnings("default:.*to compare what it captured takes")
def test_what_is_dear_to_compare_is_named_once(shared_runtimes: Any) -> None:
    big, small = np.zeros(8_000_000), [1]
    f = shared_runtimes[2].function(named("dear", lambda x: x + big[0] + small[0]), outputs="gather")
    with pytest.warns(
        UserWarning, match=r"'dear' captured big, and to compare.*synk\.data.*synk\.shared.*np\.frombuffer"
    ) as told:
        for _ in range(40):
            f(X)
    assert len(told) == 1


class Remade:
    """Its pickle makes it from an array, so the ranks get another one when the array has changed."""

    def __init__(self, k: np.ndarray) -> None:
        self.k = k

    def __reduce__(self) -> Any:
        return Remade, (self.k,)


class Pair(tuple[Any, Any]):
    @property
    def k(self) -> Any:
        return self[0]


Triple = namedtuple("Triple", "k n m")
MADE_ANEW: dict[str, Callable[[np.ndarray], Any]] = {
    "a namedtuple": lambda k: Triple(k, 2, []),
    "a tuple of its own class": lambda k: Pair((k, 2)),
    "made by its recipe": Remade,
    "in another one": lambda k: SimpleNamespace(k=Remade(k).k, inner=Triple(Remade(k), 1, 2)),
}


def total(held: Sequence[Any], x: np.ndarray) -> list[float]:
    return [float(each.k.sum()) for each in held]


def closing(*held: Any) -> Callable[[np.ndarray], Any]:
    return lambda x: total(held, x)


def of_holder(holder: Any) -> Callable[[np.ndarray], Any]:
    return lambda x: [float(holder.array.sum()), *total([holder.made], x)]


@pytest.mark.parametrize("count", [2, pytest.param(40, marks=pytest.mark.storm)])
def test_what_is_made_anew_is_so_for_every_function_that_holds_it(
    subtests: Any, shared_runtimes: Any, count: int
) -> None:
    """Such an object cannot be changed on the ranks. Functions hold it in lists, partials, closures and attributes."""
    rng, rt = random.Random(0), shared_runtimes[2]
    for kind, make in MADE_ANEW.items():
        for _ in range(count):
            arrays = [np.zeros(3), np.zeros((2, 2))]
            one, two = map(make, arrays)
            plain: list[Callable[[np.ndarray], Any]] = [
                functools.partial(total, [one, two]),
                functools.partial(total, (two, one)),
                closing(two, one),
                of_holder(SimpleNamespace(array=arrays[1], made=one)),
            ]
            functions = [rt.function(each, outputs=None) for each in plain]
            order = [rng.randrange(4) for _ in range(8)]
            with subtests.test(kind=kind, order=order):
                for which in order:  # a function is sent at its first call, which may come after a change
                    assert functions[which](np.zeros(2)) == [plain[which](np.zeros(2))] * 2
                    for array in arrays:
                        array += rng.randrange(2)
