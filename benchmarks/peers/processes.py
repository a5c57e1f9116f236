"""The ideal: independent processes that each run the function on their rows and never communicate."""

from __future__ import annotations

import os

import numpy as np

from benchmarks import _work
from benchmarks._serve import WORLD_SIZE, Call, serve

RANK = int(os.environ["SYNK_BENCHMARK_RANK"])


def prepare(job: str, **params: int) -> Call:
    """Run the function of ``job`` on this rank's rows."""
    function = _work.function_of(job, **params)
    x, y = _work.shard(_work.rows_of(job), RANK, WORLD_SIZE)

    def call(number: int) -> None:
        function(_work.fresh_weights(number), x, y)

    return call


def copy(name: str, nbytes: int) -> Call:
    """Whatever the collective, copy one array on rank 0 while the others rest: what collectives are held against."""
    source, target = np.ones(nbytes // 4, np.float32), np.zeros(nbytes // 4, np.float32)

    def call(number: int) -> None:
        if RANK == 0:
            np.copyto(target, source)

    return call


if __name__ == "__main__":
    serve({"call": prepare, "collective": copy}, rank=RANK, version=np.__version__)
