"""dask.distributed on a local cluster, the rows scattered once and used as futures."""

from __future__ import annotations

import itertools
import logging
import time
from typing import Any

import distributed
import numpy as np

from benchmarks import _work
from benchmarks._serve import WORLD_SIZE, Call, serve


def main() -> None:
    """Serve with one process a worker and one thread a process."""
    start = time.perf_counter()
    cluster = distributed.LocalCluster(
        n_workers=WORLD_SIZE, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=logging.ERROR
    )
    with cluster, distributed.Client(cluster) as client:
        workers = list(client.scheduler_info()["workers"])
        keys = itertools.count()
        client.gather([client.submit(abs, rank, workers=[worker]) for rank, worker in enumerate(workers)])

        def prepare(job: str, **params: int) -> Call:
            function = _work.function_of(job, **params)
            x, y = _work.inputs(_work.rows_of(job))
            shards = list(zip(np.array_split(x, WORLD_SIZE), np.array_split(y, WORLD_SIZE), strict=True))

            def place() -> list[Any]:
                parts = zip(shards, workers, strict=True)
                return [client.scatter(list(part), workers=[worker], hash=False) for part, worker in parts]

            placed = place()

            def call(number: int) -> float | None:
                w = _work.fresh_weights(number)
                futures = [
                    client.submit(function, w, *part, workers=[worker], key=f"call-{next(keys)}", pure=False)
                    for part, worker in zip(place() if job == "linear passed" else placed, workers, strict=True)
                ]
                return _work.combine(client.gather(futures))

            return call

        serve({"call": prepare}, start_s=time.perf_counter() - start, version=distributed.__version__)


if __name__ == "__main__":
    main()
