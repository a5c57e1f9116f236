"""Hashes, and with them the order of sets, are the same on all ranks. The oracle is an interpreter with that seed."""

from __future__ import annotations

import datetime
import functools
import itertools
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

import synk

pytestmark = pytest.mark.own_start  # workers that are forked have the seed of the process that forks them

X = np.arange(6.0)

SOURCES = {
    "set": "{'apple', 'pear', 'plum', 'fig', 'lime', 'date', 'kiwi'}",
    "frozenset": "frozenset(['apple', 'pear', 'plum', 'fig', 'lime', 'date', 'kiwi'])",
    "str": "'apple'",
    "bytes": "b'apple'",
    "date": "datetime.date(2024, 2, 29)",
    "tuple": "('user', 7, b'x', ('deep',))",
}
OF_MODULE = {
    "set": {"apple", "pear", "plum", "fig", "lime", "date", "kiwi"},
    "frozenset": frozenset(["apple", "pear", "plum", "fig", "lime", "date", "kiwi"]),
    "str": "apple",
    "bytes": b"apple",
    "date": datetime.date(2024, 2, 29),
    "tuple": ("user", 7, b"x", ("deep",)),
}


def shown(value: Any) -> str:
    """Return what depends on hashes: the order of a set, the hash of anything else."""
    return repr(list(value)) if isinstance(value, (set, frozenset)) else repr(hash(value))


def by_interpreter(source: str, seed: str) -> str:
    """Return what a new interpreter with that seed of hashes shows for the source of a value."""
    program = f"import datetime\nprint(hash({source}))"
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.strip()


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


PLACES = {"captured": captured, "literal": literal, "of a module": of_module, "broadcast": broadcast}


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


VERBS = {"calls": in_calls, "maps": in_maps, "comm": through_comm}
ALL = list(itertools.product(SOURCES, PLACES, VERBS))


def differing(rt: synk.Runtime, combinations: list[tuple[str, str, str]], seed: str) -> list[str]:
    """Return the combinations in which two ranks differ, or a hash is not that of an interpreter with the seed."""
    oracle = {kind: by_interpreter(source, seed) for kind, source in SOURCES.items() if "set" not in kind}
    wrong = []
    for kind, place, verb in combinations:
        fn, more = PLACES[place](kind)
        got = VERBS[verb](rt, fn, more)
        if set(got) != {oracle.get(kind, got[0])}:
            wrong.append(f"{kind}, {place}, in {verb}: {got}, expected {oracle.get(kind, 'one order')}")
    return wrong


def test_hashes_are_the_same_on_all_ranks(runtime: Any) -> None:
    rt = runtime(3, seed=7)
    chosen = random.Random(2).sample(ALL, 24)
    assert not (wrong := differing(rt, chosen, "7")), "\n".join(wrong)


@pytest.mark.storm
@pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")
@pytest.mark.parametrize("seed", [0, 1, 2**32 + 5, 2**70])
def test_all_of_them(runtime: Any, seed: int) -> None:
    rt = runtime(3, seed=seed)
    for _ in range(2):
        assert not (wrong := differing(rt, ALL, str(seed % 2**32))), "\n".join(wrong)
        harness.kill_and_wait(harness.pids(rt)[1])


@pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")
def test_new_workers_have_the_hashes_of_the_old_ones(runtime: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a set was changed meanwhile, so that the old ones have changed theirs and a new one has not."""
    rt = runtime(3)
    names, rng = {f"name {number}" for number in range(5)}, random.Random(3)
    look = rt.function(lambda x: f"{list(names)} {hash('apple')} {hash(('user', b'x'))}", outputs=None)
    first = look(X)
    assert len(set(first)) == 1
    monkeypatch.setenv("PYTHONHASHSEED", "5")  # for runtimes to come
    hashes = first[0].partition("]")[2]
    for number in range(12):
        names.symmetric_difference_update(f"name {rng.randrange(40)}" for _ in range(rng.randrange(1, 9)))
        if number % 4 == 1:
            harness.kill_and_wait(harness.pids(rt)[number % 3])
        elif number == 7:
            rt.restart()
        got = look(X)
        assert len(set(got)) == 1
        assert got[0].partition("]")[2] == hashes


def test_names_in_the_order_of_a_set_meet_each_other(runtime: Any) -> None:
    """The program that goes wrong without it: ranks that reduce by names, in the order of a set of them."""
    rt = runtime(3)
    values = {name: float(len(name)) for name in ("weight", "bias", "a", "scale-of-all", "no")}

    def summed(x: Any) -> dict[str, float]:
        return {name: float(synk.comm.all_reduce(np.array([values[name]]), "sum")[0]) for name in set(values)}

    for got in rt.function(lambda x: repr(sorted(summed(x).items())), outputs=None)(X):
        assert got == repr(sorted((name, 3 * value) for name, value in values.items()))


@pytest.mark.parametrize("seed", [None, 7])
def test_the_users_own_seed_is_kept(runtime: Any, monkeypatch: pytest.MonkeyPatch, seed: int | None) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "123")
    rt = runtime(2, seed=seed)
    expected = by_interpreter("'apple'", "123")
    assert rt.function(lambda x: repr(hash("apple")), outputs=None)(X) == [expected] * 2


@pytest.mark.parametrize("given", ["", "random"])
def test_no_seed_of_the_users_own(runtime: Any, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", given)
    rt = runtime(2, seed=9)
    assert rt.function(lambda x: repr(hash("apple")), outputs=None)(X) == [by_interpreter("'apple'", "9")] * 2


def test_the_ranks_of_all_nodes(runtime: Any) -> None:
    rt = runtime([1, 2], backend="auto", cluster="here", nodes=2, seed=7)
    fn, _ = literal("set")
    got = rt.function(lambda x: f"{fn(x)} {hash('apple')}", outputs=None)(X)
    assert len(set(got)) == 1
    assert got[0].endswith(by_interpreter("'apple'", "7"))
    rt.restart()
    assert rt.function(lambda x: f"{fn(x)} {hash('apple')}", outputs=None)(X) == got


def test_a_rank_in_the_program_has_the_programs_hashes() -> None:
    with synk.Runtime(inline=True, backend="numpy", seed=7) as rt:
        assert rt.function(lambda x: hash("apple"), outputs=None)(X) == [hash("apple")]
