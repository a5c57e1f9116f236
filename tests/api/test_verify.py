"""``f.verify``: what it says of each output, against the plain function or the serial call, and that nothing is left;
and ``synk.fork(check=True)``, which verifies the first call of each function and warns of a difference.

The oracle is the plain function: NumPy says which op combines the values of parts to that of all rows.
"""

from __future__ import annotations

import colorsys
import dataclasses
import enum
import fractions
import functools
import itertools
import os
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.tables import named

import synk

X = np.random.default_rng(0).normal(size=(7, 3))
HERE = os.getpid()
GENERATOR = np.random.default_rng(1)


def told(report: Any) -> tuple[str, list[str]]:
    """Return what the call was compared with, and the verdict on each output."""
    return report.oracle, [output.verdict for output in report.outputs]


# ----- which op fits

FITTING: dict[str, Callable[[np.ndarray], Any]] = {
    "avg": lambda x: x.mean(axis=0),
    "sum": lambda x: x.sum(axis=0),
    "prod": lambda x: x.prod(axis=0),
    "min": lambda x: x.min(axis=0),
    "max": lambda x: x.max(axis=0),
    "gather": lambda x: 2 * x,
    "first": lambda x: np.arange(3.0),
}


def test_the_right_op_is_confirmed_and_a_wrong_one_corrected(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    """A constant is also its own average, least and greatest value."""
    cases = list(itertools.product((1, 2, 3, 0, "1+1", "1+3"), FITTING, FITTING))
    for where, right, op in random.Random(1).sample(cases, 40):
        with subtests.test(where=where, right=right, op=op):
            report = shared_runtimes[where].function(FITTING[right], outputs=op).verify(X)
            is_fitting = op == right or where in (1, 0) or (right == "first" and op in ("avg", "min", "max"))
            assert bool(report) == is_fitting, report
            assert report.oracle == "plain"
            if not is_fitting:
                assert right in report.outputs[0].matching, report


# ----- the verdict on each output


class Verdict(NamedTuple):
    """What a report says of a function of X: the verdicts, a text, what fits where one differs, and the oracle."""

    fn: Callable[[Any], Any]
    options: dict[str, Any] | None = None
    verdicts: Sequence[str] = ("different",)
    text: str = ""
    matching: tuple[str, ...] = ()
    oracle: str = "plain"


def other_here(here: Any, elsewhere: Any) -> Callable[[Any], Any]:
    """Return a function that gives another value in the program than on a worker."""
    program = HERE
    return lambda x: here if os.getpid() == program else elsewhere


@dataclasses.dataclass
class Label:
    text: str


class Mode(enum.Enum):
    FAST = 1


class Pair(NamedTuple):
    label: Label
    mode: Mode


@dataclasses.dataclass
class Own:
    pair: Any


class InPlace(synk.Op):
    """Adds the ranks' values into the first of them."""

    def combine(self, values: list[Any], rows: list[int]) -> Any:
        values[0] *= 2
        for value in values[1:]:
            values[0] += value
        return values[0]


NESTED = {"a": 1.0, "b": (2.0, None)}
LEFT_OUT = "Not compared with the plain function: "
FIRST = {"outputs": "first"}

EQUAL = ["equal"]
VERDICTS = {
    "median": Verdict(lambda x: np.median(x, axis=0)),
    "two ops": Verdict(
        lambda x: (x.sum(), x.max()), {"outputs": ("avg", "max")}, ["different", "equal"], "NO", ("sum",)
    ),
    "unequal parts": Verdict(lambda x: 2 * x, text="CollectiveMismatch: cannot avg the output", matching=("gather",)),
    "an integer": Verdict(len, text="TypeError: cannot average the output of 'len'", matching=("sum",)),
    "NaN": Verdict(lambda x: x.max() * np.nan, {"outputs": "max"}, EQUAL),
    "classes": Verdict(lambda x: (Pair(Label("a"), Mode.FAST), Own(Mode.FAST), [1]), FIRST, ["equal"] * 4),
    "None": Verdict(len, {"outputs": None}, ["one per rank"]),
    "two ops for one value": Verdict(
        lambda x: x.sum(), {"outputs": ("avg", "max")}, text="cannot match the outputs", matching=("sum",)
    ),
    "one op for two values": Verdict(
        lambda x: (x.sum(), 1), {"outputs": ("sum",)}, text="ValueError: cannot match the outputs"
    ),
    "other keys": Verdict(lambda x: {"b": x.sum()}, {"outputs": {"a": "sum"}}, text="ValueError: cannot match"),
    "other keys in the program": Verdict(other_here({"a": 1.0, "c": 2.0}, {"a": 1.0}), {"outputs": {"a": "first"}}),
    "an exception in the program beside None": Verdict(
        lambda x, here=HERE: {}[here] if os.getpid() == here else None,
        FIRST | {"bcast_inputs": "here"},
        text="The plain function raised KeyError",
    ),
    "a partial": Verdict(functools.partial(lambda x, power: (x**power).sum(), power=3), {"outputs": "sum"}, EQUAL),
    "a float of float32": Verdict(lambda x: float(x.astype("f4").mean()), {}, EQUAL),
    "nearly": Verdict(lambda x: float(len(x) * 1e5 + (len(x) == 7)), {"outputs": "sum"}),
    "records with NaN": Verdict(
        lambda x: [{"row": float(row), "gap": (float("nan"), np.datetime64("NaT"))} for row in x[:, 0]],
        {"outputs": "gather"},
        EQUAL,
    ),
    "an op in place": Verdict(lambda x: x.sum(axis=0), {"outputs": InPlace()}, matching=("sum",)),
    "random": Verdict(lambda x: np.random.normal(), {}, ["random"], "draws random numbers"),
    "default_rng()": Verdict(lambda x: np.random.default_rng().normal(), {}, ["random"], "draws random"),
    "captured generator": Verdict(lambda x: GENERATOR.normal(size=len(x)).mean(), {}, ["random"]),
    "per rank": Verdict(
        lambda x: synk.comm.rank, {"outputs": "sum", "per_rank": True}, ["per rank"], LEFT_OUT, oracle="serial"
    ),
    "comm": Verdict(
        lambda x: x - synk.comm.all_reduce(x.mean(axis=0)),
        {"outputs": "gather"},
        EQUAL,
        LEFT_OUT + "it uses synk.comm",
        oracle="serial",
    ),
    "other value in the program": Verdict(other_here(8.0, 1.0), FIRST, text="7.0e+00"),
    "other nesting in the program": Verdict(other_here({"a": 1.0, "c": 2.0}, NESTED), FIRST),
    "other object in the program": Verdict(other_here(Own(1), Own(2)), FIRST),
    "an exception in the program": Verdict(
        lambda x, here=HERE: x.sum() / int(os.getpid() != here),
        {"outputs": "sum", "bcast_inputs": "here"},
        text="The plain function raised FloatingPointError: divide by zero",
    ),
}


def test_verdicts(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    for number, (name, case) in enumerate(VERDICTS.items()):
        kind = "1+1" if number % 3 == 0 else 2
        with subtests.test(name, kind=kind), np.errstate(all="raise"):
            report = shared_runtimes[kind].function(case.fn, **case.options or {}).verify(X)
            assert told(report) == (case.oracle, [*case.verdicts])
            assert bool(report) == ({*case.verdicts} <= {"equal", "one per rank"})
            assert report.outputs[0].verdict != "different" or report.outputs[0].matching == case.matching
            assert case.text in repr(report)


def test_each_output_is_reported_by_its_place(shared_runtimes: Any) -> None:
    def f(x: Any) -> Any:
        rows = [[0.0, str(len(x))] for _ in x]
        return {"loss": (x.sum(), x.max()), "size": [len(x), str(len(x))], "parts": len(x), "rows": rows}

    outputs = {"loss": ("avg", "max"), "size": ("sum", "first"), "parts": None, "rows": "gather"}
    report = shared_runtimes[2].function(f, outputs=outputs).verify(np.arange(6.0))
    assert {output.name: output.verdict for output in report.outputs} == {
        "['loss'][0]": "different",
        "['loss'][1]": "equal",
        "['parts']": "one per rank",
        "['rows']": "different",
        "['size'][0]": "equal",
        "['size'][1]": "different",
    }
    text = repr(report)
    assert text.splitlines()[0] == "'f' against the plain function:"
    assert "['loss'][0]  avg     NO            7.5e+00             sum" in text
    assert not any(output.difference == 0 for output in report.outputs if output.verdict == "different")


def test_tolerances(rt: Any) -> None:
    near = rt.function(lambda x: x.sum() + 1e-3, outputs="sum")
    assert not near.verify(np.ones(8))
    assert near.verify(np.ones(8), rtol=1e-3)
    assert near.verify(np.ones(8), atol=2e-3)


def test_what_a_call_raises_comes_out_as_itself(shared_runtimes: Any) -> None:
    with pytest.raises(TypeError, match="got output_subset=, expected all"):
        shared_runtimes[2].function(lambda x: (x.sum(), len(x)), outputs="sum").verify(np.ones(4), output_subset=[0])
    with pytest.raises(ZeroDivisionError):
        shared_runtimes["1+1"].function(lambda x: 1 / 0).verify(X)
    with pytest.raises(ValueError, match="cannot scatter inputs"):
        shared_runtimes[2].function(lambda x, y: x).verify(X, X[:3])


def test_it_calls_what_a_call_would_call(rt: Any, subtests: pytest.Subtests) -> None:
    """In blocks; and what no call accepts, it refuses."""
    f = rt.function(lambda x: x.sum(), outputs="avg", reproducible=2)
    assert f.verify(X).outputs[0].difference == pytest.approx(abs(f(X) - X.sum()))
    w, seen = rt.shared(np.zeros(3)), rt.resident([0])

    def assign(x: np.ndarray) -> None:
        w.value = x[0]

    sliced = {
        "assigned": rt.function(assign),
        "updates": rt.function(lambda x: (x.sum(), x.mean(axis=0)), outputs="sum", updates=w),
        "resident": rt.function(lambda x: x.sum(), outputs="sum", updates=seen),
    }
    for kind, f in sliced.items():
        with subtests.test(kind), pytest.raises(ValueError, match="num_slices"):
            f.verify(X, num_slices=2)


# ----- however the call comes


def test_the_call_may_come_in_any_way(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    rt = shared_runtimes[3]
    f = rt.function(lambda w, x: (x @ w, (x @ w).mean()), bcast_inputs="w", outputs=("gather", "avg"))
    rows = {"array": X, "Data": rt.data(X), "list": X.tolist(), "sharded": rt.shared(X, sharded=True), "few": X[:2]}
    options: list[dict[str, Any]] = [{}, {"num_slices": 2}, *({"batch": b} for b in (2, slice(None, None, -2), [1, 0]))]
    for number, ((kind, x), option) in enumerate(itertools.product(rows.items(), options)):
        with subtests.test(kind, **option):
            report = f.verify(np.ones(3), x, **option) if number % 2 else f.verify(x=x, w=np.ones(3), **option)
            assert told(report) == ("serial" if kind == "sharded" else "plain", ["equal"] * 2), report


def test_arrays_are_those_of_jax(shared_runtimes: Any) -> None:
    """Of torch: tests/engine/test_tensors.py."""
    pytest.importorskip("jax")

    def total(x: Any, w: Any) -> Any:
        assert type(x["a"]).__module__.startswith("jax")
        assert type(w["w"]).__module__.startswith("jax")
        return {"sum": (x["a"] * w["w"]).sum(), "rows": x["a"]}

    rt, x, w = shared_runtimes[1], X.astype(np.float32), {"w": np.full(3, 2.0, np.float32), "name": "w"}
    f = rt.function(total, bcast_inputs="w", outputs={"sum": "sum", "rows": "gather"}, framework="jax")
    for rows in (x, x.tolist(), rt.data(x)):
        assert told(f.verify({"a": rows}, w)) == ("plain", ["equal"] * 2)


def test_an_attribute_that_only_the_program_has_is_found(shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in (colorsys, fractions.Fraction):
        monkeypatch.setattr(owner, "scale", 2.0, raising=False)  # of the standard library, so it is imported anew there
        f = shared_runtimes[2].function(lambda x, owner=owner: getattr(owner, "scale", 1.0) * x.sum(), outputs="sum")
        assert told(f.verify(X)) == ("plain", ["different"])


def test_what_lives_on_the_workers_is_not_compared_with_the_plain_function(rt: Any, subtests: pytest.Subtests) -> None:
    w, total, shard = rt.shared(np.ones(3), name="w"), rt.shared(np.zeros(3)), rt.shared(X, sharded=True)
    kept, variables, objects = rt.resident([1.0]), "shared variables", "objects that live on the workers"
    cases = {
        "captured variable": (variables, rt.function(lambda x: x.mean() * w.value[0]).verify(X)),
        "passed variable": (variables, rt.function(lambda x, w: (x * w).mean(), bcast_inputs="w").verify(X, w)),
        "passed rows": (variables, rt.function(lambda v: v["a"].mean()).verify({"a": shard})),
        "captured rows": (variables, rt.function(lambda: shard.value.mean()).verify()),
        "updates": (variables, rt.function(lambda x: (x.mean(), [x.mean(axis=0)]), updates=total).verify(X)),
        "captured object": (objects, rt.function(lambda x: x.mean() * kept.value[0]).verify(X)),
        "passed object": (objects, rt.function(lambda x, k: x.mean() * k[0], bcast_inputs="k").verify(X, kept)),
    }
    for case, (why, report) in cases.items():
        with subtests.test(case):
            assert repr(report).splitlines()[0].endswith(" against its serial call:")
            assert f"{LEFT_OUT}it uses {why}" in "".join(report.notes)
            assert report.oracle == "serial"


# ----- nothing is left of it


def test_shared_variables_hold_what_they_held(rt: Any) -> None:
    w, s = rt.shared(np.zeros(3), name="w"), rt.shared(np.arange(5.0), sharded=True, name="s")

    def step(x: np.ndarray) -> Any:
        w.value = w.value - synk.comm.all_reduce(x.mean(axis=0))
        s.value = s.value + 1
        return x.mean(axis=0)

    f = rt.function(step)
    for _ in range(2):
        report = f.verify(X)
        assert report
        assert [output.name for output in report.outputs[1:]] == ["variable 'w'", "variable 's'"]
        np.testing.assert_array_equal(w.value, np.zeros(3))
        np.testing.assert_array_equal(s.value, np.arange(5.0))
    f(X)
    np.testing.assert_allclose(w.value, -X.mean(axis=0), rtol=1e-12)
    np.testing.assert_array_equal(s.value, np.arange(5.0) + 1)


def test_new_values_are_combined_by_their_own_ops(rt: Any) -> None:
    w, t, s = rt.shared(np.zeros(3)), rt.shared(0.0), rt.shared(np.arange(5.0), sharded=True)
    for updates, new in (
        ([w], lambda x: x.mean(axis=0)),
        ([(t, "sum"), w], lambda x: [x.sum(), x.mean(axis=0)]),
        ([s], lambda x: s.value + 1),
    ):
        f = rt.function(lambda x, new=new: (float(len(x)), new(x)), outputs="sum", updates=updates)
        report = f.verify(X)
        assert report, report


def test_replicas_and_shards_that_differ_are_found(rt: Any) -> None:
    w, s = rt.shared(np.zeros(3), name="w"), rt.shared(np.arange(5.0), sharded=True, name="s")

    def step(x: np.ndarray) -> None:
        w.value = w.value - x.mean(axis=0)  # the gradient of its own rows
        if synk.comm.rank == 0:
            s.value = s.value + 1

    report = rt.function(step).verify(X)
    assert {output.name: output.verdict for output in report.outputs} == dict.fromkeys(
        ["variable 'w'", "variable 's'"], "different"
    )
    np.testing.assert_array_equal(s.value, np.arange(5.0))


@pytest.mark.parametrize("rt", [2, "1+1", "1+3"], indirect=True)
def test_objects_on_the_workers_stay(rt: Any) -> None:
    """Also where outputs are large, and compared rank by rank."""
    seen = rt.resident([0])

    def step(x: np.ndarray) -> tuple[Any, Any]:
        seen.value.append(len(x))
        return np.outer(x, x).sum(axis=0).repeat(100), x[:, None].repeat(100, axis=1)

    f = rt.function(step, outputs=("avg", "gather"), updates=[seen])
    x = np.arange(1.0, 1001.0)
    assert [output.verdict for output in f.verify(x).outputs] == ["different", "equal"]
    assert [seen.get(rank) for rank in range(rt.world_size)] == [[0]] * rt.world_size
    f(x)
    assert [len(seen.get(rank)) for rank in range(rt.world_size)] == [2] * rt.world_size


@pytest.mark.parametrize("kind", [2, 0])
def test_the_program_is_as_it_was(shared_runtimes: Any, capfd: pytest.CaptureFixture[str], kind: Any) -> None:
    seen: list[int] = []
    array, given, w, here = np.zeros(3), np.arange(6.0), np.ones(2), HERE

    class Counter:
        calls = 0
        all: list[int] = []  # noqa: RUF012  # it is the point that instances share it

        def count(self) -> None:
            Counter.calls += 1
            self.all.append(1)
            seen.append(2)

    counter, method = Counter(), Counter.count

    def total(x: np.ndarray, w: list[np.ndarray]) -> Any:
        array[:] += 1
        counter.count()
        if os.getpid() == here:  # a worker draws nothing, so it is no random function
            random.random()
            np.random.random()
        if x.flags.writeable:  # of a call arguments are read-only
            x[0] += 0.5
            w[0][0] += 1
        print("said")
        warnings.warn("told", stacklevel=1)
        return x.sum()

    random.seed(3)
    np.random.seed(3)
    shared_runtimes[kind].function(total, bcast_inputs="w", outputs="sum").verify(given, [w])
    assert (random.random(), np.random.random()) == (random.Random(3).random(), np.random.RandomState(3).random())
    assert seen == counter.all == []
    assert (Counter.calls, Counter.count) == (0, method)
    assert not array.any()
    np.testing.assert_array_equal(given, np.arange(6.0))
    np.testing.assert_array_equal(w, np.ones(2))
    if kind == 2:  # without workers the calls are made here, and print
        assert {"said", "told"}.isdisjoint("".join(capfd.readouterr()).split())


MODULE = """
seen = []
scale = 2.0
def total(x):
    seen.append(1)
    return helped(x)
def helped(x):
    seen.append(2)
    return scale * x.sum()
"""


def test_a_function_of_a_module_changes_a_copy(
    shared_runtimes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pickle would only name it."""
    (tmp_path / "verified_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    import verified_module as module  # type: ignore[import-not-found]

    wrong, right = (shared_runtimes[2].function(module.total, outputs=op) for op in ("avg", "sum"))
    module.scale = 1.0
    assert not wrong.verify(X) and right.verify(X)
    assert module.seen == [] and right(X) == pytest.approx(X.sum())
    del sys.modules["verified_module"]


# ----- fork(check=True)

ROWS = np.arange(6.0)
TOTAL = named("total", lambda x: x.sum())
TEXT = "the first call of 'total' differs: 'total' against the plain function:"

WAYS: dict[str, Callable[[Any], Any]] = {
    "call": lambda f: f(ROWS),
    "submit": lambda f: f.submit(ROWS).result(),
    "repeat": lambda f: f.repeat(1, ROWS),
    "time limit": lambda f: f(ROWS, timeout=60.0),
}


@pytest.fixture
def checking() -> Iterator[synk.Runtime]:
    with synk.Runtime(2, backend="numpy", check=True) as rt, warnings.catch_warnings():
        warnings.simplefilter("error")
        yield rt


def test_a_difference_warns_once(checking: Any, subtests: pytest.Subtests) -> None:
    for way, call in WAYS.items():
        with subtests.test(way):
            f = checking.function(TOTAL, outputs="avg")
            with pytest.warns(RuntimeWarning, match=TEXT) as caught:
                assert call(f) == 7.5  # the user's word
            assert [each.filename for each in caught] == [__file__]
            assert call(f) == 7.5
    with pytest.warns(RuntimeWarning, match=TEXT):
        assert checking.function(TOTAL, outputs="avg", retry=1)(ROWS) == 7.5


def test_what_is_equal_or_raises_is_as_without(checking: Any) -> None:
    rt, seen = checking, checking.resident([0])

    def count(x: Any) -> Any:
        seen.value[0] += 1
        return x.sum()

    assert rt.function(TOTAL, outputs="sum")(ROWS) == 15.0
    assert rt.function(count, outputs="sum", updates=seen)(ROWS) == 15.0
    assert seen.get() == [1]
    for f in (rt.function(lambda x: 1 / 0), rt.function(lambda x: 1 / 0, outputs="sum")):
        with pytest.raises(ZeroDivisionError):
            f(ROWS)
    assert rt.profile.records["total"].num_calls == 1


def test_a_warning_may_be_an_error(checking: Any) -> None:
    f = checking.function(TOTAL, outputs="avg")
    with pytest.raises(RuntimeWarning, match=TEXT):
        f(ROWS)
    assert f(ROWS) == 7.5


def test_a_check_that_cannot_be_made_warns(checking: Any, tmp_path: Path, subtests: pytest.Subtests) -> None:
    for way, call in WAYS.items():
        with subtests.test(way):

            def total(x: Any, way: str = way) -> Any:
                (tmp_path / f"{way} {os.getpid()}").touch(exist_ok=False)  # so the second run on each worker fails
                return x.sum()

            f = checking.function(total, outputs="sum")
            text = "the first call of 'total' could not be verified: FileExistsError"
            with pytest.warns(RuntimeWarning, match=text) as caught:
                assert call(f) == 15.0
            assert [each.filename for each in caught] == [__file__]
