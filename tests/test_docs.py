"""The examples of the README and of the documentation run, and print what the text says."""

from __future__ import annotations

import contextlib
import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import start_polars
from talking import VERBS, check_on_one_rank, talks

import synk

start_polars()

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


TALKING = {
    "communication": {"smooth", "moments", "update", "forces", "pipeline", "all_wait"},
    "faq": {"shifted"},
    "logging": {"waits"},
    "parallel": {"standardised"},
    "tutorial": {"note", "standardise"},
}
"""The functions of each page in which ranks talk."""

TALK = re.compile(rf"\b(comm|torch|flow)\.({'|'.join(VERBS)})\(")


def test_the_pages_that_talk_are_known() -> None:
    blocks = {path.stem: BLOCK.findall(path.read_text(encoding="utf-8")) for path in PAGES}
    assert {name for name, found in blocks.items() if any(TALK.search(block[1]) for block in found)} == set(TALKING)


@pytest.mark.parametrize("page", TALKING)
def test_examples_that_talk_run_serially_and_with_one_row(page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other test compares what is printed; here only the calls count."""
    found: set[str] = set()
    problems: list[AssertionError] = []
    call = synk.Function.__call__

    def checked(self: synk.Function, /, *args: Any, **kwargs: Any) -> Any:
        if not talks(self):
            return call(self, *args, **kwargs)
        found.add(self.name)
        try:
            return check_on_one_rank(self, call, args, kwargs)
        except AssertionError as problem:
            problems.append(problem)
            raise

    monkeypatch.setattr(synk.Function, "__call__", checked)
    namespace: dict[str, Any] = {"__name__": "__main__"}
    parser = doctest.DocTestParser()
    for kind, source in BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")):
        parts = [source] if kind == "python" else [example.source for example in parser.get_examples(source)]
        for part in parts:
            with contextlib.suppress(Exception):
                exec(compile(part, page, "exec" if kind == "python" else "single"), namespace)
    assert not problems
    assert found == TALKING[page]
