"""Start-up: ``fork`` and ``distribute`` against Pythons that only import NumPy, and the cost of ``import synk``."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import Any

from benchmarks._harness import ROOT, Harness


def run(harness: Harness) -> dict[str, Any]:
    """Return one entry a repetition: seconds of each quantity and the noise meanwhile."""
    repetitions = []
    for _ in range(3 if harness.quick else 9):
        for attempt in range(harness.tries):
            if attempt:
                time.sleep(1.0)
            harness.noise.start()
            entry = {
                "imports_numpy_s": _parallel(harness, "import numpy", harness.world_size),
                **harness.script("startup", str(harness.world_size)),
                "import_numpy_s": _parallel(harness, "import numpy", 1),
                "import_synk_s": _parallel(harness, "import synk", 1),
            }
            entry["noise"] = {"cores": harness.noise.stop()}
            if entry["noise"]["cores"] <= harness.max_noise:
                break
        repetitions.append(entry)
        harness.progress("start-up")
    return {"repetitions": repetitions}


def _parallel(harness: Harness, code: str, count: int) -> float:
    """Return the seconds until ``count`` Pythons, started together, have run ``code`` and ended."""
    start = time.perf_counter()
    processes = [subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=harness.env) for _ in range(count)]
    statuses = [process.wait() for process in processes]
    if any(statuses):
        raise RuntimeError(f"python -c {code!r} failed")
    return time.perf_counter() - start


def measure(world_size: int) -> dict[str, float]:
    """Return the seconds of ``fork`` and ``distribute``, and until the first result after them."""
    import synk  # here, so that the harness that imports this module needs no synk

    start = time.perf_counter()
    with synk.fork(world_size):
        function = synk.function(lambda x: x.sum(), outputs="sum")
        synk.distribute()
        distributed = time.perf_counter()
        function([0.0] * world_size)
        first_result = time.perf_counter()
    return {"distributed_s": distributed - start, "first_result_s": first_result - start}


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
