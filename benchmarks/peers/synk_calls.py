"""synk: the calls that every peer makes too."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import synk
from benchmarks import _work
from benchmarks._serve import WORLD_SIZE, Call, serve
from benchmarks.messages import CUBE_S, NAP_S, WORK_S


def prepare(job: str, **params: int) -> Call:
    """Distribute the function of ``job`` and place its rows (in ``linear passed``: pass them as plain arrays)."""
    outputs = "avg" if job == "output" else ("avg", "avg", "max")
    function = synk.function(_work.function_of(job, **params), bcast_inputs="w", outputs=outputs)
    x, y = _work.inputs(_work.rows_of(job))
    if job != "linear passed":
        x, y = synk.data(x), synk.data(y)

    def call(number: int) -> float | None:
        result = function(_work.fresh_weights(number), x, y)
        return None if job == "output" else float(result[2])

    return call


def collective(name: str, nbytes: int) -> Call:
    """Run a collective on a float32 variable, as the master calls it."""
    whole = np.ones(nbytes // 4, np.float32)
    variable = synk.shared(whole, sharded=name in ("scatter", "gather"))
    calls = {
        "all_reduce": lambda: synk.all_reduce(variable),
        "broadcast": lambda: synk.broadcast(variable),
        "scatter": lambda: synk.scatter(variable, whole),
        "gather": lambda: synk.gather(variable),
    }
    run = calls[name]

    def call(number: int) -> None:
        run()

    return call


def inside(name: str, nbytes: int, repetitions: int) -> Call:
    """Run a collective of ``synk.comm`` from one given array into another, roots in turn; return the seconds of one."""
    own: dict[str, np.ndarray] = {}  # each rank's, and kept between calls

    def body(x: Any) -> float:
        comm = synk.comm
        rank, size = comm.rank, comm.world_size
        if not own:
            own.update(whole=np.ones(nbytes // 8), other=np.ones(nbytes // 8))
            own.update(part=np.ones(nbytes // 8 // size), block=np.ones(nbytes // 8 // size))
        whole, other, part, block = own.values()
        run = {
            "barrier": lambda root: comm.barrier(),
            "all_reduce": lambda root: comm.all_reduce(whole, "sum", out=other),
            "reduce": lambda root: comm.reduce(whole, "sum", root, out=other if rank == root else None),
            "broadcast": lambda root: comm.broadcast(whole, root, out=whole),
            "all_gather": lambda root: comm.all_gather(part, axis=0, out=whole),
            "reduce_scatter": lambda root: comm.reduce_scatter(whole, "sum", out=block),
            "gather": lambda root: comm.gather(part, root, out=whole if rank == root else None),
            "scatter": lambda root: comm.scatter(whole if rank == root else None, root, out=block),
            "all_to_all": lambda root: comm.all_to_all(whole, out=other),
        }[name]
        comm.barrier()
        start = time.perf_counter()
        for repetition in range(repetitions):
            run(repetition % size)
        return (time.perf_counter() - start) / repetitions

    function = synk.function(body, outputs="max")
    rows = np.zeros(WORLD_SIZE)
    return lambda number: float(function(rows))


def message(name: str, nbytes: int, repetitions: int) -> Call:
    """Exchange messages between the first two ranks in one call; return the seconds of one."""
    if name == "deadlock":
        return _deadlock()
    if name.startswith("kalman"):
        return _kalman(nbytes, is_ordered=name == "kalman")
    num_messages = repetitions * (2 if name == "round_trip" else 1)
    own: list[np.ndarray] = []  # each rank's, and kept between calls

    def body(x: Any) -> float:
        comm = synk.comm
        rank, peer = comm.rank, 1 - comm.rank
        if not own:
            own.extend(np.ones(count, np.uint8) for count in (nbytes, nbytes, 1))
        array, other, ack = own
        comm.barrier()
        start = time.perf_counter()
        for _ in range(repetitions if rank < 2 else 0):
            if name == "exchange":
                requests = [comm.irecv(peer, out=other), comm.isend(array, peer)]
                _work.spin(WORK_S)
                comm.wait_all(requests)
            elif name == "to_a_sleeper":
                if rank == 1:
                    time.sleep(NAP_S)
                    comm.recv(peer, out=other)
                    start = time.perf_counter()
                else:
                    comm.isend(array, peer)
            elif name == "one_way":
                if rank == 0:
                    comm.send(array, peer)
                    comm.recv(peer, out=ack)
                else:
                    comm.recv(peer, out=other)
                    comm.send(ack, peer)
            elif rank == 0:
                comm.send(array, peer)
                comm.recv(peer, out=other)
            else:
                comm.recv(peer, out=other)
                comm.send(array, peer)
        return (time.perf_counter() - start) / num_messages

    function = synk.function(body, outputs="max")
    rows = np.zeros(WORLD_SIZE)
    return lambda number: float(function(rows))


def _kalman(nbytes: int, *, is_ordered: bool) -> Call:
    """Update a Kalman filter on two ranks, each operation a sleep: in the order that is found, or as written."""
    matrix = np.ones(nbytes, np.uint8)

    def work(cubes: float, *needs: Any) -> Any:
        time.sleep(cubes * CUBE_S)
        return matrix

    def run(given: Any, call: Any, send: Any, recv: Any) -> Any:
        if synk.comm.rank == 0:
            a = call(work, 2)
            b = call(work, 2, a)
            mean = call(work, 2 / 3, a, b)
            for tag, array in enumerate((given, b, given, a), 1):
                send(array, 1, tag)
            return mean, recv(1, 5)
        if synk.comm.rank == 1:
            h, b, sigma, a = (recv(0, tag) for tag in (1, 2, 3, 4))
            solved = call(work, 8 / 3, b, h)
            product = call(work, 2, a, solved)
            send(call(work, 2, product, sigma), 0, 5)
        return None

    sys.path.append(str(Path(__file__).resolve().parents[2] / "demos" / "seeds"))
    import dataflow

    ordered = dataflow.flow(lambda given: run(given, dataflow.call, dataflow.send, dataflow.recv))

    def body(x: Any) -> float:
        comm = synk.comm
        comm.barrier()
        start = time.perf_counter()
        if is_ordered:
            ordered(matrix)
        else:
            run(matrix, lambda function, *args: function(*args), comm.send, comm.recv)
        return time.perf_counter() - start

    function = synk.function(body, outputs="max")
    rows = np.zeros(WORLD_SIZE)
    return lambda number: float(function(rows))


def _deadlock() -> Call:
    """Have all ranks wait for each other; return the seconds until the master has the error."""
    size = WORLD_SIZE
    function = synk.function(lambda x: synk.comm.recv((synk.comm.rank + 1) % size), outputs=None)
    rows = np.zeros(size)

    def call(number: int) -> float:
        start = time.perf_counter()
        try:
            function(rows)
        except synk.errors.CollectiveMismatch:
            return time.perf_counter() - start
        raise AssertionError("the ranks did not wait for each other")

    return call


if __name__ == "__main__":
    begin = time.perf_counter()
    with synk.fork(WORLD_SIZE):
        prepare("tiny")(0)
        serve(
            {"call": prepare, "collective": collective, "inside": inside, "message": message},
            start_s=time.perf_counter() - begin,
            version=synk.__version__,
        )
