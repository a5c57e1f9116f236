"""multiprocessing.Pool and ProcessPoolExecutor, the data placed in the workers by ``fork``."""

from __future__ import annotations

import multiprocessing
import os
import platform
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np

from benchmarks import _work
from benchmarks._serve import WORLD_SIZE, Call, serve

Task = tuple[Callable[..., Any], Any, int, int]
Map = Callable[[Callable[..., Any], list[Any]], Any]


def run_shard(task: Task) -> Any:
    """Run the function on the rows that this process has inherited."""
    function, w, rows, rank = task
    return function(w, *_work.shard(rows, rank, WORLD_SIZE))


def run_passed(task: Any) -> Any:
    """Run the function on rows that came with the task."""
    function, w, x, y = task
    return function(w, x, y)


def preparer(map_tasks: Map) -> Callable[..., Call]:
    """Return the ``prepare`` of a pool with this ``map``."""

    def prepare(job: str, **params: int) -> Call:
        function, rows = _work.function_of(job, **params), _work.rows_of(job)
        if job == "linear passed":
            x, y = _work.inputs(rows)

            def call(number: int) -> float | None:
                w = _work.fresh_weights(number)
                parts = zip(np.array_split(x, WORLD_SIZE), np.array_split(y, WORLD_SIZE), strict=True)
                return _work.combine(list(map_tasks(run_passed, [(function, w, *part) for part in parts])))

        else:

            def call(number: int) -> float | None:
                w = _work.fresh_weights(number)
                tasks = [(function, w, rows, rank) for rank in range(WORLD_SIZE)]
                return _work.combine(list(map_tasks(run_shard, tasks)))

        return call

    return prepare


def main() -> None:
    """Serve with the pool that the environment names."""
    for rows in _work.ROWS.values():  # in the master before the fork, so that every worker inherits all shards
        for rank in range(WORLD_SIZE):
            _work.shard(rows, rank, WORLD_SIZE)
    fork = multiprocessing.get_context("fork")
    start = time.perf_counter()
    if os.environ.get("SYNK_BENCHMARK_VARIANT") == "executor":
        with ProcessPoolExecutor(WORLD_SIZE, mp_context=fork) as executor:
            list(executor.map(abs, range(WORLD_SIZE)))
            _serve(executor.map, start)
    else:
        with fork.Pool(WORLD_SIZE) as pool:
            pool.map(abs, range(WORLD_SIZE))
            _serve(lambda function, tasks: pool.map(function, tasks, chunksize=1), start)


def _serve(map_tasks: Map, start: float) -> None:
    serve({"call": preparer(map_tasks)}, start_s=time.perf_counter() - start, version=platform.python_version())


if __name__ == "__main__":
    main()
