"""Programs as others have published them, in plain torch and with synk: few lines differ, and the numbers are equal."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from trainings import differences

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "demos" / "programs"


@pytest.mark.parametrize(
    ("name", "most", "options"),
    [("mnist", 8, ()), ("word_language_model", 14, ()), ("mingpt", 6, ("--max_iters", "8"))],
)
def test_a_published_program_with_few_changed_lines(
    name: str, most: int, options: tuple[str, ...], tmp_path: Path
) -> None:
    paths = [FOLDER / f"{name}.py", FOLDER / f"{name}_synk.py"]
    plain, changed = ([line for line in path.read_text().splitlines() if line] for path in paths)
    spans = difflib.SequenceMatcher(None, plain, changed, autojunk=False).get_opcodes()
    assert sum(max(i2 - i1, j2 - j1) for tag, i1, i2, j1, j2 in spans if tag != "equal") <= most
    runs = [
        subprocess.Popen(
            [
                sys.executable,
                "-W",
                "error",
                str(path),
                "--double",
                "--dropout",
                "0",
                "--save",
                f"{path.stem}.pt",
                *options,
            ],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for path in paths
    ]
    (printed, *_), (printed_by_synk, *_) = [(*run.communicate(timeout=200), run.returncode) for run in runs]
    states = [torch.load(tmp_path / f"{path.stem}.pt") for path in paths]
    assert printed == printed_by_synk != ""
    assert differences(*states, 1e-14) == []
