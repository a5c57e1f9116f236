"""What functions capture: every call works with what the names in its code mean at that moment.

The expected values come from the same function, run by plain Python in this process.
"""

from __future__ import annotations

import functools
import gc
import os
import signal
import sys
import textwrap
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import harness
from support.edited_module import LIBRARY

import synk

X = np.arange(6.0)
scale = 1.0


def twice(x: np.ndarray) -> np.ndarray:
    """Stand for a helper."""
    return 2 * x


def namespace(source: str, **names: Any) -> dict[str, Any]:
    """Run a program's text in globals of its own, as a script or a notebook does."""
    table: dict[str, Any] = {"__name__": "__main__", "np": np, **names}
    exec(textwrap.dedent(source), table)
    return table


class Checked:
    """A function on two workers whose calls are compared with plain Python."""

    def __init__(self, rt: Any, fn: Callable[[np.ndarray], Any]) -> None:
        self.fn = fn
        self.parallel = rt.function(fn, outputs="gather")
        self.sent = lambda: rt.counters["bytes_down"]
        self()

    def __call__(self) -> None:
        np.testing.assert_array_equal(self.parallel.submit(X).result(), self.fn(X))
        np.testing.assert_array_equal(self.parallel(X), self.fn(X))
        np.testing.assert_array_equal(self.parallel.serial(X), self.fn(X))


# ----- bound anew


def test_a_global_a_helper_and_a_helper_of_a_helper(shared_runtimes: Any) -> None:
    main = namespace(
        """
        rate = 1.0
        def inner(x): return x * rate
        def helper(x): return inner(x) + 1
        def f(x): return helper(x) * 2
        """
    )
    check = Checked(shared_runtimes[2], main["f"])
    main["rate"] = 3.0
    check()
    exec("def inner(x): return x * rate * 10", main)
    check()
    exec("later = 7.0\ndef helper(x): return inner(x) + later", main)
    check()
    main["later"] = 8.0
    check()


def test_a_global_that_comes_later_and_one_that_goes(shared_runtimes: Any) -> None:
    main = namespace("def f(x): return x * rate + abs(-1)")
    f = shared_runtimes[2].function(main["f"], outputs="gather")
    with pytest.raises(NameError, match="rate"):
        f(X)
    main["rate"] = 2.0
    np.testing.assert_array_equal(f(X), X * 2 + 1)
    main["abs"] = lambda x: 5  # from now on not the built-in one
    np.testing.assert_array_equal(f(X), X * 2 + 5)
    del main["rate"]
    with pytest.raises(NameError, match="rate"):
        f(X)


def test_a_closure_variable(shared_runtimes: Any) -> None:
    rate = 1.0
    check = Checked(shared_runtimes[2], lambda x: x * rate)
    rate = 2.0
    check()


def test_functions_with_a_cache(shared_runtimes: Any) -> None:
    """In a script these pickle as names, which the workers do not have; those of modules do have them."""
    source = """
        import functools

        rate = 3.0

        @functools.lru_cache(maxsize=8, typed=True)
        def scaled(k):
            return k * rate

        class Model:
            @functools.cache
            def offset(self, k):
                return k + rate

        model = Model()
        f = lambda x: x * scaled(2) + model.offset(1)
    """
    main = namespace(source, LIBRARY=LIBRARY)
    check = Checked(shared_runtimes[2], main["f"])
    assert bool(shared_runtimes[2].function(main["f"], outputs="gather").verify(X))
    exec("@functools.cache\ndef scaled(k): return k / rate", main)
    check()
    main["rate"] = 4.0  # not seen by what is in a cache, here and there
    check()
    parameters = shared_runtimes[2].function(lambda: main["Model"].offset.cache_parameters(), outputs="first")
    assert parameters() == {"maxsize": None, "typed": False}
    assert list(shared_runtimes[2].map(main["scaled"], [1.0, 2.0])) == [0.25, 0.5]


class Frozen:
    """An object without a dictionary."""

    __slots__ = ("rate",)

    def __init__(self, rate: float) -> None:
        self.rate = rate


