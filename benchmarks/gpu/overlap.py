"""Whether the inputs of a call come to the device while the one before it computes: plain and submitted calls."""

from __future__ import annotations

import statistics
import time
from collections import deque
from typing import Any

import numpy as np

import synk

HEADER = ("input", "bytes a call", "copy, ms", "compute, ms", "plain, ms", "submitted, ms", "submitted / longer")
NOTE = """\
Each call brings its own rows to the device and multiplies them by a matrix, again and again, for about as long as the
copy takes. With perfect overlap a submitted call takes as long as the longer of the two: the last column is then 1, and
with none it is about 2."""

_WIDTH = 1024
_NUM_CALLS = 20


def _seconds(action: Any, repetitions: int) -> float:
    """Return the median seconds of one of ``_NUM_CALLS`` calls."""
    durations = []
    for _ in range(repetitions + 1):
        start = time.perf_counter()
        action()
        durations.append((time.perf_counter() - start) / _NUM_CALLS)
    return statistics.median(durations[1:])


def run(runtime: synk.Runtime, quick: bool) -> list[list[str]]:
    """Return the rows of the table."""
    num_rows = 1 << (12 if quick else 15)
    repetitions = 2 if quick else 7
    blocks = [np.random.default_rng(k).standard_normal((num_rows, _WIDTH)).astype(np.float32) for k in range(3)]
    w = np.eye(_WIDTH, dtype=np.float32)

    def compute(x: Any, w: Any, times: Any) -> Any:
        for _ in range(int(times)):
            x = x @ w
        return x[-1, -1]

    f = runtime.function(compute, bcast_inputs=("w", "times"), outputs="first")
    resident = runtime.function(_compute_resident, bcast_inputs=("w", "times"), outputs="first")
    results = []
    for kind in ("Data", "Data, rows by index", "plain array"):
        sources: list[Any] = [runtime.data(block) for block in blocks] if kind.startswith("Data") else blocks
        batch = np.random.default_rng(0).permutation(num_rows) if "index" in kind else None

        def plain(times: int, sources: list[Any] = sources, batch: Any = batch) -> None:
            for k in range(_NUM_CALLS):
                f(sources[k % 3], w, np.int64(times), batch=batch)

        def submitted(times: int, sources: list[Any] = sources, batch: Any = batch) -> None:
            held: deque[synk.PendingCall] = deque()
            for k in range(_NUM_CALLS):
                held.append(f.submit(sources[k % 3], w, np.int64(times), batch=batch))
                if len(held) == 3:
                    held.popleft().result()
            for call in held:
                call.result()

        plain(1)
        time.sleep(2)  # segments are registered beside the work
        copy_s = _seconds(lambda: plain(0), repetitions)
        one_s = float(resident(blocks[0], w, np.int64(50))) / 50
        times = max(1, round(copy_s / one_s))
        compute_s = one_s * times
        plain_s = _seconds(lambda times=times: plain(times), repetitions)
        submitted_s = _seconds(lambda times=times: submitted(times), repetitions)
        durations = (copy_s, compute_s, plain_s, submitted_s)
        ratio = submitted_s / max(copy_s, compute_s)
        results.append([kind, f"{blocks[0].nbytes:,}", *(f"{s * 1e3:.2f}" for s in durations), f"{ratio:.2f}"])
    return results


def _compute_resident(x: Any, w: Any, times: Any) -> float:
    """Return the seconds of the products alone."""
    import time

    import cupy

    stream = cupy.cuda.get_current_stream()
    x @ w
    stream.synchronize()
    start = time.perf_counter()
    for _ in range(int(times)):
        x = x @ w
    stream.synchronize()
    return time.perf_counter() - start
