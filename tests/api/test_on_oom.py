"""Calls that run out of memory are repeated in slices: with a real limit of the worker's memory."""

from __future__ import annotations

import logging
import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import synk
from synk._api.slices import Slices
from synk.errors import RemoteError

Fork = Callable[..., Any]
ROOM_NBYTES = 100_000_000


def limit_memory() -> None:
    """Let this process have little more memory than it has now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        nbytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (nbytes + ROOM_NBYTES,) * 2)


def outer_sums(x: np.ndarray, w: np.ndarray) -> tuple[Any, Any, Any]:
    """Return an average, a sum and rows, by way of 8 KB for each row."""
    table = np.multiply.outer(x, w)
    return table.mean(), table.sum(), table[:, 0]


@pytest.fixture
def limited(runtime: Fork) -> Any:
    """Two workers with little room."""
    rt = runtime(2)
    rt.function(limit_memory, outputs=None, per_rank=True)()
    return rt


X = np.linspace(-1, 2, 30_001)
W = np.linspace(0, 1, 1000)
EXACT = X.mean() * W.mean(), X.sum() * W.sum(), X * W[0]  # without the table: each worker imports this module


def check(result: Any) -> None:
    for got, want in zip(result, EXACT, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-12)


def test_a_call_that_does_not_fit_is_run_in_slices(limited: Any, caplog: pytest.LogCaptureFixture) -> None:
    f = limited.function(outer_sums, bcast_inputs="w", outputs=("avg", "sum", "gather"), on_oom="slices")
    with pytest.raises(MemoryError):
        limited.function(outer_sums, bcast_inputs="w", outputs=("avg", "sum", "gather"))(X, W)
    with caplog.at_level(logging.WARNING, "synk"):
        for _ in range(3):
            check(f(X, W))
    assert [record.getMessage().partition(" (")[0] for record in caplog.records] == [
        "'outer_sums' ran out of memory on a rank"
    ]
    calls = limited.counters["calls"]
    check(f(X, W))
    assert limited.counters["calls"] == calls + 1  # what was found out is remembered
    check(f(X, w=W))
    check(f.submit(X, W).result())


def test_the_next_number_of_slices_is_twice_the_one_that_did_not_fit(caplog: pytest.LogCaptureFixture) -> None:
    slices, error = Slices("f"), MemoryError()
    error.__cause__ = RemoteError("full")
    with caplog.at_level(logging.WARNING, "synk"):
        assert slices.help_against(error, (X,), {}, 8)
    assert caplog.messages[0].startswith("'f' ran out of memory on a rank. Calls with such")
    assert [slices.of((X,), {}, number) for number in (1, 8, 20)] == [16, 16, 20]


@pytest.mark.parametrize("arg", [{"x": X, "scale": 3}, (X, [X[0]] * 5), X.tolist()], ids=["dict", "tuple", "list"])
def test_rows_of_nested_arguments_and_of_lists_count(arg: Any) -> None:
    slices, error = Slices("f"), MemoryError()
    error.__cause__ = RemoteError("full")
    assert slices.help_against(error, (arg,), {}, 1)
    assert slices.of((arg,), {}, 1) == 2
    assert slices.of(({"x": X[:2], "scale": 3},), {}, 1) == 1


def test_a_row_that_does_not_fit_is_an_error(limited: Any) -> None:
    f = limited.function(lambda x: np.ones((len(x), ROOM_NBYTES)).sum(), outputs="sum", on_oom="slices")
    with pytest.raises(MemoryError) as caught:
        f(np.ones(4))
    assert any("a single row in each" in note for note in caught.value.__notes__)
    assert limited.function(lambda x: x.sum(), outputs="sum")(np.ones(4)) == 4


def test_other_errors_and_the_programs_own_memory_are_no_reason(runtime: Fork, monkeypatch: pytest.MonkeyPatch) -> None:
    rt, calls = runtime(1), 0

    def divide(x: np.ndarray) -> float:
        return 1 / int(x.sum())

    f = rt.function(divide, outputs="sum", on_oom="slices")
    with pytest.raises(ZeroDivisionError):
        f(np.zeros(3))

    def fail(*args: object) -> None:
        nonlocal calls
        calls += 1
        raise MemoryError

    monkeypatch.setattr("synk._api.function.run_call", fail)
    with pytest.raises(MemoryError):
        f(np.ones((3, 3)))
    assert calls == 1


def test_what_it_does_not_go_with_is_refused(shared_runtimes: Any) -> None:
    rt = shared_runtimes[1]
    total = rt.shared(np.zeros(2))
    with pytest.raises(ValueError, match="got on_oom='slices' with updates"):
        rt.function(lambda x: (x.sum(), x), updates=total, on_oom="slices")
    with pytest.raises(ValueError, match="got on_oom='slice', expected 'raise' or 'slices'"):
        rt.function(lambda x: x.sum(), on_oom="slice")
    assert isinstance(rt.function(lambda x: x.sum(), on_oom="raise"), synk.Function)


# -- functions that change resident objects


class Moments:
    """Sums over all rows that it has seen, one rank's part of them."""

    def __init__(self) -> None:
        self.count = 0
        self.sums = np.zeros(len(W))
        self.num_begun = 0

    def add(self, x: np.ndarray) -> None:
        self.num_begun += 1
        self.count += len(x)  # before it runs out of memory
        self.sums += np.multiply.outer(x, W).sum(0)


