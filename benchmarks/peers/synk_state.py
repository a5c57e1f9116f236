"""synk against itself: what it costs to pass at each call what could live on the workers."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import synk
from benchmarks import _work
from benchmarks._serve import WORLD_SIZE, Call, serve

STEP = np.float32(1e-6)


def parameters(way: str, nbytes: int) -> Call:
    """Call a function that reads its parameters: ``passed`` as a broadcast argument, or ``resident``."""
    x = synk.data(np.zeros(WORLD_SIZE, np.float32))
    w = np.ones(nbytes // 4, np.float32)
    if way == "passed":
        passed = synk.function(lambda w, x: x.sum() + w.max(), bcast_inputs="w", outputs="max")
        return lambda number: _drop(passed(w, x))
    variable = synk.shared(w)
    resident = synk.function(lambda x: x.sum() + variable.value.max(), outputs="max")
    return lambda number: _drop(resident(x))


def rows(way: str) -> Call:
    """Call ``loss_and_grad`` on rows that are ``passed``, in ``Data`` (``data``) or in a variable (``sharded``)."""
    function = synk.function(_work.loss_and_grad, bcast_inputs="w", outputs=("avg", "avg", "max"))
    x: Any
    y: Any
    x, y = _work.inputs(_work.ROWS["linear"])
    if way == "data":
        x, y = synk.data(x), synk.data(y)
    elif way == "sharded":
        x, y = synk.shared(x, sharded=True), synk.shared(y, sharded=True)
    return lambda number: _drop(function(_work.fresh_weights(number), x, y))


def step(way: str, columns: int) -> Call:
    """Make a step of gradient descent in ``one`` call, or in ``three``: gradient, all_reduce, update."""
    generator = np.random.default_rng(0)
    x = synk.data(generator.standard_normal((4 * WORLD_SIZE, columns), dtype=np.float32))
    y = synk.data(generator.standard_normal(4 * WORLD_SIZE, dtype=np.float32))
    w, grad = (synk.shared(np.zeros(columns, np.float32)) for _ in range(2))

    def one(x: Any, y: Any) -> Any:
        loss, local, _ = _work.loss_and_grad(w.value, x, y)
        w.value = w.value - STEP * synk.comm.all_reduce(local)
        return loss

    def gradient(x: Any, y: Any) -> Any:
        loss, grad.value, _ = _work.loss_and_grad(w.value, x, y)
        return loss

    def update(x: Any) -> int:
        w.value = w.value - STEP * grad.value
        return 0

    if way == "one":
        whole = synk.function(one)
        return lambda number: _drop(whole(x, y))
    first, last = synk.function(gradient), synk.function(update, outputs="first")

    def three(number: int) -> None:
        first(x, y)
        synk.all_reduce(grad)
        last(x)

    return three


def _drop(result: Any) -> None:
    """Let go of a result: what is timed returns nothing."""


if __name__ == "__main__":
    begin = time.perf_counter()
    with synk.fork(WORLD_SIZE):
        serve(
            {"parameters": parameters, "rows": rows, "step": step},
            start_s=time.perf_counter() - begin,
            version=synk.__version__,
        )
