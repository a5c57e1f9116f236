"""What ``make test`` makes of tests that fail: what passes when it runs once more, alone, does not fail the run."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]

PROJECT = """
import os, signal
from pathlib import Path
import pytest

def is_first(name):
    mark = Path(__file__).with_suffix("." + name)
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True

def test_passes():
    pass

@pytest.mark.parametrize("case", ["a[b::c]", "d e"])
def test_luck(case):
    print("said before", case)
    assert not is_first(case)

def test_table(subtests):
    for case in "xyz":
        with subtests.test(case=case):
            assert case != "y" or not is_first(case)

@pytest.fixture
def ends_badly():
    yield
    assert not is_first("end")

def test_end(ends_badly):
    pass

def test_never():
    assert 1 == 2

def test_crash():
    if is_first("crash"):
        os._exit(1)

def test_crashes_later():
    if not is_first("crashes later"):
        os._exit(1)
    assert False

def test_interrupts():
    signal.raise_signal(signal.SIGINT)

def test_interrupts_later():
    if not is_first("interrupts later"):
        signal.raise_signal(signal.SIGINT)
    assert False
"""


LUCK = ("test_luck[a[b::c]]", "test_luck[d e]")


@pytest.mark.parametrize(
    ("options", "names", "status", "closing", "flaky"),
    (
        ("-n 1", "passes luck end crash", 0, "2 passed, 4 flaky", ("test_crash", "test_end", *LUCK)),
        ("-n 0 -k", "nothing", 5, "10 deselected", ()),
        ("-n 0", "luck crashes_later", 1, "3 failed", ()),
        ("-n 1 -x", "luck passes", 2, "1 failed", ()),
        ("-n 0", "luck interrupts_later", 2, "1 failed, 2 flaky", LUCK),
    ),
)
def test_what_fails_once_is_no_failure(
    tmp_path: Path, options: str, names: str, status: int, closing: str, flaky: tuple[str, ...]
) -> None:
    (tmp_path / "test_toy.py").write_text(PROJECT)
    chosen = [names] if options.endswith("-k") else [f"test_toy.py::test_{name}" for name in names.split()]
    done = run(tmp_path, *options.split(), *chosen)
    assert done.returncode == status, done.stdout
    lines = done.stdout.splitlines()
    assert re.search(rf"\b{closing}(, \d+ deselected)? in ", lines[-1]), done.stdout
    assert tuple(line.removeprefix("FLAKY test_toy.py::") for line in lines if line.startswith("FLAKY ")) == flaky


def test_the_first_traceback_is_at_the_end(tmp_path: Path) -> None:
    (tmp_path / "test_toy.py").write_text(PROJECT)
    done = run(tmp_path, "-n", "0", "-k", "luck or never or table or end")
    assert done.returncode == 1 and "1 failed, 1 passed, 5 deselected, 4 flaky in " in done.stdout.splitlines()[-1]
    last = done.stdout[done.stdout.index("\nFLAKY test_toy.py::test_luck[a[b::c]]\n") :]
    assert ">       assert not is_first(case)" in last and "said before a[b::c]" in last
    assert "assert 1 == 2" not in last
    assert "(case='y')" in last[last.index("\nFLAKY test_toy.py::test_table\n") :]


def test_a_file_that_cannot_be_imported_fails_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_toy.py").write_text(PROJECT)
    (tmp_path / "test_broken.py").write_text("import nothing_of_that_name")
    done = run(tmp_path, "-n", "1", "-k", "passes")
    assert done.returncode in (1, 2) and "1 error in " in done.stdout.splitlines()[-1], done.stdout


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pytest in a folder as ``make test`` does; lines that it prints stand in one stream."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"PYTHONPATH": str(TESTS), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}  # which takes most of the time
    command = [sys.executable, "-m", "pytest", "-p", "xdist.plugin", "-p", "support.once_more", *arguments]
    return subprocess.run(
        command, cwd=folder, env=environment, text=True, check=False,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
