"""Lines that start workers on GPUs. Functions that run there import CuPy themselves."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

import numpy as np

import synk
from synk.check._cpu import deaths, first_calls, require, seconds_of, total
from synk.check._found import Broken, Figure, Found
from synk.cuda._devices import visible_gpus

_SIZES_S = 30.0  # four sizes up to 1 GB, perhaps by host memory, and CuPy compiles its kernels
"""The time limit of the call that communicates: a second or two on devices that work."""
_DELAY_S = 0.2
_RACE = "an output was copied while a kernel on the default stream still filled it"


def on_all_gpus() -> synk.Runtime:
    return synk.Runtime(backend="cupy")


def on_two_ranks() -> synk.Runtime:
    """Return a runtime with two ranks or more; on one GPU they share it."""
    return on_all_gpus() if len(visible_gpus().devices) > 1 else synk.Runtime(backend="cupy", devices=[0, 0])


def overhead() -> Found:
    figures = first_calls(on_all_gpus, 40.0, 20.0)
    return Found(f"a worker on each of {len(visible_gpus().devices)} GPUs computes", figures)


def _filled_late(x: Any) -> Any:
    import cupy

    out, default = cupy.zeros(1 << 20, "float32"), cupy.cuda.Stream.null
    default.launch_host_func(time.sleep, _DELAY_S)  # a kernel that takes its time
    with default:
        out[...] = 7.0
    return out


def default_stream() -> Found:
    with synk.Runtime(1, backend="cupy") as rt:
        f = rt.function(_filled_late, outputs="gather")
        for _ in range(2):
            call_s = seconds_of(lambda: require(bool((f(np.ones(1)) == 7).all()), _RACE))
    text = "what another library computes on the default stream is done before it is copied"
    return Found(text, (Figure(f"a call that waits {_DELAY_S} s for it takes", call_s, "s", 1.0),))


def group() -> Found:
    with on_all_gpus() as rt:
        f = rt.function(lambda x: x[:1].repeat(1 << 18), outputs="sum")
        began = time.perf_counter()
        require(bool((f(np.arange(float(rt.world_size))) == sum(range(rt.world_size))).all()), "a large sum is wrong")
        began_s = time.perf_counter() - began
        lines = [line.strip() for line in rt.info().splitlines() if line.strip().startswith("NCCL")]
    if any("is not used" in line for line in lines) or not lines:
        raise Broken("; ".join(lines) or "NCCL is not used")
    return Found(f"{lines[0]} sums over {rt.world_size} GPUs", (Figure("the first call takes", began_s, "s", 10.0),))


def _rates(x: Any) -> str:
    """Return GB/s between the host and the device, as JSON: to it and back, from pageable and from pinned memory."""
    import cupy

    cuda = cupy.cuda
    nbytes = min(256 << 20, cuda.runtime.memGetInfo()[0] // 8)
    device, stream = cupy.empty(nbytes, "uint8"), cuda.get_current_stream()
    pinned = np.frombuffer(cuda.alloc_pinned_memory(nbytes), np.uint8, nbytes)
    found = {"nbytes": float(nbytes)}
    for kind, host in (("pageable", np.ones(nbytes, np.uint8)), ("pinned", pinned)):
        for way, copy in (("to", device.data.copy_from_host_async), ("from", device.data.copy_to_host_async)):
            times = []
            for _ in range(3):
                begin, end = cuda.Event(), cuda.Event()
                begin.record(stream)
                copy(host.ctypes.data, nbytes, stream)
                end.record(stream)
                end.synchronize()
                times.append(cuda.get_elapsed_time(begin, end))
            found[f"{kind} {way}"] = nbytes / max(min(times), 1e-6) / 1e6
    return json.dumps(found)


def bandwidth() -> Found:
    with synk.Runtime(1, backend="cupy") as rt:
        rates: dict[str, float] = json.loads(rt.function(_rates, outputs=None)(np.ones(1))[0])
        data = rt.data(np.ones(int(rates["nbytes"]), np.uint8))
        f = rt.function(lambda x: x[:1], outputs="gather")
        times = [seconds_of(lambda: f(data)) for _ in range(5)]  # the first one registers the memory
        none = min(seconds_of(lambda: f(data, batch=1)) for _ in range(3))
    rows = rates["nbytes"] / max(min(times) - none, 1e-6) / 1e9
    figures = (
        Figure("pinned memory goes to the device at", rates["pinned to"], "GB/s", 10.0, is_more_better=True),
        Figure("and back at", rates["pinned from"], "GB/s", 10.0, is_more_better=True),
        Figure("rows of synk.data go there at", rows, "GB/s", rates["pageable to"] / 2, is_more_better=True),
    )
    return Found(f"pageable memory goes to the device at {rates['pageable to']:.3g} GB/s", figures, facts=rates)


def _reductions(x: Any) -> str:
    """Return the seconds of all-reduces of 1 KB to 1 GB, as far as there is memory, as JSON; or which one was wrong."""
    import cupy

    comm, found = synk.comm, {}
    free = int(comm.all_reduce(np.array([cupy.cuda.runtime.memGetInfo()[0]], np.int64), "min")[0])
    expected = comm.world_size * (comm.world_size + 1) / 2
    for nbytes in (1 << 10, 1 << 20, 1 << 26, 1 << 30):
        if nbytes * 4 > free:
            break
        array, times = cupy.full(nbytes // 4, comm.rank + 1.0, "float32"), []
        for _ in range(4):
            comm.barrier()
            began = time.perf_counter()
            result = comm.all_reduce(array, "sum")
            float(result[-1])  # waits for the device
            times.append(time.perf_counter() - began)
            if not bool((result == expected).all()):
                return json.dumps({"wrong": nbytes})
        found[str(nbytes)] = min(times)
    return json.dumps(found)


def all_reduce() -> Found:
    with on_two_ranks() as rt:
        try:
            texts = rt.function(_reductions, outputs=None)(np.ones(rt.world_size), timeout=_SIZES_S)
        except synk.errors.CallTimeout:
            raise Broken(f"all-reduces hung after the group had been proven: no answer in {_SIZES_S:g} s") from None
        by = "NCCL" if _uses_nccl(rt) else "host memory"
    each_rank = [json.loads(text) for text in texts]
    wrong = [found["wrong"] for found in each_rank if "wrong" in found]
    require(not wrong, f"an all-reduce of {min(wrong, default=0)} bytes gives wrong sums")
    slowest = {size: max(found[size] for found in each_rank) for size in each_rank[0]}
    figures = [Figure("1 KB takes", 1e3 * slowest["1024"], "ms", 50.0)]
    largest = max(map(int, slowest))
    rate = largest / slowest[str(largest)] / 1e9
    if largest >= 1 << 26 and by == "NCCL":
        figures.append(Figure(f"{largest >> 20} MB go at", rate, "GB/s", 5.0, is_more_better=True))
    return Found(f"all-reduces up to {largest} bytes by {by} are right", tuple(figures), facts={"seconds": slowest})


def _dies_in_a_collective(x: Any) -> float:
    """Sum over all ranks. The last one dies when all have started and its device has not come to its part."""
    import cupy

    comm = synk.comm
    is_last = comm.rank == comm.world_size - 1
    array = cupy.full(1 << 18, 1.0, "float32")
    if is_last:
        cupy.cuda.get_current_stream().launch_host_func(time.sleep, 1.0)
    request = comm.all_reduce(array, "sum", out=array, async_op=True)
    comm.barrier()
    if is_last:
        signal.raise_signal(signal.SIGKILL)
    request.wait()
    return float(array[0])


def death() -> Found:
    with on_two_ranks() as rt:
        used_nccl = _uses_nccl(rt)
        figures = deaths(rt, _dies_in_a_collective)
        if used_nccl and not _uses_nccl(rt):
            raise Broken("after the death of a worker in a collective NCCL did not start again")
    return Found("a worker that dies in a collective is an error and is replaced", figures)


def _uses_nccl(rt: synk.Runtime) -> bool:
    """Whether the ranks are in a group of NCCL, which they join at the first call."""
    rt.function(total, outputs="sum")(np.ones(rt.world_size))
    text = rt.info()
    return "NCCL: " in text and "NCCL is not used" not in text


def _too_much(x: Any) -> Any:
    import cupy

    return cupy.empty(2 * cupy.cuda.runtime.memGetInfo()[1], "uint8")[:1]


def out_of_memory() -> Found:
    with synk.Runtime(1, backend="cupy") as rt:
        f = rt.function(total, outputs="sum")
        f(np.ones(4))
        pid = rt.function(lambda x: os.getpid(), outputs=None)(np.ones(1))
        try:
            rt.function(_too_much, outputs=None)(np.ones(1))
            raise Broken("more memory than the device has was given out")
        except MemoryError as error:
            require("num_slices" in str(error), f"the error does not say what to do: {error}")
        except synk.errors.WorkerDied as error:
            raise Broken(f"the worker did not live through it: {str(error).partition(chr(10))[0]}") from None
        again_s = seconds_of(lambda: require(float(f(np.ones(4))) == 4, "the next sum is wrong"))
        require(rt.function(lambda x: os.getpid(), outputs=None)(np.ones(1)) == pid, "the worker was replaced")
    return Found(
        "out of memory is an error, and the device works on", (Figure("the next call takes", again_s, "s", 0.5),)
    )
