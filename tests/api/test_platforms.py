"""Elsewhere than on Linux the import says so in a sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize("platform", ("darwin", "win32"))
def test_another_platform_is_told_at_once(platform: str) -> None:
    code = f"import sys; sys.platform = {platform!r}\nimport synk"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"ImportError: cannot import synk: got the platform {platform!r}, expected Linux")


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ([], 0, "CPU: "),
        (["--version"], 0, "synk "),
        (["--help"], 0, "usage: python -m synk"),
        (["nothing"], 2, "unrecognized arguments: nothing"),
    ],
)
def test_the_module_as_a_program(arguments: list[str], status: int, text: str) -> None:
    done = subprocess.run([sys.executable, "-m", "synk", *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == status and text in done.stdout + done.stderr
