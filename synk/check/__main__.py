"""``python -m synk.check [--output PATH]``: runs the lines, prints a sentence for each, and writes them to a file."""

from __future__ import annotations

import argparse
import datetime
import importlib.util
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from synk._version import __version__
from synk.check._found import BROKEN, SKIPPED
from synk.check._lines import DEVICES, LINES, NCCL, Line
from synk.check._places import without_places
from synk.check._run import HANGS, PER_GPU, TOTAL_S, answer, run


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m synk.check",
        description="Says in two minutes (on eight GPUs in four) what works on this machine, and writes it to a file.",
        epilog="Exit status: 0 if all that is there works, 1 if something is broken.",
    )
    parser.add_argument("--output", default="synk-check.json", help="the file for a bug report (%(default)s)")
    parser.add_argument("--only", action="append", metavar="NAME", help="run this line; may be repeated")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="SECONDS", help="for each line at most")
    parser.add_argument("--line", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.line is not None:
        answer(next(line for line in LINES if line.name == given.line))
        return 0
    unknown = set(given.only or ()) - {line.name for line in LINES}
    if unknown:
        parser.error(f"there is no line {min(unknown)!r}, but {', '.join(line.name for line in LINES)}")
    if not given.limit > 0:
        parser.error(f"cannot check with a limit of {given.limit:g} s, expected more than 0. Leave --limit out.")
    try:
        open(given.output, "a").close()
    except OSError as error:
        parser.error(f"cannot write the file for a bug report: {error}. Name another one with --output.")
    records = _records(given.only, given.limit)
    report = {
        "synk": __version__,
        "made": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "lines": records,
    }
    Path(given.output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    num_broken, num_skipped = (sum(record["outcome"] == each for record in records) for each in (BROKEN, SKIPPED))
    skipped = f", and {num_skipped} were not measured" if num_skipped else ""
    num_working = len(records) - num_broken - num_skipped
    print(f"\n{num_working} of {len(records)} lines work{skipped}. All of it is in {given.output}.")
    return 1 if num_broken else 0


def _records(only: list[str] | None, limit_s: float) -> list[dict[str, Any]]:
    """Run the lines that concern this machine, and print each when it is there."""
    began, scale, why = time.monotonic(), 1.0, HANGS
    records: list[dict[str, Any]] = []
    num_gpus = 0
    for line in LINES:
        is_wanted = not only or line.name in only
        if not (is_wanted or line.name == DEVICES) or not _concerns(line, num_gpus):
            continue
        seconds_left = began + scale * TOTAL_S - time.monotonic()
        record = without_places(run(line, min(scale * line.limit_s, limit_s), seconds_left, why))
        if line.name == DEVICES:
            num_gpus = record["facts"].get("num_gpus", 0)
            scale += PER_GPU * max(0, num_gpus - 1)
        if line.name == NCCL and record["outcome"] == BROKEN:
            why = "it waits for NCCL, which does not work here"
        if is_wanted:
            records.append(record)
            print(f"{record['outcome']:7} {line.name}: {record['text']}. {record['next_step']}", flush=True)
    return records


def _concerns(line: Line, num_gpus: int) -> bool:
    has_library = not line.library or importlib.util.find_spec(line.library) is not None
    return has_library and num_gpus >= line.min_gpus


if __name__ == "__main__":
    sys.exit(main())
