"""Captured objects of every kind are changed in place between calls: each call works with what they hold by then.

The expected values come from the same function, called by plain Python in this process on the same objects.
"""

from __future__ import annotations

import itertools
import random
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kinds import KINDS, PROGRAMS, TORCH, Made
from programs import VERBS, X, another_thread
from support import gates, harness

import synk

WORKERS = (2, 1, 3, 0)
TAKES_LONG = re.compile("import|5 500|1 600|10 MB")
IMPORT_NOTHING = [name for name in KINDS if "import" not in PROGRAMS.get(name, "")]
WHEN = {"before the first call": 0, "after one call": 1, "after quiet calls": 4}

pytestmark = pytest.mark.filterwarnings("ignore:(?s).*bcast_inputs")  # a large object that is sent whole each time


class Watched:
    """A function that reads one captured object, for the workers and for the program."""

    def __init__(self, rt: Any, name: str) -> None:
        self.name, self.made, self.rt = name, Made(name), rt
        read, held = self.made.read, self.made.held

        def reads(x: np.ndarray) -> list[str]:
            return [read(held)] * len(x)

        self.plain, self.f = reads, rt.function(reads, outputs="gather")

    def check(self, verb: str = "call") -> None:
        want, got = self.plain(X), VERBS[verb](self.rt, self.f, self.plain)
        rows = [row for row in range(len(want)) if got[row] != want[row]]
        assert not rows, f"by {verb}, rows {rows}\n  got  {got[rows[0]]}\n  want {want[rows[0]]}"


def change_twice(rt: Any, name: str, verb: str, when: str) -> None:
    watched = Watched(rt, name)
    for _ in range(WHEN[when]):
        watched.check()
    for _ in range(2):
        watched.made.change()
        watched.check(verb)
    watched.check()
    watched.check()
    before = rt.counters["bytes_down"]
    watched.check()
    assert rt.counters["bytes_down"] - before in (0, 8 * rt.world_size), "what has not changed is not sent"


HALVES = [KINDS[::2], KINDS[1::2]]


@pytest.mark.parametrize(
    "kinds", [*HALVES, pytest.param([*TORCH], marks=pytest.mark.with_torch)], ids=["even", "odd", "torch"]
)
def test_a_change_is_seen_by_the_next_call(subtests: Any, shared_runtimes: Any, kinds: list[str]) -> None:
    """Each kind by one verb, at one moment, on one runtime: what takes long, on one worker.

    To import sklearn takes more than all the rest, so it is on no worker.
    """
    rng = random.Random(kinds[0])
    for name in kinds:
        verb, when, where = rng.choice([*VERBS]), rng.choice([*WHEN]), rng.choice(WORKERS)
        where = 2 if name in TORCH else 1 if TAKES_LONG.search(name + PROGRAMS.get(name, "")) else where
        where = 0 if "sklearn" in name else where
        with subtests.test(kind=name, verb=verb, when=when, workers=where):
            change_twice(shared_runtimes[where], name, verb, when)


def test_a_change_of_a_large_container_is_seen_beside_a_thread(subtests: Any, shared_runtimes: Any) -> None:
    """Which keeps the master from comparing it in memory."""
    for name in random.Random(46).sample([name for name in KINDS if re.search(" 5 500| 1 600", name)], 5):
        with subtests.test(kind=name), another_thread():
            change_twice(shared_runtimes[1], name, "call", "after one call")


@pytest.mark.storm
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("verb", VERBS)
def test_every_change_is_seen_by_every_verb(subtests: Any, shared_runtimes: Any, verb: str) -> None:
    for name, when, where in itertools.product(KINDS, WHEN, WORKERS):
        with subtests.test(kind=name, when=when, workers=where):
            change_twice(shared_runtimes[where], name, verb, when)


