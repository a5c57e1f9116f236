"""The examples of the README and of the documentation run, and print what the text says."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import synk

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    synk.close()


def pages_with_examples() -> list[Path]:
    return [path for path in PAGES if BLOCK.search(path.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("path", pages_with_examples(), ids=lambda path: path.stem)
def test_examples_run(path: Path) -> None:
    """Blocks of one page share a namespace: ``python`` blocks are executed, ``pycon`` blocks are compared."""
    text = path.read_text(encoding="utf-8")
    namespace: dict[str, object] = {"__name__": "__main__"}
    runner = doctest.DocTestRunner(optionflags=OPTIONS)
    report: list[str] = []
    for block in BLOCK.finditer(text):
        kind, source = block.groups()
        line = text.count("\n", 0, block.start()) + 1
        if kind == "python":
            exec(compile("\n" * line + source, str(path), "exec"), namespace)
            continue
        example = doctest.DocTestParser().get_doctest(source, namespace, path.stem, str(path), line)
        runner.run(example, out=report.append, clear_globs=False)
        namespace = example.globs
    assert runner.failures == 0, "".join(report)
