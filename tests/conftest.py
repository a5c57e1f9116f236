"""Fixtures of all tests: runtimes, and the proof that each test leaves nothing behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import random
import re
import signal
import sys
import warnings
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest
from _pytest.mark import KeywordMatcher, MarkMatcher
from _pytest.mark.expression import Expression

TESTS = Path(__file__).resolve().parent
sys.path.insert(0, str(TESTS))  # for ``support``

pytest.register_assert_rewrite("support.harness")

from support import harness, nursery  # noqa: E402

import synk  # noqa: E402
from synk._master.calls.signature import OPTION_NAMES  # noqa: E402
from synk._pure.ops import OPS  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    """Undo what a run in the background, or under nohup, ignores: the scenarios that it starts would inherit it."""
    config.stash[_chosen] = expression("-m", config.option.markexpr), expression("-k", config.option.keyword)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import the files in which no word of ``-k`` occurs: to import all takes ten times as long as most choices.

    What is in a test's name and not in its file is a number, or stands in a file of helpers or a table that the file
    names. A file whose names come from elsewhere (files that it looks for, attributes) is read, as is one that
    the command line names. ``not`` chooses most files anyway.
    """
    words = [word.lower() for word in re.findall(r"[^\s()]+", config.option.keyword) if word not in ("and", "or")]
    if collection_path.suffix != ".py" or not words or "not" in words:
        return None
    if any(str(collection_path) in argument for argument in named_files(config)):
        return None
    text = collection_path.read_text()
    if re.search(r"glob\(|\b(vars|dir)\(", text):
        return None
    helpers = {**helper_texts(TESTS / "support"), **helper_texts(collection_path.parent)}
    text = "\n".join([text, *(shared for name, shared in helpers.items() if name in text)])
    tables = [names for table, names in tables_of_the_package().items() if re.search(rf"\b({table})\b", text)]
    text = f"{collection_path.relative_to(TESTS)} {text} {' '.join(tables)}".lower()
    return None if any(all(part in text for part in re.findall("[a-z]+", word)) for word in words) else True


def named_files(config: pytest.Config) -> list[str]:
    return [str(config.invocation_params.dir / argument) for argument in config.args if ".py" in argument]


@functools.cache
def helper_texts(folder: Path) -> dict[str, str]:
    return {path.stem: path.read_text() for path in folder.glob("*.py") if not path.name.startswith("test_")}


def tables_of_the_package() -> dict[str, str]:
    """Return what names of tests are made from: the ops, and the options of a call."""
    return {"REDUCE_OPS|REDUCTIONS|OPS": " ".join(OPS), "OPTION_NAMES": " ".join(OPTION_NAMES)}


@pytest.hookimpl(trylast=True)  # all parameters are known then
def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Leave most cases of a test that is ``sampled`` to the storm; of all, make items of those only that are asked for.

    pytest would make an item of each case before it drops those that ``-m`` or ``-k`` leaves out, which are most.
    """
    cases = metafunc._calls
    if sampled := metafunc.definition.get_closest_marker("sampled"):
        leave_most_to_the_storm(metafunc.definition.name, cases, *sampled.args, **sampled.kwargs)
    if cases:
        is_wanted = selection(metafunc.config, metafunc.definition)
        cases[:] = [case for case in cases if is_wanted(case)] or cases[:1]  # without any there would be one unnamed


def leave_most_to_the_storm(test: str, cases: list[Any], n: int, *, together: int = 1, in_order: bool = False) -> None:
    """Keep one case in n of a test, and whatever meets ``together`` values of parameters for the first time.

    They are gone through in a random order, the same in each run: in their own order the values of the last parameter
    would meet nothing but the first values of the others. With ``together=0`` values do not count: in a file whose
    tests all have the same parameter, a fixture's, and n is large, each test has one value of it, and not all the same.
    """
    met: set[tuple[tuple[str, str], ...]] = set()
    elsewhere = {"storm", "gpu", "multi_gpu", "high_memory"}
    cases = [case for case in cases if elsewhere.isdisjoint(mark.name for mark in case.marks)]
    for number, case in enumerate(cases if in_order else random.Random(test).sample(cases, len(cases))):
        each = sorted((name, repr(value)) for name, value in case.params.items())
        values = set(itertools.combinations(each, min(together, len(each))))
        if number % n and values <= met:
            case.marks.append(pytest.mark.storm.mark)
        else:
            met |= values


def selection(config: pytest.Config, function: Any) -> Callable[[Any], bool]:
    """Return whether ``-m`` and ``-k`` choose a case of a function, as pytest finds out once there are items."""
    markers = list(function.iter_markers())
    by_name = KeywordMatcher.from_item(function)
    chosen_by_marks, chosen_by_names = config.stash[_chosen]

    def is_wanted(case: Any) -> bool:
        names = [case.id.lower(), *(mark.name.lower() for mark in case.marks)]

        def is_named(word: str) -> bool:
            return by_name(word) or any(word.lower() in name for name in names)

        return chosen_by_marks(MarkMatcher.from_markers([*markers, *case.marks])) and chosen_by_names(is_named)

    return is_wanted


def expression(option: str, text: str) -> Callable[[Any], bool]:
    """Return how to evaluate what follows ``-m`` or ``-k``; without anything all is chosen."""
    try:
        return Expression.compile(text).evaluate if text.strip() else lambda matcher: True
    except SyntaxError as error:
        raise pytest.UsageError(f"cannot read the expression of {option}: got {text!r}. {error.msg}") from error


_chosen = pytest.StashKey[tuple[Callable[[Any], bool], Callable[[Any], bool]]]()


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
    """Runtimes that tests of pure semantics share: ``shared_runtimes[n]`` has n workers, ``["inline"]`` none, and
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
            if num_workers == "inline":
                runtime = synk.Runtime(inline=True, backend="numpy")
            elif "+" in str(num_workers):
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
                warnings.simplefilter(
                    "ignore", RuntimeWarning
                )  # of objects that were lost with workers that a test killed
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
    harness.shm_files(harness.own_processes)
    for each in opened:
        each.close()


@pytest.fixture(scope="session")
def storm_count() -> Callable[[int], int]:
    """Return how often to repeat a random fault: the given count, times ``SYNK_STORM`` (default 1)."""
    factor = float(os.environ.get("SYNK_STORM", "1"))
    return lambda count: max(1, round(count * factor))
