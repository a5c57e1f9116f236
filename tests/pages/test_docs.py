"""The examples of the README and of the documentation run, and print what the text says."""

from __future__ import annotations

import doctest
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import start_polars
from support.talking import VERBS, check_on_one_rank, talks

import synk

start_polars()

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])
BLOCK = re.compile(r"^```(python|pycon)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def pages_with_examples() -> list[Any]:
    """Return the pages as parameters, without those that repeat what another one has; the mark says which ones import
    torch on the workers.
    """
    found, known = [], set()
    for path in PAGES:
        text = path.read_text(encoding="utf-8")
        if not known.issuperset(blocks := BLOCK.findall(text)):
            found.append(pytest.param(path, marks=pytest.mark.with_torch if "import torch" in text else []))
        known.update(blocks)
    return found


@pytest.fixture
def talking(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[str]]:
    """Return the names of the functions in which ranks talk, as they are called; each also runs on one rank then.

    All but those that change what their ranks keep, with which the page goes on.
    """
    found: set[str] = set()
    call = synk.Function.__call__

    def checked(self: synk.Function, /, *args: Any, **kwargs: Any) -> Any:
        if talks(self) and "batch" not in kwargs:  # else repeat calls it, which makes many runs of it
            found.add(self.__name__)
            if not self._callee.changes:
                return check_on_one_rank(self, call, args, kwargs)
        return call(self, *args, **kwargs)

    monkeypatch.setattr(synk.Function, "__call__", checked)
    yield found
    synk.close()


@pytest.mark.parametrize("path", pages_with_examples(), ids=lambda path: path.stem)
def test_examples_run(path: Path, talking: set[str]) -> None:
    """Blocks of one page share a namespace: ``python`` blocks are executed, ``pycon`` blocks are compared.

    Functions in which ranks talk run serially and with one row as well.
    """
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
    assert talking == TALKING.get(path.stem, set())


TALKING = {
    "calls": set(),  # by repeat
    "checkpoints": set(),  # by repeat
    "communication": {"smooth", "moments", "forces", "pipeline", "all_wait"},
    "data": {"note"},
    "debugging": {"waits"},
    "errors": {"shifted"},
    "evaluation": set(),  # in a step of replicate
    "parallel": {"standardised"},
    "profiling": {"work"},
}
"""The functions of each page in which ranks talk."""

TALK = re.compile(rf"\b(comm|torch|flow)\.({'|'.join(VERBS)})\(")


def test_the_pages_that_talk_are_known() -> None:
    blocks = {path.stem: BLOCK.findall(path.read_text(encoding="utf-8")) for path in PAGES}
    assert {name for name, found in blocks.items() if any(TALK.search(block[1]) for block in found)} == set(TALKING)


def test_a_function_that_changes_what_ranks_keep_runs_on_one_rank() -> None:
    (source,) = (each for _, each in BLOCK.findall((ROOT / "docs" / "data.md").read_text()) if "def note(" in each)
    namespace: dict[str, Any] = {"np": np, "synk": synk}
    with synk.fork(2):
        exec(source, namespace)
        check_on_one_rank(namespace["note"], synk.Function.__call__, (np.arange(4.0),), {})


def test_no_box_of_a_page_ends_with_an_empty_line() -> None:
    """A reader sees it as output."""
    found = {
        path.name: re.findall(r"^```\w+\n(?:(?!```).*\n)*\n```$", path.read_text(), re.MULTILINE) for path in PAGES
    }
    assert not any(found.values()), found
