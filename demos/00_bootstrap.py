"""How sure is a correlation? A bootstrap of many resamples, as a serial program and on 1, 2, ... workers.

The admission scores of 15 American law schools correlate with 0.776, and the textbook of the bootstrap (B. Efron and
R. Tibshirani, 1993, table 6.1) gives this number a standard error of 0.132. The function is written for one process and
used unchanged by both. It computes much with few bytes, so that every core counts.

Run: python demos/00_bootstrap.py
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import numpy as np
from limits import SMALL, Watch, explain

import synk

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--size", choices=("small", "full"), default="full", help="small: for tests")
parser.add_argument("--picture", metavar="FILE", help="draw the result and the speed-up there; needs matplotlib")
options = parser.parse_args()
NUM_SEEDS, NUM_ROUNDS = {"small": (20, 1), "full": (2000, 5)}[options.size]
RESAMPLES = 1000  # for each seed

LSAT = np.array([576, 635, 558, 578, 666, 580, 555, 661, 651, 605, 653, 575, 545, 572, 594])
GPA = np.array([3.39, 3.30, 2.81, 3.03, 3.44, 3.07, 3.00, 3.43, 3.36, 3.13, 3.12, 2.74, 2.76, 2.88, 2.96])


def correlation(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Pearson's, of each row: ``(resamples, schools)`` twice to ``(resamples,)``."""
    x = x - x.mean(axis=1, keepdims=True)
    y = y - y.mean(axis=1, keepdims=True)
    return (x * y).sum(axis=1) / np.sqrt((x * x).sum(axis=1) * (y * y).sum(axis=1))


def bootstrap(seeds: np.ndarray) -> np.ndarray:
    """Return the correlations of resampled schools, a row for each seed."""
    found = []
    for seed in seeds:
        picks = np.random.default_rng(seed).integers(len(LSAT), size=(RESAMPLES, len(LSAT)))
        found.append(correlation(LSAT[picks], GPA[picks]))
    return np.array(found)


seeds = np.arange(NUM_SEEDS)
num_cores = len(os.sched_getaffinity(0))
numbers = sorted({1, *(n for n in (2, 4, 8, 16, 32) if n < num_cores), num_cores})
runtimes = {number: synk.Runtime(number, backend="numpy") for number in numbers}
programs = {"serial": bootstrap}
for number, runtime in runtimes.items():
    programs[f"{number} worker{'s' * (number > 1)}"] = runtime.function(bootstrap, outputs="gather")
for program in programs.values():
    program(seeds[: 2 * num_cores])  # start-up is not computing

seconds: dict[str, list[float]] = {name: [] for name in programs}
results: dict[str, np.ndarray] = {}
with Watch() as watch:
    for _ in range(NUM_ROUNDS):
        for name, program in programs.items():  # in turns, because a core's speed drifts
            start = time.perf_counter()
            results[name] = program(seeds)
            seconds[name].append(time.perf_counter() - start)

found = results["serial"].ravel()
assert all(np.array_equal(result, results["serial"]) for result in results.values())
assert abs(found.std() - 0.132) < 0.005

low, high = np.quantile(found, (0.025, 0.975))
estimate = np.corrcoef(LSAT, GPA)[0, 1]
print(f"correlation {estimate:.3f}, standard error {found.std():.3f}, 95 % between {low:.2f} and {high:.2f}")
print(f"({found.size} resamples of {len(LSAT)} schools, {num_cores} cores, medians of {NUM_ROUNDS} rounds)")
print()
speed_ups = {
    name: statistics.median(serial / own for serial, own in zip(seconds["serial"], times, strict=True))
    for name, times in seconds.items()
}
print(f"{'program':<12}{'time [s]':>10}{'speed-up':>10}{'equal to serial':>18}")
for name, times in seconds.items():
    equal = "" if name == "serial" else "every bit"
    print(f"{name:<12}{statistics.median(times):>10.2f}{speed_ups[name]:>10.2f}{equal:>18}")
last = list(programs)[-1]
if num_cores > 1 and speed_ups[last] < SMALL:
    job_rate = found.nbytes / statistics.median(seconds[last]) / 1e9  # all else stays in the caches
    print()
    print(explain(speed_ups[last], runtimes[num_cores], watch.other_cores, job_rate))
for runtime in runtimes.values():
    runtime.close()


def draw(file: str) -> None:
    """Draw what was found, and how much faster, and write it to a file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained", width_ratios=(3, 2))
    left.hist(found, bins=200, density=True, color="#9db8d9")
    left.axvspan(low, high, color="#1f5a99", alpha=0.12, label=f"95 % between {low:.2f} and {high:.2f}")
    left.axvline(estimate, color="#1f5a99", label=f"of the 15 schools: {estimate:.3f}")
    left.set(xlabel="correlation", yticks=[], title=f"{found.size:,} resamples")
    left.legend(frameon=False, loc="upper left")
    bars = right.bar([str(number) for number in numbers], list(speed_ups.values())[1:], color="#1f5a99", width=0.6)
    right.bar_label(bars, fmt="%.2f")
    for place, number in enumerate(numbers):
        right.plot(
            [place - 0.4, place + 0.4], [number, number], color="0.5", linestyle="--", label="one for each worker"
        )
    right.legend(*(part[:1] for part in right.get_legend_handles_labels()), frameon=False, loc="upper left")
    right.set(xlabel="workers", title="times as fast as the serial program", ylim=(0, 1.25 * max(numbers)))
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    left.spines["left"].set_visible(False)
    figure.savefig(file, dpi=150)
    print(f"\ndrawn in {file}")


if options.picture:
    draw(options.picture)
