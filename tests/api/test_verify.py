"""``f.verify``: what it says of each output, and that nothing of its runs is left."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
from support.harness import script

import synk

X = np.random.default_rng(0).normal(size=(7, 3))


def verdicts(report: Any) -> list[str]:
    return [output.verdict for output in report.outputs]


on_nodes_too = pytest.mark.parametrize("kind", [2, "1+1"])


# ----- which op

RIGHT: dict[str, Callable[[np.ndarray], Any]] = {
    "avg": lambda x: x.mean(axis=0),
    "sum": lambda x: x.sum(axis=0),
    "prod": lambda x: x.prod(axis=0),
    "min": lambda x: x.min(axis=0),
    "max": lambda x: x.max(axis=0),
    "gather": lambda x: 2 * x,
    "first": lambda x: np.arange(3),
}


@pytest.mark.sampled(20)
@pytest.mark.parametrize("where", [1, 2, 3, "inline", "1+1", "1+3"])
@pytest.mark.parametrize("op", RIGHT)
def test_the_right_op_is_confirmed_and_a_wrong_one_corrected(shared_runtimes: Any, where: Any, op: str) -> None:
    rt = shared_runtimes[where]
    report = rt.function(RIGHT[op], outputs=op).verify(X)
    assert report, report
    assert verdicts(report) == ["equal"]
    for wrong in set(RIGHT) - {op} if rt.world_size > 1 else ():
        report = rt.function(RIGHT[op], outputs=wrong).verify(X)
        if report:  # a constant is also its own average, and the like
            assert op == "first"
            assert wrong in ("min", "max")
        else:
            assert op in report.outputs[0].matching, report


# ----- what it shows where they differ

UNFIT: dict[str, tuple[Any, Callable[[np.ndarray], Any]]] = {
    "first rows": ("gather", lambda x: x[:2]),
    "rows that are new": ("gather", lambda x: np.unique(x[:, 0] > 0)),
    "cumulated": ("gather", lambda x: np.cumsum(x, axis=0)),
    "one row": ("gather", lambda x: x.sum(axis=0)[None]),
    "texts": ("gather", lambda x: [str(len(x))]),
    "a table": ("gather", lambda x: pd.DataFrame({"a": x[:2, 0], "b": ["text"] * len(x[:2])})),
    "labels": ("gather", lambda x: pd.DataFrame({"a": np.zeros(len(x)), "b": [f"{len(x)}"] * len(x)})),
    "a sum": ("avg", lambda x: x.sum(axis=0)),
    "NaN in a part": ("max", lambda x: np.where(x[:1].sum() > x.sum(), np.nan, x.sum())),
    "a number": ("gather", lambda x: float(x.sum())),
}


@pytest.mark.parametrize("kind", UNFIT)
def test_no_difference_of_zero_beside_a_no(shared_runtimes: Any, kind: str) -> None:
    """Where shapes differ it shows them: NumPy knows those of the plain function and of the joined parts."""
    op, body = UNFIT[kind]
    for num_rows in range(3, 8):
        x = np.random.default_rng(num_rows).normal(size=(num_rows, 3))
        function = shared_runtimes[2].function(body, outputs=op)
        report = function.verify(x)
        (output,) = report.outputs
        if output.verdict == "equal":
            continue
        assert output.difference != 0, report
        assert "0.0e+00" not in repr(report)
        if op == "gather" and kind != "a number":
            parts, whole = [body(part) for part in np.array_split(x, 2)], body(x)
            shapes = (sum(map(len, parts)), *np.shape(whole)[1:]), np.shape(whole)
            shown = f"parallel {shapes[0]}, serial {shapes[1]}"
            assert (shown in repr(report)) == (shapes[0] != shapes[1]), report
            assert output.shapes == ({} if shapes[0] == shapes[1] else dict(zip(("parallel", "serial"), shapes)))


def test_the_shapes_of_a_plain_function_that_differs(shared_runtimes: Any) -> None:
    program = os.getpid()

    def first(x: np.ndarray) -> np.ndarray:
        return x[: 3 if os.getpid() == program else None]

    report = shared_runtimes[2].function(first, outputs="gather").verify(np.arange(7.0))
    assert report.outputs[0].shapes == {"serial": (7,), "plain": (3,)}
    assert "serial (7,), plain (3,)" in repr(report)


def test_the_shapes_of_a_variable(shared_runtimes: Any) -> None:
    w = shared_runtimes[2].shared(np.zeros((4, 3)), sharded=True)

    def keep(x: np.ndarray) -> float:
        w.value = x[:2]
        return 0.0

    report = shared_runtimes[2].function(keep, outputs="first").verify(X)
    assert report.outputs[1].shapes == {"parallel": (4, 3), "serial": (2, 3)}


@on_nodes_too
def test_each_output_is_reported_by_its_place(shared_runtimes: Any, kind: Any) -> None:
    rt = shared_runtimes[kind]
    x = np.arange(6.0)
    report = rt.function(
        lambda x: {"loss": (x.sum(), x.max()), "size": [len(x), str(len(x))], "parts": len(x)},
        outputs={"loss": ("avg", "max"), "size": ("sum", "first"), "parts": None},
        name="f",
    ).verify(x)
    assert not report
    outputs = {output.name: output for output in report.outputs}
    assert {name: output.verdict for name, output in outputs.items()} == {
        "['loss'][0]": "different",
        "['loss'][1]": "equal",
        "['parts']": "one per rank",
        "['size'][0]": "equal",
        "['size'][1]": "different",
    }
    assert outputs["['loss'][0]"].difference == 15.0 - 7.5
    assert outputs["['loss'][0]"].matching == ("sum",)
    text = repr(report)
    assert text.splitlines()[0] == "'f' against the plain function and its serial call:"
    assert "['loss'][0]  avg    NO             yes           7.5e+00             sum" in text
    assert {name: output.plain_verdict for name, output in outputs.items()} == {
        "['loss'][0]": "equal",
        "['loss'][1]": "equal",
        "['parts']": "",
        "['size'][0]": "equal",
        "['size'][1]": "equal",
    }


@on_nodes_too
def test_outputs_that_cannot_be_combined_are_reported_with_the_error(shared_runtimes: Any, kind: Any) -> None:
    rt = shared_runtimes[kind]
    report = rt.function(lambda x: (x.sum(), 2 * x)).verify(np.arange(5.0))
    assert [output.matching for output in report.outputs] == [("sum",), ("gather",)]
    assert "CollectiveMismatch: cannot avg output 1" in repr(report)
    report = rt.function(len).verify(np.arange(5.0))
    assert not report
    assert report.outputs[0].matching == ("sum",)
    assert "TypeError: cannot average the output of 'len'" in repr(report)


@on_nodes_too
def test_what_is_not_data_parallel_is_no_op(shared_runtimes: Any, kind: Any) -> None:
    report = shared_runtimes[kind].function(lambda x: np.median(x, axis=0)).verify(X)
    assert not report
    assert report.outputs[0].matching == ()


@on_nodes_too
def test_what_the_function_raises_comes_out_as_itself(shared_runtimes: Any, kind: Any) -> None:
    with pytest.raises(ZeroDivisionError):
        shared_runtimes[kind].function(lambda x: 1 / 0).verify(X)
    with pytest.raises(ValueError, match="cannot scatter inputs"):
        shared_runtimes[kind].function(lambda x, y: x).verify(X, X[:3])


@on_nodes_too
def test_tolerances(shared_runtimes: Any, kind: Any) -> None:
    rt = shared_runtimes[kind]
    x = np.concatenate([np.full(500, 1e8), np.full(500, -1e8), [1e-3]]) + np.random.default_rng(0).normal(size=1001)
    total = rt.function(lambda x: np.cumsum(x)[-1], outputs="sum")  # a sum that cancels out, in another order
    assert total.verify(x, rtol=1e-3)
    near = rt.function(lambda x: x.sum() + 1e-3, outputs="sum")
    assert not near.verify(np.ones(8))
    assert near.verify(np.ones(8), rtol=1e-3)
    assert near.verify(np.ones(8), atol=2e-3)
    single = rt.function(lambda x: x.mean(axis=0))
    assert single.verify(X.astype("float32"))
    assert single.verify(X.astype("float16"))
    assert rt.function(lambda x: x.max()).verify(np.full(6, np.nan))


def test_the_call_may_come_in_any_way(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]
    f = rt.function(lambda w, x: (x @ w, (x @ w).mean()), bcast_inputs="w", outputs=("gather", "avg"))
    w = np.ones(3)
    for x in (X, rt.data(X), rt.shared(X, sharded=True), X[:2]):
        assert f.verify(w, x)
        assert f.verify(w=w, x=x)
        assert f.verify(w, x, num_slices=2)
        assert f.verify(w, x, batch=[1, 0, 1])
    big = rt.function(lambda x: (2 * x, x.sum(axis=0)), outputs=("gather", "sum"))
    assert big.verify(np.random.default_rng(0).normal(size=(5, 100_000)))


# ----- nothing is kept


def test_shared_variables_hold_what_they_held(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    w, s, total = rt.shared(np.zeros(3), name="w"), rt.shared(np.arange(5.0), sharded=True), rt.shared(np.zeros(3))

    def step(x: np.ndarray) -> Any:
        w.value = w.value - synk.comm.all_reduce(x.mean(axis=0))
        s.value = s.value + 1
        return x.mean(axis=0)

    f = rt.function(step, name="step")
    count = rt.function(lambda x: (len(x), [x.sum(axis=0)]), outputs="sum", updates=[(total, "sum")])
    for _ in range(2):
        report = f.verify(X)
        assert report
        assert [output.name for output in report.outputs[1:]] == ["variable 'w'", f"variable {s.name!r}"]
        count.verify(X, num_slices=2)
        np.testing.assert_array_equal(w.value, np.zeros(3))
        np.testing.assert_array_equal(s.value, np.arange(5.0))
        assert not np.any(synk.gather(total))
    f(X)
    np.testing.assert_allclose(w.value, -X.mean(axis=0), rtol=1e-12)
    np.testing.assert_array_equal(s.value, np.arange(5.0) + 1)


def test_replicas_that_drift_are_found(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    w = rt.shared(np.zeros(3), name="w")

    def step(x: np.ndarray) -> None:
        w.value = w.value - x.mean(axis=0)  # the gradient of its own rows

    report = rt.function(step).verify(X)
    assert not report
    assert [(output.name, output.verdict) for output in report.outputs] == [("variable 'w'", "different")]


def test_state_of_closures_and_generators_is_put_back(
    reused: Callable[..., Any], capfd: pytest.CaptureFixture[str]
) -> None:
    rt = reused(2)
    state, rng = {"calls": 0.0}, np.random.default_rng(3)

    def draw(x: np.ndarray) -> Any:
        state["calls"] += 1
        print("drawn", flush=True)
        return state["calls"], rng.random(), np.random.random()

    f = rt.function(draw, outputs=None)
    rt.function(lambda x: np.random.seed(7), outputs=None)(np.zeros(2))
    first = f(X)
    report = f.verify(X)
    second = f(X)
    expected_rng, expected_global = np.random.default_rng(3), np.random.RandomState(7)
    for step, got in enumerate((first, second)):
        assert len(set(got)) == 1
        assert got[0] == (step + 1, expected_rng.random(), expected_global.random_sample())
    assert "draws random numbers" in repr(report)
    assert capfd.readouterr().out.count("drawn") == 4


def test_nothing_in_the_program_itself_is_changed_inline(shared_runtimes: Any) -> None:
    import random

    state: list[int] = []
    np.random.seed(0)
    random.seed(0)
    f = shared_runtimes["inline"].function(lambda x: state.append(1) or np.random.random() + random.random())
    f.verify(X)
    assert np.random.random() == np.random.RandomState(0).random_sample()
    assert random.random() == random.Random(0).random()


@on_nodes_too
def test_buffers_of_a_torch_module_stay(shared_runtimes: Any, kind: Any) -> None:
    torch = pytest.importorskip("torch")
    rt = shared_runtimes[kind]
    kept = rt.resident(torch.nn.BatchNorm1d(3, dtype=torch.float64))
    f = rt.function(lambda x: kept.value(x).mean(), framework="torch", name="norm", updates=kept)
    report = f.verify(X)
    assert verdicts(report) == ["equal"]
    assert not kept.get(0).running_mean.any()
    assert not kept.get(1).running_mean.any()
    f(X)
    np.testing.assert_allclose(kept.get(0).running_mean, 0.1 * X[:4].mean(axis=0), rtol=1e-6)


@on_nodes_too
def test_objects_that_a_rank_has_made_are_not_touched(shared_runtimes: Any, kind: Any) -> None:
    state: dict[str, Any] = {"calls": 0}

    def hold(x: np.ndarray) -> Any:
        state["lock"] = __import__("threading").Lock()  # no pickle can copy it
        state["calls"] += 1
        return state["calls"], x.max()

    f = shared_runtimes[kind].function(hold, outputs=("first", "max"))
    assert f(np.zeros(6))[0] == 1
    report = f.verify(np.arange(6.0))
    assert verdicts(report) == ["equal", "equal"]
    assert f(np.zeros(6))[0] == 2


# ----- what is named instead of compared


@on_nodes_too
@pytest.mark.parametrize(
    ("kernel", "options", "verdict"),
    [
        (lambda x: np.random.normal(), {}, "random"),
        (lambda x: np.random.default_rng().normal(), {}, "random"),
        (lambda x: synk.comm.rank, {"outputs": "sum", "per_rank": True}, "per rank"),
        (lambda x: len(x), {"outputs": None}, "one per rank"),
    ],
)
def test_what_cannot_be_compared_is_named(
    shared_runtimes: Any, kind: Any, kernel: Any, options: Any, verdict: str
) -> None:
    report = shared_runtimes[kind].function(kernel, **options).verify(X)
    assert verdicts(report) == [verdict]
    assert bool(report) == (verdict == "one per rank")
    assert len(report.notes) == 2 * (verdict != "one per rank")  # what it is, and that the plain function was left out


def test_a_collective_with_the_serial_result_is_equal(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x: x - synk.comm.all_reduce(x.mean(axis=0)), outputs="gather")
    report = f.verify(X)
    assert report
    assert "uses synk.comm" in repr(report)  # so the plain function was left out


@on_nodes_too
def test_it_computes_with_what_has_changed_since_the_function_was_sent(reused: Callable[..., Any], kind: Any) -> None:
    rt = reused(kind)
    scale = np.ones(100_000)
    f = rt.function(lambda x: scale[12_345] * x.sum(), outputs="sum")
    rt.distribute()
    for value in (2.0, 3.0):
        scale[12_345] = value
        assert f.verify(X)
        assert f(X) == pytest.approx(value * X.sum())


def test_its_calls_are_in_no_profile(shared_runtimes: Any) -> None:
    """It is in no profile, and the calls after it take the short way again."""
    rt = shared_runtimes[2]
    f = rt.function(lambda x: x.sum(), outputs="sum", name="profiled")
    f(X)
    f.verify(X)
    assert rt.profile.records["profiled"].num_calls == 1
    f(X)
    before = dict(rt.counters)
    f(X)
    assert rt.counters["bytes_down"] - before["bytes_down"] == 2 * 8


def test_a_script_asks_and_is_answered() -> None:
    with warnings.catch_warnings():
        script(
            """
            synk.fork(2, backend="numpy")
            calls = [0]
            def total(x):
                calls[0] += 1
                return x.sum()
            x = np.arange(6.)
            wrong, right = synk.function(total), synk.function(total, outputs="sum")
            print(bool(wrong.verify(x)), bool(right.verify(x)))
            print(wrong.verify(x))
            """
        ).check(
            "False True\n"
            "'total' against the plain function and its serial call:\n"
            "output  op   equals serial  equals plain  largest difference  would match\n"
            "result  avg  NO             yes           7.5e+00             sum\n"
        )


@pytest.mark.parametrize("kind", ["1+1", "1+3"])
def test_nothing_is_left_of_it_on_nodes(shared_runtimes: Any, kind: str) -> None:
    """Also where outputs are large, and compared rank by rank."""
    rt = shared_runtimes[kind]
    seen = rt.resident([0])

    def step(x: np.ndarray) -> tuple[Any, Any]:
        seen.value.append(len(x))
        return np.outer(x, x).sum(axis=0).repeat(100), x[:, None].repeat(100, axis=1)

    f = rt.function(step, outputs=("avg", "gather"), updates=[seen], name="step on nodes")
    x = np.arange(1.0, 1001.0)
    report = f.verify(x)
    assert verdicts(report) == ["different", "equal"]
    assert rt.function(step, outputs=("sum", "gather"), updates=[seen]).verify(x).outputs[0].verdict == "different"
    assert [seen.get(rank) for rank in range(rt.world_size)] == [[0]] * rt.world_size
    f(x)
    assert rt.profile.records["step on nodes"].num_calls == 1
    assert [len(seen.get(rank)) for rank in range(rt.world_size)] == [2] * rt.world_size
