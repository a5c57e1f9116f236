"""Lines that start workers on the CPU: calls, shared memory, signals, deaths."""

from __future__ import annotations

import os
import signal
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

import synk
from synk.check._found import Broken, Figure, Found

_NBYTES = 64 << 20


def require(is_so: bool, what_is_wrong: str) -> None:
    if not is_so:
        raise Broken(what_is_wrong)


def seconds_of(act: Callable[[], Any]) -> float:
    began = time.perf_counter()
    act()
    return time.perf_counter() - began


def call_ms(f: Callable[[Any], Any], x: Any) -> float:
    """Return the median of 200 calls, or of as many as end within a second, in milliseconds."""
    times: list[float] = []
    while len(times) < 200 and sum(times) < 1.0:
        times.append(seconds_of(lambda: f(x)))
    return 1e3 * statistics.median(times)


def total(x: Any) -> Any:
    return x.sum()


def first_calls(make: Callable[[], synk.Runtime], start_s: float, small_ms: float) -> tuple[Figure, Figure]:
    """Make a runtime and call a function. Return how long both take, beside what is expected."""
    x = np.arange(10.0)
    began = time.perf_counter()
    with make() as rt:
        f = rt.function(total, outputs="sum")
        require(float(f(x)) == x.sum(), "the workers give a wrong sum")
        started = Figure("they start and answer in", time.perf_counter() - began, "s", start_s)
        return started, Figure("a small call takes", call_ms(f, x), "ms", small_ms)


def workers() -> Found:
    figures = first_calls(lambda: synk.fork(2, backend="numpy"), 10.0, 5.0)
    return Found("two workers on the CPU compute what one process does", figures)


def shared_memory() -> Found:
    x = np.ones(_NBYTES // 8)
    copy = np.empty_like(x)
    copy_s = min(seconds_of(lambda: np.copyto(copy, x)) for _ in range(5))
    with synk.fork(2, backend="numpy") as rt:
        f = rt.function(lambda x: float(x[-1] * len(x)), outputs="sum")
        require(f(x) == len(x), "rows that were passed through shared memory are not those of the program")
        call_s = min(seconds_of(lambda: f(x)) for _ in range(5))
    room = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    facts = {"dev_shm_nbytes": room.f_blocks * room.f_frsize if room is not None else 0}
    figure = Figure("a call with 64 MB takes as long as", call_s / copy_s, "copies of them", 6.0)
    return Found(f"rows go through shared memory at {_NBYTES / call_s / 1e9:.1f} GB/s", (figure,), facts=facts)


def _interrupt_and_wait(x: Any, program: int) -> None:
    if synk.comm.rank == 0:
        pidfd = os.pidfd_open(program)  # the program waits for this call, so the number is still its own
        signal.pidfd_send_signal(pidfd, signal.SIGINT)
        os.close(pidfd)
    time.sleep(60)


def signals() -> Found:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have had it ignored
    with synk.fork(2, backend="numpy") as rt:
        wait = rt.function(_interrupt_and_wait, bcast_inputs="program", outputs=None)
        began = time.perf_counter()
        try:
            wait(np.ones(2), os.getpid())
            raise Broken("Ctrl-C did not end a call")
        except KeyboardInterrupt:
            ended_s = time.perf_counter() - began
        require(rt.function(total, outputs="sum")(np.ones(4)) == 4, "the call after a Ctrl-C gives a wrong sum")
    return Found("Ctrl-C ends a call, and the next call works", (Figure("it takes", ended_s, "s", 3.0),))


def _dies_on_the_last_rank(x: Any) -> Any:
    if synk.comm.rank == synk.comm.world_size - 1:
        signal.raise_signal(signal.SIGKILL)
    return synk.comm.all_reduce(x, "sum")


def deaths(rt: synk.Runtime, body: Callable[[Any], Any]) -> tuple[Figure, Figure]:
    """Call a body in which a rank dies. Return how long the error and the next call take."""
    warnings.simplefilter("ignore", RuntimeWarning)  # of workers that were replaced
    x = np.ones(rt.world_size)
    dies = rt.function(body, outputs=None)
    rt.function(lambda x: synk.comm.all_reduce(x, "sum"), outputs=None)(x)
    began = time.perf_counter()
    try:
        dies(x)
        raise Broken("the death of a worker was not noticed")
    except synk.errors.WorkerDied:
        told_s = time.perf_counter() - began
    again_s = seconds_of(lambda: require(rt.function(total, outputs="sum")(x) == len(x), "the next sum is wrong"))
    return Figure("the error comes after", told_s, "s", 4.0), Figure("the next call takes", again_s, "s", 20.0)


def recovery() -> Found:
    with synk.fork(2, backend="numpy") as rt:
        figures = deaths(rt, _dies_on_the_last_rank)
    return Found("a worker that dies is an error and is replaced", figures)
