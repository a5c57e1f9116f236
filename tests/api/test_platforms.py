"""Elsewhere than on Linux, and the package as a program."""

from __future__ import annotations

import runpy
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


TRY_EACH = """
import synk
f = synk.function(np.sum, outputs="sum")
print(synk.info())
for fork in (synk.fork, lambda: synk.fork(0), lambda: synk.Runtime(2), synk.Executor):
    try:
        fork()
    except synk.errors.UnsupportedError as error:
        print(error)
"""


def python(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)


def test_fork_says_what_is_missing_elsewhere() -> None:
    done = python("-c", ELSEWHERE + TRY_EACH)
    assert done.returncode == 0 and "cores usable" in done.stdout
    told = done.stdout.splitlines()[-4:]
    assert len(told) == 4 and len(set(told)) == 1
    assert told[0].startswith("cannot fork: got the platform 'darwin', expected Linux.")
    assert "(os.memfd_create, os.pidfd_open, os.eventfd, os.sched_getaffinity)" in told[0]


def test_the_import_on_windows_says_so_in_a_sentence() -> None:
    done = python("-c", "import sys; sys.platform = 'win32'\nimport synk")
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: cannot import synk: got the platform 'win32', expected Linux")


@pytest.mark.parametrize(
    ("argument", "status", "text"), [("--version", 0, "synk "), ("nothing", 2, "unrecognized arguments: nothing")]
)
def test_the_module_as_a_program(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], argument: str, status: int, text: str
) -> None:
    monkeypatch.setattr(sys, "argv", ["synk", argument])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("synk", run_name="__main__")
    assert ended.value.code == status and text in "".join(capsys.readouterr())
