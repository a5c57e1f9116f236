"""The programs behind the numbers of the documentation: they run, and they tell a miss from a pass."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.harness import PACKAGE_FOLDER

from benchmarks._bars import Bar
from benchmarks._report import measured, table


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


def test_a_table_has_a_column_for_each_heading() -> None:
    lines = table(("fault", "hangs"), [["a death", "0"]]).splitlines()
    assert [[cell.strip() for cell in line.strip("|").split("|")] for line in (lines[0], lines[2])] == [
        ["fault", "hangs"],
        ["a death", "0"],
    ]


def test_the_pictures_get_medians_of_the_rounds_in_seconds() -> None:
    machine = {"date": "2026-01-02", "cores": 2, "processor": "a processor", "python": "3.11"}
    copies = [{"one copy": 1.0, "synk.data": 2.0, "plain array": 3.0, "result": each} for each in (4.0, 9.0, 5.0)]
    sums = [{"synk": {"inner_s": 3.0}, "mpi4py (mpich)": {"inner_s": each}} for each in (1.0, 2.0, 7.0)]
    found = measured(
        {
            "machine": machine,
            "costs": {"copies": {"1 MB": copies}, "workers": {"2": [1.0, 3.0, 2.0]}},
            "collectives": {"comm.all_reduce 8 B": {"mpi4py (mpich)": sums}},
        }
    )
    assert found["copies"] == {way: {str(1 << 20): value} for way, value in (copies[0] | {"result": 5.0}).items()}
    assert found["workers"] == {"2": 2.0}
    assert found["sums"] == {"synk": {"8": 3.0}, "mpi4py (mpich)": {"8": 2.0}}
    assert set(measured({"machine": machine})) == set()


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
