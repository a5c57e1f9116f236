"""Runs a line in a process of its own, which is killed when its time is over, and writes down what came of it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from typing import IO, Any

from synk.check._found import OK, Broken, broken
from synk.check._lines import Line

TOTAL_S = 115.0
"""For all lines together. What is left is the limit of a line if it is less than its own."""
_MAX_TAIL = 4000


def answer(line: Line, fd: int) -> None:
    """Measure, and write the record to a pipe. This is what the process of a line does."""
    try:
        record = line.measure().record()
    except Broken as problem:
        record = broken(str(problem))
    except BaseException as error:
        traceback.print_exc()
        first, _, _ = str(error).partition("\n")
        record = broken(f"{type(error).__name__}: {first}")
    with os.fdopen(fd, "w", encoding="utf-8") as pipe:
        json.dump(record, pipe)


def run(line: Line, seconds_left: float) -> dict[str, Any]:
    """Return the record of a line, from a process of its own."""
    limit_s = min(line.limit_s, seconds_left)
    began = time.monotonic()
    if limit_s < 1:
        record = broken("not measured: the lines before it have taken all the time")
    else:
        with tempfile.TemporaryFile() as printed:
            record = _recorded(line, limit_s, printed)
            if record["outcome"] != OK:
                record["printed"] = _tail(printed)
    seconds = round(time.monotonic() - began, 2)
    step = line.next_step(record["outcome"])
    return {"name": line.name, "question": line.question, **record, "next_step": step, "seconds": seconds}


def _recorded(line: Line, limit_s: float, printed: IO[bytes]) -> dict[str, Any]:
    reader, writer = os.pipe()
    command = [sys.executable, "-m", "synk.check", "--line", line.name, "--fd", str(writer)]
    child = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, pass_fds=(writer,), start_new_session=True
    )
    os.close(writer)
    try:
        child.wait(limit_s)
    except BaseException as error:
        os.killpg(child.pid, signal.SIGKILL)  # not after it was reaped; its workers end with it
        child.wait()
        os.close(reader)
        if isinstance(error, subprocess.TimeoutExpired):
            return broken(f"no answer in {limit_s:.0f} s: it hangs, or is much slower than expected")
        raise
    with os.fdopen(reader, encoding="utf-8") as pipe:
        text = pipe.read()
    if not text:
        return broken(f"its process ended with status {child.returncode} and without an answer")
    record: dict[str, Any] = json.loads(text)
    return record


def _tail(printed: IO[bytes]) -> list[str]:
    """Return the last lines that the process has printed."""
    printed.seek(0, os.SEEK_END)
    printed.seek(max(printed.tell() - _MAX_TAIL, 0))
    return printed.read().decode("utf-8", "replace").splitlines()[-40:]
