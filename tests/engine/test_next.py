"""The engine that is chosen by ``SYNK_ENGINE=next``: its own cases, in a process that has chosen it.

``passing.txt`` lists the files of this suite that pass on it; ``make next`` runs them. The list only grows.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_its_own_cases() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(HERE / "cases.py")]
    environment = {**os.environ, "SYNK_ENGINE": "next"}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, cwd=HERE.parents[1])
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]


def test_the_files_that_pass_exist() -> None:
    listed = (HERE / "passing.txt").read_text(encoding="utf-8").split()
    assert all((HERE.parents[1] / name).is_file() for name in listed)
