"""Maps that one can leave overnight: items that fail, kill their worker or never end, and limits of workers."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import os
import random
import signal
import time
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.gates import Gate
from support.harness import assert_right
from support.saboteurs import AtPickle, raise_value_error

import synk
from synk.errors import CallTimeout, RemoteError, SerializationError, WorkerDied


def fate(n: int, fates: dict[int, str]) -> int:
    if (mine := fates.get(n)) == "raises":
        raise LookupError(n)
    if mine == "dies":
        os._exit(3)
    if mine == "hangs":
        with contextlib.suppress(BaseException):  # it takes no notice of an interrupt
            signal.pause()
    while mine in ("hangs", "sleeps"):
        time.sleep(0.01)
    return n * n


@pytest.mark.parametrize("batch_size", [None, 1])
def test_failed_items_are_named_and_the_others_are_right(tmp_path: Path, batch_size: int | None) -> None:
    """Exceptions, deaths, items that are interrupted and items that must be killed: none counts as a restart.

    In chunks of one no item runs twice.
    """
    kinds = ["raises"] * 10 + ["dies"] * 4 + ["sleeps"] * 2 + ["hangs"]
    fates = dict(zip(random.Random(batch_size).sample(range(1000), len(kinds)), kinds))
    expected = {"raises": LookupError, "dies": WorkerDied, "sleeps": CallTimeout, "hangs": CallTimeout}
    is_ordered = batch_size is None

    def noted(n: int) -> int:
        with (tmp_path / "runs").open("a") as runs:
            print(n, file=runs)
        return fate(n, fates)

    with synk.fork(2, max_restarts=1) as rt:
        options: Any = {"on_error": "return", "item_timeout": 0.5, "ordered": is_ordered, "batch_size": batch_size}
        found = list(rt.map(noted, range(1000), **options))
        failed = {each.item: each for each in found if isinstance(each, synk.ItemError)}
        assert {number: type(each.exception) for number, each in failed.items()} == {
            number: expected[kind] for number, kind in fates.items()
        }
        good = [each for each in found if not isinstance(each, synk.ItemError)]
        assert (good if is_ordered else sorted(good)) == [n * n for n in range(1000) if n not in fates]
        if is_ordered:
            assert all(found[number] is each for number, each in failed.items())
        else:
            assert Counter(map(int, (tmp_path / "runs").read_text().split())) == dict.fromkeys(range(1000), 1)
        for number, each in failed.items():
            assert each.__cause__ is each.exception and f"item {number} " in str(each)
            assert ("LookupError" in each.traceback) == (fates[number] == "raises")
        assert_right(rt)


def test_a_map_in_which_no_item_succeeds_ends() -> None:
    with synk.fork(2, max_restarts=2) as rt:
        with pytest.raises(WorkerDied, match="exit 5") as caught:
            list(rt.map(lambda n: os._exit(5), range(50), on_error="return"))
        assert any("no item succeeded in between" in note for note in caught.value.__notes__)
        assert_right(rt)


def test_what_cannot_travel_is_an_error_in_its_place(shared_runtimes: Any) -> None:
    items = [1, AtPickle(raise_value_error), 3, 4]
    results = shared_runtimes[2].map(lambda n: AtPickle(raise_value_error) if n == 3 else n, items, on_error="return")
    kinds = [type(getattr(each, "exception", each)) for each in results]
    assert kinds == [int, SerializationError, SerializationError, int]


class Mute(ValueError):
    def __str__(self) -> str:
        raise LookupError


def mute_at_1(n: int) -> int:
    if n == 1:
        raise Mute
    return n


@pytest.mark.parametrize("rt", [0, 2], indirect=True)
def test_an_error_that_cannot_say_what_it_is_is_one_like_any_other(rt: Any, tmp_path: Path) -> None:
    with synk.Executor(runtime=rt, on_error="return") as executor:
        maps = (
            functools.partial(rt.map, on_error="return"),
            functools.partial(rt.map, on_error="return", journal=tmp_path / "journal"),
            executor.map,
        )
        for each in maps:
            zero, failed, two = each(mute_at_1, range(3))
            assert (zero, type(failed.exception), two) == (0, Mute, 2)
            assert "Mute: <its text could not be made: LookupError>" in str(failed)
    with pytest.raises(Mute):
        list(rt.map(mute_at_1, range(3)))


@pytest.mark.parametrize("rt", [0, 2], indirect=True)
def test_an_error_that_a_function_returns_is_a_result(
    rt: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """For instance one of an earlier map: nothing has failed here."""
    monkeypatch.setattr("tqdm.auto.tqdm.monitor_interval", 0)  # no thread, which would outlive the test

    def named(each: Any) -> Any:
        (tmp_path / f"ran {each}").touch()
        return each

    failed = list(rt.map(lambda n: 1 // n, [1, 0], on_error="return"))
    expected = [repr(each) for each in failed]
    assert expected == ["1", repr(failed[1])] and isinstance(failed[1], synk.ItemError)
    options: list[dict[str, Any]] = [{}, {"journal": tmp_path / "journal"}, {"progress": True}]
    for on_error in ("raise", "return"):
        for each in options:
            assert [repr(one) for one in rt.map(named, failed, on_error=on_error, **each)] == expected
    assert ", 0 failed" in capsys.readouterr().err
    for path in tmp_path.glob("ran *"):
        path.unlink()
    assert [repr(one) for one in rt.map(named, failed, journal=tmp_path / "journal")] == expected
    assert not [*tmp_path.glob("ran *")]
    monkeypatch.setenv("SYNK_REPLAY", str(tmp_path / "failures"))
    assert [repr(one) for one in rt.map(named, failed)] == expected


def test_a_map_that_raises_names_the_item_whose_time_is_over(reused: Any) -> None:
    with pytest.raises(CallTimeout, match=r"item 2 of '.*' did not end in 0.2 s"):
        list(reused(2).map(lambda n: fate(n, {2: "sleeps"}), range(9), item_timeout=0.2, batch_size=1))


def test_an_item_whose_time_is_over_is_given_up_at_once(reused: Any, tmp_path: Path) -> None:
    """Also if the next chunk waits on the same worker, which is at that one when the program hears of the end."""
    slow = dict.fromkeys(range(550, 1500, 150), "sleeps")

    def noted(n: int) -> int:
        if n in slow:
            with (tmp_path / "runs").open("a") as runs:
                print(n, file=runs)
        time.sleep(0.0005)
        return fate(n, slow)

    found = reused(1).map(noted, iter(range(1500)), item_timeout=0.1, on_error="return")
    assert [each.item for each in found if isinstance(each, synk.ItemError)] == [*slow]
    assert Counter(map(int, (tmp_path / "runs").read_text().split())) == dict.fromkeys(slow, 1)


def test_workers_are_replaced_after_so_many_items_or_bytes() -> None:
    kept: list[Any] = []

    def grow(n: int) -> int:
        kept.append(np.ones(1 << 21))
        return os.getpid()

    with synk.fork(2, max_restarts=0) as rt:
        served = Counter(rt.map(lambda n: os.getpid(), range(30), max_tasks_per_worker=6))
        assert max(served.values()) <= 6 and sum(served.values()) == 30
        grown = Counter(rt.map(grow, range(30), max_worker_memory=200 << 20, batch_size=1))
        assert max(grown.values()) < 16 and len(grown) > 2
        with synk.Executor(runtime=rt, max_tasks_per_worker=2, on_error="return") as executor:
            assert len({executor.submit(os.getpid).result() for _ in range(9)}) > 2
            assert [type(each) for each in executor.map(lambda n: 1 // n, [0, 1])] == [synk.ItemError, int]
            with pytest.raises(ZeroDivisionError):
                executor.submit(lambda: 1 // 0).result()


class LoadedSlowly:
    """Waits at a gate in the third process that loads it."""

    def __init__(self, gate: Gate, folder: Path) -> None:
        self.gate, self.folder, self.power = gate, folder, 2

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__ = state
        for number in itertools.count():
            with contextlib.suppress(FileExistsError):
                (self.folder / f"loaded {number}").mkdir()
                break
        if number == 2:
            self.gate.wait("the loading")


def test_a_replacement_that_is_interrupted_while_it_loads_a_function(tmp_path: Path) -> None:
    """What came with the chunk that was ended comes again with the next one."""
    gate = Gate(tmp_path)
    slow = LoadedSlowly(gate, tmp_path)

    def square(n: int) -> int:
        if n >= 2:  # on the other replacement, which has loaded it
            slow.gate.wait_for("the loading")
            raise LookupError(n)
        return int(n**slow.power)

    with synk.fork(2) as rt:
        with pytest.raises(LookupError):
            list(rt.map(square, range(6), batch_size=1, max_tasks_per_worker=1, ordered=False))
        gate.open()
        for _ in range(3):
            assert list(rt.map(square, [0, 1, -1, -2], batch_size=1)) == [0, 1, 1, 4]


def test_numbers_of_items(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """They come from the seed, the map's number and the item's, whoever computes the item, and in whatever chunk or
    run of the program.
    """

    def draw(n: int) -> tuple[int, float, float]:
        return n, synk.comm.rng.random(), synk.comm.rng.random()

    def expected(number: int) -> list[Any]:
        sequences = [np.random.SeedSequence(7, spawn_key=(number, n)) for n in range(40)]
        return [(n, *np.random.default_rng(each).random(2).tolist()) for n, each in enumerate(sequences)]

    options: list[dict[str, Any]] = [{}, {"batch_size": 7, "ordered": False}, {"max_tasks_per_worker": 11}]
    for num_workers in (0, 1, 3):
        with synk.fork(num_workers, seed=7) as rt:
            for number, each in enumerate(options):
                with subtests.test(num_workers=num_workers, **each):
                    assert sorted(rt.map(draw, range(40), **each)) == expected(number)
    for num_workers, taken in ((2, 9), (0, 20), (3, 40)):
        with subtests.test(taken=taken), synk.fork(num_workers, seed=7) as rt:
            results = rt.map(draw, range(40), journal=tmp_path / "journal")
            assert [next(results) for _ in range(taken)] == expected(0)[:taken]
            del results  # closes the file


def test_items_that_take_long_are_left_to_the_next_chunk(subtests: pytest.Subtests, tmp_path: Path) -> None:
    """A rank answers after some time, whatever it has been sent: each item is run once, as the item that it is."""

    def slow(n: int) -> tuple[int, float]:
        with open(ran, "a") as file:
            file.write(f"{n}\n")
        time.sleep(0.03 if n % 3 else 0)
        return 1 // (n - 7) and n, synk.comm.rng.random()

    def expected(number: int, n: int) -> tuple[int, float]:
        seed = np.random.SeedSequence(7, spawn_key=(number, n))
        return 1 // (n - 7) and n, np.random.default_rng(seed).random()

    makers: list[Any] = [range, lambda n: iter([*range(n)]), lambda n: (each for each in range(n))]
    with synk.fork(2, seed=7) as rt:
        for number, make in enumerate(makers):
            ran = tmp_path / f"ran {number}"
            with subtests.test(make=number):
                found = list(rt.map(slow, make(31), on_error="return"))
                failed = found.pop(7)
                assert failed.item == 7 and isinstance(failed.exception, ZeroDivisionError)
                assert found == [expected(number, n) for n in range(31) if n != 7]
                assert sorted(map(int, ran.read_text().split())) == [*range(31)]
        with pytest.raises(ZeroDivisionError):
            list(rt.map(slow, range(31)))


def test_nothing_is_kept_after_a_map(rt: Any) -> None:
    class Held:
        array = np.ones(1 << 18)

    def mapped() -> weakref.ref[Held]:
        held = Held()
        assert list(rt.map(lambda n: held.array[n], range(3))) == [1.0] * 3
        return weakref.ref(held)

    gone = mapped()
    assert list(rt.map(lambda n: n, [1])) == [1]
    gc.collect()
    assert_right(rt)
    assert gone() is None


def test_options_that_do_not_fit(subtests: pytest.Subtests, shared_runtimes: Any) -> None:
    cases: list[dict[str, Any]] = [
        {"on_error": "ignore"}, {"item_timeout": 0}, {"item_timeout": "1"}, {"max_tasks_per_worker": 0},
        {"max_worker_memory": 1.5},
    ]  # fmt: skip
    for each in cases:
        (name,) = each
        with subtests.test(**each), pytest.raises(ValueError, match=name.partition("_")[2] or name):
            shared_runtimes[2].map(abs, [1], **each)
    with pytest.raises(ValueError, match="num_workers=0"):
        shared_runtimes[0].map(abs, [1], item_timeout=1)


def test_ctrl_c_in_the_programs_own_rank(shared_runtimes: Any) -> None:
    for on_error in ("raise", "return"):
        with pytest.raises(KeyboardInterrupt):
            list(shared_runtimes[0].map(lambda n: signal.raise_signal(signal.SIGINT), range(3), on_error=on_error))
    with pytest.raises(RemoteError, match="SystemExit"):
        list(shared_runtimes[0].map(lambda n: exit(3), [1]))
