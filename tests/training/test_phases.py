"""The phases of training steps in the profile and in a trace: forward, backward, reduce, optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from trainings import F, batches, mlp

import synk
from synk._wire.cell import cell

torch = pytest.importorskip("torch")

SLEEP_S = 0.1
NAMES = ["forward", "backward", "reduce", "optimizer"]


def slow_step(model: Any, optimizer: Any, x: Any, y: Any, where: str) -> Any:
    """Sleep on rank 1, in one of the phases."""
    seconds = {name: SLEEP_S if where == name and synk.comm.rank == 1 else 0.0 for name in NAMES}
    optimizer.zero_grad()
    time.sleep(seconds["forward"])
    out = model(x)
    out.register_hook(lambda gradient: time.sleep(seconds["backward"]))
    loss = F.mse_loss(out, y)
    loss.backward()
    handle = optimizer.register_step_pre_hook(lambda *args: time.sleep(seconds["optimizer"]))
    optimizer.step()
    handle.remove()
    return loss


def test_the_profile_and_a_trace_show_the_phases_of_each_rank(
    subtests: Any, reused: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict names the rank that computes longest, and in which phase."""
    rt, model = reused(2), mlp()
    monkeypatch.setattr(cell, "runtime", rt)
    monkeypatch.setattr(cell, "session", rt._session)
    rep = synk.torch.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), runtime=rt)
    verdicts = {
        "forward": "in its forward pass",
        "backward": "in its backward pass",
        "optimizer": "in the optimizer",
    }
    for where, words in verdicts.items():
        with subtests.test(where=where):
            run = rep.function(slow_step, bcast_inputs="where", name=f"slow in {where}")
            run(*batches(1)[0], "")
            rt.profile.reset()
            with synk.profiler.trace() as trace:
                for _ in range(4):
                    run(*batches(1)[0], where)
            first, second = (each for each in rt.profile.ranks if each.function == run.name)
            for each in (first, second):
                assert [*each.phases] == [*NAMES, "copy"]
                assert sum(each.phases[name] for name in NAMES) <= each.function_s - each.wait_s
            assert second.phases[where] >= 4 * SLEEP_S and second.phases[where] == max(second.phases.values())
            verdict = rt.profile.records[run.name].verdict()
            assert verdict.startswith("rank 1 computes ") and f"the others, {words}: " in verdict
            assert f"{run.name}: {verdict}" in str(rt.profile).splitlines()
            for process in (1, 2):
                steps = [row[3:] for row in trace.rows() if row[:3] == (process, "0", run.name)]
                parts = [row[2:] for row in trace.rows() if row[0] == process and row[1].startswith("span")]
                assert len(steps) == 4
                for start, duration in steps:
                    inside = [each for each in parts if start - 1e-6 <= each[1] <= start + duration]
                    assert list(dict.fromkeys(name for name, *_ in inside)) == NAMES
                    assert all(sum(each[1:]) <= start + duration + 1e-6 for each in inside)
