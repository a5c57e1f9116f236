"""The phases of training steps in the profile and in a trace: forward, backward, reduce, optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from trainings import batches, mlp, plain_step

import synk
from synk._wire.cell import cell

torch = pytest.importorskip("torch")

SLEEP_S = 0.1
NAMES = ["forward", "backward", "reduce", "optimizer"]


def slow_step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    time.sleep(SLEEP_S * synk.comm.rank)
    return plain_step(model, optimizer, x, y)


def test_the_profile_and_a_trace_show_the_phases_of_each_rank(
    reused: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict names the rank that computes longest, and in which phase."""
    rt, model = reused(2), mlp()
    monkeypatch.setattr(cell, "runtime", rt)
    monkeypatch.setattr(cell, "session", rt._session)
    rep = synk.torch.replicate(model, torch.optim.SGD(model.parameters(), lr=0.1), runtime=rt)
    run = rep.function(slow_step, outputs="avg")
    run(*batches(1)[0])
    rt.profile.reset()
    with synk.profiler.trace() as trace:
        for _ in range(4):
            run(*batches(1)[0])
    first, second = (each for each in rt.profile.ranks if each.function == run.name)
    for each in (first, second):
        assert [*each.phases] == [*NAMES, "copy"]
        assert sum(each.phases[name] for name in NAMES) <= each.function_s - each.wait_s
    assert second.phases["forward"] >= 4 * SLEEP_S
    verdict = rt.profile.records[run.name].verdict()
    assert verdict.startswith("rank 1 computes ") and "the others, in its forward pass: " in verdict
    for process in (1, 2):
        assert {*NAMES} <= {row[2] for row in trace.rows() if row[0] == process and row[1].startswith("span")}
