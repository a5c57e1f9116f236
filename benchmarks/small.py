"""Tiny calls in other circumstances: beside busy processes, with a shared variable, inline. One process, in turns.

*busy* is a tiny call beside processes that want the same cores, by a runtime that waits awake where that pays, as it
does by default, and by one that never does. *variable* reads and assigns a shared variable. *repeat* is a hundred calls
with an update, one by one and for one message. *pytensor* is a graph, where PyTensor is installed. *dpnp* is a hundred
calls of a function of 1 MB on one device, where dpnp is installed, and a hundred runs of the same program with its two
copies in one process, the worker's. *inline* is the processor time of a call with one rank in the master's process.
*parameters* are dicts of many small arrays, and *outputs* are results of several kinds.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from typing import Any

import numpy as np

from benchmarks import _work
from benchmarks._harness import Harness

BUSY = (2, 4)
NUM_LEAVES = (10, 100, 1000)


def run(harness: Harness) -> dict[str, Any]:
    """Return case -> rounds, each with the seconds of a call by way."""
    harness.progress("small")
    return dict(harness.script("small", str(harness.world_size), str(3 if harness.quick else 9), str(harness.block_s)))


def measure(world_size: int, rounds: int, block_s: float) -> dict[str, list[dict[str, float]]]:
    """Return what ``run`` returns; in a process of its own."""
    import synk  # here, so that the harness that imports this module needs no synk

    with synk.fork(0, backend="numpy") as runtime:
        inline = _turns({"inline": _tiny(runtime)}, rounds, block_s, time.process_time)
    results = {"inline": inline}
    with synk.fork(world_size, backend="numpy") as runtime:
        value = runtime.shared(np.zeros(4, np.float32))

        def step(w: Any, x: Any, y: Any) -> Any:
            value.value = value.value + 1
            return _work.loss_and_grad(w, x, y)

        ways = {"plain": _tiny(runtime), "variable": _tiny(runtime, step)}
        results["variable"] = _turns(ways, rounds, block_s, time.perf_counter)
        results["repeat"] = _turns(_repeated(runtime), rounds, block_s, time.perf_counter)
        ways = {name: _tiny(runtime, _holding(each)) for name, each in _captured().items()}
        results["captured"] = _turns(ways, rounds, block_s, time.perf_counter)
        with suppress(ImportError):
            results["pytensor"] = _turns(_graph(runtime), rounds, block_s, time.perf_counter)
        with suppress(synk.errors.UnsupportedError), synk.Runtime(1, backend="dpnp") as device:  # it is installed
            results["dpnp"] = _turns(_on_dpnp(device), rounds, block_s, time.perf_counter)
        results["parameters"] = _turns(_parameters(runtime), rounds, block_s, time.perf_counter)
        results["outputs"] = _turns(_outputs(runtime), rounds, block_s, time.perf_counter)
        results["followed"] = _followed(runtime, rounds, block_s)
        os.environ["SYNK_SPIN_US"] = "0"
        with synk.Runtime(world_size, backend="numpy") as asleep:
            ways = {"default": _tiny(runtime), "never awake": _tiny(asleep)}
            for number in BUSY:
                with _busy(number):
                    results[f"beside {number} busy"] = _turns(ways, rounds, block_s, time.perf_counter)
    return results


def _followed(runtime: Any, rounds: int, block_s: float) -> list[dict[str, float]]:
    """Measure calls that are traced beside plain ones on the same workers."""
    from synk.profiler import trace

    folder = tempfile.mkdtemp()
    contexts = {"plain": nullcontext, "traced": lambda: trace(os.path.join(folder, "run.json"))}
    mode = "plain"
    stack = ExitStack()

    def under(name: str, call: Callable[[int], Any]) -> Callable[[int], Any]:
        def run(number: int) -> Any:
            nonlocal mode
            if mode != name:  # at the first call of a block
                stack.close()
                stack.enter_context(contexts[name]())
                mode = name
            return call(number)

        return run

    ways = {name: under(name, _tiny(runtime)) for name in contexts}
    with stack:
        return _turns(ways, rounds, block_s, time.perf_counter)


def _tiny(runtime: Any, function: Callable[..., Any] = _work.loss_and_grad) -> Callable[[int], Any]:
    call = runtime.function(function, bcast_inputs="w", outputs=("avg", "avg", "max"))
    x, y = (runtime.data(each) for each in _work.inputs(_work.ROWS["tiny"]))
    return lambda number: call(_work.fresh_weights(number), x, y)


def _repeated(runtime: Any) -> dict[str, Callable[[int], Any]]:
    """Return a hundred calls with an update, one by one and for one message."""
    value, x = runtime.shared(np.zeros(4)), np.ones(8)
    call = runtime.function(lambda x: (x[0], value.value + 1), updates=[value])

    def one_by_one(number: int) -> None:
        for _ in range(100):
            call(x)

    return {"100 calls": one_by_one, "repeat(100)": lambda number: call.repeat(100, x)}


def _graph(runtime: Any) -> dict[str, Callable[[int], Any]]:
    """Return a graph of PyTensor and the same in NumPy, each on the workers and in this process."""
    os.environ.setdefault("PYTENSOR_FLAGS", "cxx=,linker=py")
    import pytensor.tensor as pt

    from synk.extensions.synkhronos import function

    def mean_square(x: Any, w: Any) -> Any:
        return ((x @ w) ** 2).mean()

    x, w = pt.matrix("x", dtype="float64"), pt.vector("w", dtype="float64")
    graph = function([x], mean_square(x, w), bcast_inputs=[w])
    plain = runtime.function(mean_square, bcast_inputs="w")
    rows, weights = np.ones((64, 8)), np.ones(8)
    return {
        "numpy": lambda number: plain(rows, weights),
        "pytensor": lambda number: graph(rows, weights),
        "numpy, serial": lambda number: mean_square(rows, weights),
        "pytensor, serial": lambda number: graph.compiled(rows, weights),
    }


def _on_dpnp(runtime: Any) -> dict[str, Callable[[int], Any]]:
    """Return a hundred calls, and as many runs of the same program in one process."""
    x = np.ones((1 << 14, 8))

    def norms(x: Any) -> Any:
        return (x * x).sum(axis=1)

    def alone(x: Any) -> float:
        import dpnp

        host = dpnp.asnumpy(x)
        for _ in range(100):
            found = dpnp.asnumpy(norms(dpnp.asarray(host)))
        return float(found.sum())

    call, alone_there = runtime.function(norms, outputs="gather"), runtime.function(alone, outputs="first")

    def one_by_one(number: int) -> None:
        for _ in range(100):
            call(x)

    return {"dpnp": one_by_one, "dpnp, one process": lambda number: alone_there(x)}


def _parameters(runtime: Any) -> dict[str, Callable[[int], Any]]:
    """Return calls with many small arrays in a dict, which go whole to every rank or are divided by rows."""
    ways = {}
    for count in NUM_LEAVES:
        tree = {f"p{k}": np.ones(8, np.float32) for k in range(count)}
        whole = runtime.function(lambda p: p["p0"].sum(), bcast_inputs="p", outputs="first")
        rows = runtime.function(lambda p: p["p0"].sum(), outputs="sum")
        ways[f"{count} whole"] = lambda number, f=whole, tree=tree: f(tree)
        ways[f"{count} by rows"] = lambda number, f=rows, tree=tree: f(tree)
    return ways


def _outputs(runtime: Any) -> dict[str, Callable[[int], Any]]:
    """Return calls whose outputs look different."""
    x, keys = np.ones(8), [f"k{k}" for k in range(64)]
    functions = {
        "an array": runtime.function(lambda x: x, outputs="gather"),
        "a text": runtime.function(lambda x: "text", outputs=None),
        "a small dict of texts": runtime.function(lambda x: {"a": "text", "n": "more"}, outputs=None),
        "a tuple of 64": runtime.function(lambda x: (x,) * 64, outputs="sum"),
        "a dict of 64": runtime.function(lambda x: dict.fromkeys(keys, x), outputs="sum"),
    }
    return {name: lambda number, f=f: f(x) for name, f in functions.items()}


def _captured() -> dict[str, Any]:
    """Return what a function holds, by name; a module of torch's only where that is installed."""
    found: dict[str, Any] = {
        "nothing": None,
        "80 B": np.zeros(10),
        "10 arrays of 8 KB": {number: np.zeros(1024) for number in range(10)},
        "100 MB": np.ones(12_500_000),
        "a list of 100": list(range(1000, 1100)),
        "a generator": np.random.default_rng(0),
    }
    with suppress(ImportError):
        import torch

        found["400 tensors"] = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(200)))
    return found


