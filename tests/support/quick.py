"""The tests of what has changed since the last commit, or since ``main``, for at most 40 s: ``make quick``.

First the tests that were changed themselves, then those that quote a text that has changed, the examples of changed
files and pages, and the tests that use a changed verb or name a changed file of the package, as ``_pure/ops.py`` is
named by ``synk._pure.ops`` or ``from synk._pure import ops``; and always those of the layout and of the messages.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import time
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ALWAYS = ("tests/house/test_layout.py", "tests/house/test_messages.py")
LONGEST_S = 40
MOST_FILES = 20
"""Of those that only use what has changed: to collect more would take longer than to run them."""


class Clock:
    """Ends the run, and says so, when its time is over."""

    def __init__(self) -> None:
        self._ends = time.monotonic() + LONGEST_S
        self._session: pytest.Session | None = None

    def status(self, code: int) -> int:
        """Return what to exit with: that time was over is no failure."""
        is_over = self._session is not None and self._session.shouldstop and not self._session.testsfailed
        return 0 if is_over and code == pytest.ExitCode.INTERRUPTED else code

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        self._session = session

    def pytest_runtest_logreport(self) -> None:
        if self._session is not None and time.monotonic() > self._ends:
            processes = self._session.config.pluginmanager.getplugin("dsession")  # of xdist; it asks itself alone
            for each in filter(None, (self._session, processes)):
                each.shouldstop = f"{LONGEST_S} s are over. The rest: make test"


def git(*arguments: str) -> list[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")


def base() -> str:
    """Return what to compare with: the last commit or, if nothing differs from it, where the branch left ``main``."""
    return "HEAD" if any(git("status", "--porcelain")) else git("merge-base", "main", "HEAD")[0]


def changed() -> set[str]:
    """Return the files that differ."""
    return {*git("diff", "--name-only", base()), *git("ls-files", "--others", "--exclude-standard")} - {""}


def quoted(lines: list[str]) -> set[str]:
    """Return all runs of four words in the texts of lines of source; what is filled in ends a run."""
    sources = [line for line in lines if '"""' not in line]
    texts = [part for line in sources for text in re.findall(r'"([^"]*)"', line) for part in re.split(r"\{.*?\}", text)]
    return quoted_runs(texts)


def quoted_runs(texts: Iterable[object]) -> set[str]:
    words = [re.findall(r"[^\s\\]+", text) for text in texts if isinstance(text, str)]
    return {" ".join(each[k : k + 4]) for each in words for k in range(len(each) - 3)}


def functions_at(text: str, numbers: set[int]) -> set[str]:
    """Return the public functions and methods of a source of which a line is among ``numbers``; docstrings aside."""
    numbers = numbers - docstring_lines(text)
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef) and node.name[0] != "_"]
    return {node.name for node in nodes if numbers.intersection(lines_of(node))}


def texts_at(text: str, numbers: set[int]) -> set[str]:
    """Return all runs of four words in the texts of a source of which a line is among ``numbers``; docstrings aside."""
    numbers = numbers - docstring_lines(text)
    runs: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.JoinedStr, ast.Constant)) and numbers.intersection(lines_of(node)):
            parts = node.values if isinstance(node, ast.JoinedStr) else [node]
            runs |= quoted_runs(part.value for part in parts if isinstance(part, ast.Constant))
    return runs


def docstring_lines(text: str) -> set[int]:
    nodes = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    return {n for node in nodes if isinstance(node.value, ast.Constant) for n in lines_of(node)}


def lines_of(node: ast.stmt | ast.expr) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def removed_and_touched(file: str) -> tuple[list[str], set[int]]:
    """Return the lines of a file that are gone, and the numbers of those that took their place."""
    gone, touched = [], set()
    for line in git("diff", "-U0", base(), "--", file):
        if found := re.match(r"@@ -\S+ \+(\d+)(?:,(\d+))? @@", line):
            touched |= set(range(int(found[1]), int(found[1]) + max(int(found[2] or 1), 1)))
        elif line.startswith("-") and not line.startswith("---"):
            gone.append(line[1:])
    return gone, touched


def names_of(file: str) -> tuple[str, ...]:
    """Return how a test names a file of the package."""
    *folders, name = Path(file).with_suffix("").parts
    package = ".".join(folders)
    return f"{package}.{name}", f"from {package} import {name}"


def chosen(files: set[str]) -> list[str]:
    """Return what to run, first what is nearest to the changed files."""
    tests = {str(path.relative_to(ROOT)): path.read_text() for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    pages = {str(path.relative_to(ROOT)): path.read_text() for path in (ROOT / "README.md", *ROOT.glob("docs/*.md"))}
    sources = [file for file in sorted(files) if file.startswith("synk/") and file.endswith(".py")]
    present = {file: (ROOT / file).read_text() for file in sources if (ROOT / file).exists()}
    wanted = [name for file in sources for name in names_of(file)]
    gone: set[str] = set()
    edited: set[str] = set()
    for file, text in present.items():
        lines, numbers = removed_and_touched(file)
        gone |= quoted(lines)
        edited |= texts_at(text, numbers)
        if file.startswith("synk/_api/"):
            wanted += [f".{name}(" for name in functions_at(text, numbers)]
    package = "\n".join(path.read_text() for path in (ROOT / "synk").rglob("*.py"))
    gone = {words for words in gone if words not in package}  # elsewhere it is still said
    gone |= {words for words in edited if package.count(words) <= 1}  # what is quoted whole is no longer whole

    def concerned(texts: dict[str, str]) -> list[str]:
        return [file for file, text in texts.items() if file in files or any(words in text for words in gone)]

    examples = [file for file, text in present.items() if ">>> " in text]
    with_blocks = [Path(page).stem for page in concerned(pages) if "```py" in pages[page]]
    blocks = [f"tests/pages/test_docs.py::test_examples_run[{stem}]" for stem in with_blocks]
    counts = {file: sum(text.count(name) for name in wanted) for file, text in tests.items()}
    nearest = sorted(filter(counts.__getitem__, tests), key=lambda file: (-counts[file], len(tests[file])))
    return list(dict.fromkeys([*ALWAYS, *concerned(tests), *examples, *blocks, *nearest[:MOST_FILES]]))


if __name__ == "__main__":
    found = chosen(changed())
    print(*found, sep="\n")
    options = ["-q", "--doctest-modules", "-n", "logical", "--maxprocesses", "8", "--maxschedchunk", "1", *sys.argv[1:]]
    clock = Clock()
    sys.exit(clock.status(pytest.main([*options, *found], plugins=[clock])))
