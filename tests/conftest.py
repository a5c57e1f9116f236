"""Fixtures of all tests: runtimes, and the proof that each test leaves nothing behind."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent))

pytest.register_assert_rewrite("harness")

import harness  # noqa: E402

import synk  # noqa: E402


def pytest_configure() -> None:
    """Undo the ignored SIGINT of a run started in the background: the scenarios that it starts would inherit it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Remember whether the test's body failed: its traceback then holds what the census would count."""
    report = yield
    if report.when == "call":
        item.stash[_failed] = report.failed
    return report


_failed = pytest.StashKey[bool]()


class SharedRuntimes:
    """Runtimes that tests of pure semantics share: ``shared_runtimes[n]`` has n workers, ``["inline"]`` none.

    Made at first use; made again when a test closed one.
    """

    def __init__(self) -> None:
        self._runtimes: dict[int | str, synk.Runtime] = {}

    def __getitem__(self, num_workers: int | str) -> synk.Runtime:
        runtime = self._runtimes.get(num_workers)
        if runtime is None or runtime.is_closed:
            if num_workers == "inline":
                runtime = synk.Runtime(inline=True, backend="numpy")
            else:
                runtime = synk.Runtime(int(num_workers), backend="numpy")
            self._runtimes[num_workers] = runtime
            harness.pids(runtime)
        return runtime

    def close(self) -> None:
        """Close all."""
        for runtime in self._runtimes.values():
            runtime.close()
        self._runtimes.clear()


class ReusedRuntimes:
    """Runtimes that serve one test after the other, whatever befalls their workers: what a test may rely on in any
    case is that the next call is right. It saves the start of all workers but those that were killed.
    """

    def __init__(self) -> None:
        self._idle: dict[int, list[synk.Runtime]] = {}

    def take(self, num_workers: int) -> synk.Runtime:
        """Return a runtime that no test has, which the caller gives back or closes."""
        idle = self._idle.setdefault(num_workers, [])
        return idle.pop() if idle else synk.Runtime(num_workers, backend="numpy", max_restarts=10**9)

    def give_back(self, runtime: synk.Runtime) -> None:
        """Keep a runtime for the tests to come, after proving that it can be used."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of a death that the test had no call after
            harness.arm(runtime)
        harness.assert_right(runtime)
        self._idle[runtime.world_size].append(runtime)

    def close(self) -> None:
        """Close all."""
        for runtime in itertools.chain(*self._idle.values()):
            runtime.close()
        self._idle.clear()


@pytest.fixture(scope="session")
def kept_open(request: pytest.FixtureRequest) -> Iterator[tuple[SharedRuntimes, ReusedRuntimes]]:
    """The runtimes of many tests; the census is checked once, when all of them are closed."""
    before = harness.census()
    shared, reused = SharedRuntimes(), ReusedRuntimes()
    yield shared, reused
    shared.close()
    reused.close()
    if request.session.testsfailed:  # tracebacks hold what the census would count
        return
    left = harness.settled_census(before).leftovers(before)
    assert not left, f"the runtimes of many tests left behind: {left}"


@pytest.fixture(scope="session")
def shared_runtimes(kept_open: tuple[SharedRuntimes, ReusedRuntimes]) -> SharedRuntimes:
    """Runtimes for tests whose after-state is *usable*."""
    return kept_open[0]


@pytest.fixture
def reused(
    request: pytest.FixtureRequest, kept_open: tuple[SharedRuntimes, ReusedRuntimes]
) -> Iterator[Callable[..., synk.Runtime]]:
    """Return ``reused(num_workers=2, *failpoints)``: a runtime that may have served other tests, given back at the end.

    For tests that neither look at what a runtime counts from its start on, nor need options or an environment.
    """
    pool = kept_open[1]
    taken: list[synk.Runtime] = []

    def take(num_workers: int = 2, *failpoints: harness.Failpoint) -> synk.Runtime:
        taken.append(pool.take(num_workers))
        harness.arm(taken[-1], *failpoints)
        return taken[-1]

    yield take
    has_failed = request.node.stash.get(_failed, False)
    for each in taken:
        if has_failed or each.is_closed:
            each.close()
        else:
            pool.give_back(each)


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Assert after each test that no worker, descriptor, thread or segment is left, and SIGINT is as it was.

    Tests on shared runtimes leave theirs alive on purpose; the runtimes' own census is taken when they close.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_shared = "kept_open" in request.fixturenames
    before = harness.census()
    yield
    assert signal.getsignal(signal.SIGINT) is handler, "the handler of SIGINT was changed"
    if is_shared or request.node.stash.get(_failed, False):
        return
    left = harness.settled_census(before).leftovers(before)
    assert not left, f"the test left behind: {left}"


@pytest.fixture
def runtime() -> Iterator[Callable[..., Any]]:
    """Return ``runtime(num_workers=2, *failpoints, **options)``: makes a runtime for this test, closed at its end."""
    opened: list[synk.Runtime] = []

    def make(num_workers: int = 2, *failpoints: harness.Failpoint, **options: Any) -> synk.Runtime:
        options.setdefault("backend", "numpy")
        if failpoints:
            options["_failpoints"] = failpoints
        opened.append(synk.Runtime(num_workers, **options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.fixture(scope="session")
def storm_count() -> Callable[[int], int]:
    """Return how often to repeat a random fault: the given count, times ``SYNK_STORM`` (default 1)."""
    factor = float(os.environ.get("SYNK_STORM", "1"))
    return lambda count: max(1, round(count * factor))
