"""What a call costs at one worker beyond the same work in raw CuPy: waited for, and submitted."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

import synk
from benchmarks.gpu._clock import median_s

HEADER = ("inputs of 4 bytes", "calls are", "raw CuPy, us", "synk, us", "difference, us", "must be under, us")
NOTE = """\
A function that returns its first input, or a number. Raw: each input to the device, one result back. Submitted: three
calls in flight, the time of a long row of them divided by their number."""

LIMIT_US = 100
SUBMITTED_LIMIT_US = 30
_NUM_UNDER_WAY = 3


def raw(num_inputs: int, repetitions: int) -> float:
    """Return the median seconds of the same transfers in CuPy; runs in the worker."""
    import cupy

    hosts = [np.zeros(1, np.float32) for _ in range(num_inputs)]

    def action() -> None:
        arrays = [cupy.asarray(host) for host in hosts]
        if arrays:
            cupy.asnumpy(arrays[0])
        else:
            cupy.cuda.get_current_stream().synchronize()

    return median_s(action, repetitions)


def run(runtime: synk.Runtime, quick: bool) -> list[list[str]]:
    """Return the rows of the table."""
    repetitions = 200 if quick else 2000
    baseline = runtime.function(raw, bcast_inputs=("num_inputs", "repetitions"), outputs="first")
    rows = []
    for num_inputs in (0, 1, 8):

        def first(*inputs: Any) -> Any:
            return inputs[0] if inputs else 0.0

        f = runtime.function(first, bcast_inputs="inputs", outputs="first")
        arguments = [np.zeros(1, np.float32) for _ in range(num_inputs)]
        of_raw = float(baseline(num_inputs, repetitions)) * 1e6
        of_synk = median_s(lambda f=f, arguments=arguments: f(*arguments), repetitions) * 1e6
        of_submitted = _submitted_s(f, arguments, repetitions) * 1e6
        for how, us, limit in (("waited for", of_synk, LIMIT_US), ("submitted", of_submitted, SUBMITTED_LIMIT_US)):
            rows.append([str(num_inputs), how, f"{of_raw:.1f}", f"{us:.1f}", f"{us - of_raw:.1f}", str(limit)])
    return rows


def _submitted_s(f: synk.Function, arguments: list[np.ndarray], repetitions: int) -> float:
    """Return the seconds for one of many calls, of which three are in flight at any time."""

    def many() -> None:
        held: deque[synk.PendingCall] = deque()
        for _ in range(repetitions):
            held.append(f.submit(*arguments))
            if len(held) == _NUM_UNDER_WAY:
                held.popleft().result()
        for call in held:
            call.result()

    return median_s(many, 5) / repetitions
