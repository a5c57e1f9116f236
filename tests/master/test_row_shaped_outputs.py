"""An output with a value for each row, under an op that reduces it, is told; a program that is right stays silent."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from harness import script

from synk._master.row_shapes import RowShapes
from synk._wire.messages import Leaf
from synk.errors import CollectiveMismatch, RowShapedOutput

Y = np.arange(6.0)
TEXT = r"""the output of '<lambda>' has as many rows as its rank.*op '(avg|sum|min|max)'.*outputs="gather".*f\.verify"""


@pytest.fixture(params=[2, 3])
def rt(request: pytest.FixtureRequest, shared_runtimes: Any) -> Iterator[Any]:
    yield shared_runtimes[request.param]


def told(call: Callable[[], Any]) -> list[str]:
    """Return what a call warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(each.category is RowShapedOutput and each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("op", ["avg", "sum", "min", "max"])
def test_a_value_for_each_row_is_told_at_the_first_call_and_once(rt: Any, op: str) -> None:
    f = rt.function(lambda x: x * 2, outputs=op)
    with pytest.warns(RowShapedOutput, match=TEXT) as caught:
        f(Y)
    assert [each.filename for each in caught] == [__file__]  # the line of the program
    assert told(lambda: f(Y)) == told(lambda: f(np.arange(12.0))) == []


@pytest.mark.parametrize("op", ["avg", "sum", "min", "max"])
def test_where_shards_differ_the_error_says_it(rt: Any, op: str) -> None:
    with pytest.raises(CollectiveMismatch, match='Use outputs="gather" if it holds one value for each row'):
        rt.function(lambda x: x * 2, outputs=op)(np.arange(7.0))


WAYS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "matrix": lambda rt, f, x: f(x),
    "Data": lambda rt, f, x: f(rt.data(x)),
    "sharded": lambda rt, f, x: f(rt.shared(x, sharded=True)),
    "list of rows": lambda rt, f, x: f(x, batch=[11, 3, 1, 4, 0, 5]),
    "rows of shards": lambda rt, f, x: f(rt.shared(x, sharded=True), batch=np.arange(12) % 2 == 0),
    "slices": lambda rt, f, x: f(x, num_slices=2),
    "slices of one row": lambda rt, f, x: f(x, num_slices=100),
}


@pytest.mark.parametrize("way", WAYS)
def test_however_the_rows_come(rt: Any, way: str) -> None:
    f = rt.function(lambda x: (x.mean(axis=0), {"double": 2 * x}))
    with pytest.warns(RowShapedOutput, match=r"output\[1\]\['double'\] of"):
        WAYS[way](rt, f, np.arange(24.0).reshape(12, 2))


def test_rows_of_a_variable_that_the_function_closes_over(rt: Any) -> None:
    s, share = rt.shared(Y, sharded=True), 6 // rt.world_size
    with pytest.warns(RowShapedOutput):
        rt.function(lambda: s.value * 2)()
    assert told(rt.function(lambda: np.full(share, s.value.mean()))) == []


def test_submitted_calls_tell_at_another_number_of_rows(rt: Any) -> None:
    f = rt.function(lambda x: x * 2)
    assert told(lambda: f.submit(Y).result()) == []
    with pytest.warns(RowShapedOutput):
        f.submit(np.arange(12.0)).result()
    assert told(lambda: f.submit(np.arange(18.0)).result()) == []


# ----- programs that are right


