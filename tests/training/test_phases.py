"""The phases of training steps in the profile and in a trace: forward, backward, reduce, optimizer, copy."""

from __future__ import annotations

import time
import types
from collections.abc import Callable
from typing import Any

import pytest
from support.models import batches, mlp

import synk
from synk._wire import spans as _spans
from synk._wire.cell import cell

torch = pytest.importorskip("torch")

SLEEP_S = 0.03
NAMES = ["forward", "backward", "reduce", "optimizer"]
VERDICTS = {
    "forward": "in its forward pass",
    "backward": "in its backward pass",
    "optimizer": "in the optimizer",
}


class SleepyGradient(torch.autograd.Function):  # type: ignore[misc]
    """The identity, whose backward pass takes a while."""

    @staticmethod
    def forward(ctx: Any, x: Any, seconds: float) -> Any:
        ctx.seconds = seconds
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        time.sleep(ctx.seconds)
        return gradient, None


class SleepySGD(torch.optim.SGD):  # type: ignore[misc]
    """An optimizer whose step takes a while on rank 1, if it is told to."""

    seconds = 0.0

    def step(self, closure: Any = None) -> Any:
        time.sleep(self.seconds)
        return super().step(closure)


def sleepy_step(model: Any, optimizer: Any, x: Any, y: Any, where: str) -> Any:
    """Sleep on rank 1, in one of the phases."""
    seconds = {name: SLEEP_S if where == name and synk.comm.rank == 1 else 0.0 for name in NAMES}
    optimizer.zero_grad()
    time.sleep(seconds["forward"])
    loss = torch.nn.functional.mse_loss(SleepyGradient.apply(model(x), seconds["backward"]), y)
    loss.backward()
    optimizer.seconds = seconds["optimizer"]
    optimizer.step()
    return loss


def build() -> tuple[Any, ...]:
    model = mlp()
    return model, SleepySGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize("where", VERDICTS)
def test_the_profile_names_the_slow_rank_and_its_phase(reused: Callable[..., Any], where: str) -> None:
    rt = reused(2)
    run = synk.torch.replicate(*build(), runtime=rt).function(
        sleepy_step, bcast_inputs="where", name=f"slow in {where}"
    )
    (x, y), *_ = batches(1)
    run(x, y, "")
    rt.profile.reset()
    for _ in range(4):
        run(x, y, where)
    first, second = (each for each in rt.profile.ranks if each.function == run.name)
    for each in (first, second):
        assert [*each.phases] == [*NAMES, "copy"] and each.phases["copy"] > 0
        assert sum(each.phases[name] for name in NAMES) <= each.function_s - each.wait_s
    assert second.phases[where] > 4 * SLEEP_S > 4 * first.phases[where]
    assert all(second.phases[name] < 2 * SLEEP_S for name in NAMES if name != where)
    if where != "optimizer":  # after that nobody waits for it
        assert first.wait_s > 3 * SLEEP_S and first.phases["reduce"] < SLEEP_S  # to wait is no work
    verdict = rt.profile.records[run.name].verdict()
    assert verdict.startswith("rank 1 computes ") and f"the others, {VERDICTS[where]}: " in verdict
    text = str(rt.profile)
    assert "training step" in text and f"{run.name}: {verdict}" in text.splitlines()
    assert "training steps</caption>" in rt.profile._repr_html_()


