"""B: exceptions from functions. The user sees their own exception, the workers live on."""

from __future__ import annotations

import dataclasses
import gc
import os
import traceback
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support import saboteurs
from support.harness import assert_right, same_workers, script

import synk
from synk.errors import CallTimeout, RemoteError, WorkerDied

RANKS = np.arange(4)
Fork = Callable[..., Any]


def raiser(runtime: Any, errors: dict[int, Callable[[], BaseException]], output: int = 1) -> Any:
    """Return a function that raises on the ranks named in ``errors``, and else returns ``output`` ones, averaged."""

    def fail(row: np.ndarray) -> np.ndarray:
        if int(row[0]) in errors:
            raise errors[int(row[0])]()
        return np.ones(output)

    return runtime.function(fail, outputs="avg")


def test_B1_raises_on_one_rank_only(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    rt = shared_runtimes[4]
    for rank in (0, 3):
        with subtests.test(rank=rank), same_workers(rt):
            with pytest.raises(ValueError) as caught:
                raiser(rt, {rank: lambda: ValueError("bad row")})(RANKS)
            assert (caught.type, str(caught.value)) == (ValueError, "bad row")
            cause = caught.value.__cause__
            assert isinstance(cause, RemoteError)
            assert (cause.rank, cause.type_name) == (rank, "ValueError")
            assert cause.device
            shown = "".join(traceback.format_exception(caught.value))
            assert f"rank {rank} of 4" in shown and "in fail" in shown and "in fail" in cause.traceback_text


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    code: int

    def __reduce__(self) -> Any:
        return Frozen, (self.code,)


def test_B1_a_frozen_class_is_raised_as_it_is(rt: Any) -> None:
    with same_workers(rt):
        try:
            raiser(rt, {0: lambda: Frozen(7), 1: lambda: Frozen(7)})(RANKS[:2])
        except Frozen as error:  # pytest.raises would write into it
            assert error.code == 7
            assert isinstance(error.__cause__, RemoteError)
            assert "likewise on 1 more" in str(error.__cause__)


def test_B1_an_exception_keeps_its_attributes_and_its_causes(rt: Any) -> None:

    def chain(row: np.ndarray) -> None:
        try:
            {}["inner"]
        except KeyError:
            os.stat("/does/not/exist")

    with same_workers(rt), pytest.raises(FileNotFoundError) as caught:
        rt.function(chain)(np.arange(2))
    assert (caught.value.filename, caught.value.errno) == ("/does/not/exist", 2)
    assert "KeyError: 'inner'" in caught.value.__cause__.traceback_text


def test_B2_the_users_error_wins_over_the_abort_of_its_peers(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    """Whether they are waiting in a collective, or for the reduction of large outputs, or have nothing to wait for."""
    rt = shared_runtimes[3]
    total = rt.function(lambda row: synk.comm.all_reduce(row, "sum"), outputs="first")

    def meet(row: np.ndarray, rank: int, size: int) -> np.ndarray:
        if row[0] == rank:
            raise ZeroDivisionError("mine")
        return synk.comm.all_reduce(np.ones(size))

    meeting = rt.function(meet, bcast_inputs=("rank", "size"), outputs="first")
    error = {1: lambda: ZeroDivisionError("mine")}
    calls = {
        "no output": lambda: raiser(rt, error)(RANKS[:3]),
        "large output": lambda: raiser(rt, error, 1 << 17)(RANKS[:3]),
        "collective": lambda: meeting(np.arange(3.0), 1, 1),
        "large collective": lambda: meeting(np.arange(3.0), 1, 1 << 20),
    }
    for where, call in calls.items():
        with subtests.test(where), same_workers(rt):
            with pytest.raises(ZeroDivisionError, match="mine") as caught:
                call()
            assert caught.value.__cause__.rank == 1
            assert total(np.arange(3.0)) == [3.0]


def test_B3_the_lowest_rank_is_raised_and_the_others_noted(shared_runtimes: Any) -> None:
    rt = shared_runtimes[4]
    errors = {1: lambda: KeyError("one"), 2: lambda: ValueError("two"), 3: lambda: OSError("three")}
    fail = raiser(rt, errors)
    seen = set()
    with same_workers(rt):
        for _ in range(20):
            with pytest.raises(KeyError, match="one") as caught:
                fail(RANKS)
            notes = "\n".join(caught.value.__notes__)
            for part in ("rank 1 of 4", "rank 2", "ValueError", "rank 3", "OSError"):
                assert part in notes
            seen.add(notes)
    assert len(seen) == 1


class NotesThatExit(Exception):
    @property
    def __notes__(self) -> Any:
        raise SystemExit(3)


DESCRIBED: dict[str, Callable[[], BaseException]] = {
    "B4 a lock": lambda: saboteurs.HoldsLock("with a lock"),
    "B5 two arguments": lambda: saboteurs.TwoArguments("one", "two"),
    "B6 a huge payload": lambda: ValueError(b"x" * (1 << 23)),
    "B7 fails when it is pickled": lambda: saboteurs.Hostile("pickle", saboteurs.raise_value_error),
    "B7 fails when it is loaded": lambda: saboteurs.Hostile("load", saboteurs.raise_value_error),
    "B7 fails when it is printed": lambda: saboteurs.Hostile("print", saboteurs.raise_value_error),
    "B7 exits when it is pickled": lambda: saboteurs.Hostile("pickle", saboteurs.system_exit),
    "B7 exits when it is loaded": lambda: saboteurs.Hostile("load", saboteurs.system_exit),
    "B7 exits when it is printed": lambda: saboteurs.Hostile("print", saboteurs.system_exit),
    "B8 SystemExit": lambda: SystemExit("leave"),
    "B8 KeyboardInterrupt": lambda: KeyboardInterrupt("leave"),
    "B8 BaseException": lambda: saboteurs.Quit("leave"),
    "B8 notes that exit": lambda: NotesThatExit("no"),
}


def test_B4_B5_B6_B7_B8_what_cannot_travel_is_described(rt: Any, subtests: pytest.Subtests) -> None:
    """Loading happens in the worker first: what cannot be loaded there never reaches the master, nor ends it."""
    for row, make in DESCRIBED.items():
        with subtests.test(row), same_workers(rt):
            with pytest.raises(RemoteError) as caught:
                raiser(rt, {1: make})(RANKS[:2])
            assert caught.value.rank == 1
            assert type(make()).__name__ in caught.value.type_name
            assert "in fail" in caught.value.traceback_text
            assert len(str(caught.value)) + len(caught.value.traceback_text) < 1 << 20
            if row.startswith(("B4", "B5")):
                assert str(make()) in str(caught.value)
                assert any("cannot be pickled and loaded again: " in note for note in caught.value.__notes__)


def test_B7_an_exception_that_takes_its_worker_along(rt: Any, subtests: pytest.Subtests) -> None:
    for stage, act in (
        ("pickle", saboteurs.segfault),
        ("load", saboteurs.segfault),
        ("print", saboteurs.loop_for_ever),
    ):
        with subtests.test(stage, act=act.__name__):
            fail = raiser(rt, {1: lambda stage=stage, act=act: saboteurs.Hostile(stage, act)})
            with pytest.raises(WorkerDied if act is saboteurs.segfault else (CallTimeout, RemoteError)):
                fail(RANKS[:2], timeout=0.5 if act is saboteurs.loop_for_ever else None)
            assert_right(rt)


def test_B9_recursion_and_memory_errors_keep_their_type(rt: Any) -> None:

    def recurse(x: Any) -> Any:
        return recurse(x)

    with same_workers(rt):
        with pytest.raises(RecursionError) as caught:
            rt.function(recurse)(np.arange(2))
        assert len(caught.value.__cause__.traceback_text) < 1 << 20
        with pytest.raises(MemoryError):
            rt.function(lambda row: np.empty(2**50))(np.arange(2))


def test_B10_a_class_of_the_main_program_is_caught_by_its_own_name() -> None:
    script("""
        class MyError(Exception):
            pass

        def fail(row):
            raise MyError("mine")

        with synk.fork(2, backend="numpy") as rt:
            for _ in range(2):
                try:
                    rt.function(fail)(np.arange(2))
                except MyError as error:
                    print(type(error) is MyError, error)
    """).check("True mine\nTrue mine\n")


def test_B11_a_traceback_pins_nothing(rt: Any) -> None:
    """Neither the worker's frames nor the master's arguments outlive the exception."""

    def fail(row: np.ndarray) -> None:
        big = np.ones(1 << 20)
        saboteurs.pins.append(weakref.ref(big))
        raise ValueError("with a big local")

    with pytest.raises(ValueError, match="big local") as caught:
        rt.function(fail)(np.arange(2))
    del caught
    alive = rt.function(lambda row: saboteurs.pins.pop()() is not None, outputs=None)
    assert alive(np.arange(2)) == [False, False]

    def fail_in_master() -> weakref.ref[np.ndarray]:
        array = np.ones(1 << 20)
        with pytest.raises(ValueError, match="in the worker"):
            raiser(rt, {0: lambda: ValueError("in the worker")})(np.arange(2))
        return weakref.ref(array)

    reference = fail_in_master()
    gc.collect()
    assert reference() is None


def test_B12_warnings_of_workers_are_shown_with_their_rank_and_may_be_errors() -> None:
    result = script(
        """
        import warnings

        def warn(row, kind):
            warnings.warn("careful", kind)
            return 0.0

        with synk.fork(2, backend="numpy") as rt:
            f = rt.function(warn, bcast_inputs="kind")
            f(np.arange(2), RuntimeWarning)
            try:
                f(np.arange(2), UserWarning)
            except UserWarning as error:
                print("raised", error)
        """,
        flags=("-W", "error::UserWarning"),
    ).check("raised careful\n", stderr=None)
    assert [result.stderr.count(f"[rank {rank}] ") > 0 for rank in range(2)] == [True, True]
    assert result.stderr.count("RuntimeWarning: careful") == 2
