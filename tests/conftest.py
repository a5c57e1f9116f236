"""Fixtures of all tests: runtimes, and the proof that each test leaves nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS))  # for ``support``

pytest.register_assert_rewrite("support.harness")

from support import gates, harness, nursery  # noqa: E402

import synk  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    """Undo what a run in the background, or under nohup, ignores: the scenarios that it starts would inherit it."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests that use torch first.

    With ``--dist worksteal`` each of two processes gets half of all tests in a row: so the workers of one process only
    import torch, which takes longer than most tests.
    """
    items.sort(key=lambda item: not uses_torch(item))


def pytest_collection_finish() -> None:
    """Take what there is by now out of all garbage collections to come: tests ask for hundreds, of half a second."""
    gc.collect()
    gc.freeze()


def pytest_sessionstart(session: pytest.Session) -> None:
    """From now on have workers forked: not in the storm, nor in a process that only hands out the tests to others."""
    config = session.config
    hands_out = not hasattr(config, "workerinput") and getattr(config.option, "numprocesses", None)
    if hands_out or config.option.markexpr == "storm" or not nursery.is_possible():
        return
    config.stash[_nurseries] = nurseries = nursery.Nurseries()
    harness.lasting_processes |= nurseries.pids


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Choose from where the workers of a test come."""
    SharedRuntimes.has_torch = uses_torch(item)
    if nurseries := item.config.stash.get(_nurseries, None):
        is_forked = harness.forks_workers = item.get_closest_marker("own_start") is None
        nurseries.choose(uses_torch(item) if is_forked else None)


def pytest_report_teststatus(report: pytest.TestReport, config: pytest.Config) -> tuple[str, str, str] | None:
    """Say FLAKY of what failed in the run before and passes now."""
    is_again = config.getoption("lf", False) and type(report) is pytest.TestReport
    return ("passed", ".", "FLAKY") if is_again and report.when == "call" and report.passed else None


def pytest_sessionfinish(session: pytest.Session) -> None:
    if nurseries := session.config.stash.get(_nurseries, None):
        nurseries.close()


_nurseries = pytest.StashKey[nursery.Nurseries]()


@pytest.fixture
def nurseries(pytestconfig: pytest.Config) -> nursery.Nurseries:
    """Where the workers of this process come from; without it all are started."""
    if _nurseries not in pytestconfig.stash:
        pytest.skip("all workers are started")
    return pytestconfig.stash[_nurseries]


def uses_torch(item: pytest.Item) -> bool:
    """Whether a test, or its module, names torch, or says by a mark that its workers import it."""
    code = getattr(getattr(item, "function", None), "__code__", None)
    names = () if code is None else (*code.co_names, *code.co_varnames, *code.co_consts)
    is_named = "torch" in names or hasattr(getattr(item, "module", None), "torch")
    return is_named or item.get_closest_marker("with_torch") is not None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Remember whether the test's body failed: its traceback then holds what the census would count."""
    report = yield
    if report.when == "call":
        item.stash[_failed] = report.failed
    return report


_failed = pytest.StashKey[bool]()


def nodes_of(kind: str, **options: Any) -> synk.Runtime:
    """Return a runtime over nodes: ``"1+3"`` are one with one worker and one with three."""
    counts = [int(count) for count in kind.split("+")]
    return synk.Runtime(counts, cluster="here", nodes=len(counts), **options)


