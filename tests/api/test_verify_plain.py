"""``f.verify`` against the plain function in the program: what it finds, when it is left out, that nothing is kept."""

from __future__ import annotations

import colorsys
import dataclasses
import enum
import fractions
import os
import pickle
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.harness import script

import synk
from synk._api import plain, plain_copy
from synk._api.verify import Report

X = np.random.default_rng(0).normal(size=(7, 3))
HERE = os.getpid()


def columns(report: Report) -> list[tuple[str, str]]:
    """Return of each output whether it equals the serial one, and the serial one that of the plain function."""
    return [(output.verdict, output.plain_verdict) for output in report.outputs]


def is_left_out(report: Report, why: str) -> bool:
    """Whether a report says that the plain function was not called, for that reason and once."""
    notes = [note for note in report.notes if note.startswith("Not compared with the plain function: ")]
    has_head = repr(report).splitlines()[0].endswith(" against its serial call:")
    return has_head and len(notes) == 1 and why in notes[0] and all(not each.plain_verdict for each in report.outputs)


# ----- what it finds


def test_a_worker_that_computes_something_else_is_found(shared_runtimes: Any) -> None:
    here = HERE
    f = shared_runtimes[2].function(lambda x: (x.sum() + (os.getpid() == here), x.max()), outputs=("sum", "max"))
    report = f.verify(X)
    assert not report
    assert columns(report) == [("equal", "different"), ("equal", "equal")]
    assert report.outputs[0].difference == pytest.approx(1.0)
    head, titles, first, second = repr(report).splitlines()
    assert head == "'<lambda>' against the plain function and its serial call:"
    assert titles.split("  ")[0] == "output"
    at = titles.index("equals plain"), titles.index("largest difference")
    assert (first[slice(*at)].strip(), second[slice(*at)].strip()) == ("NO", "yes")


@pytest.mark.parametrize("owner", [colorsys, fractions.Fraction], ids=["module", "class"])
def test_an_attribute_that_only_the_program_has_is_found(
    shared_runtimes: Any, owner: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "scale", 2.0, raising=False)  # of the standard library, so it is imported anew there
    f = shared_runtimes[2].function(lambda x: getattr(owner, "scale", 1.0) * x.sum(), outputs="sum")
    report = f.verify(X)
    assert columns(report) == [("equal", "different")]
    assert not report
    assert report.outputs[0].difference == pytest.approx(abs(X.sum()))


def test_what_the_plain_function_raises_is_a_difference(shared_runtimes: Any) -> None:
    here = HERE
    f = shared_runtimes[2].function(lambda x: x.sum() / (os.getpid() != here), outputs="sum")
    with np.errstate(all="raise"):
        report = f.verify(X)
    assert columns(report) == [("equal", "different")]
    assert not report
    (note,) = report.notes
    assert "The plain function raised FloatingPointError: divide by zero" in note


def test_another_nesting_of_outputs_is_a_difference(shared_runtimes: Any) -> None:
    here = HERE
    for wrong in ((1.0,), {"a": 1.0, "c": 2.0}, None, 1.0):
        right = {"a": 1.0, "b": (2.0, None)}
        f = shared_runtimes[2].function(lambda x, w=wrong, r=right: w if os.getpid() == here else r, outputs="first")
        report = f.verify(X)
        assert columns(report) == [("equal", "different")] * 2, wrong
        assert "another nesting of outputs" in report.notes[0]


def test_arguments_are_those_that_were_passed(shared_runtimes: Any) -> None:
    """A tensor is an array of NumPy's to a call without a framework."""
    torch = pytest.importorskip("torch")
    rt = shared_runtimes[2]
    report = rt.function(lambda x: x.std() + 0 * len(x), outputs="max").verify(
        torch.arange(5.0)
    )  # torch divides by n - 1
    assert report.outputs[0].plain_verdict == "different"


# ----- what it calls with


