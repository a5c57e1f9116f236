"""What a call costs at one worker beyond the same work in raw CuPy."""

from __future__ import annotations

from typing import Any

import numpy as np

import synk
from benchmarks.gpu._clock import median_s

HEADER = ("inputs of 4 bytes", "raw CuPy, us", "synk, us", "difference, us", "must be under, us")
NOTE = "A function that returns its first input, or a number. Raw: each input to the device, one result back."

LIMIT_US = 100


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
        rows.append([str(num_inputs), f"{of_raw:.1f}", f"{of_synk:.1f}", f"{of_synk - of_raw:.1f}", str(LIMIT_US)])
    return rows
