"""``synk.map``: what the built-in gives, whatever else happens between two results."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from support.harness import assert_right, ctrl_c_when, kill_and_wait, replaced_workers, same_workers, wait_for

import synk
from synk.errors import (
    CallCancelled,
    CallTimeout,
    ClosedError,
    ReentrancyError,
    RemoteError,
    StaleCaptureError,
    WorkerDied,
)
from synk.errors import SerializationError as NotSent


class Point:
    """An object of a class of this file, which workers cannot import by name."""

    def __init__(self, x: int) -> None:
        self.x = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Point) and other.x == self.x

    def __repr__(self) -> str:
        return f"Point({self.x})"


class Unpicklable:
    def __reduce__(self) -> Any:
        raise RuntimeError("no way out")

    def __repr__(self) -> str:
        return "Unpicklable()"


class Unloadable:
    def __reduce__(self) -> Any:
        return _raise, ()


def _raise() -> None:
    raise RuntimeError("no way in")


def square(n: Any) -> Any:
    return n * n


def stay(gate: Path) -> Callable[[Any], Any]:
    """Return a function that tells when it is running and stays until the gate opens."""

    def wait(n: Any) -> Any:
        import time

        (gate / f"at {n}").touch()
        while not (gate / "open").exists():
            time.sleep(0.005)
        return n

    return wait


def stay_from(first: int, gate: Path) -> Callable[[Any], Any]:
    """Return a function of numbers that stays from ``first`` on; of 0 it returns as soon as it is at ``first``."""
    wait = stay(gate)

    def step(n: int) -> int:
        import time

        while n == 0 and not (gate / f"at {first}").exists():
            time.sleep(0.005)
        return wait(n) if n >= first else n

    return step


def stay_after(first: str, second: str, gate: Path) -> Callable[[Any], Any]:
    """Return a function that stays, but for the first item, which ends as soon as another worker is at the second."""
    wait = stay(gate)

    def step(n: str) -> str:
        import time

        while n == first and not (gate / f"at {second}").exists():
            time.sleep(0.005)
        return n if n == first else str(wait(n))

    return step


def is_at(gate: Path, *items: Any) -> Callable[[], bool]:
    return lambda: all((gate / f"at {item}").exists() for item in items)


@pytest.fixture(params=[2, "1+3", "2+2"])
def rt(request: pytest.FixtureRequest, shared_runtimes: Any) -> synk.Runtime:
    """A runtime of one machine, and two over nodes."""
    runtime: synk.Runtime = shared_runtimes[request.param]
    return runtime


with_two_workers = pytest.mark.parametrize("kind", [2, "1+1"])
"""On one machine, or on two nodes."""


# -- what the built-in gives ------------------------------------------------------------------------------------------


@pytest.mark.sampled(20)
@pytest.mark.parametrize("num_workers", [1, 2, 3, "inline", "1+3", "2+2"])
@pytest.mark.parametrize("batch_size", [None, 1, 3, 100])
def test_a_map_gives_what_the_builtin_gives(shared_runtimes: Any, num_workers: Any, batch_size: Any) -> None:
    rt = shared_runtimes[num_workers]
    for items in ([], [5], range(37), "letters", {"a": 1, "b": 2}, (n for n in range(7))):
        items = list(items)
        assert list(rt.map(lambda n: (n, n * 2), items, batch_size=batch_size)) == [(n, n * 2) for n in items]
    assert_right(rt)


def test_items_and_results_are_any_objects(rt: Any) -> None:
    items = [None, 1.5, "a", b"b", [1, [2]], {"k": Point(1)}, Point(2), np.arange(3), lambda n: n + 1, Ellipsis]
    results = list(rt.map(lambda item: (item, Point(7)), items))
    for (item, point), expected in zip(results, items):
        assert point == Point(7) and type(point) is Point
        if isinstance(expected, np.ndarray):
            np.testing.assert_array_equal(item, expected)
        elif callable(expected):
            assert item(1) == 2
        else:
            assert item == expected and type(item) is type(expected)


def test_the_kinds_of_functions(rt: Any) -> None:
    import functools
    import math

    class Model:
        scale = 3

        def apply(self, n: int) -> int:
            return self.scale * n

        def __call__(self, n: int) -> int:
            return -n

    model = Model()
    for fn in (math.sqrt, len, str.upper, functools.partial(pow, 2), model.apply, model, Point):
        items: Any = ["ab", "c"] if fn in (len, str.upper) else [1, 4, 9]
        assert list(rt.map(fn, items)) == list(map(fn, items))


def test_unordered_results_are_the_same_ones(rt: Any, tmp_path: Path) -> None:
    wait = stay(tmp_path)
    results = rt.map(lambda n: wait(n) if n == 0 else n, range(6), batch_size=1, ordered=False)
    first = [next(results) for _ in range(4)]
    assert 0 not in first  # one other may wait behind it
    (tmp_path / "open").touch()
    assert sorted([*first, *results]) == [0, 1, 2, 3, 4, 5]


def test_results_come_while_the_iterable_goes_on(rt: Any) -> None:
    pulled = itertools.count()
    results = rt.map(square, pulled, batch_size=1)
    assert list(itertools.islice(results, 200)) == [n * n for n in range(200)]
    assert next(pulled) <= 200 + 4 * rt.world_size + 1  # bounded, and the iterable is endless


def test_work_begins_with_the_first_result_that_is_asked_for(rt: Any) -> None:
    before = rt.counters["messages_down"]
    pulled = iter([1, 2])
    results = rt.map(square, pulled)
    assert rt.counters["messages_down"] == before and next(pulled) == 1
    assert list(results) == [4]


def test_what_a_function_or_an_iterable_changes_in_place(rt: Any) -> None:
    buffer = np.zeros(3)

    def filled() -> Iterator[np.ndarray]:
        for n in range(10):
            buffer[:] = n
            yield buffer

    own = np.zeros(3)

    def add(x: np.ndarray) -> np.ndarray:
        own[:] = x + 1
        return own

    for n, result in enumerate(rt.map(add, filled(), batch_size=5)):
        np.testing.assert_array_equal(result, np.full(3, n + 1.0))


@pytest.mark.parametrize("order", ["C", "F"])
def test_large_items_and_results(rt: Any, order: Any) -> None:
    items = [np.asfortranarray(np.arange(n, n + (1 << 18), dtype=float).reshape(2, -1)) for n in range(6)]
    items = [np.array(item, order=order) for item in items]
    for item, (total, back, is_writable) in zip(items, rt.map(lambda x: (x.sum(), x + 1, x.flags.writeable), items)):
        assert total == item.sum() and not is_writable
        np.testing.assert_array_equal(back, item + 1)


def test_a_large_array_crosses_once_as_long_as_it_is_the_same(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    x = np.ones(1 << 18)
    list(rt.map(square, range(2)))
    before = rt.counters["bytes_down"]
    assert list(rt.map(lambda pair: float(pair[0].sum() * pair[1]), ((x, n) for n in range(20)))) == [
        float(x.sum() * n) for n in range(20)
    ]
    assert rt.counters["bytes_down"] - before < x.nbytes / 4  # memory is passed as a descriptor, once per worker
    sums = []
    for n in range(4):
        x[-1] = n  # what was copied before does not count
        sums += rt.map(lambda pair: float(pair[0].sum()), [(x, n)])
    assert sums == [x.size - 1.0 + n for n in range(4)]


def test_the_memory_of_large_items_is_given_back(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    x = np.ones(1 << 18)
    most = 0
    for _ in rt.map(lambda x: None, (x + n for n in range(40)), batch_size=1):
        copies = rt._session.memory.copies
        most = max(most, len(copies))
    assert most <= 4 * 2 + 4
    list(rt.map(square, [1]))
    list(rt.map(square, [1]))
    assert not len(copies)


def test_what_a_function_keeps_of_large_items(rt: Any) -> None:
    kept: list[np.ndarray] = []

    def keep(x: np.ndarray) -> list[float]:
        kept.append(x)
        return [float(each.mean()) for each in kept]

    items = (np.full(1 << 17, float(n)) for n in range(1, 21))
    for n, means in enumerate(rt.map(keep, items, batch_size=1), start=1):
        assert means[-1] == n and means == sorted(set(means)) and means[0] >= 1
    for _ in range(3):
        assert_right(rt)
    for means in rt.map(lambda n: [float(each.mean()) for each in kept], range(4), batch_size=1):
        assert means == sorted(set(means)) and min(means, default=1) >= 1


# -- beside other things ----------------------------------------------------------------------------------------------


def test_a_loop_that_is_left_and_another_call(rt: Any) -> None:
    with same_workers(rt):
        for n in rt.map(lambda n: n, itertools.count(), batch_size=1):
            if n == 5:
                break
        assert_right(rt)
        results = rt.map(lambda n: n, itertools.count())
        assert next(results) == 0
        results.close()
        assert_right(rt)
        assert list(results) == []


@with_two_workers
def test_what_was_left_running_is_ended_and_not_waited_for(reused: Any, kind: Any, tmp_path: Path) -> None:
    rt = reused(kind)
    with same_workers(rt):
        results = rt.map(stay_from(1, tmp_path), range(9), batch_size=1)
        assert next(results) == 0
        del results
        assert_right(rt)
        assert not (tmp_path / "at 8").exists()


def test_calls_between_the_results(rt: Any) -> None:
    total = rt.function(lambda x: x.sum(), outputs="sum")
    d = rt.data(np.arange(5.0))
    for n, result in enumerate(rt.map(square, range(60), batch_size=2)):
        assert result == n * n
        if n % 7 == 0:
            assert total(d) == 10.0
        if n % 11 == 0:
            assert total.submit(np.arange(4.0)).result() == 6.0
        if n % 13 == 0:
            d.set_value(np.arange(5.0))


def test_shared_variables_between_the_results(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    total = rt.function(lambda x: x.sum(), outputs="sum")
    w = rt.shared(np.zeros(2))
    for n, result in enumerate(rt.map(square, range(60), batch_size=2)):
        assert result == n * n
        if n % 11 == 0:
            pending = total.submit(np.arange(4.0))
            w.value = np.full(2, float(n))
            assert pending.result() == 6.0
    np.testing.assert_array_equal(w.value, np.full(2, 55.0))


def test_maps_side_by_side_and_in_one_another(rt: Any) -> None:
    pairs = zip(rt.map(square, range(100)), rt.map(lambda n: -n, range(100), batch_size=3))
    assert list(pairs) == [(n * n, -n) for n in range(100)]
    inner = rt.map(square, range(50), batch_size=2)
    assert list(rt.map(lambda n: n + 1, inner, batch_size=3)) == [n * n + 1 for n in range(50)]
    rows = [list(rt.map(lambda k: k + 1, range(n))) for n in rt.map(square, range(5))]
    assert rows == [[k + 1 for k in range(n * n)] for n in range(5)]


def test_an_iterable_that_uses_the_runtime(rt: Any) -> None:
    total = rt.function(lambda x: x.sum(), outputs="sum")

    def items() -> Iterator[float]:
        for n in range(12):
            yield float(total(np.full(4, float(n))))

    assert list(rt.map(square, items(), batch_size=1)) == [(4.0 * n) ** 2 for n in range(12)]


def test_threads(rt: Any) -> None:
    total = rt.function(lambda x: x.sum(), outputs="sum")
    results: dict[int, Any] = {}

    def work(k: int) -> None:
        if k % 2:
            results[k] = [float(total(np.full(3, float(n)))) for n in range(20)]
        else:
            results[k] = list(rt.map(lambda n: n + k, range(200), batch_size=4))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for k in range(6):
        assert results[k] == ([3.0 * n for n in range(20)] if k % 2 else [n + k for n in range(200)])


def test_one_iterator_in_a_thread_that_did_not_make_it(rt: Any) -> None:
    results = rt.map(square, range(30), batch_size=2)
    first = [next(results), next(results)]
    rest: list[int] = []
    thread = threading.Thread(target=lambda: rest.extend(results))
    thread.start()
    thread.join()
    assert first + rest == [n * n for n in range(30)]


def test_a_function_is_sent_once_and_again_where_it_has_changed(rt: Any) -> None:
    shift = [0]

    def add(n: int) -> int:
        return n + shift[0]

    list(rt.map(add, range(5)))
    before = rt.counters["messages_down"]
    assert list(rt.map(add, range(2), batch_size=1)) == [0, 1]
    if rt.devices[0] == "cpu:0":  # nodes may be asked for resident objects first, if any test has left one
        assert rt.counters["messages_down"] - before == 2
    shift = [10]
    assert list(rt.map(add, range(3))) == [10, 11, 12]


@pytest.mark.parametrize("between", ["nothing", "a call", "another map"])
def test_what_the_program_changes_while_a_map_runs_counts_for_the_chunks_that_are_sent_after_it(
    rt: Any, between: str
) -> None:
    shift = [0]

    def add(n: int) -> int:
        return n + shift[0]

    total = rt.function(lambda x: x + shift[0], outputs="gather")
    results = rt.map(add, range(200), batch_size=1)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    shift[0] = 1000
    if between == "a call":
        assert total(np.zeros(4)).tolist() == [1000.0] * 4
    elif between == "another map":
        assert list(rt.map(add, range(2))) == [1000, 1001]
    rest = list(results)
    num_old = sum(value < 1000 for value in rest)
    assert num_old <= 4 * rt.world_size
    assert rest == [n + 1000 * (n >= 3 + num_old) for n in range(3, 200)]


def test_an_element_of_a_large_array_that_changes_while_a_map_runs_is_found(rt: Any) -> None:
    table = np.zeros(1 << 18)  # 32 windows, of which each chunk compares one

    def look_up(n: int) -> float:
        return float(table[-5001])

    results = rt.map(look_up, itertools.count(), batch_size=1)
    assert next(results) == 0.0
    table[-5001] = 1.0
    with pytest.raises(StaleCaptureError, match="table"):
        list(itertools.islice(results, 100))
    assert next(rt.map(look_up, [0])) == 1.0


def test_items_that_bring_a_class_do_not_wait_for_one_another(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def double(point: Point) -> Point:
        return Point(2 * point.x)

    list(rt.map(double, [Point(1)]))
    before = rt.counters["messages_down"]
    assert list(rt.map(double, map(Point, range(40)), batch_size=1)) == [Point(2 * n) for n in range(40)]
    assert rt.counters["messages_down"] - before <= 40 + 2 * rt.world_size  # each chunk, and the class at the beginning


def test_shared_variables(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    w = rt.shared(np.arange(3.0), name="weights")
    rows = rt.shared(np.arange(4.0), sharded=True, name="rows")
    kept = rt.resident({"k": 5})
    assert list(rt.map(lambda n: float(w.value.sum()) * n + kept.value["k"], range(4))) == [5.0, 8.0, 11.0, 14.0]
    w.value = np.ones(3)
    assert list(rt.map(lambda n: float(w.value.sum()) * n, range(3))) == [0.0, 3.0, 6.0]
    with pytest.raises(TypeError, match=r"cannot map .* refers to the sharded variable 'rows'"):
        rt.map(lambda n: rows.value.sum(), range(3))

    def assign(n: int) -> None:
        w.value = np.full(3, float(n))

    with pytest.raises(TypeError, match="cannot assign variable 'weights' in a map of 'assign'"):
        list(rt.map(assign, range(3)))
    np.testing.assert_array_equal(w.value, np.ones(3))
    with pytest.raises(NotSent, match=r"cannot send item 1 .*got Shared"):
        list(rt.map(square, [1, w]))


@pytest.mark.parametrize("verb", ["all_reduce", "rows", "total_rows", "ranks", "barrier"])
def test_communication_has_no_meaning(rt: Any, verb: str) -> None:

    def talk(n: int) -> Any:
        if verb == "all_reduce":
            return synk.comm.all_reduce(np.ones(2))
        found = getattr(synk.comm, verb)
        return found() if callable(found) else found

    with pytest.raises(ValueError, match=r"cannot communicate in 'talk': synk.map runs it for each item"):
        list(rt.map(talk, range(4)))
    seen = set(rt.map(lambda n: (synk.comm.rank, synk.comm.world_size), range(9)))
    assert seen <= {(rank, rt.world_size) for rank in range(rt.world_size)}
    assert_right(rt)


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_an_exception_comes_behind_the_results_before_it_and_names_its_item(rt: Any) -> None:

    def fail(n: int) -> float:
        return 1 / (n - 17)

    for batch_size in (1, 5, None):
        results, got = rt.map(fail, range(40), batch_size=batch_size), []
        with pytest.raises(ZeroDivisionError) as raised:
            got.extend(results)
        assert list(results) == []
        assert [note for note in raised.value.__notes__ if "'fail' for item 17 (17)" in note]
        assert isinstance(raised.value.__cause__, RemoteError) and "for item 17 (17)" in str(raised.value.__cause__)
    results, got = rt.map(fail, range(40), batch_size=5), []
    with pytest.raises(ZeroDivisionError):
        for result in results:
            got.append(result)
    assert got == [1 / (n - 17) for n in range(17)]
    assert_right(rt)


@pytest.mark.parametrize("error", [StopIteration, KeyboardInterrupt, SystemExit])
def test_exceptions_that_are_no_errors_elsewhere(rt: Any, error: type[BaseException]) -> None:

    def fail(n: int) -> int:
        if n == 3:
            raise error("here")
        return n

    got = []
    with same_workers(rt), pytest.raises(RemoteError, match=f"{error.__name__} in 'fail' for item 3"):
        for n in rt.map(fail, range(9)):
            got.append(n)
    assert got == [0, 1, 2]
    assert_right(rt)


def test_an_iterable_that_raises(rt: Any) -> None:

    def items() -> Iterator[int]:
        yield from range(5)
        raise LookupError("no more")

    got = []
    with pytest.raises(LookupError, match="no more"):
        for n in rt.map(square, items(), batch_size=2):
            got.append(n)
    assert got == [0, 1, 4, 9, 16]
    assert_right(rt)


def test_items_that_cannot_be_pickled_or_loaded(rt: Any) -> None:
    for item, text in ((Unpicklable(), r"item 3 \(Unpicklable\(\)\)"), (Unloadable(), "an item")):
        got = []
        with pytest.raises(NotSent, match=f"cannot (send|load) {text} of the map of 'square'"):
            for n in rt.map(square, [0, 1, 2, item, 4], batch_size=2):
                got.append(n)
        assert got == [0, 1, 4]
    assert_right(rt)


@pytest.mark.parametrize(("result", "verb"), [("Unpicklable", "send"), ("Unloadable", "load")])
def test_results_that_cannot_be_pickled_or_loaded(rt: Any, result: str, verb: str) -> None:
    made = {"Unpicklable": Unpicklable, "Unloadable": Unloadable}[result]
    got = []
    with pytest.raises(NotSent, match=f"cannot {verb} what .* returned"):
        for n in rt.map(lambda n: made() if n == 3 else n, range(6), batch_size=2):
            got.append(n)
    assert got == [0, 1, 2]
    with pytest.raises(NotSent, match="generator"):
        list(rt.map(lambda n: (k for k in range(n)), [1]))
    assert_right(rt)


def test_bad_input(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(square, name="f")
    with pytest.raises(TypeError, match=r"cannot map 'f': got a synk function.*f.__wrapped__.*f.stream"):
        rt.map(f, [1])
    assert list(rt.map(f.__wrapped__, [3])) == [9]
    with pytest.raises(TypeError, match="cannot map over items: got int"):
        rt.map(3, [1])
    with pytest.raises(TypeError, match="cannot map 'square': got items of type int"):
        rt.map(square, 3)
    for batch_size in (0, -1, 1.5, True, "2"):
        with pytest.raises(ValueError, match="cannot map 'square': got batch_size="):
            rt.map(square, [1], batch_size=batch_size)
    lock = threading.Lock()
    with pytest.raises(NotSent, match=r"cannot send .* its variable 'lock'"):
        rt.map(lambda n: lock, [1])


def test_inside_a_function(rt: Any) -> None:
    with pytest.raises(ReentrancyError, match="inside worker rank"):
        list(rt.map(lambda n: list(synk.map(square, range(n))), range(3)))


@pytest.mark.parametrize("is_noticed_by_another_call", [False, True])
@with_two_workers
def test_a_worker_that_dies(reused: Any, kind: Any, tmp_path: Path, is_noticed_by_another_call: bool) -> None:
    rt = reused(kind)
    with replaced_workers(rt, [1]) as before:
        results = rt.map(stay_from(2, tmp_path), range(12), batch_size=1)
        assert next(results) == 0
        os.kill(before[1], signal.SIGKILL)
        if is_noticed_by_another_call:
            assert_right(rt)
        got = []
        with pytest.raises(WorkerDied, match=r"rank 1 of 2 .* during .* \(item \d\)"):
            for n in results:
                got.append(n)
        assert got == [1]
        assert_right(rt)
    assert list(rt.map(square, range(5))) == [0, 1, 4, 9, 16]


@with_two_workers
def test_a_worker_that_dies_while_it_has_no_items(reused: Any, kind: Any) -> None:
    rt = reused(kind)
    with replaced_workers(rt, [0]) as before, pytest.warns(RuntimeWarning, match="rank 0 .* started again"):
        results = rt.map(square, range(20), batch_size=1)
        assert next(results) == 0
        assert_right(rt)  # nothing is in flight any more
        kill_and_wait(before[0])
        assert list(results) == [n * n for n in range(1, 20)]


@with_two_workers
def test_ctrl_c(reused: Any, kind: Any, tmp_path: Path) -> None:
    rt = reused(kind)
    wait = stay(tmp_path)
    with same_workers(rt):
        results = rt.map(lambda n: wait(n) if n >= 2 else n, range(9), batch_size=1)
        got: list[int] = []
        with pytest.raises(KeyboardInterrupt), ctrl_c_when(lambda: len(got) == 2 and is_at(tmp_path, 2, 3)()):
            for n in results:
                got.append(n)
        assert got == [0, 1] and list(results) == []
        assert_right(rt)


@with_two_workers
def test_runtime_interrupt_and_time_limits(reused: Any, kind: Any, tmp_path: Path) -> None:
    rt = reused(kind)
    wait = stay(tmp_path)
    with same_workers(rt):
        results = rt.map(stay_from(1, tmp_path), range(9), batch_size=1)
        assert next(results) == 0
        rt.interrupt()  # while nobody waits
        with pytest.raises(CallCancelled, match=r"Runtime.interrupt\(\)"):
            next(results)
        thread = threading.Thread(target=lambda: (wait_for(is_at(tmp_path, "a")), rt.interrupt()))
        thread.start()
        with pytest.raises(CallCancelled, match=r"Runtime.interrupt\(\)"):
            list(rt.map(wait, ["a"]))
        thread.join()
        results = rt.map(stay_after("b", "c", tmp_path), ["b", "c", "d"], batch_size=1)
        assert next(results) == "b"
        total = rt.function(lambda x: x.sum(), outputs="sum")
        with pytest.raises(CallTimeout, match=r"items of a map of .* are still in flight"):
            total(np.ones(3), timeout=0.1)
        (tmp_path / "open").touch()
        assert list(results) == ["c", "d"]
        (tmp_path / "open").unlink()
        rt.timeout = 0.2
        try:
            with pytest.raises(CallTimeout, match=r"'wait' \(item 0\) did not end in time"):
                list(rt.map(wait, ["e", "f"], batch_size=1))
        finally:
            rt.timeout = None
        assert_right(rt)


@pytest.mark.parametrize(
    ("num_workers", "options"), [(2, {}), ((1, 2), {"cluster": "here", "nodes": 2, "backend": "auto"})]
)
def test_a_runtime_that_is_closed_or_restarted(runtime: Any, num_workers: Any, options: dict[str, Any]) -> None:
    rt = runtime(num_workers, **options)
    results = rt.map(square, range(50), batch_size=1)
    assert next(results) == 0
    rt.restart()
    assert [next(results) for _ in range(5)] == [1, 4, 9, 16, 25]
    rt.close()
    got = []
    with pytest.raises(ClosedError):
        for n in results:
            got.append(n)
    with pytest.raises(ClosedError):
        rt.map(square, [1])


def test_the_current_runtime_and_the_names(runtime: Any) -> None:
    with synk.fork(2, backend="numpy"):
        assert list(synk.map(square, range(4))) == [0, 1, 4, 9]
    assert "map" not in synk.__all__ and "map" in dir(synk)
    names: dict[str, Any] = {}
    exec("from synk import *", names)
    assert "map" not in names


# -- progress ---------------------------------------------------------------------------------------------------------


class Bar:
    """Stands in for tqdm, which the tests do not need."""

    made: ClassVar[list[Bar]] = []

    def __init__(self, iterable: Any, desc: str, total: Any) -> None:
        self.iterable, self.desc, self.total, self.n, self.is_closed = iterable, desc, total, 0, False
        self.made.append(self)

    def __iter__(self) -> Iterator[Any]:
        try:
            for value in self.iterable:
                self.n += 1
                yield value
        finally:
            self.is_closed = True


def test_progress(shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rt = shared_runtimes[2]
    module = types.ModuleType("tqdm.auto")
    module.tqdm = Bar  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tqdm", types.ModuleType("tqdm"))
    monkeypatch.setitem(sys.modules, "tqdm.auto", module)
    assert list(rt.map(square, range(7), progress=True)) == [n * n for n in range(7)]
    assert next(rt.map(square, (n for n in range(7)), progress=True)) == 0
    assert [(bar.desc, bar.total, bar.n, bar.is_closed) for bar in Bar.made] == [
        ("square", 7, 7, True),
        ("square", None, 1, True),
    ]


def test_progress_without_tqdm(shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "synkhronos\[progress\]"'):
        shared_runtimes[2].map(square, range(7), progress=True)


def test_what_emcee_and_scipy_take_for_a_pool(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    import emcee
    from scipy.optimize import differential_evolution

    def log_probability(x: np.ndarray) -> float:
        return float(-0.5 * (x @ x))

    start = np.random.default_rng(0).normal(size=(8, 2))
    chains = []
    for pool in (None, rt):
        np.random.seed(5)
        sampler = emcee.EnsembleSampler(8, 2, log_probability, pool=pool)
        sampler.random_state = np.random.RandomState(5).get_state()
        sampler.run_mcmc(start, 20)
        chains.append(sampler.get_chain())
    np.testing.assert_array_equal(chains[0], chains[1])

    def rosenbrock(x: np.ndarray) -> float:
        return float((1 - x[0]) ** 2 + 100 * (x[1] - x[0] ** 2) ** 2)

    options: dict[str, Any] = {"seed": 3, "maxiter": 5, "polish": False, "updating": "deferred"}
    alone = differential_evolution(rosenbrock, [(-2, 2)] * 2, **options)
    together = differential_evolution(rosenbrock, [(-2, 2)] * 2, workers=rt.map, **options)
    np.testing.assert_array_equal(alone.x, together.x)


# -- several iterables ------------------------------------------------------------------------------------------------


def test_several_iterables_are_taken_together(rt: Any) -> None:
    assert list(rt.map(pow, range(10), itertools.repeat(2))) == [k**2 for k in range(10)]
    assert list(rt.map(lambda a, b, c: (a, b, c), "abc", range(2), itertools.count())) == [("a", 0, 0), ("b", 1, 1)]
    assert list(rt.map(divmod, [7, 8], [2, 3], batch_size=1, ordered=True)) == [(3, 1), (2, 2)]
    assert list(rt.map(pow, [], range(3))) == []


def test_a_function_of_one_item_and_of_several(rt: Any) -> None:
    """The function that is remembered as sent is told apart by how it is called."""

    def both(a: Any, b: Any = None) -> Any:
        return a, b

    for _ in range(3):
        assert list(rt.map(both, [(1, 2)])) == [((1, 2), None)]
        assert list(rt.map(both, [1], [2])) == [(1, 2)]


def test_what_is_wrong_with_several(rt: Any) -> None:
    with pytest.raises(TypeError, match="got no items"):
        rt.map(pow)
    with pytest.raises(TypeError, match="items of type int"):
        rt.map(pow, [1], 2)
    with pytest.raises(ZeroDivisionError) as caught:
        list(rt.map(divmod, [1, 2], [1, 0]))
    assert any("(2, 0)" in note for note in caught.value.__notes__)
