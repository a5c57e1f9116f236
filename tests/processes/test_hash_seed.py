"""Hashes, and with them the order of sets, are the same on all ranks. The oracle is an interpreter with that seed."""

from __future__ import annotations

import datetime
import os
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from support import harness

import synk

pytestmark = pytest.mark.own_start  # workers that are forked have the seed of the process that forks them

X = np.arange(6.0)
FRUIT = "{'apple', 'pear', 'plum', 'fig', 'lime', 'date', 'kiwi'}"
SOURCES = {
    "set": FRUIT,
    "frozenset": f"frozenset({FRUIT})",
    "str": "'apple'",
    "bytes": "b'apple'",
    "date": "datetime.date(2024, 2, 29)",
    "tuple": "('user', 7, b'x', ('deep',))",
}
OF_MODULE = {kind: eval(source, {"datetime": datetime}) for kind, source in SOURCES.items()}


def shown(value: Any) -> str:
    """Return what depends on hashes: the order of a set, the hash of anything else."""
    return repr(list(value)) if isinstance(value, (set, frozenset)) else repr(hash(value))


def by_interpreter(seed: str) -> dict[str, str]:
    """Return what a new interpreter with that seed of hashes shows; the order of a set depends on its history too."""
    hashes = ", ".join(f"{kind!r}: repr(hash({source}))" for kind, source in SOURCES.items() if "set" not in kind)
    environment, program = {**os.environ, "PYTHONHASHSEED": seed}, f"import datetime\nprint({{{hashes}}})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    found: dict[str, str] = eval(done.stdout)
    return found


def looker(kind: str) -> Any:
    """Return a function that shows what it has captured, its own constant, the module's, and what it is given."""
    value, constant = eval(SOURCES[kind]), eval(f"lambda: {SOURCES[kind]}")

    def look(x: Any, box: Any) -> str:
        return repr([shown(each) for each in (value, constant(), OF_MODULE[kind], *box)])

    return look


def test_hashes_are_the_same_on_all_ranks_of_all_nodes(
    subtests: Any, runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rt, oracle = runtime([1, 1], backend="auto", cluster="here", nodes=2, seed=7), by_interpreter("7")
    monkeypatch.setenv("PYTHONHASHSEED", "5")  # for runtimes to come
    for kind, source in SOURCES.items():
        with subtests.test(kind=kind):
            look, box = looker(kind), [eval(source)]
            f = rt.function(look, outputs=None, bcast_inputs="box")
            found = {*f(X, box), *f.submit(X, box).result(), f.serial(X, box)[0]}
            (text,) = found | set(rt.map(look, [0.0] * 12, [box] * 12, batch_size=1))
            assert kind not in oracle or set(eval(text)) == {oracle[kind]}


@pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")
def test_a_worker_that_replaces_another_walks_through_sets_as_the_others(runtime: Any) -> None:
    """Ranks that reduce by the names in a set, in its order, meet each other; the set has changed meanwhile."""
    rt, names = runtime(2, seed=7), {f"name {number}" for number in range(5)}

    def summed(x: Any) -> str:
        return repr([(name, float(synk.comm.all_reduce(np.array([float(len(name))]), "sum")[0])) for name in names])

    f = rt.function(summed, outputs=None)
    for number in range(6):
        names.symmetric_difference_update(f"name {number * step}" for step in (3, 7, 11))
        if number == 2:
            harness.kill_and_wait(harness.pids(rt)[1])
        elif number == 4:
            rt.restart()
        (text,) = set(f(X))
        assert sorted(eval(text)) == [(name, 2.0 * len(name)) for name in sorted(names)]


@pytest.mark.parametrize(("given", "seed", "expected"), [("123", 7, "123"), ("random", 9, "9")])
def test_the_users_own_seed_is_kept(
    runtime: Any, monkeypatch: pytest.MonkeyPatch, given: str, seed: int, expected: str
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", given)
    rt = runtime(1, seed=seed)
    assert rt.function(lambda x: repr(hash("apple")), outputs=None)(X) == [by_interpreter(expected)["str"]]


def test_a_rank_in_the_program_has_the_programs_hashes() -> None:
    with synk.Runtime(0, backend="numpy", seed=7) as rt:
        assert rt.function(lambda x: hash("apple"), outputs=None)(X) == [hash("apple")]
