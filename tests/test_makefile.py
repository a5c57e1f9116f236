"""What make would run is a program that the shell understands; nothing is run."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


TARGETS = ("help", "demo", "test", "jax", "pytensor", "bench", "checks", "docs", "lint", "quick", "smoke", "gpu-test")


@pytest.mark.parametrize("target", TARGETS)
def test_the_commands_of_a_target_are_whole(target: str, tmp_path: Path) -> None:
    plan = subprocess.run(
        ["make", "-n", f"VENV={tmp_path / 'venv'}", target], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    for line in plan.replace("\\\n", " ").splitlines():
        done = subprocess.run(["sh", "-n", "-c", line], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stderr}"
