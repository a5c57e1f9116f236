"""The programs behind the numbers of the documentation: they run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.harness import PACKAGE_FOLDER


@pytest.mark.parametrize("count", [1, pytest.param(3, marks=pytest.mark.storm)])
def test_injected_faults_are_counted(count: int) -> None:
    """``make faults``, small: no hang, no wrong answer, nothing left behind."""
    kinds = ["kill-one", "interrupt"]
    ran = subprocess.run(
        [sys.executable, "-m", "benchmarks.faults", "--count", str(count), "--only", *kinds],
        cwd=PACKAGE_FOLDER,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ran.stdout.splitlines() if "|" in line][2:]
    assert len(rows) == len(kinds)
    for row in rows:
        assert row[1] == str(count), row
        assert row[3:6] == ["0", "0", "0"], row
