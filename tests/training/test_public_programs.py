"""Programs as others have published them, in plain torch and with synk: few lines differ, and the numbers are equal."""

from __future__ import annotations

import difflib
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from trainings import differences

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "demos" / "programs"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Compute in one thread, as each worker does, and leave the settings as they were."""
    before, dtype = torch.get_num_threads(), torch.get_default_dtype()
    torch.set_num_threads(1)
    yield
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
    options = ("--double", "--dropout", "0", *options, "--save")
    with subprocess.Popen(
        [sys.executable, "-W", "error", str(paths[1]), *options, "synk.pt"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    ) as run:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(paths[0]), *options, "plain.pt"])
        runpy.run_path(str(paths[0]), run_name="__main__")
        printed_by_synk, _ = run.communicate(timeout=200)
    assert capsys.readouterr().out == printed_by_synk != ""
    assert differences(torch.load("plain.pt"), torch.load("synk.pt"), 1e-14) == []
