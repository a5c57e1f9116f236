"""torch.distributed with gloo, one program on all ranks: compute on the own rows, one ``all_reduce``."""

from __future__ import annotations

import os

import numpy as np
import torch
import torch.distributed as dist

from benchmarks import _work
from benchmarks._serve import WORLD_SIZE, Call, serve

RANK = int(os.environ["SYNK_BENCHMARK_RANK"])


def prepare(job: str, **params: int) -> Call:
    """Run the function of ``job`` on the own rows (in ``linear passed``: scattered from rank 0 at each call)."""
    function, rows = _work.function_of(job, **params), _work.rows_of(job)
    x, y = _work.shard(rows, RANK, WORLD_SIZE)
    if job == "output":
        return _output(params["nbytes"], x, y)
    flat = np.zeros(_work.COLUMNS + 1, np.float32)
    shared = torch.from_numpy(flat)
    whole_x, whole_y = _work.inputs(rows) if RANK == 0 else (None, None)

    def call(number: int) -> float:
        if job == "linear passed":
            _scatter(whole_x, x)
            _scatter(whole_y, y)
        flat[0], flat[1:], seconds = function(_work.fresh_weights(number), x, y)
        dist.all_reduce(shared)
        np.multiply(flat, np.float32(1 / WORLD_SIZE), out=flat)
        return seconds

    return call


def _scatter(whole: _work.Array | None, part: _work.Array) -> None:
    parts = None if whole is None else list(torch.from_numpy(whole).chunk(WORLD_SIZE))
    dist.scatter(torch.from_numpy(part), parts)


def _output(nbytes: int, x: _work.Array, y: _work.Array) -> Call:
    array = torch.from_numpy(_work.output(_work.fresh_weights(0), x, y, nbytes))

    def call(number: int) -> None:
        _work.output(_work.fresh_weights(number), x, y, nbytes)
        dist.all_reduce(array)  # in place: gloo has no other
        array.mul_(1 / WORLD_SIZE)

    return call


def collective(name: str, nbytes: int) -> Call:
    """Run a collective on float32 arrays; a barrier ends those after which a rank may run ahead."""
    whole = torch.ones(nbytes // 4)
    part = torch.ones(nbytes // 4 // WORLD_SIZE)
    parts = list(whole.chunk(WORLD_SIZE)) if RANK == 0 else None
    calls = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
        "scatter": lambda: dist.scatter(part, parts),
        "gather": lambda: dist.gather(part, parts),
    }
    run = calls[name]

    def call(number: int) -> None:
        run()
        if name == "all_reduce":
            whole.mul_(1 / WORLD_SIZE)
        else:
            dist.barrier()

    return call


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['SYNK_BENCHMARK_SOCKET']}.gloo", rank=RANK, world_size=WORLD_SIZE
    )
    serve({"call": prepare, "collective": collective}, rank=RANK, version=torch.__version__)
    dist.destroy_process_group()
