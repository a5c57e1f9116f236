"""``f.plan`` against the calls that follow it: the count of new calls in the profile says what they really were."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import kill_and_wait, pids

X = np.arange(12.0).reshape(6, 2)
FACTOR = 2.0
MANY_NBYTES = 1 << 20

Change = Callable[["Case"], None]


class Case:
    """A function whose calls fit the one before, and what it captured."""

    def __init__(self, rt: Any, name: str, **options: Any) -> None:
        self.rt, self.name = rt, name
        table = self.table = {"a": 1.0}
        self.extra: Any = rt.data(np.ones(3))
        self.f = rt.function(lambda x: (x * table["a"] * FACTOR).sum(), outputs="sum", name=name, **options)
        gc.collect()  # functions of earlier tests: a call that has some dropped is new
        for _ in range(4):
            self.f(X)

    @property
    def num_new(self) -> int:
        return int(self.rt.profile.records[self.name].num_new)

    def change_table(self) -> None:
        self.table["a"] += 1.0

    def drop_data(self) -> None:
        self.extra = None

    def call_with_timeout(self) -> None:
        self.f(X, timeout=60)

    def call_with_float32(self) -> None:
        self.f(X.astype(np.float32))

    def fail(self) -> None:
        with pytest.raises(IndexError, match="cannot select rows"):
            self.f(X, batch=7)


def nothing(case: Case) -> None:
    """Change nothing."""


CASES: dict[str, tuple[Change, Any, dict[str, Any], str]] = {
    "like the last": (nothing, X, {}, ""),
    "other numbers": (nothing, X + 1, {}, ""),
    "fewer rows": (nothing, X, {"batch": 4}, ""),
    "a slice": (nothing, X, {"batch": slice(1, 5)}, ""),
    "num_slices": (nothing, X, {"num_slices": 2}, "num_slices="),
    "indices": (nothing, X, {"batch": [1, 2, 3]}, "batch="),
    "rows for one rank": (nothing, X, {"batch": 1}, "with this batch other ranks"),
    "timeout": (nothing, X, {"timeout": 60}, "timeout="),
    "after a timeout": (Case.call_with_timeout, X, {}, ""),
    "dtype": (nothing, X.astype(np.float32), {}, "x has dtype float32, was float64"),
    "shape": (nothing, X[:, :1].copy(), {}, "x has shape (6, 1), was (6, 2)"),
    "rows": (nothing, X[:4].copy(), {}, "x has shape (4, 2), was (6, 2)"),
    "no array": (nothing, X.tolist(), {}, "x is of type list"),
    "after another dtype": (Case.call_with_float32, X, {}, "x has dtype float64, was float32"),
    "captured": (Case.change_table, X, {}, "captured"),
    "dropped": (Case.drop_data, X, {}, "the workers must be told"),
    "refused": (Case.fail, X, {}, ""),
}


def compare(case: Case, x: Any, options: dict[str, Any], why: str) -> None:
    """Compare the plan of a call with what the call then is, and the reasons of both."""
    plan = case.f.plan(x, **options)
    before = case.num_new
    case.f(x, **options)
    assert plan.is_compiled == (case.num_new == before), plan.why_new
    assert plan.is_compiled == (not why)
    assert why in plan.why_new
    if why:
        assert why in case.rt.profile.records[case.name].why_new or why in ("captured", "the workers must be told")
        assert plan.why_new in repr(plan)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("where", [2, "inline"])
def test_a_plan_says_what_the_next_call_is(shared_runtimes: Any, where: Any, name: str) -> None:
    change, x, options, why = CASES[name]
    case = Case(shared_runtimes[where], f"planned {name}")
    change(case)
    if where == "inline" and name == "rows for one rank":
        why = ""
    compare(case, x, options, why)


@pytest.mark.parametrize("where", [2, "inline"])
def test_a_global_that_has_changed(shared_runtimes: Any, where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    case = Case(shared_runtimes[where], "planned global")
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    compare(case, X, {}, "captured")
    assert case.f(X) == 3.0 * X.sum()


def test_a_setting_that_has_changed(shared_runtimes: Any) -> None:
    case = Case(shared_runtimes[2], "planned setting")
    with np.errstate(under="raise"):
        compare(case, X, {}, "a setting of a library")


@pytest.mark.parametrize(
    ("option", "why"), [({"retry": 1}, "retry="), ({"reproducible": True}, "reproducible=")], ids=["retry", "blocks"]
)
def test_options_of_the_function(shared_runtimes: Any, option: dict[str, Any], why: str) -> None:
    compare(Case(shared_runtimes[2], f"planned {why}", **option), X, {}, why)


def test_a_worker_that_was_started_again(reused: Any) -> None:
    case = Case(reused(2), "planned restart")
    kill_and_wait(pids(case.rt)[0])
    with pytest.warns(RuntimeWarning, match="started again"):
        compare(case, X, {}, "the workers must be told")
    gc.collect()
    for _ in range(3):
        case.f(X)
    compare(case, X, {}, "")


def test_outputs_of_another_dtype(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: x.sum() if x[0] < 5 else np.float32(x.sum()), outputs="sum", name="other outputs")
    for _ in range(4):
        f(np.ones(6))
    f(np.full(6, 9.0))
    plan = f.plan(np.ones(6))
    assert plan.why_new.startswith("the outputs of the call before had other dtypes")
    before = rt.profile.records["other outputs"].num_new
    f(np.ones(6))
    assert rt.profile.records["other outputs"].num_new == before + 1
    assert rt.profile.records["other outputs"].why_new == plan.why_new


def test_an_object_that_may_hold_arrays(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x, y: x.sum(), bcast_inputs="y", outputs="sum", name="planned object")
    for _ in range(4):
        f(X, {1: {(2, 3)}})
    assert f.plan(X, {1: {(2, 3)}}).why_new.startswith("y is an object that may hold arrays")


def test_results_that_are_kept_leave_no_buffer(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(lambda x: np.ones(MANY_NBYTES), outputs="sum", name="kept results")
    kept = [f(X) for _ in range(6)]
    for _ in range(3):
        plan, before = f.plan(X), rt.profile.records["kept results"].num_new
        kept.append(f(X))
        assert plan.is_compiled == (rt.profile.records["kept results"].num_new == before)
    del kept


def test_a_plan_sends_nothing_and_leaves_the_next_call_as_it_was(shared_runtimes: Any) -> None:
    case = Case(shared_runtimes[2], "planned only")
    workers = case.rt._session.workers
    state, sent = workers.log.state, case.rt.counters["messages_down"]
    for change, x, options, _ in CASES.values():
        if change is nothing:
            case.f.plan(x, **options)
    assert (workers.log.state, case.rt.counters["messages_down"]) == (state, sent)
    compare(case, X, {}, "")


def test_over_nodes(shared_runtimes: Any) -> None:
    f = shared_runtimes["1+1"].function(lambda x: x.sum(), outputs="sum")
    for _ in range(3):
        f(X)
    assert f.plan(X).why_new == "the workers are on several nodes"
