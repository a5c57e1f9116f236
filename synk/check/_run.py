"""Runs a line in a process of its own, which is killed when its time is over, and reads what it answers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from typing import Any

from synk.check._found import BROKEN, OK, SKIPPED, Broken, without_figures
from synk.check._lines import Line

TOTAL_S = 115.0
"""For all lines together, on one GPU. What is left is the limit of a line if it is less than its own."""
PER_GPU = 0.15
"""What each further GPU adds to all limits: as many workers have to start."""
HANGS = "it hangs, or is much slower than expected"


def answer(line: Line) -> None:
    """Measure, and print the record. This is what the process of a line does."""
    try:
        record = line.measure().record()
    except Broken as problem:
        record = without_figures(BROKEN, str(problem))
    except BaseException as error:
        traceback.print_exc()
        first, _, _ = str(error).partition("\n")
        record = without_figures(BROKEN, f"{type(error).__name__}: {first}")
    print("\n" + json.dumps(record), flush=True)


def run(line: Line, limit_s: float, seconds_left: float, why: str = HANGS) -> dict[str, Any]:
    """Return the record of a line, from a process of its own. ``why`` is what to say if its limit passes."""
    began = time.monotonic()
    if seconds_left >= 1:
        late = (BROKEN, why) if limit_s <= seconds_left else (SKIPPED, "no more time was left")
        record = _recorded(line, min(limit_s, seconds_left), *late)
    else:
        record = without_figures(SKIPPED, "not measured: the lines before it have taken all the time")
    seconds = round(time.monotonic() - began, 2)
    step = line.next_step(record["outcome"])
    return {"name": line.name, "question": line.question, **record, "next_step": step, "seconds": seconds}


def _recorded(line: Line, limit_s: float, late: str, why: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "synk.check", "--line", line.name]
    with tempfile.TemporaryFile() as out:
        child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True)
        outcome = BROKEN
        try:
            problem = f"its process ended with status {child.wait(limit_s)} and without an answer"
        except BaseException as error:
            os.killpg(child.pid, signal.SIGKILL)  # not after it was reaped; its workers end with it
            child.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            outcome, problem = late, f"no answer in {limit_s:.0f} s: {why}"
        out.seek(0)
        printed = out.read().decode("utf-8", "replace").splitlines()
    answers = [place for place, text in enumerate(printed) if text.startswith('{"outcome": ')]
    record: dict[str, Any] = json.loads(printed.pop(answers[-1])) if answers else without_figures(outcome, problem)
    return record if record["outcome"] == OK else {**record, "printed": printed[-40:]}
