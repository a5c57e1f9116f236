"""synk: the calls that every peer makes too."""

from __future__ import annotations

import time

import numpy as np

import synk
from benchmarks import _work
from benchmarks._serve import WORLD_SIZE, Call, serve


def prepare(job: str, **params: int) -> Call:
    """Distribute the function of ``job`` and place its rows (in ``linear passed``: pass them as plain arrays)."""
    outputs = "avg" if job == "output" else ("avg", "avg", "max")
    function = synk.function(_work.function_of(job, **params), bcast_inputs="w", outputs=outputs, name=job)
    x, y = _work.inputs(_work.rows_of(job))
    if job != "linear passed":
        x, y = function.build_inputs(x, y)

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


if __name__ == "__main__":
    begin = time.perf_counter()
    with synk.fork(WORLD_SIZE):
        prepare("tiny")(0)
        serve(
            {"call": prepare, "collective": collective},
            start_s=time.perf_counter() - begin,
            version=synk.__version__,
        )