class SharedRuntimes:
    """Runtimes that tests of pure semantics share: ``shared_runtimes[n]`` has n workers, ``[0]`` none, and
    ``["1+3"]`` two nodes.

    Made at first use; made again when a test closed one. Tests without torch have others than those with it: a worker
    that takes the place of another imports what the functions before it have named.
    """

    has_torch = False
    """Whether the current test uses torch."""

    def __init__(self) -> None:
        self._runtimes: dict[tuple[int | str, bool], synk.Runtime] = {}

    def __getitem__(self, num_workers: int | str) -> synk.Runtime:
        kind = num_workers, self.has_torch
        runtime = self._runtimes.get(kind)
        if runtime is None or runtime.is_closed:
            if "+" in str(num_workers):
                runtime = nodes_of(str(num_workers))
            else:
                runtime = synk.Runtime(int(num_workers), backend="numpy")
            self._runtimes[kind] = runtime
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

    MOST_IDLE = 4

    def __init__(self) -> None:
        self._idle: list[tuple[Hashable, synk.Runtime]] = []

    def take(self, kind: Hashable, make: Callable[[], synk.Runtime]) -> synk.Runtime:
        """Return a runtime of its kind that no test has, which the caller gives back or closes."""
        for position, (other, runtime) in enumerate(self._idle):
            if other == kind and not runtime.is_closed:
                return self._idle.pop(position)[1]
        return make()

    def give_back(self, kind: Hashable, runtime: synk.Runtime) -> None:
        """Keep a runtime for the tests to come, after proving that it can be used."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)  # of a death that the test had no call after
                harness.disarm(runtime)
                harness.assert_right(runtime)
        except BaseException:
            runtime.close()
            raise
        self._idle.append((kind, runtime))
        self.close(self.MOST_IDLE)

    def close(self, num_kept: int = 0) -> None:
        """Close all but the last ones."""
        while len(self._idle) > num_kept:
            with warnings.catch_warnings():
                # of objects that were lost with workers that a test killed
                warnings.simplefilter("ignore", RuntimeWarning)
                self._idle.pop(0)[1].close()


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


Reuse = Callable[[Hashable, Callable[[], synk.Runtime]], synk.Runtime]


@pytest.fixture
def reuse(request: pytest.FixtureRequest, kept_open: tuple[SharedRuntimes, ReusedRuntimes]) -> Iterator[Reuse]:
    """Return ``reuse(kind, make)``: a runtime that earlier tests made for ``kind``, or a new one."""
    pool = kept_open[1]

    def end(kind: Hashable, runtime: synk.Runtime) -> None:
        if runtime.is_closed or request.node.stash.get(_failed, False):
            runtime.close()
        else:
            pool.give_back(kind, runtime)

    with contextlib.ExitStack() as ends:

        def take(kind: Hashable, make: Callable[[], synk.Runtime]) -> synk.Runtime:
            runtime = pool.take(kind, make)
            ends.callback(end, kind, runtime)
            return runtime

        yield take


@pytest.fixture
def reused(request: pytest.FixtureRequest, reuse: Reuse) -> Callable[..., synk.Runtime]:
    """Return ``reused(num_workers=2, *failpoints)``: a runtime that may have served other tests, given back at the end.

    ``reused("1+3")`` has two nodes.

    For tests that need no options, and count neither what a runtime counts from its start on nor the descriptors or
    memory of processes: what earlier tests left to the garbage collector may go at any time. It was started under the
    variables of synk's own that are set now. Tests without torch get one that served none with it: a worker that takes
    the place of another imports what the functions before it have named.
    """

    def take(num_workers: int | str = 2, *failpoints: harness.Failpoint) -> synk.Runtime:
        variables = frozenset(item for item in os.environ.items() if item[0].startswith("SYNK_"))
        kind = num_workers, uses_torch(request.node), variables
        make = nodes_of if isinstance(num_workers, str) else synk.Runtime
        runtime = reuse(kind, lambda: make(num_workers, backend="numpy", max_restarts=10**9))
        if failpoints:
            harness.arm(runtime, *failpoints)
        return runtime

    return take


@pytest.fixture
def rt(request: pytest.FixtureRequest, reused: Callable[..., synk.Runtime]) -> synk.Runtime:
    """The runtime of most tests: one of ``reused``, with two workers unless the test is parametrised by it."""
    return reused(getattr(request, "param", 2))


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Assert after each test that no worker, descriptor, thread or segment is left, and SIGINT is as it was.

    Tests on shared runtimes leave theirs alive on purpose; the runtimes' own census is taken when they close.
    """
    handler = signal.getsignal(signal.SIGINT)
    before = None if "kept_open" in request.fixturenames else harness.census()
    yield
    assert signal.getsignal(signal.SIGINT) is handler, "the handler of SIGINT was changed"
    if before is None or request.node.stash.get(_failed, False):
        return
    left = harness.settled_census(before).leftovers(before)
    assert not left, f"the test left behind: {left}"


@pytest.fixture
def runtime() -> Iterator[Callable[..., Any]]:
    """Return ``runtime(num_workers=2, *failpoints, **options)``: makes a runtime for this test, closed at its end."""
    opened: list[synk.Runtime] = []

    def make(num_workers: int = 2, *failpoints: harness.Failpoint, **options: Any) -> synk.Runtime:
        options.setdefault("backend", "numpy")
        with harness.armed(*failpoints):
            opened.append(synk.Runtime(num_workers, **options))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.fixture
def gate(tmp_path: Path) -> gates.Gate:
    return gates.Gate(tmp_path)


@pytest.fixture(scope="session")
def storm_count() -> Callable[[int], int]:
    """Return how often to repeat a random fault: the given count, times ``SYNK_STORM`` (default 1)."""
    factor = float(os.environ.get("SYNK_STORM", "1"))
    return lambda count: max(1, round(count * factor))