def _holding(held: Any) -> Callable[..., Any]:
    """Return the function of the tiny call, with something in a cell."""

    def loss_and_grad(w: Any, x: Any, y: Any) -> Any:
        assert held is not None
        return _work.loss_and_grad(w, x, y)

    return _work.loss_and_grad if held is None else loss_and_grad


def _turns(
    ways: dict[str, Callable[[int], Any]], rounds: int, block_s: float, clock: Callable[[], float]
) -> list[dict[str, float]]:
    """Measure each way in turn; return by round the median seconds of a call, and the 95th percentile as ``... p95``.

    The processor's clock is too coarse for one call: there it is the mean of the block.
    """
    counts = {}
    for way, call in ways.items():
        start = time.perf_counter()
        for number in range(50):
            call(number)
        counts[way] = max(50, int(block_s / ((time.perf_counter() - start) / 50)))
    entries = []
    for _ in range(rounds):
        entry = {}
        for way, call in ways.items():
            seconds = []
            begin = clock()
            for number in range(counts[way]):
                start = clock()
                call(number)
                seconds.append(clock() - start)
            mean = (clock() - begin) / counts[way]
            entry[way] = mean if clock is time.process_time else statistics.median(seconds)
            entry[f"{way} p95"] = statistics.quantiles(seconds, n=20)[-1]
        entries.append(entry)
    return entries


@contextmanager
def _busy(number: int) -> Iterator[None]:
    """Have so many processes compute meanwhile."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for each in others:
            each.kill()
            each.wait()


def lines(results: dict[str, Any]) -> list[list[str]]:
    """Return the rows of the table: microseconds a call, and the 95th percentile."""
    rows = []
    for case, rounds in results.items():
        for way in (name for name in rounds[0] if not name.endswith("p95")):
            cells = [statistics.median(entry[key] for entry in rounds) * 1e6 for key in (way, f"{way} p95")]
            rows.append([case, way, *(f"{cell:.0f}" for cell in cells)])
    return rows


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))))
