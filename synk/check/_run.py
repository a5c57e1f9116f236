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
from pathlib import Path
from typing import Any

from synk.check._found import OK, Broken, broken
from synk.check._lines import Line

TOTAL_S = 115.0
"""For all lines together. What is left is the limit of a line if it is less than its own."""
_MAX_TAIL = 4000


def answer(line: Line, path: str) -> None:
    """Measure, and write the record to a file. This is what the process of a line does."""
    try:
        record = line.measure().record()
    except Broken as problem:
        record = broken(str(problem))
    except BaseException as error:
        traceback.print_exc()
        first, _, _ = str(error).partition("\n")
        record = broken(f"{type(error).__name__}: {first}")
    Path(path).write_text(json.dumps(record), encoding="utf-8")


def run(line: Line, seconds_left: float) -> dict[str, Any]:
    """Return the record of a line, from a process of its own."""
    limit_s = min(line.limit_s, seconds_left)
    began = time.monotonic()
    if limit_s < 1:
        record = broken("not measured: the lines before it have taken all the time")
    else:
        with tempfile.TemporaryDirectory() as folder:
            printed, answered = Path(folder, "printed"), Path(folder, "record")
            record = _recorded(line, limit_s, printed, answered)
            if record["outcome"] != OK:
                record["printed"] = _tail(printed)
    seconds = round(time.monotonic() - began, 2)
    step = line.next_step(record["outcome"])
    return {"name": line.name, "question": line.question, **record, "next_step": step, "seconds": seconds}


def _recorded(line: Line, limit_s: float, printed: Path, answered: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "synk.check", "--line", line.name, "--record", str(answered)]
    with open(printed, "wb") as out:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
    try:
        child.wait(limit_s)
    except BaseException as error:
        os.killpg(child.pid, signal.SIGKILL)  # not after it was reaped; its workers end with it
        child.wait()
        if isinstance(error, subprocess.TimeoutExpired):
            return broken(f"no answer in {limit_s:.0f} s: it hangs, or is much slower than expected")
        raise
    if not answered.exists():
        return broken(f"its process ended with status {child.returncode} and without an answer")
    record: dict[str, Any] = json.loads(answered.read_text(encoding="utf-8"))
    return record


def _tail(printed: Path) -> list[str]:
    """Return the last lines that the process has printed."""
    return printed.read_bytes()[-_MAX_TAIL:].decode("utf-8", "replace").splitlines()[-40:]
