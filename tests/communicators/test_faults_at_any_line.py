"""A rank dies, raises, is interrupted, or catches what it has raised, at any line of the communicators' source.

No rank gets a wrong number, nobody hangs, and the next call is right. The lines are those that a run without a fault
executes: so the table needs no names from inside, and holds for whatever carries collectives and messages.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
from support.harness import pids

import synk
from synk.errors import CollectiveMismatch, WorkerDied

FOLDER = str(Path(synk.__file__).parent / "communicators")
COUNT = 200_000
Line = tuple[str, int]


def operations(comm: Any, arrays: list[np.ndarray]) -> dict[str, Callable[[], list[Any]]]:
    """Return the operations by name. Each returns what it got, and then what it must get."""
    rank, size = comm.rank, comm.world_size
    after, before = (rank + 1) % size, (rank - 1) % size
    mine, few, large = arrays
    total, stack = float(sum(range(1, size + 1))), np.arange(1.0, size + 1)

    def exchange(send: Callable[..., Any], array: np.ndarray) -> list[Any]:
        request = comm.irecv(before)
        send(array, after)
        return [request.wait()[-1], before + 1.0]

    def from_first(array: np.ndarray) -> list[Any]:
        """Only the first rank sends, and waits for its receiver."""
        comm.send(array, 1) if rank == 0 else None
        return [comm.recv(0)[-1] if rank == 1 else 1.0, 1.0]

    def started() -> list[Any]:
        """The arrays of started collectives are not the victim's to change."""
        requests = [
            comm.all_reduce(mine.copy(), "sum", async_op=True),
            comm.all_gather(few.copy(), async_op=True),
            comm.irecv(before),
        ]
        comm.isend(few, after)
        found = comm.wait_all(requests)
        return [found[0][-1], *found[1][:, 0], found[2][0], total, *stack, before + 1.0]

    return {
        "a reduction": lambda: [comm.all_reduce(mine, "sum")[-1], total],
        "a short reduction": lambda: [comm.all_reduce(few, "sum")[0], total],
        "a broadcast": lambda: [comm.broadcast(mine, 1)[-1], 2.0],
        "rows": lambda: [*comm.all_to_all(mine)[:: COUNT // 2], *stack],
        "a gather": lambda: [*comm.all_gather(mine)[:, 0], *comm.all_gather(few, 0)[::3], *stack, *stack],
        "a message": lambda: exchange(comm.send, few),
        "a long message that nobody waits with": lambda: exchange(comm.isend, large),
        "a long message that its sender waits with": lambda: from_first(large),
        "several at once": started,
        "a barrier": lambda: [comm.barrier()] * 2,
    }


def at_lines(visit: Callable[[Line], None]) -> Callable[..., Any]:
    """Return a trace function that calls ``visit`` before each line of the communicators."""

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if not frame.f_code.co_filename.startswith(FOLDER):
            return None
        if event == "line":
            visit((frame.f_code.co_filename, frame.f_lineno))
        return trace

    return trace


def run(name: str, victim: int, act: Callable[[list[np.ndarray]], None], line: Line | None) -> list[Any]:
    """Run an operation; the victim acts at a line. Return what was got if that is wrong, else nothing; if the victim is
    to act at no line, the lines that it executes.

    Another rank may get what a victim that goes on has written meanwhile, but then the call fails.
    """
    comm, seen, wrong = synk.comm, dict[Line, None](), list[Any]()
    counts = (COUNT // 2 * comm.world_size, 3, 10 * COUNT if "long" in name else 0)
    arrays = [np.full(count, comm.rank + 1.0) for count in counts]

    def visit(here: Line) -> None:
        seen.setdefault(here)
        if here == line:
            sys.settrace(None)
            act(arrays)

    operation = operations(comm, arrays)[name]
    if comm.rank == victim:
        sys.settrace(at_lines(visit))
    try:
        found = operation()
        wrong = [] if found[: len(found) // 2] == found[len(found) // 2 :] else found
        comm.barrier()
    except Caught:
        pass  # and goes on
    finally:
        sys.settrace(None)
    return list(seen) if line is None else wrong


class Caught(Exception):
    """The victim catches it, and writes to its arrays, of which it believes that nobody reads them any more."""


def die(arrays: list[np.ndarray]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def leave(arrays: list[np.ndarray]) -> None:
    raise LookupError("at a bad moment")


def go_on(arrays: list[np.ndarray]) -> None:
    for array in arrays:
        array[:] = 77.0
    raise Caught


def interrupted_by(master: int) -> Callable[[list[np.ndarray]], None]:
    def be_interrupted(arrays: list[np.ndarray]) -> None:
        os.kill(master, signal.SIGINT)
        time.sleep(600)  # the interrupt comes here

    return be_interrupted


FAULTS: dict[str, tuple[Callable[[list[np.ndarray]], None], tuple[type[BaseException], ...]]] = {
    "dies": (die, (WorkerDied,)),
    "raises": (leave, (LookupError,)),
    "goes on": (go_on, (CollectiveMismatch,)),
    "is interrupted": (interrupted_by(os.getpid()), (KeyboardInterrupt,)),
}


PLACES = (2, 3, "1+2")


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_number_is_wrong_and_the_next_call_is_right(
    reused: Any, place: Any, fault: str, subtests: Any, storm_count: Any
) -> None:
    """Each operation with each fault at one place; at all of them in the storm.

    What a run executes depends on who comes first. So a line that is not reached this time is followed by another.
    """
    runtime, rng = reused(place), random.Random(f"{place} {fault}")
    size, (act, errors) = runtime.world_size, FAULTS[fault]
    names = ("name", "victim", "line")
    call = runtime.function(
        lambda x, name, victim, line: repr(run(name, victim, act, line)), bcast_inputs=names, outputs=None
    )
    names_of_all = random.Random(fault).sample([*operations(synk_comm_of(size), [np.zeros(1)] * 3)], 10)
    for name in names_of_all[PLACES.index(place) :: len(PLACES) if storm_count(1) == 1 else 1]:
        victim = rng.randrange(size)
        lines = eval(call(np.zeros(size), name, victim, None)[victim])
        num_acted, num_wanted = 0, min(len(lines), storm_count(1))
        for line in rng.sample(lines, len(lines)):
            if num_acted == num_wanted:
                break
            with subtests.test(case=f"rank {victim} {fault} at {Path(line[0]).name}:{line[1]} in {name}"):
                before = pids(runtime)
                try:
                    assert call(np.zeros(size), name, victim, line) == ["[]"] * size
                except errors:
                    num_acted += 1
                assert [mine == his for mine, his in zip(pids(runtime), before)].count(False) <= (fault == "dies")
                assert call(np.zeros(size), name, -1, None) == ["[]"] * size
        assert num_acted, f"{fault} at none of {len(lines)} lines in {name}"


def synk_comm_of(size: int) -> Any:
    return type("Ranks", (), {"rank": 0, "world_size": size})()
