"""A plate that conducts heat, its rows divided over workers: neighbours exchange edges while they compute the rest.

At each step a point moves towards its four neighbours. A rank has the rows above and below its own, the halo, from the
ranks next to it; it needs them for its first and its last row only. So it starts the messages, computes the rows
between, and then waits. What this hides is the wait for a neighbour that is behind; a message between CPU workers is
itself a copy by the processor.

Run: python demos/32_halo.py
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import synk

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--size", choices=("small", "full"), default="full", help="small: for tests")
parser.add_argument("--mpi", action="store_true", help="be one rank of the same program on mpi4py, under mpiexec")
options = parser.parse_args()
NUM_ROWS, NUM_COLUMNS, NUM_STEPS, NUM_RUNS = {"small": (30, 40, 20, 1), "full": (500, 8000, 30, 3)}[options.size]
RATE = 0.2

Exchange = Callable[[np.ndarray], Callable[[], Any]]
"""Starts the messages of a step, and returns what waits for the halo."""


def within_walls(rows: np.ndarray) -> np.ndarray:
    """Return rows with a frame: walls at temperature 0, or the place of a halo."""
    return np.pad(rows, 1)


def moved(framed: np.ndarray) -> np.ndarray:
    """Return the points inside of a frame after one step of explicit Euler."""
    points = framed[1:-1, 1:-1]
    around = framed[:-2, 1:-1] + framed[2:, 1:-1] + framed[1:-1, :-2] + framed[1:-1, 2:]
    return points + RATE * (around - 4 * points)


def serial(plate: np.ndarray) -> np.ndarray:
    framed = within_walls(plate)
    for _ in range(NUM_STEPS):
        framed[1:-1, 1:-1] = moved(framed)
    return framed[1:-1, 1:-1]


def parallel(rows: np.ndarray, exchange: Exchange) -> np.ndarray:
    """Return a rank's rows at the end."""
    now = within_walls(rows)
    after = now.copy()
    for _ in range(NUM_STEPS):
        wait = exchange(now)
        after[2:-2, 1:-1] = moved(now[1:-1])  # meanwhile: the rows that need no halo
        wait()
        after[1:2, 1:-1] = moved(now[:3])
        after[-2:-1, 1:-1] = moved(now[-3:])
        now, after = after, now
    return now[1:-1, 1:-1]


def neighbours(rank: int, size: int) -> list[tuple[int, int, int]]:
    """Return (peer, which row it gets, where its row goes) of the ranks above and below."""
    return [(peer, *rows) for peer, rows in ((rank - 1, (1, 0)), (rank + 1, (-2, -1))) if 0 <= peer < size]


@synk.function(bcast_inputs="is_blocking", outputs="gather")
def on_workers(rows: np.ndarray, is_blocking: bool) -> np.ndarray:
    comm = synk.comm
    peers = neighbours(comm.rank, comm.world_size)

    def started(now: np.ndarray) -> Callable[[], Any]:
        for peer, edge, _ in peers:
            comm.isend(now[edge], peer)
        requests = [comm.irecv(peer, out=now[halo]) for peer, _, halo in peers]
        return lambda: comm.wait_all(requests)

    def waited_for(now: np.ndarray) -> Callable[[], Any]:
        for peer, edge, _ in peers:
            comm.send(now[edge], peer)
        for peer, _, halo in peers:
            comm.recv(peer, out=now[halo])
        return lambda: None

    return parallel(rows, waited_for if is_blocking else started)


def on_mpi(plate: np.ndarray) -> None:
    """Be one rank under mpiexec; rank 0 checks the plate and prints the seconds."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    peers = neighbours(comm.rank, comm.size)

    def started(now: np.ndarray) -> Callable[[], Any]:
        requests = [comm.Isend(now[edge], peer) for peer, edge, _ in peers]
        requests += [comm.Irecv(now[halo], peer) for peer, _, halo in peers]
        return lambda: MPI.Request.Waitall(requests)

    seconds = []
    for _ in range(NUM_RUNS):
        comm.Barrier()
        start = time.perf_counter()
        rows = parallel(np.array_split(plate, comm.size)[comm.rank], started)
        comm.Barrier()
        seconds.append(time.perf_counter() - start)
    blocks = comm.gather(rows)
    if comm.rank == 0:
        assert np.array_equal(np.concatenate(blocks), serial(plate))
        print(min(seconds))


def seconds_of_mpi(num_ranks: int) -> float | str:
    """Return what the same program takes on mpi4py, or why it does not run here."""
    folders = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    mpiexec = shutil.which("mpiexec", path=os.pathsep.join(folders))
    if importlib.util.find_spec("mpi4py") is None or mpiexec is None:
        return "not installed"
    command = [mpiexec, "-n", str(num_ranks), sys.executable, __file__, "--mpi", "--size", options.size]
    ran = subprocess.run(command, capture_output=True, text=True)
    return float(ran.stdout) if ran.returncode == 0 else f"mpiexec failed: {ran.stderr}"


def seconds_of(program: Callable[[], np.ndarray]) -> float:
    program()  # workers start, memory is touched
    seconds = []
    for _ in range(NUM_RUNS):
        start = time.perf_counter()
        plate_after = program()
        seconds.append(time.perf_counter() - start)
        assert np.array_equal(plate_after, expected), "not the serial plate, bit for bit"
    return min(seconds)


plate = np.random.default_rng(0).random((NUM_ROWS, NUM_COLUMNS))
if options.mpi:
    on_mpi(plate)
    sys.exit()

expected = serial(plate)
num_workers = synk.fork(backend="numpy").world_size
rows = synk.data(plate)
table = {
    "serial": seconds_of(lambda: serial(plate)),
    f"{num_workers} workers, blocking messages": seconds_of(lambda: on_workers(rows, True)),
    f"{num_workers} workers, computing meanwhile": seconds_of(lambda: on_workers(rows, False)),
    f"{num_workers} ranks of mpi4py, computing meanwhile": seconds_of_mpi(num_workers),
}
synk.close()
print(f"{NUM_STEPS} steps of a plate of {NUM_ROWS} x {NUM_COLUMNS} points: each time the same, bit for bit")
for program, seconds in table.items():
    print(f"{program:<42}", seconds if isinstance(seconds, str) else f"{seconds:9.3f} s")
