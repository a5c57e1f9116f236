"""What functions keep of their inputs, and what they write into them: neither changes in later calls, nor changes them.

The expected values are those that the master passed, which NumPy holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_gpus import Gpus
from support.harness import same_workers
from support.seeds import examples
from support.stateful import Box

import synk

SIZES = (6, 200_000)
"""Rows: within a page, and over many."""


def keeper(view: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return a function that keeps a view of each input and returns the first and the last element of all of them."""
    kept: list[Any] = []

    def keep(x: Any) -> Any:
        kept.append(view(x))
        return [(float(each.reshape(-1)[0]), float(each.reshape(-1)[-1])) for each in kept]

    return keep


VIEWS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x,
    "slice": lambda x: x[1:],
    "view of a view": lambda x: x[:, None][1:][:2],
    "other shape": lambda x: x.reshape(-1, 1),
}


@pytest.mark.parametrize("framework", [None, "torch"])
@pytest.mark.parametrize("where", ["inline", 1, 2])
@pytest.mark.sampled(90)
def test_kept_inputs_stay_as_they_were(shared_runtimes: Any, where: Any, framework: str | None) -> None:
    if framework:
        pytest.importorskip(framework)
    rt = shared_runtimes[where]
    for size in SIZES:
        for view in VIEWS.values():
            f = rt.function(keeper(view), outputs=None, framework=framework)
            arrays = [np.arange(float(size)) + 10.0 * k for k in range(4)]
            for count, array in enumerate(arrays, 1):
                rows = np.array_split(arrays[0], rt.world_size)
                expected = [
                    [
                        (float(v.reshape(-1)[0]), float(v.reshape(-1)[-1]))
                        for v in (view(part + 10.0 * k) for k in range(count))
                    ]
                    for part in rows
                ]
                assert f(array) == expected


@pytest.mark.parametrize("batch", [5, slice(1, 5), slice(None, None, 2), slice(None, None, -1), [3, 1, 1, 0]])
@pytest.mark.parametrize("num_slices", [1, 2])
def test_kept_rows_of_a_batch(shared_runtimes: Any, batch: Any, num_slices: int) -> None:
    rt = shared_runtimes[2]
    kept: list[Any] = []

    def keep(x: Any) -> Any:
        kept.append(x)
        return np.concatenate(kept)

    f = rt.function(keep, outputs=None)
    index = slice(batch) if isinstance(batch, int) else batch
    seen: list[list[np.ndarray]] = [[], []]
    for k in range(3):
        x = np.arange(6.0) + 10.0 * k
        got = f(x, batch=batch, num_slices=num_slices)
        for rank, part in enumerate(np.array_split(x[index], 2)):
            seen[rank] += [piece for piece in np.array_split(part, num_slices) if len(piece)]
            mine = got[rank][-1] if num_slices > 1 else got[rank]
            np.testing.assert_array_equal(mine, np.concatenate(seen[rank]))


@pytest.mark.parametrize("where", ["inline", 2])
@pytest.mark.parametrize("size", SIZES)
def test_kept_broadcast_inputs(shared_runtimes: Any, where: Any, size: int) -> None:
    """Arrays, and arrays inside tuples and objects, which travel beside the pickle."""
    rt = shared_runtimes[where]
    kept: list[Any] = []

    def keep(w: Any, pair: Any, box: Any, x: Any) -> Any:
        kept.append((w, pair[0], pair[1]["a"], box.value))
        return [[float(array[-1]) for array in arrays] for arrays in kept]

    f = rt.function(keep, outputs="first", bcast_inputs=("w", "pair", "box"))
    for k in range(4):
        a = np.full(size, float(k))
        got = f(a, (a + 0.25, {"a": a + 0.5}), Box(a + 0.75), np.ones(4))
        assert got == [[j, j + 0.25, j + 0.5, j + 0.75] for j in range(k + 1)]


