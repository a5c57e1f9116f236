"""Elsewhere than on Linux, and the package as a program."""

from __future__ import annotations

import subprocess
import sys

import pytest

ELSEWHERE = """
import asyncio, multiprocessing, os, select, signal, socket, subprocess, sys
import numpy as np

for module, names in {
    os: "sched_getaffinity memfd_create pidfd_open eventfd eventfd_read eventfd_write posix_fallocate",
    select: "epoll",
    signal: "pidfd_send_signal",
}.items():
    for name in names.split():
        if hasattr(module, name):
            delattr(module, name)
sys.platform = "darwin"
"""
"""A stand-in for Python on macOS: what it lacks there."""


@pytest.mark.parametrize("code", ["synk.fork()", "synk.fork(inline=True)", "synk.Runtime(2)", "synk.Executor()"])
def test_fork_says_what_is_missing_elsewhere(code: str) -> None:
    program = f"{ELSEWHERE}\nimport synk\nf = synk.function(np.sum, outputs='sum')\nprint(synk.info())\n{code}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "cores usable" in done.stdout
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("synk.errors.UnsupportedError: cannot fork: got the platform 'darwin', expected Linux.")
    assert "(os.memfd_create, os.pidfd_open, os.eventfd, os.sched_getaffinity)" in last


def test_the_import_on_windows_says_so_in_a_sentence() -> None:
    code = "import sys; sys.platform = 'win32'\nimport synk"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: cannot import synk: got the platform 'win32', expected Linux")


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