def test_attributes_and_keys(shared_runtimes: Any) -> None:
    class Settings:
        offset = 1.0

        def __init__(self) -> None:
            self.rate = 2.0
            self.inner = SimpleNamespace(power=1.0)

    settings, table, slots = Settings(), {"lr": 1.0, 3: 2.0}, Frozen(1.0)

    def helper(x: np.ndarray, s: Any) -> np.ndarray:
        return x**s.power

    def f(x: np.ndarray) -> np.ndarray:
        alias = settings
        return helper(x * settings.rate, settings.inner) + alias.offset + table["lr"] * table[3] + slots.rate

    check = Checked(shared_runtimes[2], f)
    settings.rate = 5.0
    check()
    settings.inner.power = 2.0
    check()
    settings.inner = SimpleNamespace(power=3.0)
    check()
    Settings.offset = 4.0
    check()
    settings.offset = 5.0  # hides that of the class
    check()
    del settings.offset
    check()
    table["lr"], table[3] = 8.0, 9.0
    check()
    slots.rate = 6.0
    check()


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


def test_an_object_with_whatever_attribute_is_asked_for_is_taken_for_itself(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    captured = Proxy([1.0, 2.0])

    def f(x: np.ndarray, other: Any) -> float:
        return float((x + sum(captured.rows) + sum(other.rows)).sum())

    total = rt.function(f, bcast_inputs="other", outputs="sum", name="total")
    rt.distribute()
    assert total(np.array([1.0, 2.0, 3.0]), Proxy([4.0, 5.0])) == 42.0
    w = rt.shared(np.zeros(2), name="w")
    with pytest.raises(TypeError, match="got Proxy, which has a meaning of its own"):
        total(Proxy([1.0, 2.0, 3.0]), captured)
    with pytest.raises(TypeError, match="got Proxy, which has a meaning of its own"):
        rt.set_value(w, Proxy([4.0, 5.0]))  # type: ignore[arg-type]
    assert np.array_equal(w.value, [0.0, 0.0])


def test_a_bound_method_a_callable_object_and_a_partial(shared_runtimes: Any) -> None:
    class Model:
        def __init__(self) -> None:
            self.w = 1.0

        def step(self, x: np.ndarray) -> np.ndarray:
            return self.scaled(x) + 1

        def scaled(self, x: np.ndarray) -> np.ndarray:
            return x * self.w

        __call__ = step

    for make in (lambda m: m.step, lambda m: m, lambda m: functools.partial(Model.step, m)):
        model = Model()
        check = Checked(shared_runtimes[2], make(model))
        model.w = 3.0
        check()
        was = Model.scaled
        Model.scaled = lambda self, x: x * self.w + 10  # type: ignore[method-assign]
        check()
        Model.scaled = was  # type: ignore[method-assign]
        check()


def test_code_and_defaults_inside_the_same_function(shared_runtimes: Any) -> None:
    def helper(x: np.ndarray, factor: float = 2.0, *, shift: float = 1.0) -> np.ndarray:
        return x * factor + shift

    check = Checked(shared_runtimes[2], lambda x: helper(x))
    helper.__defaults__ = (5.0,)
    check()
    helper.__kwdefaults__ = {"shift": 9.0}
    check()
    helper.__code__ = (lambda x, factor, *, shift: x - factor - shift).__code__
    check()


def test_the_function_itself_can_get_other_parameters(shared_runtimes: Any) -> None:
    def f(x: np.ndarray) -> np.ndarray:
        return x

    def g(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return x + y

    parallel = shared_runtimes[2].function(f, outputs="gather")
    parallel(X)
    f.__code__ = g.__code__
    np.testing.assert_array_equal(parallel(X, X), 2 * X)
    np.testing.assert_array_equal(parallel(X, y=X), 2 * X)


def test_parameters_of_a_torch_module(shared_runtimes: Any) -> None:
    torch = pytest.importorskip("torch")
    model = torch.nn.Sequential(torch.nn.Linear(1, 1), torch.nn.BatchNorm1d(1))
    model.eval()
    own = SimpleNamespace(net=model)

    def f(x: np.ndarray) -> np.ndarray:
        return own.net(torch.tensor(x).float()[:, None]).detach().numpy()

    parallel = shared_runtimes[2].function(f, outputs="gather")

    def check() -> None:
        np.testing.assert_allclose(parallel(X), f(X), rtol=1e-6)

    check()
    with torch.no_grad():
        model[0].weight += 1
    check()
    model[1].running_mean.fill_(3.0)
    check()
    model[0].bias = torch.nn.Parameter(torch.ones(1))
    check()
    model[0] = torch.nn.Linear(1, 1)
    check()
    model.train()
    assert shared_runtimes[2].function(lambda x: own.net.training, outputs=None)(X) == [True, True]


def test_a_submitted_call_works_with_what_was_there_when_it_was_submitted(shared_runtimes: Any) -> None:
    main = namespace("rate = 0\ndef f(x): return x * rate")
    f = shared_runtimes[2].function(main["f"], outputs="gather")
    f(X)
    calls = []
    for rate in (0, 1, 1, 2, 3, 3, 3):
        main["rate"] = rate
        calls.append((rate, f.submit(X)))
    for rate, call in calls:
        np.testing.assert_array_equal(call.result(), X * rate)


def test_only_what_has_changed_is_sent(shared_runtimes: Any) -> None:
    """And the rest stays the rank's own, with the state that it has there."""
    rt = shared_runtimes[2]
    main = namespace(
        """
        table = np.ones(100_000)
        rate = 1.0
        def helper(x): return x * rate
        def build():
            total, seen = 0.0, []
            def f(x):
                nonlocal total
                total += 1
                seen.append(len(x))
                return np.array([total, len(seen), helper(table[0])])
            return f
        f = build()
        """
    )
    f = rt.function(main["f"], outputs="first")
    assert f(X).tolist() == [1, 1, 1]
    sent = rt.counters["bytes_down"]
    main["rate"] = 4.0
    assert f(X).tolist() == [2, 2, 4]
    exec("def helper(x): return 10 * x * rate", main)
    assert f(X).tolist() == [3, 3, 40]
    assert rt.counters["bytes_down"] - sent < 10_000
    assert f(X).tolist() == [4, 4, 40]


def test_a_function_that_another_has_updated_for_is_up_to_date(shared_runtimes: Any) -> None:
    main = namespace("rate = 1.0\ndef f(x): return x * rate\ndef g(x): return x + rate")
    f, g = (Checked(shared_runtimes[2], main[name]) for name in "fg")
    for rate in (2.0, 3.0):
        main["rate"] = rate
        f()
        g()


def test_a_shared_variable_bound_anew_is_the_one_that_counts(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    main = namespace("def f(x):\n    w.value = w.value + 1\n    return x * w.value", w=rt.shared(1.0))
    f = rt.function(main["f"], outputs="gather")
    np.testing.assert_array_equal(f(X), 2 * X)
    old, main["w"] = main["w"], rt.shared(10.0)
    np.testing.assert_array_equal(f(X), 11 * X)
    assert (old.value, main["w"].value) == (2.0, 11.0)
    assert main["w"]._referent in f._callee.variables


def test_what_cannot_be_sent_is_an_error_and_the_next_call_is_right(shared_runtimes: Any) -> None:
    main = namespace("rate, shift = 1.0, 0.0\ndef f(x): return x * rate + shift")
    f = shared_runtimes[2].function(main["f"], outputs="gather")
    f(X)
    was = main["rate"]
    main["rate"], main["shift"] = 2.0, (x for x in X)
    for _ in range(2):
        with pytest.raises(synk.errors.SerializationError, match=r"cannot send 'f'.*'shift' \(generator\)"):
            f(X)
    main["rate"], main["shift"] = was, 5.0
    np.testing.assert_array_equal(f(X), X + 5)
    main["rate"] = 5.0
    np.testing.assert_array_equal(f(X), X * 5 + 5)


def test_a_large_object_that_changes_at_each_call_is_told_once(shared_runtimes: Any) -> None:
    main = namespace("weights = np.zeros(200_000)\ndef f(x): return x + weights[0]")
    f = shared_runtimes[2].function(main["f"], outputs="gather")
    f(X)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for k in range(5):
            main["weights"] = np.full(200_000, float(k))
            np.testing.assert_array_equal(f(X), X + k)
    assert [str(w.message).partition(" (")[0] for w in caught] == ["'f' uses 'weights'"]
    assert "bcast_inputs" in str(caught[0].message)


def test_looking_costs_few_steps(shared_runtimes: Any) -> None:
    """The names, what a function has anyway, and its empty dictionary: one check, and nothing in turn."""
    main = namespace("a = b = c = 1.0\ndef f(x): return a * x + b * x + c * x")
    f = shared_runtimes[2].function(main["f"], outputs="gather")
    f(X)
    capture = f._callee.capture
    assert (len(capture._checks), list(capture._turns())) == (1, [])
    assert capture.is_current()


# ----- changed in place


def test_a_change_in_place_is_seen_by_all_functions_that_captured_the_object(shared_runtimes: Any) -> None:
    main = namespace("table, items = np.zeros(2), [1.0]\ndef f(x): return x + table[0] + sum(items)")
    rt = shared_runtimes[2]
    f = rt.function(main["f"], outputs="gather")
    np.testing.assert_array_equal(f(X), X + 1)
    main["table"][0] = 5.0
    main["items"].append(2.0)
    np.testing.assert_array_equal(f(X), X + 8)
    main["table"][0] = 6.0
    exec("def f(x): return x + table[0] + sum(items)", main)
    again = rt.function(main["f"], outputs="gather")
    np.testing.assert_array_equal(again(X), X + 9)
    np.testing.assert_array_equal(f(X), X + 9)  # one object
    main["table"][0] = 5.0  # as it was when f was sent, and not when again was
    np.testing.assert_array_equal(f(X), X + 8)
    np.testing.assert_array_equal(again(X), X + 8)


def test_an_unchanged_object_of_the_master_does_not_reset_that_of_the_rank(shared_runtimes: Any) -> None:
    """L6: a function distributed later finds the objects of earlier ones, with the state that they have there."""
    rt = shared_runtimes[2]

    class Model:
        def __init__(self) -> None:
            self.w = np.zeros(2)
            self.log: list[float] = []

    model = Model()
    holder = SimpleNamespace(inner=model.w)

    def train(x: np.ndarray) -> float:
        model.w += len(x)
        model.log.append(1.0)
        return model.w[0]

    first = rt.function(train, outputs="first")
    assert [first(X), first(X)] == [3.0, 6.0]
    second = rt.function(lambda x: model.w[0] + len(model.log), outputs="first")
    assert second(X) == 8.0
    third = rt.function(lambda x: holder.inner[0], outputs="first")  # reached another way
    assert third(X) == 6.0
    assert first(X) == 9.0
    assert (second(X), third(X)) == (12.0, 9.0)


def test_functions_share_the_variables_of_their_closure(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    count = 0

    def add(x: np.ndarray) -> int:
        nonlocal count
        count += 1
        return count

    def read(x: np.ndarray) -> int:
        return count

    adding, reading = rt.function(add, outputs="first"), rt.function(read, outputs="first")
    assert [adding(X), adding(X), reading(X)] == [1, 2, 2]
    count = 10
    assert [reading(X), adding(X), reading(X)] == [10, 11, 11]


def test_recursion_and_functions_that_name_each_other(shared_runtimes: Any) -> None:
    main = namespace(
        """
        def even(n): return n == 0 or odd(n - 1)
        def odd(n): return n != 0 and even(n - 1)
        def f(x): return x + even(4)
        """
    )
    Checked(shared_runtimes[2], main["f"])

    def power(x: np.ndarray, n: int = 3) -> np.ndarray:
        return x if n == 1 else x * power(x, n - 1)

    Checked(shared_runtimes[2], power)


def test_objects_are_let_go_of_with_the_last_function_that_needs_them(runtime: Callable[..., Any]) -> None:
    rt = runtime(2)

    class Large(np.ndarray):
        """An array that can be watched."""

    main = namespace("def f(x): return x + table[0]\ndef g(x): return x - table[0]")
    main["table"] = np.ones(3).view(Large)
    alive = weakref.ref(main["table"])
    f, g = rt.function(main["f"], outputs="gather"), rt.function(main["g"], outputs="gather")
    f(X), g(X)
    count = rt.function(
        lambda x: sum(type(o).__name__ == "Large" for o in __import__("gc").get_objects()), outputs=None
    )
    del f
    np.testing.assert_array_equal(g(X), X - 1)
    main["table"] = np.full(3, 2.0)
    np.testing.assert_array_equal(g(X), X - 2)
    del g
    count(X)
    gc.collect()
    assert alive() is None
    assert (
        set(rt._session.functions.book.parcels)
        == rt._session.workers.by_rank[0].known.held["parcel"]
        == rt._session.workers.by_rank[1].known.held["parcel"]
    )


def test_a_replaced_worker_gets_what_the_others_have(runtime: Callable[..., Any]) -> None:
    rt = runtime(2)
    main = namespace(
        "rate, table = 1.0, np.ones(3)\ndef helper(x): return x\ndef f(x): return helper(x) * rate + table[0]"
    )
    f = rt.function(main["f"], outputs="gather")
    for rate in (2.0, 3.0, 4.0):
        main["rate"] = rate
        f(X)
    exec("def helper(x): return -x", main)
    main["table"][0] = 100.0
    np.testing.assert_array_equal(f(X), -X * 4 + 100)
    kill(rt, 1)
    with pytest.warns(RuntimeWarning, match="kept there, in closures or globals, is gone"):
        np.testing.assert_array_equal(f(X), -X * 4 + 100)
    assert len(rt._session.functions.book.parcels) < 12


def kill(rt: Any, rank: int) -> None:
    pid = rt._session.workers.by_rank[rank].process.pid
    os.kill(pid, signal.SIGKILL)
    harness.wait_until_dead(pid, 10.0)


# ----- after a death


on_one_machine_and_two_nodes = pytest.mark.parametrize(
    ("num_workers", "options"), [(2, {}), ((1, 1), {"cluster": "here", "nodes": 2})], ids=["local", "1+1"]
)


@on_one_machine_and_two_nodes
def test_on_restart_prepares_replacements_before_their_first_call(
    runtime: Callable[..., Any], tmp_path: Path, num_workers: Any, options: Any
) -> None:
    saved = tmp_path / "state.npy"
    np.save(saved, np.full(1, 5.0))
    state = np.zeros(1)

    def load() -> None:
        state[:] = np.load(saved)

    def step(x: np.ndarray) -> float:
        state[0] += 1
        return state[0]

    rt = runtime(num_workers, on_restart=load, **options)
    f = rt.function(step, outputs=None)
    assert f(X) == [1.0, 1.0]
    kill(rt, 0)
    with pytest.warns(RuntimeWarning, match="started again"):
        assert f(X) == [6.0, 2.0]
    assert f(X) == [7.0, 3.0]


@on_one_machine_and_two_nodes
def test_an_error_in_on_restart_is_told_and_it_is_run_again(
    runtime: Callable[..., Any], tmp_path: Path, num_workers: Any, options: Any
) -> None:
    fine = tmp_path / "fine"

    def load() -> None:
        if not fine.exists():
            raise FileNotFoundError("no checkpoint")

    rt = runtime(num_workers, on_restart=load, **options)
    f = rt.function(lambda x: x.sum(), outputs="sum")
    assert f(X) == 15
    kill(rt, 1)
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(synk.errors.StartupError, match=r"rank 1 of 2.*no checkpoint") as info,
    ):
        f(X)
    assert isinstance(info.value.__cause__, FileNotFoundError)
    with pytest.raises(synk.errors.StartupError, match="no checkpoint"):
        f(X)
    fine.touch()
    assert f(X) == 15


def test_on_restart_cannot_assign_variables(runtime: Callable[..., Any]) -> None:
    w: Any = None

    def load() -> None:
        w.value = 3.0

    rt = runtime(1, on_restart=load)
    w = rt.shared(1.0)
    f = rt.function(lambda x: x.sum() + w.value, outputs="sum")
    assert f(X) == 16
    kill(rt, 0)
    with pytest.warns(RuntimeWarning), pytest.raises(synk.errors.StartupError, match="cannot assign a shared variable"):
        f(X)
    assert w.value == 1.0


def test_on_restart_cannot_communicate(runtime: Callable[..., Any]) -> None:
    rt = runtime(2, on_restart=lambda: synk.comm.all_reduce(np.ones(2), "sum"))
    f = rt.function(lambda x: x.sum(), outputs="sum")
    assert f(X) == 15
    kill(rt, 1)
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(synk.errors.StartupError, match="cannot communicate outside of a call"),
    ):
        f(X)


@pytest.mark.parametrize(
    ("fn", "match"),
    [
        (3, "of type int, expected a callable"),
        (lambda x: x, "needs arguments"),
        ((lambda gen: lambda: gen)(x for x in "a"), "cannot send 'on_restart'"),
    ],
)
def test_on_restart_is_checked_before_anything_starts(fn: Any, match: str) -> None:
    with pytest.raises((TypeError, synk.errors.SerializationError), match=match):
        synk.Runtime(2, backend="numpy", on_restart=fn)


def test_restart_brings_everything_up_to_date(
    runtime: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = []

    def load() -> None:
        prepared.append(1)

    rt = runtime(2, on_restart=load, max_restarts=0)
    table, w, data = np.zeros(1), rt.shared(np.ones(2)), rt.data(X)
    parts = rt.shared(X, sharded=True)
    w.value = 2 * w.value

    def f(x: np.ndarray, part: np.ndarray) -> tuple[Any, ...]:
        return (
            table[0],
            os.environ.get("SYNK_TEST_CAPTURED"),
            os.getcwd(),
            np.geterr()["divide"],
            len(prepared),
            part.sum(),
        )

    look = rt.function(f, outputs=None)
    look(data, parts)
    pids = harness.pids(rt)
    table[0] = 5.0
    monkeypatch.setenv("SYNK_TEST_CAPTURED", "yes")
    monkeypatch.chdir(tmp_path)
    rt.restart()
    with np.errstate(divide="raise"):
        got = look(data, parts)
    assert [values[:5] for values in got] == [(5.0, "yes", str(tmp_path), "raise", 1)] * 2
    assert sum(values[5] for values in got) == 15
    assert w.value.tolist() == [2.0, 2.0]
    assert not set(pids) & set(harness.pids(rt))
    rt.restart()
    assert [values[4] for values in look(data, parts)] == [1, 1]


def test_restart_of_an_inline_runtime() -> None:
    with synk.Runtime(inline=True, backend="numpy") as rt:
        table = np.zeros(1)
        f = rt.function(lambda x: x + table[0], outputs="gather")
        np.testing.assert_array_equal(f(X), X)
        table[0] = 1.0
        rt.restart()
        np.testing.assert_array_equal(f(X), X + 1)


def test_an_inline_runtime_sees_changes_too(shared_runtimes: Any, module: Callable[..., Any]) -> None:
    settings = module("rate = 1.0\ndef helper(x): return x * rate\n")
    offset = 1.0
    check = Checked(shared_runtimes["inline"], lambda x: settings.helper(x) + offset)
    offset = 2.0
    check()
    settings.rate = 3.0
    check()


# ----- modules of the user's


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return ``module(source, name)``: writes a module of the user's and imports it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    made: list[str] = []

    def make(source: str, name: str = "users_module") -> Any:
        import importlib

        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        if name in sys.modules and name in made:
            return importlib.reload(sys.modules[name])
        made.append(name)
        return importlib.import_module(name)

    yield make
    for name in made:
        sys.modules.pop(name, None)


def test_a_module_whose_globals_are_set(runtime: Callable[..., Any], module: Callable[..., Any]) -> None:
    """Before the first call, as from a command line, and later."""
    library = module(LIBRARY)
    library.rate = 5.0
    check = Checked(runtime(2), lambda x: library.helper(x))
    library.rate = 6.0
    check()
    helper = library.helper
    check = Checked(runtime(2), lambda x: helper(x))
    library.rate = 7.0
    check()
    library.inner = twice
    check()


def test_a_module_that_is_reloaded(runtime: Callable[..., Any], module: Callable[..., Any]) -> None:
    rt = runtime(2)
    library = module(LIBRARY)
    model = library.Model()
    colour = library.Colour.RED

    def f(x: np.ndarray) -> np.ndarray:
        return library.helper(x) + library.registry["plus"](x) + model.step(x)

    def kinds(x: np.ndarray) -> tuple[bool, bool, Any]:
        return isinstance(model, library.Model), colour is library.Colour.RED, library.Colour.RED

    parallel, kinds_of = rt.function(f, outputs="gather"), rt.function(kinds, outputs=None)
    np.testing.assert_array_equal(parallel(X), f(X))
    kinds_of(X)
    library = module(LIBRARY.replace("x * rate", "x * rate + 100").replace("x + 1", "x + 50"))
    np.testing.assert_array_equal(parallel(X), f(X))
    assert kinds_of(X) == [(True, True, library.Colour.RED)] * 2
    library.rate = 3.0
    np.testing.assert_array_equal(parallel(X), f(X))
    library = module(LIBRARY.replace("x * self.w", "x * self.w + 7"))
    model = library.Model()
    np.testing.assert_array_equal(parallel(X), f(X))


def test_a_decorated_function_is_found_by_module_and_name(
    runtime: Callable[..., Any], module: Callable[..., Any]
) -> None:
    source = "import synk\n@synk.function(outputs='gather')\ndef f(x):\n    return x + 1\n"
    runtime(2)
    with synk.fork(2, backend="numpy"):
        f = module(source).f
        np.testing.assert_array_equal(f(X), X + 1)
        module(source.replace("x + 1", "x + 2"))
        np.testing.assert_array_equal(f(X), X + 2)
        np.testing.assert_array_equal(f.submit(X).result(), X + 2)
        module("import synk\n@synk.function(outputs='sum')\ndef f(x, y):\n    return (x * y).sum()\n")
        assert f(X, X) == 55


def test_a_module_that_holds_an_array_under_the_name_of_the_function(
    runtime: Callable[..., Any], module: Callable[..., Any]
) -> None:
    library = module("def f(x):\n    return x + 1\n")
    f = runtime(1).function(library.f, outputs="gather")
    library.f = np.arange(3)
    np.testing.assert_array_equal(f(X), X + 1)


def test_a_plain_function_of_a_module_is_found_by_module_and_name(
    runtime: Callable[..., Any], module: Callable[..., Any]
) -> None:
    f = runtime(2).function(module("def f(x):\n    return x + 1\n").f, outputs="gather")
    np.testing.assert_array_equal(f(X), X + 1)
    module("def f(x, y):\n    return x + y\n")
    np.testing.assert_array_equal(f(X, X), 2 * X)


def test_sys_path_holds_as_of_the_function(
    runtime: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rt = runtime(2)
    assert rt.function(lambda x: x.sum(), outputs="sum")(X) == 15
    (tmp_path / "users_late_module.py").write_text("value = 3\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def f(x: np.ndarray) -> int:
        import users_late_module

        return users_late_module.value

    assert rt.function(f, outputs=None)(X) == [3, 3]
