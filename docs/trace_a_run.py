"""Trace small programs, for the pictures on the page about profiling: ``python docs/trace_a_run.py``.

Calls on two ranks, the second of which has three times the work, and of these two that were not disturbed; and the
first program of the page, with what each argument transfers. Writes ``traced.json``.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import synk


def uneven(x: Any) -> Any:
    """Take 40 ms on rank 0 and 120 ms on rank 1, and average."""
    time.sleep(0.12 if synk.comm.rank == 1 else 0.04)
    return float(synk.comm.all_reduce(float(x.mean()), "avg"))


def residual(table: Any, x: Any, y: Any) -> Any:
    """Compute with a table that stays the same, an array that changes, and data that lie in shared memory."""
    return ((table * x - y) ** 2).mean()


def transferred() -> list[list[Any]]:
    """Return ``[argument, kind, MB]`` of ten calls."""
    f = synk.function(residual, outputs="avg")
    table, y = np.ones((2000, 50)), synk.data(np.zeros((2000, 50)))
    for step in range(10):
        f(table, np.full((2000, 50), float(step)), y)
    return [
        [each.argument, each.kind, each.nbytes / 1e6]
        for each in synk.profile().transfers
        if each.function == "residual" and each.argument in ("table", "x", "y")
    ]


def bars_of(path: str) -> list[list[Any]]:
    """Return ``[process, name, start, duration, waited]``, in seconds, of the two quickest calls in a row."""
    events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
    bars = [each for each in events if each["ph"] == "X"]
    last = max(each["args"]["call"] for each in bars)
    pairs = [[each for each in bars if each["args"]["call"] in (call, call + 1)] for call in range(last - 8, last)]
    quickest = min(pairs, key=lambda pair: max(each["ts"] + each["dur"] for each in pair) - pair[0]["ts"])
    return [
        [each["pid"], each["name"], each["ts"] / 1e6, each["dur"] / 1e6, each["args"].get("waited_ms", 0.0) / 1e3]
        for each in quickest
    ]


def main() -> None:
    with synk.fork(2), tempfile.TemporaryDirectory() as folder:
        f = synk.function(uneven, outputs="first", per_rank=True)
        x = np.ones((2000, 1000))
        for _ in range(5):
            f(x)
        with synk.profiler.trace(folder + "/run.json"):
            for _ in range(10):  # on a machine that has other things to do, most are disturbed
                f(x)
        rows = bars_of(folder + "/run.json")
        found = {"rows": rows, "transfers": transferred()}
    Path(__file__).with_name("traced.json").write_text(json.dumps(found) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
