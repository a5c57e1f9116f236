"""What synk takes besides time: processor when idle, control bytes, memory. All read from the kernel, not from synk."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import _work
from benchmarks._harness import Harness

MB = 1 << 20


def run(harness: Harness) -> dict[str, Any]:
    """Run the measurement in a process of its own."""
    harness.progress("footprint")
    return harness.script("footprint", str(harness.world_size), str(2000 if harness.quick else 10_000))


def worker_pids() -> list[str]:
    """Return the workers among this process's children."""
    pids = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            parent = path.joinpath("stat").read_bytes().rpartition(b")")[2].split()[1]
            if int(parent) == os.getpid() and b"synk-worker-" in path.joinpath("cmdline").read_bytes():
                pids.append(path.name)
        except OSError:  # it has ended
            continue
    return pids


def _table(path: Path) -> dict[str, int]:
    """Read ``name: number ...`` lines."""
    words = (line.replace(":", " ", 1).split() for line in path.read_text().splitlines())
    return {name: int(number) for name, number, *_ in (line for line in words if len(line) > 1) if number.isdigit()}


def written_nbytes(pid: str) -> int:
    """Return the bytes that a process has passed to ``write`` so far: pipes, sockets and files alike."""
    return _table(Path(f"/proc/{pid}/io"))["wchar"]


def processor_s(pid: str) -> float:
    """Return the processor seconds of all threads of a process, to the nanosecond."""
    return sum(int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")) / 1e9


def shared_nbytes(pids: list[str]) -> int:
    """Return the shared memory of this process and its workers, a page that several map counted once."""
    return 1024 * sum(_table(Path(f"/proc/{pid}/smaps_rollup"))["Pss_Shmem"] for pid in ("self", *pids))


def holdings(pid: str) -> dict[str, int]:
    """Return a process's private and anonymous memory in bytes, and its descriptors and mappings."""
    rollup = _table(Path(f"/proc/{pid}/smaps_rollup"))
    return {
        "private_nbytes": 1024 * (rollup["Private_Clean"] + rollup["Private_Dirty"]),
        "anonymous_nbytes": 1024 * rollup["Anonymous"],
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "mappings": Path(f"/proc/{pid}/maps").read_text().count("\n"),
    }


def idle(pids: list[str], calls_per_s: int, call: Any) -> float:
    """Return the share of a core that a worker takes over 3 seconds, at so many calls a second."""
    begin = {pid: processor_s(pid) for pid in pids}
    start = time.perf_counter()
    for number in range(3 * calls_per_s):
        time.sleep(max(0.0, start + number / calls_per_s - time.perf_counter()))
        call(number)
    time.sleep(max(0.0, start + 3 - time.perf_counter()))
    elapsed = time.perf_counter() - start
    return max(processor_s(pid) - begin[pid] for pid in pids) / elapsed


def control(synk: Any, pids: list[str], call: Any) -> dict[str, Any]:
    """Return the bytes per call and worker that master and workers write, by the kernel and by synk's own count."""
    calls = 1000
    call(0)
    counters, down, up = dict(synk.current().counters), written_nbytes("self"), sum(map(written_nbytes, pids))
    for number in range(calls):
        call(number)
    share = 1 / (calls * len(pids))
    return {
        "down": (written_nbytes("self") - down) * share,
        "up": (sum(map(written_nbytes, pids)) - up) * share,
        "counters": {name: (value - counters[name]) * share for name, value in synk.current().counters.items()},
    }


def data_memory(synk: Any, pids: list[str]) -> dict[str, Any]:
    """Return what each process holds after calls on ``Data`` of growing size, and the master's peak in a call."""
    function = synk.function(lambda x: x.sum(), outputs="sum")
    sizes, peak = [], 0
    for rows in (25_000, 100_000, 400_000):
        before = shared_nbytes(pids)
        data = synk.data(dtype=np.float32, shape=(rows, 200))
        data[:] = 1.0
        Path("/proc/self/clear_refs").write_text("5")  # the peak of resident memory starts again from here
        resident = _table(Path("/proc/self/status"))["VmRSS"]
        function(data)
        peak = max(peak, 1024 * (_table(Path("/proc/self/status"))["VmHWM"] - resident))
        entry = {"data_nbytes": rows * 800, "shared_nbytes": shared_nbytes(pids) - before}
        sizes.append({**entry, "workers": [holdings(pid) for pid in pids], "master": holdings("self")})
        data.free_memory()
    return {"sizes": sizes, "master_peak_in_call_nbytes": peak}


def many_calls(pids: list[str], count: int, call: Any) -> dict[str, dict[str, int]]:
    """Return how much the holdings of master and worst worker grow over ``count`` calls, after a warm-up."""
    for number in range(1000):
        call(number)
    before = {pid: holdings(pid) for pid in ("self", *pids)}
    for number in range(count):
        call(number)
    growth = {pid: {key: value - before[pid][key] for key, value in holdings(pid).items()} for pid in ("self", *pids)}
    worst = {key: max(growth[pid][key] for pid in pids) for key in growth["self"]}
    return {"master": growth["self"], "worker": worst}


def measure(world_size: int, calls: int) -> dict[str, Any]:
    """Return all of it."""
    import synk

    with synk.fork(world_size):
        function = synk.function(_work.loss_and_grad, bcast_inputs="w", outputs=("avg", "avg", "max"))
        x, y = map(synk.data, _work.inputs(_work.ROWS["tiny"]))

        def call(number: int) -> None:
            function(_work.fresh_weights(number), x, y)

        call(0)
        pids = worker_pids()
        time.sleep(0.2)  # let start-up's last threads settle
        return {
            "idle": {rate: idle(pids, rate, call) for rate in (0, 100)},
            "control": control(synk, pids, call),
            "memory": data_memory(synk, pids),
            "many_calls": {"calls": calls, **many_calls(pids, calls, call)},
        }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]))))
