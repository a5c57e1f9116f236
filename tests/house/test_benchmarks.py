"""The programs behind the numbers of the documentation: they run, and they tell a miss from a pass."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.harness import PACKAGE_FOLDER

from benchmarks._bars import Bar


@pytest.mark.parametrize(
    ("must", "aim", "at_least", "verdicts"),
    [
        (1.0, 0.5, False, {0.4: "aim", 0.5: "aim", 0.51: "pass", 1.0: "pass", 1.01: "MISS"}),
        (0.93, 0.96, True, {0.97: "aim", 0.96: "aim", 0.95: "pass", 0.93: "pass", 0.92: "MISS"}),
    ],
)
def test_a_bar_tells_a_miss_from_a_pass(must: float, aim: float, at_least: bool, verdicts: dict[float, str]) -> None:
    bar = Bar("a quantity", must, aim, lambda results: ([], False), at_least=at_least)
    assert {value: bar.verdict(value) for value in verdicts} == verdicts


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
