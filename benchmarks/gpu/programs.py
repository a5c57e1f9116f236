"""``y = m @ x + b`` in a loop, with more and more of it resident: what transfers cost.

After "theano and the curse of GpuFromHost" (matpalm.com, 2015): three matrices of 1000 x 1000 float32, 500 iterations.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import synk

HEADER = ("program", "raw CuPy, s", "synk, s", "synk / raw")
NOTE = "500 iterations of y = m @ x + b, 1000 x 1000 float32. Raw: the same loop in one function, without synk."

SIZE = 1000


def raw(m: Any, x: Any, b: Any, program: str, iterations: int) -> float:
    """Return the seconds of a loop in CuPy; runs in the worker, where the arguments are arrays on the host."""
    import cupy

    stream = cupy.cuda.get_current_stream()
    resident = [cupy.asarray(array) for array in (m, x, b)]
    for is_warm in (False, True):
        start = time.perf_counter()
        for _ in range(iterations if is_warm else 10):
            if program == "all transferred":
                y = cupy.asnumpy(cupy.asarray(m) @ cupy.asarray(x) + cupy.asarray(b))
            elif program == "m and b resident":
                y = cupy.asnumpy(resident[0] @ cupy.asarray(x) + resident[2])
            else:
                y = resident[0] @ resident[1] + resident[2]
        stream.synchronize()
    del y
    return time.perf_counter() - start


class _Host:
    """Arrays that stay on the host on their way to a worker."""

    def __init__(self, *arrays: np.ndarray) -> None:
        self.arrays = arrays


def _seconds(call: Any, iterations: int) -> float:
    for _ in range(10):
        call()
    start = time.perf_counter()
    for _ in range(iterations):
        call()
    return time.perf_counter() - start


def run(runtime: synk.Runtime, quick: bool) -> list[list[str]]:
    """Return the rows of the table."""
    iterations = 50 if quick else 500
    rng = np.random.default_rng(123)
    m, x, b = (rng.standard_normal((SIZE, SIZE)).astype(np.float32) for _ in range(3))
    start = time.perf_counter()
    for _ in range(iterations // 25):
        np.add(np.dot(m, x), b)
    rows = [["NumPy, on the host", "-", f"{(time.perf_counter() - start) * 25:.2f}", "-"]]

    shared_m, shared_b = runtime.shared(m, name="m"), runtime.shared(b, name="b")
    shared_x, y = runtime.shared(x, name="x"), runtime.shared(np.zeros_like(x), name="y")

    def transferred(m: Any, x: Any, b: Any) -> Any:
        return m @ x + b

    def partly(x: Any) -> Any:
        return shared_m.value @ x + shared_b.value

    def resident() -> None:
        y.value = shared_m.value @ shared_x.value + shared_b.value

    everything = runtime.function(transferred, bcast_inputs=("m", "x", "b"), outputs="first")
    some = runtime.function(partly, bcast_inputs="x", outputs="first")
    nothing = runtime.function(resident, outputs=None)
    baseline = runtime.function(
        lambda host, program, iterations: raw(*host.arrays, program, iterations),
        bcast_inputs=("host", "program", "iterations"),
        outputs="first",
    )
    host = _Host(m, x, b)
    for program, call in (
        ("all transferred", lambda: everything(m, x, b)),
        ("m and b resident", lambda: some(x)),
        ("all resident", nothing),
    ):
        of_raw = float(baseline(host, program, iterations))
        of_synk = _seconds(call, iterations)
        rows.append([program, f"{of_raw:.3f}", f"{of_synk:.3f}", f"{of_synk / of_raw:.2f}"])
    return rows
