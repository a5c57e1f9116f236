"""torch's DistributedDataParallel with gloo: one process for each rank, which trains on its own rows."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks import _models
from benchmarks._serve import WORLD_SIZE, Call, serve

RANK = int(os.environ["SYNK_BENCHMARK_RANK"])


def prepare(job: str) -> Call:
    """Train the model of ``job``; the loss is averaged for the one who reads it, as a training loop does."""
    model, optimizer, x, y = _models.make(job)
    wrapped = DistributedDataParallel(model)
    own = slice(RANK * len(x) // WORLD_SIZE, (RANK + 1) * len(x) // WORLD_SIZE)
    x, y = x[own].clone(), y[own].clone()

    def call(number: int) -> None:
        loss = _models.step(wrapped, optimizer, x, y).detach()
        dist.all_reduce(loss)

    return call


def memory(job: str) -> Call:
    """Return the memory of this rank after some steps, in bytes."""
    step = prepare(job)

    def call(number: int) -> float:
        for _ in range(5):
            step(number)
        return _models.resident_nbytes()

    return call


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{os.environ['SYNK_BENCHMARK_SOCKET']}.gloo", rank=RANK, world_size=WORLD_SIZE
    )
    serve({"step": prepare, "memory": memory}, rank=RANK, version=torch.__version__)
    dist.destroy_process_group()
