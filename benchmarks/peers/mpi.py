"""mpi4py, one program on all ranks: compute on the own rows, one ``Allreduce`` of one flat buffer."""

from __future__ import annotations

import importlib.metadata
import time
from collections.abc import Callable

import numpy as np
from mpi4py import MPI

from benchmarks import _work
from benchmarks._serve import Call, serve
from benchmarks.messages import CUBE_S, WORK_S

WORLD = MPI.COMM_WORLD
RANK, SIZE = WORLD.Get_rank(), WORLD.Get_size()


def prepare(job: str, **params: int) -> Call:
    """Run the function of ``job`` on the own rows (in ``linear passed``: scattered from rank 0 at each call)."""
    function, rows = _work.function_of(job, **params), _work.rows_of(job)
    x, y = _work.shard(rows, RANK, SIZE)
    if job == "output":
        return _output(params["nbytes"], x, y)
    flat, mean = np.zeros(_work.COLUMNS + 1, np.float32), np.zeros(_work.COLUMNS + 1, np.float32)
    slowest = np.zeros(1)
    whole_x, whole_y = _work.inputs(rows) if RANK == 0 else (None, None)

    def call(number: int) -> float:
        if job == "linear passed":
            WORLD.Scatter(whole_x, x)
            WORLD.Scatter(whole_y, y)
        flat[0], flat[1:], slowest[0] = function(_work.fresh_weights(number), x, y)
        WORLD.Allreduce(flat, mean)
        np.multiply(mean, np.float32(1 / SIZE), out=mean)
        return slowest[0]

    return call


def _output(nbytes: int, x: _work.Array, y: _work.Array) -> Call:
    mean = np.zeros(nbytes // 4, np.float32)

    def call(number: int) -> None:
        WORLD.Allreduce(_work.output(_work.fresh_weights(number), x, y, nbytes), mean)
        np.multiply(mean, np.float32(1 / SIZE), out=mean)

    return call


def collective(name: str, nbytes: int) -> Call:
    """Run a collective on float32 arrays; a barrier ends those after which a rank may run ahead."""
    whole, other = np.ones(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)
    part = np.ones(nbytes // 4 // SIZE, np.float32)
    calls = {
        "all_reduce": lambda: WORLD.Allreduce(whole, other),
        "broadcast": lambda: WORLD.Bcast(whole),
        "scatter": lambda: WORLD.Scatter(whole if RANK == 0 else None, part),
        "gather": lambda: WORLD.Gather(part, whole if RANK == 0 else None),
    }
    run = calls[name]

    def call(number: int) -> None:
        run()
        if name == "all_reduce":
            np.multiply(other, np.float32(1 / SIZE), out=other)
        else:
            WORLD.Barrier()

    return call


def inside(name: str, nbytes: int, repetitions: int) -> Call:
    """Run a collective from one given array into another, roots in turn; return the seconds of one."""
    whole, other = np.ones(nbytes // 8), np.ones(nbytes // 8)
    part, block = np.ones(nbytes // 8 // SIZE), np.ones(nbytes // 8 // SIZE)
    run = {
        "barrier": lambda root: WORLD.Barrier(),
        "all_reduce": lambda root: WORLD.Allreduce(whole, other),
        "reduce": lambda root: WORLD.Reduce(whole, other if root == RANK else None, root=root),
        "broadcast": lambda root: WORLD.Bcast(whole, root),
        "all_gather": lambda root: WORLD.Allgather(part, whole),
        "reduce_scatter": lambda root: WORLD.Reduce_scatter_block(whole, block),
        "gather": lambda root: WORLD.Gather(part, whole if root == RANK else None, root),
        "scatter": lambda root: WORLD.Scatter(whole if root == RANK else None, block, root),
        "all_to_all": lambda root: WORLD.Alltoall(whole, other),
    }[name]

    def call(number: int) -> float:
        WORLD.Barrier()
        start = time.perf_counter()
        for repetition in range(repetitions):
            run(repetition % SIZE)
        return (time.perf_counter() - start) / repetitions

    return call


def message(name: str, nbytes: int, repetitions: int) -> Call:
    """Exchange messages between the first two ranks; return the seconds of one, as both have seen it."""
    array, other = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    ack = np.ones(1, np.uint8)
    peer = 1 - RANK

    def round_trip() -> None:
        for _ in range(repetitions):
            if RANK == 0:
                WORLD.Send(array, peer)
                WORLD.Recv(other, peer)
            else:
                WORLD.Recv(other, peer)
                WORLD.Send(array, peer)

    def one_way() -> None:
        for _ in range(repetitions):
            if RANK == 0:
                WORLD.Send(array, peer)
                WORLD.Recv(ack, peer)
            else:
                WORLD.Recv(other, peer)
                WORLD.Send(ack, peer)

    def exchange() -> None:
        for _ in range(repetitions):
            requests = [WORLD.Irecv(other, peer), WORLD.Isend(array, peer)]
            _work.spin(WORK_S)
            MPI.Request.Waitall(requests)

    body = {"round_trip": round_trip, "one_way": one_way, "exchange": exchange, "kalman": _kalman(nbytes)}[name]
    num_messages = repetitions * (2 if name == "round_trip" else 1)

    def call(number: int) -> float:
        WORLD.Barrier()
        start = time.perf_counter()
        if RANK < 2:
            body()
        return (time.perf_counter() - start) / num_messages

    return call


def _kalman(nbytes: int) -> Callable[[], None]:
    """Update a Kalman filter on two ranks, each operation a sleep, its messages where an expert would put them."""
    peer = 1 - RANK
    array, *others = (np.ones(nbytes, np.uint8) for _ in range(6))

    def work(cubes: float) -> None:
        time.sleep(cubes * CUBE_S)

    def mean() -> None:
        requests = [WORLD.Isend(array, peer, 1), WORLD.Isend(array, peer, 3), WORLD.Irecv(others[0], peer, 5)]
        work(2)
        requests.append(WORLD.Isend(array, peer, 4))
        work(2)
        requests.append(WORLD.Isend(array, peer, 2))
        work(2 / 3)
        MPI.Request.Waitall(requests)

    def covariance() -> None:
        h, b, sigma, a = (WORLD.Irecv(others[tag], peer, tag) for tag in (1, 2, 3, 4))
        MPI.Request.Waitall([h, b])
        work(8 / 3)
        a.Wait()
        work(2)
        sigma.Wait()
        work(2)
        WORLD.Send(array, peer, 5)

    return covariance if RANK else mean


if __name__ == "__main__":
    jobs = {"call": prepare, "collective": collective, "inside": inside, "message": message}
    serve(jobs, rank=RANK, version=importlib.metadata.version("mpi4py"))
