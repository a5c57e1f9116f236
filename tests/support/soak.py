"""The whole suite, three times beside four busy processes: ``make soak``. What fails in any of the runs is listed.

Beside load a test may be slower, never red. One that fails here races with something, or has found a bug.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUSY = 4
RUNS = 3
BUSY_UNTIL_LEFT_ALONE = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"


def main(arguments: list[str]) -> int:
    """Run pytest with further arguments; return 1 if any test failed, or pytest's status if it could not run."""
    failed: dict[str, list[int]] = {}
    busy = [subprocess.Popen([sys.executable, "-c", BUSY_UNTIL_LEFT_ALONE]) for _ in range(BUSY)]
    try:
        for number in range(1, RUNS + 1):
            print(f"== run {number} of {RUNS}, beside {BUSY} busy processes", flush=True)
            names, status = run(f"build/soak/{number}", arguments)
            if status not in (0, 1):
                return status
            for name in names:
                failed.setdefault(name, []).append(number)
    finally:
        for each in busy:
            each.kill()
        for each in busy:
            each.wait()
    for name, runs in sorted(failed.items()):
        print(f"FAILED in run {', '.join(map(str, runs))}: {name}")
    print(f"{len(failed)} tests failed at least once")
    return 1 if failed else 0


def run(cache: str, arguments: list[str]) -> tuple[list[str], int]:
    """Run the suite once. Return the names of what failed, and pytest's exit status."""
    options = [
        "-n",
        "logical",
        "--maxprocesses",
        "8",
        "--dist",
        "worksteal",
        "-o",
        f"cache_dir={cache}",
        "--cache-clear",
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    status = subprocess.call([sys.executable, "-m", "pytest", *options, *arguments], cwd=ROOT, env=environment)
    noted = ROOT / cache / "v" / "cache" / "lastfailed"
    return (sorted(json.loads(noted.read_text())) if noted.exists() else []), status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
