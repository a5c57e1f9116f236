"""Programs as others have published them, in plain torch and with synk: few lines differ, and the numbers are equal.

All run in this process, which has imported torch, and whose workers are forked. Demos run as programs of their own. The
recipes of the documentation run, and learn what the same loops learn in plain torch.
"""

from __future__ import annotations

import difflib
import importlib.util
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trainings import differences

import synk

torch = pytest.importorskip("torch")

FOLDER = Path(__file__).resolve().parents[2] / "demos" / "programs"


@pytest.fixture
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compute in one thread, here and in the workers, and leave the settings as they were."""
    before, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    synk.close()
    torch.set_num_threads(before)
    torch.set_default_dtype(dtype)


@pytest.mark.parametrize(
    ("name", "most", "options"),
    [("mnist", 8, ()), ("word_language_model", 14, ()), ("mingpt", 6, ("--max_iters", "8"))],
)
def test_a_published_program_with_few_changed_lines(
    name: str, most: int, options: tuple[str, ...], tmp_path: Path, monkeypatch: Any, capsys: Any, one_thread: None
) -> None:
    paths = [FOLDER / f"{name}.py", FOLDER / f"{name}_synk.py"]
    plain, changed = ([line for line in path.read_text().splitlines() if line] for path in paths)
    spans = difflib.SequenceMatcher(None, plain, changed, autojunk=False).get_opcodes()
    assert sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in spans if tag != "equal") <= most
    monkeypatch.chdir(tmp_path)
    printed = []
    for path in paths:
        monkeypatch.setattr(sys, "argv", [str(path), "--double", "--dropout", "0", *options, "--save", path.stem])
        runpy.run_path(str(path), run_name="__main__")
        printed.append(capsys.readouterr())
    assert printed[0].out == printed[1].out != "" and printed[1].err == ""
    assert differences(torch.load(name), torch.load(f"{name}_synk"), 1e-14) == []


PAGE = (Path(__file__).resolve().parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^### ([^\n]+)\n\n```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
BEGINNING = re.findall(r"All recipes begin like this:\n\n```py\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)[0]
PACKAGES = {"torchmetrics": "torchmetrics", "A logger": "tensorboard"}


def test_recipes_run(subtests: Any, kept_open: Any) -> None:
    threads, begun = torch.get_num_threads(), {"__name__": "__main__"}
    try:
        exec(compile(BEGINNING, "the beginning of evaluation.md", "exec"), begun)
        for title, block in BLOCKS.items():
            if importlib.util.find_spec(PACKAGES.get(title, "torch")) is None:
                continue
            with subtests.test(recipe=title):
                names: dict[str, Any] = dict(begun)
                exec(compile(block, f"{title} of evaluation.md", "exec"), names)
                if title == "EMA and SWA":
                    model, *others = names["make"]()
                    for rows in zip(names["x"].split(32), names["y"].split(32)):
                        names["step"](model, *others, *rows)
                    assert differences(model.state_dict(), names["model"].state_dict(), 1e-12) == []
    finally:
        synk.close()
        torch.set_num_threads(threads)
