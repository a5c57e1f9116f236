"""ray: one actor a worker that holds its rows, weights by ``ray.put``."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import ray

from benchmarks import _work
from benchmarks._serve import WORLD_SIZE, Call, serve


@ray.remote(num_cpus=0)
class Actor:
    """A worker with its rows."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def prepare(self, function: Callable[..., Any], rows: int) -> None:
        """Take the function and the rows of the next calls."""
        self.function, self.rows = function, _work.shard(rows, self.rank, WORLD_SIZE)

    def run(self, w: Any, *rows: Any) -> Any:
        """Run the function on rows that came with the call, or on those held."""
        return self.function(w, *(rows or self.rows))


def main() -> None:
    """Serve with a local ray."""
    start = time.perf_counter()
    ray.init(num_cpus=WORLD_SIZE, include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    actors: list[Any] = [Actor.remote(rank) for rank in range(WORLD_SIZE)]  # type: ignore[attr-defined]

    def prepare(job: str, **params: int) -> Call:
        function, rows = _work.function_of(job, **params), _work.rows_of(job)
        ray.get([actor.prepare.remote(function, rows) for actor in actors])
        shards = [_work.shard(rows, rank, WORLD_SIZE) for rank in range(WORLD_SIZE)]
        passed = shards if job == "linear passed" else [()] * WORLD_SIZE

        def call(number: int) -> float | None:
            w = ray.put(_work.fresh_weights(number))
            return _work.combine(
                ray.get([actor.run.remote(w, *part) for actor, part in zip(actors, passed, strict=True)])
            )

        return call

    prepare("tiny")(0)
    try:
        serve({"call": prepare}, start_s=time.perf_counter() - start, version=ray.__version__)
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