@pytest.mark.parametrize("size", SIZES)
def test_kept_inputs_of_submitted_calls_that_are_returned_as_well(shared_runtimes: Any, size: int) -> None:
    """In all lanes, between plain calls, with views of the inputs as outputs: small ones and large ones."""
    rt = shared_runtimes[2]
    kept: list[Any] = []

    def keep(x: Any) -> Any:
        kept.append(x)
        return x, x[::-1], np.array([part[0] for part in kept])

    f = rt.function(keep, outputs=("gather", None, "first"))
    other = rt.function(lambda x: x, outputs="gather")
    waiting, count = deque[Any](), 0

    def collect(number: int, value: Any) -> None:
        rows, back, firsts = value
        np.testing.assert_array_equal(rows, np.full(size, float(number)))
        assert all((part == number).all() for part in back)
        assert firsts.tolist() == list(range(number + 1))

    for k in range(12):
        if k % 4 == 3:
            while waiting:
                collect(count - len(waiting), waiting.popleft().result())
            collect(count, f(np.full(size, float(count))))
        else:
            waiting.append(f.submit(np.full(size, float(count))))
        count += 1
        np.testing.assert_array_equal(other.submit(np.full(size, -1.0)).result(), np.full(size, -1.0))
    while waiting:
        collect(count - len(waiting), waiting.popleft().result())


