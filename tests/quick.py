"""The tests of what has changed since the last commit, or since ``main``, for at most 40 s: ``make quick``.

First the tests that were changed themselves, then those that name a changed file of the package, as ``_pure/ops.py`` is
named by ``synk._pure.ops`` or ``from synk._pure import ops``; and always those of the layout and of the messages.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
ALWAYS = ("tests/test_layout.py", "tests/test_messages.py")
LONGEST_S = 40


class Clock:
    """Ends the run, and says so, when its time is over."""

    def __init__(self) -> None:
        self._ends = time.monotonic() + LONGEST_S
        self._session: pytest.Session | None = None

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_runtest_logreport(self) -> None:
        if self._session is not None and time.monotonic() > self._ends:
            self._session.shouldstop = f"{LONGEST_S} s are over. The rest: make test"


def git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")


def changed() -> set[str]:
    """Return the files that differ from the last commit, or, where none does, from where the branch left ``main``."""
    files = {*git("diff", "--name-only", "HEAD"), *git("ls-files", "--others", "--exclude-standard")} - {""}
    return files or set(git("diff", "--name-only", "main...HEAD")) - {""}


def names_of(file: str) -> tuple[str, ...]:
    """Return how a test names a file of the package."""
    *folders, name = Path(file).with_suffix("").parts
    package = ".".join(folders)
    return f"{package}.{name}", f"from {package} import {name}"


def chosen(files: set[str]) -> list[str]:
    """Return the test files to run, those first that are nearest to what was changed."""
    texts = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    own = [file for file in sorted(files) if file in texts]
    wanted = [name for file in files if file.startswith("synk/") and file.endswith(".py") for name in names_of(file)]
    named = {file: sum(name in text for name in wanted) for file, text in texts.items()}
    nearest = sorted(
        (file for file, count in named.items() if count), key=lambda file: (-named[file], len(texts[file]))
    )
    return list(dict.fromkeys([*ALWAYS, *own, *nearest]))


if __name__ == "__main__":
    files = chosen(changed())
    print(*files, sep="\n")
    sys.exit(pytest.main(["-q", "-n", "logical", "--maxprocesses", "8", *files, *sys.argv[1:]], plugins=[Clock()]))
