"""Fixtures of all tests: runtimes, and the proof that each test leaves nothing behind."""

from __future__ import annotations

import os
import signal
import sys
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


@pytest.fixture(scope="session")
def shared_runtimes(request: pytest.FixtureRequest) -> Iterator[SharedRuntimes]:
    """Runtimes for tests whose after-state is *usable*; the census is checked once, at their end."""
    before = harness.census()
    shared = SharedRuntimes()
    yield shared
    shared.close()
    if request.session.testsfailed:  # tracebacks hold what the census would count
        return
    left = harness.settled_census(before).leftovers(before)
    assert not left, f"the shared runtimes left behind: {left}"


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Assert after each test that no worker, descriptor, thread or segment is left, and SIGINT is as it was.

    Tests on shared runtimes leave theirs alive on purpose; the runtimes' own census is taken when they close.
    """
    handler = signal.getsignal(signal.SIGINT)
    is_shared = "shared_runtimes" in request.fixturenames
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
