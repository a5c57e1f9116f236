"""``synk.map``: what the built-in gives, whatever else happens between two results."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.gates import Gate
from support.harness import (
    assert_right,
    kill_and_wait,
    nothing_sent,
    replaced_workers,
    same_workers,
    wait_for,
)
from support.saboteurs import AtLoad, AtPickle, raise_value_error
from support.tables import combinations

import synk
from synk.errors import CallCancelled, CallTimeout, ClosedError, ReentrancyError, RemoteError, WorkerDied
from synk.errors import SerializationError as NotSent


@dataclasses.dataclass
class Point:
    """An object of a class of this file, which workers cannot import by name."""

    x: int


def square(n: Any) -> Any:
    return n * n


def stay_from(first: int, gate: Gate) -> Callable[[int], int]:
    """Return a function that stays with its number from ``first`` on; with 0 only until another stays at ``first``."""

    def step(n: int) -> int:
        if n == 0:
            gate.wait_for(first)
        elif n >= first:
            gate.wait(n)
        return n

    return step


def taken(results: Iterator[Any], error: type[BaseException], match: str | None = None) -> tuple[list[Any], Any]:
    """Return what comes before an error, and the error, after which nothing comes."""
    got = []
    with pytest.raises(error, match=match) as caught:
        for result in results:
            got.append(result)
    assert list(results) == []
    return got, caught.value


with_two_workers = pytest.mark.parametrize("rt", [2, "1+1"], indirect=True)
"""On one machine, or on two nodes."""


# ----- what the built-in gives


class Scale:
    factor = 3

    def apply(self, n: Any) -> Any:
        return self.factor * n

    def __call__(self, n: Any) -> Any:
        return (n, n)


ITEMS: list[Callable[[], Any]] = [
    list, lambda: [5], lambda: range(37), lambda: "letters", lambda: {"a": 1, "b": 2}, lambda: (n for n in range(7)),
    lambda: [None, 1.5, b"b", [1, [2]], {"k": Point(1)}, Point(2), Ellipsis], lambda: [*range(200), "z"],
]  # fmt: skip
FUNCTIONS: list[Callable[[Any], Any]] = [
    lambda n: (n, n * 2), str, functools.partial(max, key=repr, default=0), Scale().apply, Scale(), Point,
    lambda n: math.sqrt(n), lambda n: [n], "{}!".format,
]  # fmt: skip


def test_a_map_gives_what_the_builtin_gives(subtests: pytest.Subtests, shared_runtimes: Any) -> None:
    """Results, and the error that ends it."""

    def outcome(results: Iterator[Any]) -> tuple[list[Any], Any]:
        got = []
        try:
            for result in results:
                got.append(result)
        except Exception as error:
            return got, type(error)
        return got, None

    kinds = (1, 2, 3, 0, "1+3", "2+2")
    table = combinations(40, kinds, (None, 1, 3, 100), (True, False), range(len(ITEMS)), range(len(FUNCTIONS)))
    for kind, batch_size, is_ordered, items, fn in table:
        with subtests.test(kind=kind, batch_size=batch_size, ordered=is_ordered, items=items, fn=fn):
            options = {"batch_size": batch_size, "ordered": is_ordered}
            got, error = outcome(shared_runtimes[kind].map(FUNCTIONS[fn], ITEMS[items](), **options))
            expected, expected_error = outcome(map(FUNCTIONS[fn], ITEMS[items]()))
            assert error is expected_error
            if is_ordered:
                assert got == expected
            elif error is None:
                assert sorted(map(repr, got)) == sorted(map(repr, expected))


class Unsure:
    """An iterator that cannot say how long it is."""

    def __init__(self) -> None:
        self.left = [3, 2, 1]

    def __iter__(self) -> Unsure:
        return self

    def __next__(self) -> int:
        if not self.left:
            raise StopIteration
        return self.left.pop()

    def __len__(self) -> int:
        raise ValueError("unknown")


def test_the_length_of_an_iterable_is_only_a_hint(rt: Any) -> None:
    assert list(rt.map(square, Unsure())) == list(synk.Executor(runtime=rt).map(square, Unsure())) == [1, 4, 9]


def test_results_are_the_programs_own(rt: Any) -> None:
    """Also where the function gives back its item, or a part of it."""
    for size, act in itertools.product((10, 1 << 17), (np.asarray, lambda x: x[2:], lambda x: {"x": x[::2]})):
        (result,) = rt.map(act, [np.zeros(size)])
        array = result["x"] if isinstance(result, dict) else result
        array += 1
        assert len(array) >= size // 2 and (array == 1).all()


def test_several_iterables_are_taken_together(rt: Any) -> None:
    def both(a: Any, b: Any = None) -> Any:
        return a, b

    assert list(rt.map(pow, range(10), itertools.repeat(2))) == [k**2 for k in range(10)]
    assert list(rt.map(lambda a, b, c: (a, b, c), "abc", range(2), itertools.count())) == [("a", 0, 0), ("b", 1, 1)]
    assert list(rt.map(divmod, [7, 8], [2, 3], batch_size=1, ordered=True)) == [(3, 1), (2, 2)]
    assert list(rt.map(pow, [], range(3))) == []
    for _ in range(3):  # what is remembered as sent is told apart by how it is called
        assert list(rt.map(both, [(1, 2)])) == [((1, 2), None)]
        assert list(rt.map(both, [1], [2])) == [(1, 2)]
    _, error = taken(rt.map(divmod, [1, 2], [1, 0]), ZeroDivisionError)
    assert any("(2, 0)" in note for note in error.__notes__)


def test_unordered_results_come_as_they_are_ready(rt: Any, gate: Gate) -> None:
    results = rt.map(lambda n: (n == 0 and gate.wait(), n)[1], range(6), batch_size=1, ordered=False)
    first = [next(results) for _ in range(4)]
    assert 0 not in first  # one other may wait behind it
    gate.open()
    assert sorted([*first, *results]) == [0, 1, 2, 3, 4, 5]


def test_it_is_lazy(rt: Any) -> None:
    """Work begins with the first result that is asked for, and the iterable may be endless."""
    pulled = iter([1, 2])
    with nothing_sent(rt):
        results = rt.map(square, pulled)
        assert next(pulled) == 1
    assert list(results) == [4]
    numbers = itertools.count()
    assert list(itertools.islice(rt.map(square, numbers, batch_size=1), 200)) == [n * n for n in range(200)]
    assert next(numbers) <= 200 + 4 * rt.world_size + 1


@pytest.mark.parametrize("size", [3, 1 << 17])
def test_what_a_function_or_an_iterable_changes_in_place_or_keeps(rt: Any, size: int) -> None:
    """Small items are copied, large ones mapped: neither is another one later."""
    buffer, own, kept = np.zeros((2, size)), np.zeros((size, 2), order="F"), []

    def filled() -> Iterator[np.ndarray]:
        for n in range(1, 21):
            buffer[:] = n
            yield buffer.T

    def add(x: np.ndarray) -> Any:
        own[:] = x + 1
        kept.append(x)
        return own, [float(each.mean()) for each in kept]

    for n, (result, means) in enumerate(rt.map(add, filled(), batch_size=1), start=1):
        np.testing.assert_array_equal(result, np.full((size, 2), n + 1.0))
        assert means[-1] == n and means == sorted(set(means)) and means[0] >= 1
    assert_right(rt)
    for means in rt.map(lambda n: [float(each.mean()) for each in kept], range(4), batch_size=1):
        assert means == sorted(set(means)) and min(means, default=1) >= 1


def test_a_large_array_crosses_once_as_long_as_it_is_the_same(rt: Any) -> None:
    """Memory is passed as a descriptor, once per worker."""
    x = np.ones(1 << 18)
    before, pairs = rt.counters["bytes_down"], ((x, n) for n in range(20))
    assert list(rt.map(lambda pair: float(pair[0].sum() * pair[1]), pairs)) == [x.sum() * n for n in range(20)]
    assert rt.counters["bytes_down"] - before < x.nbytes / 4
    for n in range(4):
        x[-1] = n  # what was copied before does not count
        assert list(rt.map(lambda pair: float(pair[0].sum()), [(x, n)])) == [x.size - 1.0 + n]
    rt.profile.reset()
    x, before = np.ones(1 << 20), rt.counters["messages_down"]
    assert list(rt.map(lambda pair: pair[0].size, [(x, n) for n in range(50)])) == [x.size] * 50
    items = next(each for each in rt.profile.transfers if each.kind == "items")
    assert x.nbytes <= items.nbytes < 1.1 * x.nbytes
    assert rt.counters["messages_down"] - before < 25, "an array that was there before makes no item large"


def test_a_row_of_a_tensor_crosses_without_the_others(rt: Any) -> None:
    """Both ways, with any strides; torch pickles the memory of the whole."""
    torch = pytest.importorskip("torch")
    x = torch.arange(1 << 17).reshape(512, 256).bfloat16()
    before = rt.counters["bytes_pickled"]
    for row, found in zip(x.T, rt.map(lambda row: torch.stack([row, -row])[0], x.T), strict=True):
        assert torch.equal(found, row) and found.untyped_storage().nbytes() == row.nbytes
    assert rt.counters["bytes_pickled"] - before < 4 * x.nbytes


@pytest.mark.parametrize("size", [3, 1 << 17])
def test_an_array_that_items_change_while_they_are_taken(rt: Any, size: int) -> None:
    x = np.zeros(size)
    items = [(x, AtPickle(lambda: operator.iadd(x, 1))) for _ in range(12)]
    assert list(rt.map(lambda pair: float(pair[0][-1]), items)) == list(range(12))


# ----- beside other things


@with_two_workers
def test_a_loop_that_is_left_and_another_call(rt: Any, gate: Gate) -> None:
    """What is left running is ended, and not waited for. A generator of items is closed at once."""
    closed: list[bool] = []

    def items() -> Iterator[int]:
        try:
            yield from itertools.count()
        finally:
            closed.append(True)

    with same_workers(rt):
        for end in ("break", "close", "del"):
            results = rt.map(stay_from(2, gate) if end == "del" else abs, items(), batch_size=1)
            for n in results:
                if n == 1:
                    break
            if end == "close":
                results.close()
                assert list(results) == []
            del results
            assert closed == [True]
            closed.clear()
            assert_right(rt)
            assert not gate.has(8)


def test_calls_between_the_results(rt: Any) -> None:
    total = rt.function(lambda x: x.sum(), outputs="sum")
    d, w = rt.data(np.arange(5.0)), rt.shared(np.zeros(2))
    for n, result in enumerate(rt.map(square, range(60), batch_size=2)):
        assert result == n * n
        if n % 7 == 0:
            assert total(d) == 10.0
        if n % 11 == 0:
            pending = total.submit(np.arange(4.0))
            w.value = np.full(2, float(n))
            assert pending.result() == 6.0
        if n % 13 == 0:
            d.set_value(np.arange(5.0))
    np.testing.assert_array_equal(w.value, np.full(2, 55.0))


def test_a_call_after_a_long_break_between_results(rt: Any) -> None:
    """Items that were answered in time are not late because nobody has looked."""
    assert_right(rt)  # the workers have started
    rt.timeout = 1.0
    try:
        results = rt.map(square, range(12), batch_size=2)
        assert next(results) == 0
        time.sleep(1.2)
        assert_right(rt)
        assert list(results) == [n * n for n in range(1, 12)]
    finally:
        rt.timeout = None


def test_maps_side_by_side_and_in_one_another(rt: Any) -> None:
    """Also where the iterable itself calls."""
    total = rt.function(lambda x: x.sum(), outputs="sum")
    pairs = zip(rt.map(square, range(100)), rt.map(lambda n: -n, range(100), batch_size=3))
    assert list(pairs) == [(n * n, -n) for n in range(100)]
    inner = rt.map(square, range(50), batch_size=2)
    assert list(rt.map(lambda n: n + 1, inner, batch_size=3)) == [n * n + 1 for n in range(50)]
    rows = [list(rt.map(lambda k: k + 1, range(n))) for n in rt.map(square, range(5))]
    assert rows == [[k + 1 for k in range(n * n)] for n in range(5)]
    called = (float(total(np.full(4, float(n)))) for n in range(12))
    assert list(rt.map(square, called, batch_size=1)) == [(4.0 * n) ** 2 for n in range(12)]


def test_threads(rt: Any) -> None:
    """One goes on with a map that was begun here."""
    total = rt.function(lambda x: x.sum(), outputs="sum")
    passed_on = rt.map(square, range(30), batch_size=2)
    begun = [next(passed_on), next(passed_on)]
    ways: list[tuple[Callable[[], list[Any]], list[Any]]] = [
        (lambda: [*begun, *passed_on], [n * n for n in range(30)]),
        *[(lambda: [float(total(np.full(3, float(n)))) for n in range(20)], [3.0 * n for n in range(20)])] * 2,
        *[(lambda: list(rt.map(lambda n: n + 1, range(200), batch_size=4)), [n + 1 for n in range(200)])] * 2,
    ]
    with ThreadPoolExecutor(len(ways)) as pool:
        found = [pool.submit(act) for act, _ in ways]
    assert [each.result() for each in found] == [expected for _, expected in ways]


def test_what_the_program_changes_counts_for_the_chunks_that_are_sent_after_it(rt: Any) -> None:
    shift = [0]

    def add(n: int) -> int:
        return n + shift[0]

    total = rt.function(lambda x: x + shift[0], outputs="gather")
    for number, between in enumerate(("nothing", "a call", "another map"), start=1):
        old, new = shift[0], 1000 * number
        pulled = iter(range(200))
        results = rt.map(add, pulled, batch_size=1)
        assert [next(results) for _ in range(3)] == [old, old + 1, old + 2]
        shift[0], num_pulled = new, 200 - operator.length_hint(pulled)
        if between == "a call":
            assert total(np.zeros(4)).tolist() == [new] * 4
        elif between == "another map":
            assert list(rt.map(add, range(2))) == [new, new + 1]
        rest = list(results)
        num_old = sum(value < new for value in rest)
        assert num_old <= num_pulled - 3
        assert rest == [n + (new if n >= 3 + num_old else old) for n in range(3, 200)]


@with_two_workers
def test_shared_variables_are_read_and_not_assigned(rt: Any) -> None:
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


def test_communication_has_no_meaning(rt: Any) -> None:
    for verb in (lambda: synk.comm.all_reduce(np.ones(2)), lambda: synk.comm.barrier(), lambda: synk.comm.rows):
        with pytest.raises(ValueError, match=r"cannot communicate in .*: synk.map runs it for each item"):
            list(rt.map(lambda n: verb(), range(4)))  # noqa: B023
    seen = set(rt.map(lambda n: (synk.comm.rank, synk.comm.world_size), range(9)))
    assert seen <= {(rank, rt.world_size) for rank in range(rt.world_size)}
    assert_right(rt)


# ----- what goes wrong


def test_an_exception_comes_behind_the_results_before_it_and_names_its_item(rt: Any) -> None:
    def fail(n: int) -> float:
        return 1 / (n - 17)

    for batch_size in (1, 5, None):
        got, error = taken(rt.map(fail, range(40), batch_size=batch_size), ZeroDivisionError)
        assert got == [1 / (n - 17) for n in range(17)]
        assert [note for note in error.__notes__ if "'fail' for item 17 (17)" in note]
        assert isinstance(error.__cause__, RemoteError) and "for item 17 (17)" in str(error.__cause__)
    with same_workers(rt):
        for kind in (StopIteration, KeyboardInterrupt, SystemExit):  # no errors elsewhere

            def leave(n: int) -> int:
                if n == 3:
                    raise kind("here")  # noqa: B023
                return n

            got, _ = taken(rt.map(leave, range(9)), RemoteError, f"{kind.__name__} in 'leave' for item 3")
            assert got == [0, 1, 2]


def test_what_cannot_be_had_sent_or_loaded(rt: Any) -> None:
    """The iterable raises, or an item or a result cannot travel: what was before it still comes."""

    def items() -> Iterator[int]:
        yield from range(3)
        raise LookupError("no more")

    assert taken(rt.map(square, items(), batch_size=2), LookupError, "no more")[0] == [0, 1, 4]
    for kind, text in ((AtPickle, r"send item 3 \(<.*>\)"), (AtLoad, "load an item")):
        results = rt.map(square, [0, 1, 2, kind(raise_value_error), 4], batch_size=2)
        assert taken(results, NotSent, f"cannot {text} of the map of 'square'")[0] == [0, 1, 4]
    for kind, verb in ((AtPickle, "send"), (AtLoad, "load")):
        results = rt.map(lambda n: kind(raise_value_error) if n == 3 else n, range(6), batch_size=2)  # noqa: B023
        assert taken(results, NotSent, rf"(?s)cannot {verb} what .* for item 3")[0] == [0, 1, 2]
    taken(rt.map(lambda n: (k for k in range(n)), [1]), NotSent, "generator")
    assert_right(rt)


def test_bad_input(subtests: pytest.Subtests, rt: Any) -> None:
    f, lock = rt.function(square), threading.Lock()
    assert list(rt.map(f.__wrapped__, [3])) == [9]
    nested = rt.map(lambda n: list(synk.map(square, range(n))), range(3))
    cases: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (
            TypeError,
            r"cannot map 'square': got a synk function.*square.__wrapped__.*square.stream",
            lambda: rt.map(f, [1]),
        ),
        (TypeError, "cannot map over items: got int", lambda: rt.map(3, [1])),
        (TypeError, "cannot map 'square': got items of type int", lambda: rt.map(square, 3)),
        (TypeError, "items of type int", lambda: rt.map(pow, [1], 2)),
        (TypeError, "got no items", lambda: rt.map(pow)),
        (NotSent, r"cannot send .* its variable 'lock'", lambda: rt.map(lambda n: lock, [1])),
        (ReentrancyError, "inside worker rank .* Call it in the program; synk.comm", lambda: list(nested)),
        *(
            (ValueError, "'square': got batch_size=", lambda size=size: rt.map(square, [1], batch_size=size))
            for size in (0, -1, 1.5, True, "2")
        ),
        *(
            (TypeError, f"'square': got {option}={value!r}", lambda given={option: value}: rt.map(square, [1], **given))
            for option, value in (("journal", True), ("key", "name"), ("ordered", "no"), ("progress", 1))
        ),
        (ValueError, "got True, expected seconds", lambda: rt.map(square, [1], item_timeout=True)),
        (TypeError, "got timeout='3'", lambda: synk.Executor(runtime=rt).map(square, [1], timeout="3")),
        (TypeError, "got runtime=3", lambda: synk.Executor(runtime=3)),
    ]
    for error, text, act in cases:
        with subtests.test(text), pytest.raises(error, match=text):
            act()


@pytest.mark.parametrize("is_noticed_by_another_call", [False, True])
def test_a_worker_that_dies(rt: Any, gate: Gate, is_noticed_by_another_call: bool) -> None:
    with replaced_workers(rt, [1]) as before:
        results = rt.map(stay_from(2, gate), range(12), batch_size=1)
        assert next(results) == 0
        os.kill(before[1], signal.SIGKILL)
        if is_noticed_by_another_call:
            assert_right(rt)
        assert taken(results, WorkerDied, r"rank 1 of 2 .* during .* \(item \d\)")[0] == [1]
    assert list(rt.map(square, range(5))) == [0, 1, 4, 9, 16]


def test_a_worker_that_dies_while_it_has_no_items(rt: Any) -> None:
    with replaced_workers(rt, [0]) as before, pytest.warns(RuntimeWarning, match="rank 0 .* started again"):
        results = rt.map(square, range(20), batch_size=1)
        assert next(results) == 0
        assert_right(rt)  # nothing is in flight any more
        kill_and_wait(before[0])
        assert list(results) == [n * n for n in range(1, 20)]


@with_two_workers
def test_runtime_interrupt_and_time_limits(rt: Any, gate: Gate) -> None:
    total = rt.function(lambda x: x.sum(), outputs="sum")
    with same_workers(rt):
        results = rt.map(stay_from(1, gate), range(9), batch_size=1)
        assert next(results) == 0
        rt.interrupt()  # while nobody waits
        with pytest.raises(CallCancelled, match=r"Runtime.interrupt\(\)"):
            next(results)
        gate.close()
        thread = threading.Thread(target=lambda: (wait_for(lambda: gate.has("a")), rt.interrupt()))
        thread.start()
        with pytest.raises(CallCancelled, match=r"Runtime.interrupt\(\)"):
            list(rt.map(gate.wait, ["a"]))
        thread.join()
        results = rt.map(stay_from(1, gate), range(3), batch_size=1)
        assert next(results) == 0
        with pytest.raises(CallTimeout, match=r"items of a map of .* are still in flight"):
            total(np.ones(3), timeout=0.1)
        gate.open()
        assert list(results) == [1, 2]
        gate.close()
        rt.timeout = 0.2
        try:
            with pytest.raises(CallTimeout, match=r"'wait' \(item 0\) did not end in time"):
                list(rt.map(gate.wait, ["e", "f"], batch_size=1))
        finally:
            rt.timeout = None


def test_a_runtime_that_is_closed_or_restarted() -> None:
    with synk.fork(2, backend="numpy") as rt:
        results = synk.map(square, range(50), batch_size=1)
        assert next(results) == 0
        rt.restart()
        assert [next(results) for _ in range(5)] == [1, 4, 9, 16, 25]
    taken(results, ClosedError)
    with pytest.raises(ClosedError):
        rt.map(square, [1])
