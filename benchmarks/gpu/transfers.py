"""How fast arrays come from shared segments to the device, and back, against CuPy's own page-locked memory."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import synk
from benchmarks.gpu._clock import median_s

HEADER = ("bytes", "direction", "pageable, GB/s", "CuPy pinned, GB/s", "segment, GB/s", "segment / pinned")
NOTE = "Must reach 0.95 of CuPy's pinned memory from 4 MiB on. Rows of 1 KiB by index: read by the device."


def measure(data: Any, sizes: tuple[int, ...], repetitions: int) -> list[list[str]]:
    """Time copies in the worker; ``data`` brings a segment of the largest size with it."""
    import cupy

    from synk._wire.cell import cell

    worker: Any = cell.worker
    backend = worker.backend
    runtime = cupy.cuda.runtime
    segment = max(worker.held.segments.values(), key=lambda segment: segment.nbytes)
    known = backend._segments
    known.add(segment)  # anew: it was registered when ``data`` was copied
    began = time.perf_counter()
    known.on_device(segment.buffer.__array_interface__["data"][0], segment.nbytes)
    registering = f"{segment.nbytes / (time.perf_counter() - began) / 1e9:.1f}"
    largest = max(sizes)
    memory = cupy.cuda.alloc_pinned_memory(largest)
    pinned = np.frombuffer(memory, np.uint8, largest)
    pinned[:] = 1
    pageable = np.ones(largest, np.uint8)
    device = cupy.empty(largest, np.uint8)
    pointers = [array.__array_interface__["data"][0] for array in (pageable, pinned, segment.buffer)]
    rows = []
    for size in sizes:
        for direction in ("to the device", "to the host"):
            if direction == "to the host" and not segment.buffer.flags.writeable:
                continue
            speeds = []
            for pointer in pointers:

                def action(pointer: int = pointer, size: int = size, direction: str = direction) -> None:
                    if direction == "to the device":
                        target, source, kind = device.data.ptr, pointer, runtime.memcpyHostToDevice
                    else:
                        target, source, kind = pointer, device.data.ptr, runtime.memcpyDeviceToHost
                    runtime.memcpyAsync(target, source, size, kind, backend.stream.ptr)
                    backend.stream.synchronize()

                speeds.append(size / median_s(action, repetitions) / 1e9)
            rows.append([f"{size:,}", direction, *(f"{speed:.1f}" for speed in speeds), f"{speeds[2] / speeds[1]:.2f}"])
    table = segment.buffer[: largest // 1024 * 1024].reshape(-1, 1024)
    picked = np.random.default_rng(0).permutation(len(table))[: len(table) // 4]

    def gather() -> None:
        backend.take_rows(table, picked)
        backend.stream.synchronize()

    nbytes = len(picked) * 1024
    rows.append([f"{nbytes:,}", "rows by index", "", "", f"{nbytes / median_s(gather, repetitions) / 1e9:.1f}", ""])
    rows.append([f"{segment.nbytes:,}", "registering it, once", "", "", registering, ""])
    return rows


def run(runtime: synk.Runtime, quick: bool) -> list[list[str]]:
    """Return the rows of the table."""
    sizes = (1 << 12, 1 << 16, 1 << 20, 1 << 22, 1 << 26, *(() if quick else (1 << 30,)))
    data = runtime.data(np.zeros(max(sizes), np.uint8), name="source")
    f = runtime.function(measure, bcast_inputs=("data", "sizes", "repetitions"), outputs=None)
    return f(data, sizes, 5 if quick else 30)[0]
