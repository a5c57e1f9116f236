"""``python -m benchmarks.gpu [--quick] [--only FAMILY ...]``: measure on one GPU, print tables, write a JSON file.

Every baseline runs in the same worker process, on the same stream, as what is compared with it: raw CuPy, or plain
torch, in a loop of its own inside one function. What differs is synk.
"""

from __future__ import annotations

import argparse
import json
import time
import traceback
from typing import Any

import synk
from benchmarks._harness import ROOT
from benchmarks._report import table
from benchmarks.gpu import overhead, overlap, programs, resnet, transfers

FAMILIES = {
    "programs": programs,
    "overhead": overhead,
    "transfers": transfers,
    "overlap": overlap,
    "resnet": resnet,
}


def main() -> int:
    """Measure what was asked for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few repetitions: to see that everything runs")
    parser.add_argument("--only", nargs="+", choices=FAMILIES, metavar="FAMILY", help=", ".join(FAMILIES))
    options = parser.parse_args()
    results: dict[str, Any] = {"date": time.strftime("%Y-%m-%d"), "quick": options.quick}
    with synk.Runtime(1, backend="cupy") as runtime:
        results["machine"] = runtime.info()
        print(runtime.info())
        for name in options.only or FAMILIES:
            family = FAMILIES[name]
            try:
                rows = family.run(runtime, options.quick)
            except Exception as error:  # the other families still count
                traceback.print_exc()
                results[name] = {"error": f"{type(error).__name__}: {error}"}
                continue
            results[name] = rows
            print(f"\n### {name}\n\n{table(family.HEADER, rows)}\n\n{family.NOTE}")
    path = ROOT / "benchmarks" / "results" / "gpu.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