def test_a_trace_shows_them_inside_of_the_step(reused: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    rt = reused(2)
    monkeypatch.setattr(cell, "runtime", rt)
    monkeypatch.setattr(cell, "session", rt._session)
    run = synk.torch.replicate(*build(), runtime=rt).function(sleepy_step, bcast_inputs="where", name="traced")
    (x, y), *_ = batches(1)
    run(x, y, "forward")
    with synk.profiler.trace() as t:
        for _ in range(3):
            run(x, y, "forward")
    run(x, y, "")  # what is not traced leaves no spans
    for process in (1, 2):
        steps = [row[3:] for row in t.rows() if row[:3] == (process, "0", "traced")]
        parts = [row[2:] for row in t.rows() if row[0] == process and row[1].startswith("span")]
        assert len(steps) == 3 and {name for name, *_ in parts} == set(NAMES)
        for start, duration in steps:
            inside = [each for each in parts if start - 1e-6 <= each[1] and sum(each[1:]) <= start + duration + 1e-6]
            order = list(dict.fromkeys(name for name, *_ in inside))
            assert order == NAMES
            ends = [sum(each[1:]) for each in inside]
            assert all(end <= each[1] + 1e-6 for end, each in zip(ends, inside[1:]))  # they follow one another
            assert SLEEP_S < sum(each[2] for each in inside) <= duration
            if process == 2:
                assert max(inside, key=lambda each: each[2])[0] == "forward"
    with synk.profiler.trace() as empty:
        pass
    assert not [row for row in empty.rows() if row[0]]


def test_functions_that_change_other_objects_have_no_phases(reused: Callable[..., Any]) -> None:
    rt = reused(2)
    run = synk.torch.replicate(*build(), runtime=rt).function(sleepy_step, bcast_inputs="where", name="with phases")
    (x, y), *_ = batches(1)
    seen = rt.resident([])
    note = rt.function(lambda x: seen.value.append(len(x)), outputs=None, changes=[seen], name="without phases")
    for _ in range(3):
        run(x, y, "")
        note(x.numpy())
    found = {each.function: each.phases for each in rt.profile.ranks}
    assert found["with phases"] and not found["without phases"]


def test_a_closure_is_forward_backward_and_reduction(reused: Callable[..., Any]) -> None:
    rt = reused(2)
    model = mlp()
    rep = synk.torch.replicate(model, torch.optim.LBFGS(model.parameters(), max_iter=3), runtime=rt)

    @rep.function(name="with a closure")  # type: ignore[untyped-decorator]
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        def closure() -> Any:
            optimizer.zero_grad()
            time.sleep(0.01)
            loss = torch.nn.functional.mse_loss(model(x), y)
            loss.backward()
            return loss

        return optimizer.step(closure)

    step(*batches(1)[0])
    for each in rt.profile.ranks:
        if each.function == "with a closure":
            assert each.phases["forward"] > 0.03 and min(each.phases[name] for name in NAMES) > 0


def test_data_parallel_has_a_row_for_each_pass(reused: Callable[..., Any]) -> None:
    rt = reused(2)
    model = synk.torch.DataParallel(mlp(), runtime=rt)
    (x, y), *_ = batches(1)
    for _ in range(2):
        torch.nn.functional.mse_loss(model(x), y).backward()
    found = {each.function for each in rt.profile.ranks}
    assert {"Sequential.forward", "Sequential.backward"} <= found
    for name in ("Sequential.forward", "Sequential.backward"):
        assert rt.profile.records[name].num_calls == 2


def test_phases_are_nvtx_ranges_where_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    pushed: list[Any] = []
    stand_in = types.SimpleNamespace(push_range=pushed.append, pop_range=lambda: pushed.append(None))
    stand_in.annotate = lambda name: lambda fn: fn
    with synk.Runtime(1, inline=True) as rt:
        run = synk.torch.replicate(*build(), runtime=rt).function(sleepy_step, bcast_inputs="where")
        (x, y), *_ = batches(1)
        run(x, y, "")
        monkeypatch.setattr("synk.torch._phases.nvtx", lambda: stand_in)
        backward = torch.autograd.backward
        run(x, y, "")
        assert torch.autograd.backward is backward
    assert [each for each in pushed if each] == [
        "forward", "backward", "reduce", "backward", "forward", "optimizer", "forward"
    ]  # fmt: skip
    assert pushed[1::2] == [None] * (len(pushed) // 2)
    assert _spans.nvtx() is None
