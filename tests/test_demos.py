"""Every demo runs as a program of its own, checks its own numbers, and says nothing on stderr.

Each of its functions is verified at its first call: see ``verified.py``.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DEMOS = sorted((ROOT / "demos").glob("[0-9]*.py"))
SMALL = {"06_transfers.py", "10_digits_softmax.py", "20_torch_digits.py"}


def test_the_demos_are_found() -> None:
    assert {"01_intro.py", "02_data.py", "04_batch.py", "10_digits_softmax.py"} <= {path.name for path in DEMOS}


@pytest.mark.parametrize("path", DEMOS, ids=lambda path: path.stem)
def test_demo_checks_its_numbers_and_equals_its_serial_calls(path: Path, tmp_path: Path) -> None:
    size = ["--size", "small"] if path.name in SMALL else []
    search_path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    finished = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "tests" / "verified.py"), str(path), *size],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": search_path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert finished.stderr == ""
    assert finished.returncode == 0
    assert finished.stdout