def test_what_a_failing_call_keeps(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    kept: list[Any] = []

    def keep(x: Any) -> Any:
        kept.append(x)
        if len(kept) % 2:
            raise KeyError("odd")
        return [float(part[0]) for part in kept]

    f = rt.function(keep, outputs="first")
    with same_workers(rt):
        for k in range(6):
            if k % 2 == 0:
                with pytest.raises(KeyError, match="odd"):
                    f(np.full(5, float(k)))
            else:
                assert f(np.full(5, float(k))) == list(range(k + 1))


def test_a_kept_view_of_data_follows_the_data(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    kept: list[Any] = []

    def keep(x: Any) -> Any:
        kept.append(x[:1])
        return [float(part[0]) for part in kept]

    f = rt.function(keep, outputs="first")
    data = rt.data(np.ones(6))
    for k in range(1, 4):
        data[:] = k
        assert f(data) == [k] * k


def test_what_is_kept_no_longer_is_freed(runtime: Any) -> None:
    """Also where it is the whole life of a layer: each call replaces what the last one kept."""
    rt = runtime(2)

    class Layer:
        def forward(self, x: Any) -> Any:
            self.x = x
            with open("/proc/self/maps") as file:
                return len(file.readlines()), float(self.x[0])

    f = rt.function(Layer().forward, outputs=None)
    counts = []
    for k in range(60):
        lines, first = zip(*f(np.arange(100_000.0) + k))
        assert first == (k, k + 50_000)
        counts.append(max(lines))
    assert counts[-1] <= counts[9] + 5


def test_a_call_whose_function_keeps_nothing_maps_nothing(runtime: Any) -> None:
    rt = runtime(2)
    counts: list[int] = []

    def watch(x: Any) -> Any:
        from synk._wire.memory import Segment
        from synk._worker.held import pages as _pages

        if not counts:
            counts.append(0)
            for owner, name in ((Segment, "map_again"), (_pages, "make_own"), (_pages, "give_back")):
                original = getattr(owner, name)

                def counted(*args: Any, original: Any = original) -> Any:
                    counts[0] += 1
                    return original(*args)

                setattr(owner, name, counted)
        return counts[0]

    watcher = rt.function(watch, outputs=None)
    watcher(np.ones(2))
    functions = [
        rt.function(lambda x, w: x * w[0][0], outputs="gather", bcast_inputs="w"),
        rt.function(lambda x, w: (x, x[1:], {"w": w}), outputs=None, bcast_inputs="w"),
        rt.function(lambda x, w: x, outputs="gather", bcast_inputs="w"),
    ]
    for f in functions:
        for size in SIZES:
            for k in range(4):
                f(np.full(size, float(k)), [np.ones(3)])
                f.submit(np.full(size, float(k)), [np.ones(3)]).result()
    with pytest.raises(ZeroDivisionError):
        rt.function(lambda x: 1 / 0, outputs="sum")(np.ones(4))
    assert watcher(np.ones(2)) == [0, 0]


# ----- tensors that are written into


WRITES: dict[str, Callable[[Any], Any]] = {
    "in place": lambda x: x.add_(100.0),
    "through data": lambda x: x.data.mul_(0.0),
    "through numpy": lambda x: x.numpy().fill(-1.0),
    "an element": lambda x: x.__setitem__(-1, 7.0),
}


@pytest.mark.parametrize("where", ["inline", 1, 2])
@pytest.mark.parametrize("write", WRITES)
def test_a_tensor_that_is_written_into_is_a_copy_of_this_call(shared_runtimes: Any, where: Any, write: str) -> None:
    """Written in one call, read in the next one, other data, same shape; plain arrays and ``Data``, rows and whole."""
    pytest.importorskip("torch")
    rt = shared_runtimes[where]
    spoil = WRITES[write]

    def work(x: Any, d: Any, w: Any, v: Any, flag: Any) -> Any:
        sums = [each.sum().item() for each in (x, d, w, v)]
        if flag:
            for each in (x, d, w, v):
                spoil(each)
        return tuple(sums)

    f = rt.function(work, outputs=("sum", "sum", "max", "max"), bcast_inputs=("w", "v", "flag"), framework="torch")
    for size in SIZES:
        d, v = rt.data(np.zeros(size)), rt.data(np.zeros(size))
        for k in range(6):
            x, w = np.full(size, k + 0.25), np.full(size, k + 0.5)
            d[:], v[:] = k, k + 0.75
            expected = [size * value for value in (k + 0.25, k, k + 0.5, k + 0.75)]
            call = f.submit if k % 3 == 2 else lambda *args: Done(f(*args))
            assert list(call(x, d, w, v, k % 2 == 0).result()) == expected
            assert (x == k + 0.25).all() and (w == k + 0.5).all()
            assert (np.asarray(d) == k).all() and (np.asarray(v) == k + 0.75).all()


class Done:
    """The result of a plain call, asked for like that of a submitted one."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self) -> Any:
        return self._value


@pytest.mark.parametrize("where", ["inline", 2])
@pytest.mark.parametrize("op", ["gather", None])
@pytest.mark.parametrize("size", SIZES)
def test_a_tensor_that_is_written_into_and_returned(shared_runtimes: Any, where: Any, op: Any, size: int) -> None:
    pytest.importorskip("torch")
    rt = shared_runtimes[where]
    f = rt.function(lambda x, d: (x.add_(1.0), d.mul_(2.0), [str(x[0])]), outputs=(op, op, None), framework="torch")
    data = rt.data(np.zeros(size))
    for k in range(4):
        data[:] = k
        pending = f.submit(np.full(size, float(k)), data)
        x, d, text = pending.result()
        assert np.concatenate(x if op is None else [x]).tolist() == [k + 1.0] * size
        assert np.concatenate(d if op is None else [d]).tolist() == [k * 2.0] * size
        assert text == [[f"tensor({k + 1}., dtype=torch.float64)"]] * rt.world_size
        assert (np.asarray(data) == k).all()


def test_slices_do_not_see_what_an_earlier_one_wrote(shared_runtimes: Any) -> None:
    pytest.importorskip("torch")
    rt = shared_runtimes[2]
    f = rt.function(lambda x, w: (w.add_(1.0)[0] * len(x)).item(), outputs="sum", bcast_inputs="w", framework="torch")
    for _ in range(2):
        for num_slices in (1, 2, 5):
            assert f(np.ones(20), np.zeros(3), num_slices=num_slices) == 20.0


@pytest.mark.parametrize("size", SIZES)
def test_tensors_that_are_kept_and_written_into_later(shared_runtimes: Any, size: int) -> None:
    """One of a plain array is the function's own; what is written into one of ``Data`` no other call sees."""
    pytest.importorskip("torch")
    rt = shared_runtimes[2]
    kept: list[Any] = []

    def keep(x: Any, d: Any) -> Any:
        sums = x.sum().item(), d.sum().item()
        kept.append((x, d))
        return sums

    def write(x: Any) -> Any:
        for own, data in kept:
            own.add_(1.0)
            data.add_(1.0)
        return [own[0].item() for own, _ in kept]

    f = rt.function(keep, outputs="sum", framework="torch")
    g = rt.function(write, outputs="first")
    rt.distribute()
    data = rt.data(np.zeros(size))
    reader = rt.function(lambda d: d.sum(), outputs="sum")
    for k in range(4):
        data[:] = k
        assert f(np.full(size, float(k)), data) == (size * k, size * k)
        assert reader(data) == size * k
        g(np.ones(2))
        assert (reader(data), reader(data)) == (size * k,) * 2


@pytest.mark.parametrize("where", ["inline", 2])
def test_the_value_of_a_variable_changes_only_by_assignment(shared_runtimes: Any, where: Any) -> None:
    pytest.importorskip("torch")
    rt = shared_runtimes[where]
    w = rt.shared(np.zeros(3))

    def work(v: Any) -> Any:
        seen = w.value[0].item(), v[0].item()
        w.value.add_(1.0)
        v.add_(1.0)
        return seen

    f = rt.function(work, outputs="first", bcast_inputs="v", framework="torch")
    assert [f(w) for _ in range(3)] == [(0.0, 0.0)] * 3
    assert (w.value == 0.0).all()


# ----- devices


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., synk.Runtime]]:
    made = Gpus(monkeypatch, True)
    yield made
    while made.opened:
        made.opened.pop().close()


