"""Every demo checks its own numbers, and says nothing on stderr. Each notebook runs from top to bottom.

Each runs as a program of its own in the storm. Here most run in this process, which imports torch, SciPy and the like
once. Each function is verified at its first call: see ``support/verified.py``.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support import harness
from support.harness import ctrl_c_when
from support.verified import all_verified, built, verified

ROOT = Path(__file__).resolve().parents[2]
DEMOS = sorted([*(ROOT / "demos").glob("[0-9]*.py"), *(ROOT / "demos" / "seeds").glob("[0-9]*.py")])
SMALL = {
    "00_bootstrap.py",
    "06_transfers.py",
    "10_digits_softmax.py",
    "14_overnight.py",
    "20_torch_digits.py",
    "23_resume.py",
    "000_kalman.py",
    "32_halo.py",
    "40_two_nodes.py",
}

ALONE = {"01_intro.py"}
"""The first of them all runs as a program also outside the storm."""

CHILDREN = {"14_overnight.py": ["walks.journal"], "23_resume.py": ["checkpoint.pt"]}
"""What a demo that starts itself as a child gives it. Here only the child runs, which does all but be killed."""

NEEDS = {"001_theano.py": "pytensor"}
"""A demo that ends at once, and says why, where this package is not installed."""

WITHOUT_SERIAL = {"001_training.py", "22_fsdp.py", "40_two_nodes.py"}
"""Functions of process groups, which all workers must run: they have no serial call, and compare with one process. So
does a training function that says how many ranks took part. And calls over nodes, which cannot be verified."""


def test_the_demos_are_found() -> None:
    assert {"01_intro.py", "02_data.py", "04_batch.py", "10_digits_softmax.py"} <= {path.name for path in DEMOS}


def test_a_small_speed_up_is_explained(reused: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    explain, rt = runpy.run_path(str(ROOT / "demos" / "limits.py"))["explain"], reused(2)
    for other_cores, job_rate, limit in (
        (1.0, 0.0, "the other programs are the limit"),
        (0.0, 1e9, "memory is the limit"),
        (0.0, 0.0, "Neither"),
    ):
        said = explain(1.1, rt, other_cores, job_rate).splitlines()
        assert said[0] == "A speed-up of 1.10 is small. Two measurements:"
        assert f"used {other_cores:.1f} of the 2 cores" in said[1]
        assert f"moves {job_rate:.1f} GB/s" in said[2]
        assert limit in said[3]


def arguments(path: Path) -> list[str]:
    return [str(path), *(["--size", "small"] if path.name in SMALL else [])]


@pytest.mark.parametrize(
    "path",
    [pytest.param(path, marks=pytest.mark.storm if path.name not in ALONE else []) for path in DEMOS],
    ids=lambda path: path.stem,
)
def test_demo_checks_its_numbers_and_equals_its_serial_calls(path: Path, tmp_path: Path) -> None:
    """The workers of those with a serial call are forked, except in the storm."""
    search_path = os.pathsep.join([str(ROOT), str(ROOT / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])])
    verified = [] if path.name in WITHOUT_SERIAL else ["-m", "support.verified"]
    one_thread = {"OMP_NUM_THREADS": "1"}  # threads that wait take cores of others
    how = {"SYNK_TEST_FORKS_WORKERS": "1"} if harness.forks_workers else {}
    finished = subprocess.run(
        [sys.executable, "-W", "error", *verified, *arguments(path)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": search_path, **one_thread, **how},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.stderr == ""
    assert finished.returncode == 0
    assert finished.stdout


@pytest.mark.parametrize("path", [path for path in DEMOS if path.name not in ALONE], ids=lambda path: path.stem)
def test_demo_in_this_process_equals_its_serial_calls(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if path.name in NEEDS:
        pytest.importorskip(NEEDS[path.name])
    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(path.parent)
    monkeypatch.setattr(sys, "argv", [*arguments(path), *CHILDREN.get(path.name, [])])
    for name in ("OMP_NUM_THREADS", "PYTENSOR_FLAGS"):  # which demos set, and which are put back
        monkeypatch.setenv(name, "1")
    monkeypatch.delenv("PYTENSOR_FLAGS")
    ended = contextlib.suppress(SystemExit) if path.name in CHILDREN else contextlib.nullcontext()
    with contextlib.nullcontext() if path.name in WITHOUT_SERIAL else all_verified(), ended:
        runpy.run_path(str(path), run_name="__main__")
    built.clear(), verified.clear()  # they hold the functions of the demo, whose globals hold its data
    printed = capfd.readouterr()
    assert printed.err == ""
    assert printed.out


def test_the_demo_for_gpus_says_what_it_needs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine without one; its network has the number of parameters that is published for ResNet-50."""
    path = ROOT / "demos" / "gpu" / "resnet50.py"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr(sys, "argv", [str(path)])
    with pytest.raises(SystemExit, match=r"^2$"):
        runpy.run_path(str(path), run_name="__main__")
    needed = "resnet50: this demo needs an NVIDIA GPU. cannot fork with backend 'cupy'"
    assert capsys.readouterr().err.startswith(needed)
    demo = runpy.run_path(str(path))
    model = demo["resnet50"]()
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032
    images = torch.zeros((2, 64, 64, 3), dtype=torch.uint8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss = demo["step"](model, optimizer, images, torch.tensor([0, 999]))
    assert 0 < float(loss.detach()) < 20
    assert all(parameter.grad is not None for parameter in model.parameters())


# ----- notebooks


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@pytest.mark.parametrize("name", ["tour", "training"])
def test_a_notebook_runs_in_this_process(name: str) -> None:
    """It is interrupted where it says so. A real kernel is of tests/faults/test_notebook.py."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for cell in code_cells(ROOT / "demos" / f"{name}.ipynb"):
        printed, end = io.StringIO(), contextlib.ExitStack()
        if "interrupt" in cell["metadata"].get("tags", ()):
            end.enter_context(pytest.raises(KeyboardInterrupt))
            end.enter_context(ctrl_c_when(printed.getvalue))
        with end, contextlib.redirect_stdout(printed):
            exec("".join(cell["source"]), namespace)


def test_notebooks_hold_no_outputs() -> None:
    notebooks = sorted((ROOT / "demos").glob("*.ipynb"))
    assert [path.stem for path in notebooks] == ["tour", "training"]
    for path in notebooks:
        cells = code_cells(path)
        assert len(cells) > 6
        assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