def test_a_worker_that_was_started_again_has_what_there_is_now(subtests: Any, runtime: Callable[..., Any]) -> None:
    """An eighth of all kinds at once; every other one is changed before the worker ends."""
    rt = runtime(2)
    all_watched = [Watched(rt, name) for name in IMPORT_NOTHING[::8]]
    for watched in all_watched:
        watched.f(X)
    for watched in all_watched[::2]:
        watched.made.change()
    harness.kill_and_wait(harness.pids(rt)[1])
    with pytest.warns(RuntimeWarning, match="started again"):
        rt.function(len, outputs="sum")(X)
    harness.pids(rt)
    for watched in all_watched[1::2]:
        watched.made.change()
    for watched in all_watched:
        with subtests.test(kind=watched.name):
            watched.check()


# ----- while something is being sent


class Late:
    """Acts while it is pickled, and while it is loaded: what the function captured besides was packed before."""

    while_pickled: Callable[[], Any] | None = None
    signs: tuple[str, str] | None = None

    def __reduce__(self) -> Any:
        act, self.while_pickled = self.while_pickled, None
        if act is not None:
            act()
        told, self.signs = self.signs, None
        return load, (told,)


def load(told: tuple[str, str] | None) -> int:
    """Say that the function is being loaded, and wait for the answer."""
    if told is not None:
        gates.say(told[0])
        gates.hear(told[1])
    return 0


CHANGES = {
    "item": "a_dict['rate'] = 7",
    "element": "a_list.append(7)",
    "attribute": "a_space.rate = 7",
    "a long list": "a_long.append(7)",
    "an array": "an_array[1] = 7",
    "global": "threshold = 7",
    "new global": "made = 7",
    "lost global": "del gone",
}
SENT = """
from types import SimpleNamespace
import numpy as np
a_dict, a_list, a_space, a_long, an_array = {"rate": 1}, [1, 2, 3], SimpleNamespace(rate=1), [*range(2000)], np.zeros(2)
threshold = gone = 1
def f(x):
    try: of_made = made
    except NameError: of_made = 0
    try: of_gone = gone
    except NameError: of_gone = 0
    known = a_dict["rate"], sum(a_list), a_space.rate, sum(a_long), an_array[1], threshold, of_made, of_gone
    return known if z_late is not None else ()
"""


def test_what_changes_while_a_function_is_being_sent_is_sent_with_the_next_call(
    subtests: Any, shared_runtimes: Any, tmp_path: Path
) -> None:
    """By the pickling rule of an object, or by another thread while the worker loads."""
    for number, (what, when) in enumerate(itertools.product(CHANGES, ["pickled", "loaded"])):
        with subtests.test(change=what, while_it_is=when):
            late = Late()
            names: dict[str, Any] = {"__name__": "__main__", "z_late": late}
            exec(SENT, names)
            sent = shared_runtimes[1].function(names["f"], outputs=None)  # which pickles it, to see whether that works

            def change(what: str = what, names: dict[str, Any] = names) -> None:
                exec(CHANGES[what], names)

            if when == "pickled":
                late.while_pickled = change
                sent(X)
                assert late.while_pickled is None
            else:
                late.signs = told = gates.sign(tmp_path / f"loads {number}"), gates.sign(tmp_path / f"goes on {number}")
                thread = threading.Thread(target=lambda told=told: (gates.hear(told[0]), change(), gates.say(told[1])))
                thread.start()
                sent(X)
                thread.join()
            assert sent(X) == sent(X) == [names["f"](X)]
            names["a_dict"]["rate"] = 9
            assert sent(X) == [names["f"](X)]


def test_a_change_whose_sending_has_failed_is_sent_with_the_next_call(subtests: Any, shared_runtimes: Any) -> None:
    for name in random.Random(48).sample(IMPORT_NOTHING, 24):
        with subtests.test(kind=name):
            watched, beside = Watched(shared_runtimes[2], name), {"k": 0}
            read, held = watched.made.read, watched.made.held
            f = shared_runtimes[2].function(lambda x: [read(held), beside["k"]], outputs="first")  # noqa: B023
            f(X)
            watched.made.change()
            beside["k"] = threading.Lock()  # type: ignore[assignment]
            with pytest.raises(synk.errors.SerializationError, match="lock"):
                f(X)
            beside["k"] = 1
            assert f(X) == [read(held), 1]
            watched.made.change()
            assert f(X) == [read(held), 1]
