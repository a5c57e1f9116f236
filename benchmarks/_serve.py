"""The peer's side of the harness: run jobs on demand, time each call. Imports nothing but the standard library.

One line of JSON down (``prepare`` a job, ``run`` so many calls), one line up. A rank that waits for the next line
sleeps in ``read``, so a peer that is not being measured takes no processor time even if its runtime polls.
"""

from __future__ import annotations

import json
import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

Call = Callable[[int], "float | None"]  # number of the call -> seconds in the slowest rank's function, if known
Prepare = Callable[..., Call]  # parameters of the job -> the call to time

WORLD_SIZE = int(os.environ.get("SYNK_BENCHMARK_WORLD_SIZE", "2"))


def seconds_since_launch() -> float:
    """Return the seconds since the harness launched this peer."""
    return time.time() - float(os.environ["SYNK_BENCHMARK_LAUNCHED"])


def serve(jobs: Mapping[str, Prepare], *, rank: int = 0, start_s: float | None = None, version: str = "") -> None:
    """Answer the harness until it hangs up.

    Parameters
    ----------
    jobs : mapping
        Name to a function that prepares the job and returns what to time.
    rank : int
        Of this process, where the peer consists of several that all run the same calls.
    start_s : float, optional
        Seconds that the runtime took to start; by default since the launch of this process.
    version : str
        Of the library measured.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(os.environ["SYNK_BENCHMARK_SOCKET"])
        with connection.makefile("rw", encoding="utf-8") as stream:
            hello = {"rank": rank, "version": version, "start_s": start_s or seconds_since_launch()}
            print(json.dumps(hello), file=stream, flush=True)
            call: Call = _nothing
            before: Callable[[], None] = _rest
            for line in stream:
                request = json.loads(line)
                answer: dict[str, Any] = {}
                try:
                    if "prepare" in request:
                        call = _nothing  # lets go of the last job's arrays before the next one takes its own
                        params = request["params"]
                        before = memory_traffic() if params.pop("is_cold", False) and rank == 0 else _rest
                        call = jobs[request["prepare"]](**params)
                    else:
                        answer["call_s"], answer["inner_s"] = _run(call, before, request["calls"])
                except Exception as error:
                    traceback.print_exc()
                    answer["error"] = f"{type(error).__name__}: {error}"
                print(json.dumps(answer), file=stream, flush=True)


def _nothing(call: int) -> float | None:
    return None


def _rest() -> None:
    pass


def memory_traffic(nbytes: int = 64 << 20) -> Callable[[], None]:
    """Return what to do before each call, untimed, so that it finds workers asleep and caches flushed."""
    source, target = bytearray(nbytes // 2), bytearray(nbytes // 2)

    def move() -> None:
        target[:] = source

    return move


def _run(call: Call, before: Callable[[], None], calls: int) -> tuple[list[float], list[float | None]]:
    clock = time.perf_counter
    seconds, inner = [], []
    for number in range(calls):
        before()
        start = clock()
        slowest = call(number)
        seconds.append(clock() - start)
        inner.append(slowest)
    return seconds, inner