def test_data_and_rows_of_numbers_are_arrays(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def total(x: Any, y: Any, w: Any) -> Any:
        assert type(x) is type(y) is np.ndarray
        assert type(w) is list
        return (x * y).sum() * w[0]

    f = rt.function(total, bcast_inputs="w", outputs="sum")
    for x in (rt.data(np.arange(4)), [0, 1, 2, 3], (0, 1, 2, 3)):
        assert columns(f.verify(x, y=np.arange(4), w=[2])) == [("equal", "equal")]


@pytest.mark.parametrize("batch", [None, 3, slice(None, None, -2), [4, -1, 0, 0], np.arange(6) % 2 == 0])
def test_batch_picks_the_rows_of_a_call(shared_runtimes: Any, batch: Any) -> None:
    rt = shared_runtimes[2]
    x = np.arange(6.0)
    weights = rt.data(10.0 ** np.arange(6))
    sparse = pytest.importorskip("scipy.sparse").csr_array(np.diag(x))
    f = rt.function(lambda v, m, s: ((v["x"] * m).sum(), s.sum()), outputs="sum")
    report = f.verify({"x": x, "y": [0] * 6}, weights, sparse, batch=batch)
    assert report, report
    assert columns(report) == [("equal", "equal")] * 2


def test_rows_that_cannot_be_picked_are_a_note(shared_runtimes: Any) -> None:
    rows = pytest.importorskip("jax.numpy").arange(6.0)
    f = shared_runtimes[2].function(lambda x: np.asarray(x).sum(), outputs="sum")
    assert columns(f.verify(rows)) == [("equal", "equal")]
    assert is_left_out(f.verify(rows, batch=3), "batch= picks rows of a ArrayImpl")


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_arrays_are_those_of_the_framework(shared_runtimes: Any, framework: str) -> None:
    module = pytest.importorskip(framework)

    def total(x: Any, w: Any) -> Any:
        assert type(x["a"]).__module__.startswith(framework)
        assert type(w["w"]).__module__.startswith(framework)
        assert w["name"] == "w"
        return {"sum": (x["a"] * w["w"]).sum(), "rows": x["a"]}

    f = shared_runtimes[2].function(
        total, bcast_inputs="w", outputs={"sum": "sum", "rows": "gather"}, framework=framework
    )
    w = {"w": np.full(3, 2.0, np.float32), "name": "w"}
    x = X.astype(np.float32)
    for rows in (x, x.tolist(), shared_runtimes[2].data(x)):
        report = f.verify({"a": rows}, w)
        assert report, report
        assert columns(report) == [("equal", "equal")] * 2
    if framework == "torch":
        assert columns(f.verify({"a": module.from_numpy(x).bfloat16()}, w, batch=[2, 1])) == [("equal", "equal")] * 2


def test_defaults_methods_and_partials_are_the_users(shared_runtimes: Any) -> None:
    import functools

    class Scale:
        def __init__(self, factor: float) -> None:
            self.factor = factor

        def total(self, x: np.ndarray, *, power: int = 2) -> Any:
            return (self.factor * x**power).sum()

    rt = shared_runtimes[2]
    for fn in (Scale(3.0).total, functools.partial(Scale(3.0).total, power=3)):
        assert columns(rt.function(fn, outputs="sum").verify(X)) == [("equal", "equal")]
    f = rt.function(Scale(3.0).total, bcast_inputs="power", outputs="sum")
    assert columns(f.verify(X, power=1, batch=2)) == [("equal", "equal")]


@dataclasses.dataclass
class Label:
    text: str


class Mode(enum.Enum):
    FAST = 1


class Pair(NamedTuple):
    label: Label
    mode: Mode


def test_outputs_of_the_programs_own_classes_are_equal(shared_runtimes: Any) -> None:
    @dataclasses.dataclass
    class Own:
        mode: Any

    kinds = enum.Enum("kinds", "A B")
    f = shared_runtimes[2].function(lambda x: (Pair(Label("a"), Mode.FAST), Own(kinds.B), [1]), outputs="first")
    report = f.verify(X)
    assert report, report
    assert {output.plain_verdict for output in report.outputs} == {"equal"}
    here = HERE
    f = shared_runtimes[2].function(lambda x: Own(kinds.B if os.getpid() == here else kinds.A), outputs="first")
    assert columns(f.verify(X)) == [("equal", "different")]


# ----- nothing is left of it


def test_the_program_is_as_it_was(reused: Callable[..., Any], capfd: pytest.CaptureFixture[str]) -> None:
    seen: list[int] = []
    array, given = np.zeros(3), np.arange(6.0)

    class Counter:
        calls = 0
        all: list[int] = []  # noqa: RUF012  # it is the point that instances share it

        def count(self) -> None:
            Counter.calls += 1
            self.all.append(1)
            seen.append(2)

    counter, method = Counter(), Counter.count

    here = HERE

    def total(x: np.ndarray, w: list[np.ndarray]) -> Any:
        seen.append(1)
        array[:] += 1
        if os.getpid() == here:  # on the workers arguments are read-only
            x[0] += 0.5
            x[0] -= 0.5
            w[0][0] += 1
        counter.count()
        print("said")
        warnings.warn("told", stacklevel=1)
        return x.sum()

    w = np.ones(2)
    report = reused(2).function(total, bcast_inputs="w", outputs="sum").verify(given, [w])
    assert report.outputs[0].plain_verdict == "equal"
    assert seen == counter.all == []
    assert Counter.calls == 0
    assert Counter.count is method
    assert Counter.count.__globals__ is globals()
    assert not array.any()
    np.testing.assert_array_equal(given, np.arange(6.0))
    np.testing.assert_array_equal(w, np.ones(2))
    out, err = capfd.readouterr()
    assert "said" not in out
    assert "told" not in err


def test_generators_are_put_back(shared_runtimes: Any) -> None:
    torch = pytest.importorskip("torch")
    here = HERE

    def draw(x: np.ndarray) -> Any:
        if os.getpid() == here:  # on the workers it draws nothing, so it is no random function
            random.random()
            np.random.random()
            torch.rand(1)
        return x.sum()

    random.seed(3)
    np.random.seed(3)
    torch.manual_seed(3)
    assert columns(shared_runtimes[2].function(draw, outputs="sum").verify(X)) == [("equal", "equal")]
    assert random.random() == random.Random(3).random()
    assert np.random.random() == np.random.RandomState(3).random_sample()
    assert torch.equal(torch.rand(2), torch.rand(2, generator=torch.Generator().manual_seed(3)))


def test_functions_of_the_programs_modules_change_a_copy() -> None:
    """Also those that a pickle would only name."""
    script(
        """
        import pathlib, sys, tempfile
        folder = tempfile.mkdtemp()
        pathlib.Path(folder, "of_mine.py").write_text(
            "import numpy as np\\nseen = []\\nscale = 2.0\\n"
            "def total(x):\\n    seen.append(1)\\n    return helped(x)\\n"
            "def helped(x):\\n    seen.append(2)\\n    return scale * x.sum()\\n"
        )
        sys.path.insert(0, folder)
        import of_mine
        synk.fork(2, backend="numpy")
        f = synk.function(of_mine.total, outputs="sum")
        of_mine.scale = 3.0
        report = f.verify(np.arange(6.0))
        print(bool(report), report.outputs[0].plain_verdict, of_mine.seen, f(np.arange(6.0)))
        """
    ).check("True equal [] 45.0\n")


def test_function_and_arguments_are_pickled_once(shared_runtimes: Any) -> None:
    class Counted:
        pickled = 0

        def __reduce__(self) -> Any:
            type(self).pickled += 1
            return int, ()

    counted, weights = Counted(), np.ones((1000, 300))
    f = shared_runtimes[2].function(lambda x, c: x.sum() * weights[0, 0] + c, bcast_inputs="c", outputs="first")
    call = plain.PlainCall(f._callee, (X, counted), {}, None)
    outputs = call.run(0, 0.0)
    assert Counted.pickled == 1
    assert outputs.leaves == [X.sum()]


# ----- when it is left out


def test_what_lives_on_the_workers_is_left_out(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    w, total, shard = rt.shared(np.ones(3), name="w"), rt.shared(np.zeros(3)), rt.shared(X, sharded=True)
    kept = rt.resident([1.0])
    cases = {
        "captured": rt.function(lambda x: x.mean() * w.value[0]).verify(X),
        "passed": rt.function(lambda x, w: (x * w).mean(), bcast_inputs="w").verify(X, w),
        "passed by rows": rt.function(lambda x: x.mean()).verify(shard),
        "closed over by rows": rt.function(lambda: shard.value.mean()).verify(),
        "in a nesting": rt.function(lambda v: v["a"].mean()).verify({"a": shard}),
        "updates": rt.function(lambda x: (x.mean(), [x.mean(axis=0)]), updates=total).verify(X),
    }
    for case, report in cases.items():
        assert is_left_out(report, "it uses shared variables"), case
    cases = {
        "captured": rt.function(lambda x: x.mean() * kept.value[0]).verify(X),
        "passed": rt.function(lambda x, k: x.mean() * k[0], bcast_inputs="k").verify(X, kept),
        "changes": rt.function(lambda x: (x.mean(), kept.value.append(1.0))[0], updates=kept).verify(X),
    }
    for case, report in cases.items():
        assert is_left_out(report, "it uses objects that live on the workers"), case
        assert report, case


def test_steps_of_replicate_are_left_out(reused: Callable[..., Any]) -> None:
    torch = pytest.importorskip("torch")
    import synk.torch

    rt = reused(2)
    model = torch.nn.Linear(3, 1)
    replicated = synk.torch.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), runtime=rt)

    @replicated.function
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss

    report = step.verify(torch.from_numpy(X).float())
    assert is_left_out(report, "it uses objects that live on the workers")
    evaluate = replicated.function(lambda model, optimizer, x: (model(x) ** 2).mean(), trains=False)
    assert is_left_out(evaluate.verify(torch.from_numpy(X).float()), "it uses objects that live on the workers")


