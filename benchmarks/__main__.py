"""``python -m benchmarks [--quick] [--only FAMILY ...]``: measure, print the tables, write a JSON file."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from contextlib import closing
from pathlib import Path
from typing import Any

from benchmarks import (
    _report,
    calls,
    collectives,
    costs,
    footprint,
    items,
    messages,
    small,
    startup,
    state,
    submitted,
    training,
    worth,
)
from benchmarks._harness import ROOT, Harness

RESULTS = ROOT / "benchmarks" / "results"
MARKS = ("<!-- results -->", "<!-- end of results -->")
FAMILIES = {
    "calls": calls.run,
    "submitted": submitted.run,
    "small": small.run,
    "items": items.run,
    "worth": worth.run,
    "costs": costs.run,
    "startup": startup.run,
    "footprint": footprint.run,
    "state": state.run,
    "collectives": collectives.run,
    "messages": messages.run,
    "training": training.run,
}


def main() -> int:
    """Measure what was asked for, or print the tables of an earlier run."""
    options = _parser().parse_args()
    if options.tables is not None:
        results = json.loads(options.tables.read_text())
        text = _report.report(results)
        if options.into:
            fill(options.into, text)
            path = ROOT / "docs" / "measured.json"  # what the pictures draw
            measured = json.loads(path.read_text()) | _report.measured(results)
            path.write_text(json.dumps(measured, indent=2) + "\n")
        else:
            print(text)
        return 0
    harness = Harness(
        world_size=options.workers,
        rounds=options.rounds or (1 if options.quick else 3),
        block_s=0.1 if options.quick else 0.3,
        max_noise=options.max_noise,
        tries=options.tries,
        quick=options.quick,
        only_peers=options.peers,
        interpreters=[*options.python, *filter(None, os.environ.get("SYNK_BENCHMARK_PYTHONS", "").split(os.pathsep))],
    )
    results = {"machine": _machine(), "options": {"quick": options.quick, "rounds": harness.rounds}}
    start = time.perf_counter()
    path = RESULTS / time.strftime("%Y%m%d-%H%M%S.json")
    with closing(harness):
        for family in options.only or FAMILIES:
            try:
                results[family] = FAMILIES[family](harness)
            except Exception as error:  # the other families still count
                traceback.print_exc()
                results[family] = {"error": f"{type(error).__name__}: {error}"}
            results |= {"versions": harness.versions, "failures": harness.failures, "max_noise": harness.max_noise}
            results["elapsed_s"] = time.perf_counter() - start
            _write(results, path)  # a run that is ended by hand has lost one family
    print(_report.report(results))
    print(f"\n{path.relative_to(ROOT)}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one short round, fewer sizes")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, metavar="FAMILY", help=" ".join(FAMILIES))
    parser.add_argument("--peers", nargs="+", default=[], metavar="NAME", help="only those whose names begin like this")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, help="default: 3, or 1 with --quick")
    parser.add_argument("--max-noise", type=float, default=0.15, help="cores that others may use during a block")
    parser.add_argument("--tries", type=int, default=3, help="at a block that is too noisy")
    parser.add_argument(
        "--python", action="append", default=[], metavar="PATH",
        help="another interpreter, for peers missing in this one",
    )  # fmt: skip
    parser.add_argument(
        "--tables", type=Path, nargs="?", const=RESULTS / "latest.json", metavar="JSON",
        help="measure nothing: print the tables of an earlier run",
    )  # fmt: skip
    parser.add_argument(
        "--into",
        type=Path,
        metavar="PAGE",
        help=f"with --tables: write them between the marks of a page, {MARKS[0]} ...",
    )
    return parser


def fill(page: Path, text: str) -> None:
    """Write ``text`` between the marks of a page."""
    before, rest = page.read_text().split(MARKS[0])
    page.write_text(f"{before}{MARKS[0]}\n\n{text}\n\n{MARKS[1]}{rest.split(MARKS[1])[1]}")


def _machine() -> dict[str, Any]:
    """Return what the numbers depend on."""
    cpu = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    memory = Path("/proc/meminfo").read_text().split()[1]
    describe = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "processor": cpu.partition(":")[2].strip(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory) / (1 << 20), 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "commit": commit,
        "date": time.strftime("%Y-%m-%d"),
    }


def _write(results: dict[str, Any], path: Path) -> None:
    RESULTS.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1))
    (RESULTS / "latest.json").write_text(path.read_text())


if __name__ == "__main__":
    sys.exit(main())
