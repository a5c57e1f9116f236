"""Hashes, and with them the order of sets, are the same on all ranks. The oracle is an interpreter with that seed."""

from __future__ import annotations

import datetime
import functools
import os
import random
import subprocess
import sys
import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import harness
from support.tables import combinations

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


def captured(kind: str) -> tuple[Callable[..., str], tuple[Any, ...]]:
    value = eval(SOURCES[kind])
    return lambda x: shown(value), ()


def literal(kind: str) -> tuple[Callable[..., str], tuple[Any, ...]]:
    return eval(f"lambda x: shown({SOURCES[kind]})"), ()


def of_module(kind: str) -> tuple[Callable[..., str], tuple[Any, ...]]:
    return lambda x: shown(OF_MODULE[kind]), ()


def broadcast(kind: str) -> tuple[Callable[..., str], tuple[Any, ...]]:
    value = eval(SOURCES[kind])
    return lambda x, box: shown(box()), (functools.partial(_same, value),)  # a tuple would be a nesting of arguments


def _same(value: Any) -> Any:
    return value


def in_calls(rt: synk.Runtime, fn: Any, more: tuple[Any, ...]) -> list[str]:
    f = rt.function(fn, outputs=None, bcast_inputs="box" if more else ())
    return [*f(X, *more), *f.submit(X, *more).result(), *f.serial(X, *more)[:1]]


def in_maps(rt: synk.Runtime, fn: Any, more: tuple[Any, ...]) -> list[str]:
    return list(rt.map(fn, [0.0] * 12, *([each] * 12 for each in more), batch_size=1))


def through_comm(rt: synk.Runtime, fn: Any, more: tuple[Any, ...]) -> list[str]:
    """Let the ranks compare what they have."""

    def compared(x: Any, *more: Any) -> str:
        own = fn(x, *more)
        mark = np.array([zlib.crc32(own.encode())], np.int64)
        least, greatest = synk.comm.all_reduce(mark, "min"), synk.comm.all_reduce(mark, "max")
        return own if (least == greatest).all() else f"{own}, another rank differs"

    return list(rt.function(compared, outputs=None, bcast_inputs="more")(X, *more))


@pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")
def test_hashes_are_the_same_on_all_ranks_and_those_that_replace_them(
    subtests: pytest.Subtests, runtime: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rt, oracle = runtime(3, seed=7), by_interpreter("7")
    places, verbs = (captured, literal, of_module, broadcast), (in_calls, in_maps, through_comm)
    monkeypatch.setenv("PYTHONHASHSEED", "5")  # for runtimes to come
    for kind, place, verb in combinations(30, SOURCES, places, verbs):
        with subtests.test(kind=kind, place=place.__name__, verb=verb.__name__):
            fn, more = place(kind)
            got = verb(rt, fn, more)
            assert set(got) == {oracle.get(kind, got[0])}
    # A set is changed meanwhile, so that the old workers have changed theirs and a new one has not.
    names, rng = {f"name {number}" for number in range(5)}, random.Random(3)
    look = rt.function(lambda x: f"{list(names)} {hash('apple')}", outputs=None)
    for number in range(12):
        names.symmetric_difference_update(f"name {rng.randrange(40)}" for _ in range(rng.randrange(1, 9)))
        if number % 4 == 1:
            harness.kill_and_wait(harness.pids(rt)[number % 3])
        elif number == 7:
            rt.restart()
        got = look(X)
        assert len(set(got)) == 1 and got[0].endswith(f"] {oracle['str']}")


@pytest.mark.parametrize(("given", "seed", "expected"), [("123", 7, "123"), ("123", None, "123"), ("random", 9, "9")])
def test_the_users_own_seed_is_kept(
    runtime: Any, monkeypatch: pytest.MonkeyPatch, given: str, seed: int | None, expected: str
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", given)
    rt = runtime(1, seed=seed)
    assert rt.function(lambda x: repr(hash("apple")), outputs=None)(X) == [by_interpreter(expected)["str"]]


def test_the_ranks_of_all_nodes(runtime: Any) -> None:
    """Ranks that reduce by names, in the order of a set of them, meet each other."""
    rt = runtime([1, 2], backend="auto", cluster="here", nodes=2, seed=7)
    values = {name: float(len(name)) for name in ("weight", "bias", "a", "scale-of-all", "no")}

    def summed(x: Any) -> str:
        sums = {name: float(synk.comm.all_reduce(np.array([values[name]]), "sum")[0]) for name in set(values)}
        return f"{sorted(sums.items())} {hash('apple')}"

    expected = f"{sorted((name, 3 * value) for name, value in values.items())} {by_interpreter('7')['str']}"
    assert rt.function(summed, outputs=None)(X) == [expected] * 3
    rt.restart()
    assert rt.function(summed, outputs=None)(X) == [expected] * 3


def test_a_rank_in_the_program_has_the_programs_hashes() -> None:
    with synk.Runtime(inline=True, backend="numpy", seed=7) as rt:
        assert rt.function(lambda x: hash("apple"), outputs=None)(X) == [hash("apple")]