@pytest.mark.parametrize(
    ("kernel", "options", "why"),
    [
        (lambda x: x - synk.comm.all_reduce(x.mean(axis=0)), {"outputs": "gather"}, "it uses synk.comm"),
        (lambda x: x.sum() + 0 * synk.comm.rank, {"outputs": "sum"}, "it uses synk.comm"),
        (lambda x: np.random.normal(size=len(x)), {"outputs": "gather"}, "it draws random numbers"),
        (lambda x: x.max(), {"outputs": "max", "per_rank": True}, "depends on the number of workers"),
    ],
)
def test_what_means_something_else_in_the_program_is_left_out(
    shared_runtimes: Any, kernel: Any, options: Any, why: str
) -> None:
    assert is_left_out(shared_runtimes[2].function(kernel, **options).verify(X), why)


def test_devices_are_left_out(shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: x.sum(), outputs="sum")
    f(X)
    monkeypatch.setattr(rt._session, "has_devices", True)
    assert "devices" in plain.PlainCall(f._callee, (X,), {}, None).why_not()


def test_what_cannot_be_copied_is_left_out(shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def copied(fn: Any, args: Any, kwargs: Any) -> Any:
        return pickle.dumps(threading.Lock())

    monkeypatch.setattr(plain, "copied", copied)
    f = shared_runtimes[2].function(lambda x: x.sum(), outputs="sum")
    report = f.verify(X)
    assert is_left_out(
        report, "it cannot be copied with its arguments (TypeError: cannot pickle '_thread.lock' object)"
    )
    assert columns(report) == [("equal", "")]


def test_what_takes_too_long_or_too_much_is_left_out(shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = np.ones(10_000)
    f = shared_runtimes[2].function(lambda x, y: x.sum() + weights[0] * y.sum(), outputs="sum")
    y = np.ones((7, 1000))
    monkeypatch.setattr(plain_copy, "available_nbytes", lambda: 2 * (weights.nbytes + y.nbytes))
    assert is_left_out(f.verify(X, y), "more than half of the memory that is free")
    monkeypatch.setattr(plain_copy, "available_nbytes", lambda: 3 * (weights.nbytes + y.nbytes))
    assert f.verify(X, y).outputs[0].plain_verdict == "equal"
    monkeypatch.setattr(plain, "MAX_S", 0.0)
    assert is_left_out(f.verify(X, y), "its serial call takes 0 s, expected at most 0 s")


def test_where_there_is_nothing_to_compare_nothing_is_said(shared_runtimes: Any) -> None:
    report = shared_runtimes[2].function(lambda x: len(x), outputs=None).verify(X)
    assert report
    assert report.notes == ()