def test_a_program_that_is_right_stays_silent_whatever_the_coincidence(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    rng = np.random.default_rng(0)
    scaled = rt.function(lambda w, x: w * x.sum(), bcast_inputs="w", outputs="sum")
    gradient = rt.function(lambda w, x: x.T @ (x @ w) / len(x), bcast_inputs="w")
    nearest = lambda x, c: ((x[:, None] - c) ** 2).sum(axis=2).argmin(axis=1)  # noqa: E731
    centroids = rt.function(
        lambda x, c: np.stack([x[nearest(x, c) == k].sum(axis=0) for k in range(len(c))]),
        bcast_inputs="c",
        outputs="sum",
    )
    histogram = rt.function(lambda x: np.histogram(x, 5, (0, 1))[0], outputs="sum")
    one = rt.function(lambda x: x.sum(axis=0, keepdims=True), outputs="sum")

    def program() -> None:
        for size in (4, 3, 1, 5, 4):
            x = rng.random((2 * size, size))
            np.testing.assert_allclose(scaled(np.ones(size), x), np.full(size, x.sum()))
            np.testing.assert_allclose(gradient(np.ones(size), x), x.T @ (x @ np.ones(size)) / len(x))
            assert centroids(x, x[:size]).shape == (size, size)
            np.testing.assert_allclose(scaled.submit(np.ones(size), x).result(), np.full(size, x.sum()))
            np.testing.assert_allclose(one(x), x.sum(axis=0, keepdims=True))
        for rows in (10, 10, 20, 10):
            assert histogram(rng.random(rows)).sum() == rows

    assert told(program) == []


def test_what_differs_by_nothing_but_rows_is_told_of_submitted_calls_alone(shared_runtimes: Any) -> None:
    """Two coincidences are no proof where another input may be the reason."""
    rt = shared_runtimes[2]
    f = rt.function(lambda w, x: w * x.sum(), bcast_inputs="w", outputs="sum")
    assert told(lambda: [f.submit(np.ones(size), np.ones(2 * size)).result() for size in (4, 3, 4)]) == []


@pytest.mark.parametrize(
    "options",
    [{"outputs": "gather"}, {"outputs": "first"}, {"outputs": None}, {"per_rank": True}],
    ids=str,
)
def test_where_each_row_or_rank_is_meant_nothing_is_told(rt: Any, options: dict[str, Any]) -> None:
    assert told(lambda: rt.function(lambda x: x * 2, **options)(Y)) == []


def test_one_rank_alone_is_right(shared_runtimes: Any) -> None:
    assert told(lambda: shared_runtimes[1].function(lambda x: x * 2)(Y)) == []
    assert told(lambda: shared_runtimes["inline"].function(lambda x: x * 2)(Y)) == []
    assert told(lambda: shared_runtimes[2].function(lambda x: x * 2).serial(Y)) == []


# ----- the second run is not seen


def test_the_shorter_call_leaves_no_trace(reused: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    """It happens once, where the first call leaves a doubt; what it does to the function's state, nobody sees."""
    rt = reused(2)
    w = rt.shared(np.zeros(3), name="w")

    def new_step() -> Any:
        state, rng = {"calls": 0}, np.random.default_rng(3)

        def step(x: np.ndarray) -> Any:
            state["calls"] += 1
            w.value = w.value + 1
            print("here", flush=True)
            return np.array([state["calls"], rng.random(), np.random.random()])

        return step

    f = rt.function(new_step(), outputs="first")
    g = rt.function(new_step(), outputs="sum")
    np.random.seed(0)
    seeded = rt.function(lambda x: np.random.seed(1))
    results = []
    for function in (f, g):  # the op is all that differs, so that only one of them leaves a doubt
        seeded(Y)
        results.append([function(Y) for _ in range(3)])
    assert [row[0] for row in results[0]] == [1, 2, 3]
    np.testing.assert_array_equal(np.array(results[1]), 2 * np.array(results[0]))
    np.testing.assert_array_equal(w.value, np.full(3, 6.0))
    assert capfd.readouterr().out.count("here") == 12


def test_an_exception_in_the_shorter_call_is_nobodys(rt: Any) -> None:
    share = 6 // rt.world_size

    def full(x: np.ndarray) -> np.ndarray:
        if len(x) != share:
            raise ValueError("not the rows I know")
        return x

    f = rt.function(full)
    assert told(lambda: [f(Y) for _ in range(3)]) == []


def test_the_quiet_repeated_call_looks_for_nothing(rt: Any) -> None:
    share = 6 // rt.world_size
    f = rt.function(lambda x: np.full(share, x.sum()))
    f(Y), f(Y)
    before = dict(rt.counters)
    for _ in range(5):
        f(Y)
    assert rt.counters["messages_down"] - before["messages_down"] == 5 * rt.world_size


# ----- the evidence, by itself


def look(shapes: RowShapes, length: int, rows: list[int], num_slices: int = 1, others: Any = ()) -> str:
    return shapes.look(["sum"], [Leaf((length,), np.dtype(float))], rows, num_slices, others, 0)


def test_evidence() -> None:
    shapes = RowShapes("f")
    assert look(shapes, 3, [3, 3]) == ""
    assert shapes.suspects == (0,)
    assert shapes.is_open
    assert look(shapes, 3, [3, 3]) == ""
    assert 'outputs="gather"' in look(shapes, 4, [4, 4])
    assert not shapes.is_open

    for length, rows in ((3, [4, 4]), (3, [4, 3]), (0, [0, 0])):
        shapes = RowShapes("f")
        assert look(shapes, length, rows) == ""
        assert not shapes.is_open

    shapes = RowShapes("f")
    assert look(shapes, 3, [3, 3]) == look(shapes, 4, [4, 4], others="another input") == ""
    assert look(shapes, 4, [4, 4], others=None) == look(shapes, 5, [5, 5], others=None) == ""
    assert shapes.is_open
    assert look(shapes, 4, [3, 3]) == ""
    assert not shapes.is_open

    shapes = RowShapes("f")
    assert look(shapes, 2, [6, 6], num_slices=3) == ""
    assert shapes.is_open
    assert look(RowShapes("f"), 2, [5, 5], num_slices=2) == ""


def test_a_script_is_told_and_can_silence_it() -> None:
    script(
        """
        import warnings
        synk.fork(2, backend="numpy")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            synk.function(lambda x: x * 2)(np.arange(6.))
        print([each.category.__name__ for each in caught])
        warnings.simplefilter("ignore", synk.errors.RowShapedOutput)
        print(synk.function(lambda x: x * 2)(np.arange(6.)))
        """
    ).check("['RowShapedOutput']\n[3. 5. 7.]\n")


def test_a_worker_that_ends_in_the_shorter_call_is_told_of(reused: Callable[..., Any]) -> None:
    """Its state is gone, and the call before, which is over, keeps its result."""
    rt = reused(2)

    def fragile(x: np.ndarray) -> np.ndarray:
        if len(x) < 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return x * 2

    f = rt.function(fragile, outputs="sum")
    with pytest.warns(RuntimeWarning, match=r"second run of 'fragile' on rank 0.*SIGKILL"):
        result = f(Y)
    np.testing.assert_array_equal(result, 2 * (Y[:3] + Y[3:]))
    np.testing.assert_array_equal(f(Y), result)


def test_a_time_limit_ends_no_worker_in_the_shorter_call(reused: Callable[..., Any]) -> None:
    rt = reused(2)

    def slow(x: np.ndarray) -> np.ndarray:
        time.sleep(0.3 if len(x) == 3 else 3600)
        return x * 2

    pids = rt.function(lambda row: os.getpid(), outputs=None)(np.ones(2))
    f = rt.function(slow, outputs="sum")
    np.testing.assert_array_equal(f(Y, timeout=3.0), 2 * (Y[:3] + Y[3:]))
    assert rt.function(lambda row: os.getpid(), outputs=None)(np.ones(2)) == pids
