"""Time limits: which numbers are one; and workers that never come up."""

from __future__ import annotations

import decimal
import fractions
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
from support.harness import EVERY_TIME, assert_right, children, failpoint, pids, same_workers

from synk._master.processes.reports import signs_of_life
from synk.errors import CallTimeout, ClosedError, StartupError

Fork = Callable[..., Any]

LIMITS = (
    1e7,
    1e300,
    float("inf"),
    10**400,
    2**31,
    np.float32(1e9),
    np.int64(5_000_000),
    fractions.Fraction(10**9),
    decimal.Decimal("1e12"),
)
NO_LIMITS: tuple[Any, ...] = (0, -1, -1e300, -(10**400), float("nan"), "5", b"5", [1], 1j, object)


def test_any_positive_number_is_a_time_limit(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    rt = shared_runtimes[2]
    total = rt.function(lambda x: x.sum(), outputs="sum")
    x = np.arange(5.0)
    with same_workers(rt):
        for limit in LIMITS:
            with subtests.test(limit=f"{type(limit).__name__} {str(limit)[:8]}"):
                assert total(x, timeout=limit) == total.serial(x, timeout=limit) == 10
                assert total.submit(x, timeout=limit).result(limit) == 10
        for limit in NO_LIMITS:
            told = r"cannot set a timeout: got .*, expected seconds above 0, or None"
            with subtests.test(limit=f"{type(limit).__name__} {str(limit)[:8]}"), pytest.raises(ValueError, match=told):
                total(x, timeout=limit)


def test_a_limit_without_end_is_waited_for_while_a_call_is_explained(
    runtime: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before and after the report of a long call, which is due before the limit."""
    for stuck_after in ("0.001", "0", "1e10"):
        monkeypatch.setenv("SYNK_STUCK_AFTER", stuck_after)
        rt = runtime(1, timeout=float("inf"))
        total = rt.function(lambda x: x.sum(), outputs="sum")
        assert total(np.ones(3)) == total(np.ones(3), timeout=1e7) == 3
        assert total.submit(np.ones(3), timeout=1e10).result(float("inf")) == 3


# ----- workers that are stuck as they start


@pytest.fixture
def short_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait for workers that start, and give no sign of life, for 2 s only."""
    monkeypatch.setattr("synk._master.workers.starting.START_TIMEOUT_S", 2.0)


@pytest.mark.usefixtures("short_start")
@pytest.mark.parametrize("action", ["stop", "sleep"])
def test_A12_a_worker_that_is_stuck_as_it_starts_is_replaced(runtime: Fork, action: str) -> None:
    """The time counts from the start of its process on, however short the limits of the calls are."""
    rt = runtime(2, failpoint("start.ready", 1, 1, action), max_restarts=10)
    first = set(children(os.getpid()))
    total = rt.function(lambda x: x.sum(), outputs="sum")
    with pytest.raises(CallTimeout, match="still starting"):
        total(np.arange(4.0), timeout=0.05)
    with pytest.warns(RuntimeWarning, match=r"rank 1 .*was not up 2 s after its last sign of life, was killed"):
        assert total(np.arange(4.0)) == 6
    after = pids(rt)
    assert after[0] in first and after[1] not in first
    assert first - set(children(os.getpid())), "who was stuck was reaped"
    assert_right(rt)


@pytest.mark.usefixtures("short_start")
@pytest.mark.parametrize("max_restarts", [0, 1])
def test_A12_a_worker_that_never_comes_up_ends_the_runtime(runtime: Fork, max_restarts: int) -> None:
    rt = runtime(2, failpoint("start.ready", 1, EVERY_TIME, "stop"), max_restarts=max_restarts)
    total = rt.function(lambda x: x.sum())
    with pytest.raises(StartupError, match=r"rank 1 of 2 was not up 2 s after its last sign of life"):
        total(np.arange(4.0))
    with pytest.raises(ClosedError):
        total(np.ones(2))
    assert rt.is_closed


def test_reading_is_a_sign_of_life(tmp_path: Path) -> None:
    """A worker on a slow file system has time, as long as it reads."""
    path = tmp_path / "library"
    path.write_bytes(bytes(100_000))
    program = f"print(flush=True); input(); open({str(path)!r}, 'rb').read(); print(flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=PIPE, stdout=PIPE) as child:
        assert child.stdin is not None and child.stdout is not None
        child.stdout.readline()
        before = signs_of_life(child.pid)
        assert before > 0
        child.stdin.write(b"\n")
        child.stdin.flush()
        child.stdout.readline()
        assert signs_of_life(child.pid) >= before + 100_000
        child.stdin.close()
    assert signs_of_life(child.pid) == signs_of_life(-1) == 0