def test_arrays_that_stay_on_the_host_beside_a_device(gpu: Any) -> None:
    """Text is no array of a device, and nobody looks into an object of the user's: both are views of shared memory."""
    rt = gpu(2)
    kept: list[Any] = []

    def keep(x: Any, pair: Any, box: Any, w: Any) -> Any:
        kept.append((pair[0], box.value, w))
        return [(str(text[0]), float(value[-1]), float(array.sum())) for text, value, array in kept]

    f = rt.function(keep, outputs="first", bcast_inputs=("pair", "box", "w"))
    for k in range(4):
        got = f(np.ones(4), (np.array([f"text {k}"] * 9000),), Box(np.full(9000, float(k))), np.full(5, float(k)))
        assert got == [(f"text {j}", float(j), 5.0 * j) for j in range(k + 1)]


# ----- anything between anything


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["keep", "keep a part", "forget", "nothing", "write", "write and keep"]),
        st.booleans(),  # submitted
        st.sampled_from([1, 3, 700, 70_000]),
        st.sampled_from([None, slice(None, None, -1), [0, 0]]),
        st.booleans(),  # data
    ),
    min_size=2,
    max_size=14,
)


@examples(12)
@given(actions=ACTIONS, where=st.sampled_from(["inline", 2]), framework=st.sampled_from([None, "torch"]))
def test_keeping_and_writing_between_calls_of_all_kinds(
    shared_runtimes: Any, actions: Any, where: Any, framework: str | None
) -> None:
    if framework:
        pytest.importorskip(framework)
    rt = shared_runtimes[where]
    kept: list[Any] = []

    def work(x: Any, how: str) -> Any:
        values = [(float(part[0]), float(part[-1]), float(part.sum())) for part in kept]
        total = float(x.sum())
        if how.startswith("write") and not isinstance(x, np.ndarray):
            x += 0.5
        if how == "forget":
            kept.clear()
        elif "keep" in how:
            kept.append(x[-1:] if how == "keep a part" else x)
        return total, deque(values)  # one object: ranks without rows have kept less

    f = rt.function(work, outputs="first", bcast_inputs="how", framework=framework)
    g = rt.function(lambda x: x, outputs="gather")
    expected_kept: list[tuple[float, float, float]] = []
    waiting = []
    for k, (how, is_submitted, size, batch, as_data) in enumerate(actions):
        x = np.arange(float(size)) + k
        selected = x if batch is None else x[batch]
        mine = np.array_split(selected, rt.world_size)[0]
        is_kept_data = as_data and "keep" in how  # it would follow the data, which is another story
        source = rt.data(x) if as_data and not is_kept_data else x
        expected = (float(mine.sum()), deque(expected_kept))
        own = mine + 0.5 if how.startswith("write") and framework else mine
        if how == "forget":
            expected_kept = []
        elif "keep" in how:
            part = own[-1:] if how == "keep a part" else own
            expected_kept = [*expected_kept, (float(part[0]), float(part[-1]), float(part.sum()))]
        if is_submitted:
            waiting.append((f.submit(source, how, batch=batch), expected))
        else:
            waiting.append((Done(f(source, how, batch=batch)), expected))
        np.testing.assert_array_equal(g(x), x)
    for call, expected in waiting:
        assert call.result() == expected
