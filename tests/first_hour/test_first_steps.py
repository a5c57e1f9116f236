"""What somebody tries in the first hour with the library, mistakes included."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import ctrl_c_when, failpoint, process_stat, wait_for, waits_in_synk

import synk

X = np.arange(11.0)


# ----- Ctrl-C and limits while the workers come up


def test_limits_and_ctrl_c_while_the_workers_start_lose_none_of_them(runtime: Callable[..., Any]) -> None:
    rt = runtime(2, failpoint("start.ready", 1, action="stop"))
    slow = rt._session.by_rank[1].process.pid
    f = rt.function(lambda x: x.sum(), outputs="sum")
    with pytest.raises(synk.errors.CallTimeout, match="still starting"):
        f(X, timeout=0.1)
    with pytest.raises(KeyboardInterrupt), ctrl_c_when(waits_in_synk):
        f(X)
    assert wait_for(lambda: process_stat(slow)[1] == "T")
    os.kill(slow, signal.SIGCONT)
    assert f(X) == 55


# ----- inside a worker


def test_verbs_are_refused_inside_a_worker(runtime: Callable[..., Any]) -> None:
    """In workers that have run nothing of the package yet. Making a function is harmless; calling it is not."""
    f = runtime(2).function(lambda x, verb: eval(f"synk.{verb}", {"synk": synk, "x": x}), bcast_inputs="verb")
    for verb in ("data(x)", "shared(x)", "function(len)(x)", "fork(2)", "distribute()", "close()"):
        with pytest.raises(synk.errors.ReentrancyError):
            f(X, verb)


# ----- arguments


def test_a_named_dtype_converts_as_numpy_does(shared_runtimes: Any) -> None:
    rt = shared_runtimes[1]
    for value, dtype in (([-1, 300], "u1"), ([np.nan, 1.5], "i4"), ([1, "a"], "f8")):
        with pytest.raises((OverflowError, ValueError)) as numpys:
            np.array(value, dtype=dtype)
        with pytest.raises(numpys.type):
            rt.data(value, dtype=dtype)
    assert rt.data([1, 2], dtype="f4").data.tolist() == [1.0, 2.0]


# ----- shared variables


def test_a_variable_is_an_array_to_numpy(shared_runtimes: Any) -> None:
    w = shared_runtimes[2].shared(np.arange(3.0))
    assert np.array(w, dtype="f4").dtype == np.float32
    assert shared_runtimes[2].function(lambda x: np.dot(w, [1, 2, 3]), outputs="first")(X) == 8


def test_a_bfloat16_variable_needs_ml_dtypes(shared_runtimes: Any) -> None:
    """What the master reads of a variable is an array, and NumPy alone has no such dtype."""
    pytest.importorskip("torch")
    rt = shared_runtimes[1]
    w = rt.shared(np.zeros(2, np.float32))

    def assign(x: Any) -> None:
        import sys

        import torch

        sys.modules["ml_dtypes"] = None  # type: ignore[assignment]
        try:
            w.value = x.to(torch.bfloat16)
        finally:
            del sys.modules["ml_dtypes"]

    with pytest.raises(TypeError, match="Install ml_dtypes"):
        rt.function(assign, framework="torch", outputs=None)(np.ones(2))


def test_what_a_runtime_numbers_it_numbers_itself(runtime: Any) -> None:
    """Variables have the same names whatever other runtimes there are."""
    first, second = ([rt.shared(0.0).name, rt.shared(1.0).name] for rt in (runtime(0), runtime(0)))
    assert first == second


# ----- what it is told


def test_a_folder_that_came_later(runtime: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def total(x: Any) -> Any:
        if x[0] > 0:
            import came_later  # type: ignore[import-not-found]

            return came_later.total(x)
        return x.sum()

    rt = runtime(1)
    f = rt.function(total, outputs="sum")
    assert f(X) == X.sum()
    (tmp_path / "came_later.py").write_text("def total(x): return x.sum()\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(ModuleNotFoundError) as caught:
        f(X + 1)
    text = "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])
    assert "the program itself finds 'came_later'" in text and str(tmp_path) in text and "restart()" in text
    rt.restart()
    assert f(X + 1) == (X + 1).sum()