@pytest.mark.parametrize("num_short", [2, 1])
def test_what_a_failed_attempt_has_changed_is_put_back(runtime: Fork, num_short: int) -> None:
    """On all ranks, or on one: then the other one has come through the call, and goes back all the same."""
    rt = runtime(2)

    def limit() -> None:
        if synk.comm.rank >= 2 - num_short:
            limit_memory()

    rt.function(limit, outputs=None, per_rank=True)()
    moments = rt.resident(Moments())

    def add(x: np.ndarray) -> int:
        moments.value.add(x)
        return len(x)

    f = rt.function(add, outputs="sum", changes=[moments], on_oom="slices")
    small = X[:4]
    assert f(small) == 4  # compiled, and then it does not fit
    for _ in range(2):
        assert f(X) == len(X)
    found = [moments.get(rank) for rank in range(2)]
    per_call = found[0].num_begun // 2
    assert per_call >= 2 and {each.num_begun for each in found} == {1 + 2 * per_call}  # as many slices on both
    rows = [np.concatenate([half, *[whole] * 2]) for half, whole in zip(np.array_split(small, 2), np.array_split(X, 2))]
    for each, own in zip(found, rows, strict=True):
        assert each.count == len(own)
        np.testing.assert_allclose(each.sums, own.sum() * W, rtol=1e-9)


def test_an_error_that_slices_do_not_help_against_leaves_it_as_it_was(limited: Any) -> None:
    moments = limited.resident(Moments())

    def add(x: np.ndarray) -> int:
        moments.value.add(x)
        return int(np.ones((len(x), ROOM_NBYTES)).sum())

    f = limited.function(add, outputs="sum", changes=[moments], on_oom="slices")
    with pytest.raises(MemoryError) as caught:
        f(X[:4])
    assert caught.value.step_counted is False  # type: ignore[attr-defined]
    assert [moments.get(rank).count for rank in range(2)] == [0, 0]
    with pytest.raises(ValueError, match="expected 1, because it changes resident objects"):
        limited.function(add, outputs="sum", changes=[moments])(X[:4], num_slices=2)


def test_a_call_is_not_repeated_where_nobody_knows_what_it_has_changed(
    reused: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks could not be asked after the failure: a second attempt might change the object twice."""
    rt = reused(2)
    moments = rt.resident(Moments())

    def add(x: np.ndarray) -> int:
        moments.value.add(x)
        if len(x) > 2:
            raise MemoryError("too much")
        return len(x)

    f = rt.function(add, outputs="sum", changes=[moments], on_oom="slices")

    def silent(*args: Any) -> Any:
        raise synk.errors.CallTimeout("nobody answers")

    with monkeypatch.context() as patched:
        patched.setattr(rt._session.residents._ranks, "ask_living", silent)
        with pytest.raises(MemoryError, match="too much") as caught:
            f(X[:8])
    assert caught.value.step_counted is None  # type: ignore[attr-defined]
    assert {moments.get(rank).num_begun for rank in range(2)} <= {0, 1}
    assert f(X[:8]) == 8
    assert sum(moments.get(rank).count for rank in range(2)) == 8
