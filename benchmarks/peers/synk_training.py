"""``synk.torch``: the same steps, whole batches given by the master at each call."""

from __future__ import annotations

import time
from typing import Any

import torch

import synk
from benchmarks import _models
from benchmarks._serve import WORLD_SIZE, Call, serve


def prepare(job: str, is_parallel: bool = False) -> Call:
    """Train the model of ``job``, and read the loss of each step.

    ``nothing``: a step with a module that is empty; ``plain``: a call that does the same without one; ``own``: one
    whose body takes the step of ``empty`` on a model of each worker's own, so that nothing is kept alike.
    ``is_parallel``: in the program, with the passes on the workers.
    """
    model, optimizer, x, y = _models.make("empty" if job in ("nothing", "plain", "own") else job)
    run: Any
    if job == "plain":
        run = synk.function(lambda x, y: x.sum(), framework="torch", outputs="avg")
    elif job == "nothing":
        run = synk.torch.replicate(torch.nn.Module()).function(lambda model, x, y: x.sum(), outputs="avg")
    elif job == "own":
        run = synk.function(_models.own_step, framework="torch")
    elif is_parallel:
        wrapped = synk.torch.DataParallel(model)

        def run(x: Any, y: Any) -> Any:
            return _models.step(wrapped, optimizer, x, y).detach()
    else:
        run = synk.torch.replicate(model, optimizer).function(_models.step)

    def call(number: int) -> None:
        float(run(x, y))

    return call


def memory(job: str) -> Call:
    """Return the memory of the larger worker after some steps, in bytes."""
    step = prepare(job)
    measure = synk.function(lambda rows: _models.resident_nbytes(), outputs="max")

    def call(number: int) -> float:
        for _ in range(5):
            step(number)
        return float(measure([0.0] * WORLD_SIZE))

    return call


if __name__ == "__main__":
    torch.set_num_threads(1)
    begin = time.perf_counter()
    with synk.fork(WORLD_SIZE):
        serve({"step": prepare, "memory": memory}, start_s=time.perf_counter() - begin, version=synk.__version__)
