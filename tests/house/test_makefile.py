"""What make would run is a program that the shell understands; nothing is run but the faults of the documentation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pip
import pytest
from support.quick import functions_at, quoted, texts_at

ROOT = Path(__file__).resolve().parents[2]


TARGETS = (
    "help demo test soak mutants bench checks docs lint quick smoke newest oldest gpu-test",
    *(f"install test EXTRA={name}" for name in ("jax", "pytensor", "transformers", "dpnp", "ray")),
)


def test_the_commands_of_each_target_are_whole(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for target in TARGETS:
        make = ["make", "-n", f"VENV={tmp_path / 'venv'}", *target.split()]
        plan = subprocess.run(make, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        # In braces, what is not whole does not go on in the next line.
        lines = "".join(f"{{ {line}\n}}\n" for line in plan.replace("\\\n", " ").splitlines())
        with subtests.test(target):
            done = subprocess.run(["sh", "-n"], input=lines, capture_output=True, text=True, check=False)
            assert done.returncode == 0, f"{plan}\n{done.stderr}"


def test_without_a_network_one_sentence_is_said(tmp_path: Path) -> None:
    """The package index is an address where nobody listens. The environment is there, and borrows its pip."""
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", venv], check=True)
    (packages,) = venv.glob("lib/python*/site-packages")
    (packages / "pip.pth").write_text(str(Path(pip.__file__).parents[1]), encoding="utf-8")
    (venv / ".base-{}.{}".format(*sys.version_info)).touch()
    environment = {**os.environ, "PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_CONFIG_FILE": os.devnull}
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "PIP_NO_INDEX"):
        environment.pop(name, None)
    done = subprocess.run(
        ["make", f"PYTHON={sys.executable}", f"VENV={venv}", "demo"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.splitlines()[0].startswith("cannot install: no package index answers. Connect to a network")
    assert len(done.stderr.splitlines()) == 2, done.stderr


def test_quick_finds_the_quoted_words_and_the_functions_of_a_change() -> None:
    text = 'f"cannot stream {self.name!r}: got {found}, expected an iterable of batches."'
    runs = quoted([text, '"""Not what a docstring says."""'])
    assert "an iterable of batches." in runs
    assert not any("self" in words or "docstring" in words for words in runs)
    source = "class A:\n    def first(self):\n        pass\n\n    def second(self):\n        pass\n"
    assert functions_at(source, {6}) == {"second"} and functions_at(source, {4}) == set()
    source = 'def told(name):\n    """Some words of it."""\n    raise ValueError(\n'
    source += '        f"one two three four {name} five"\n        " six seven eight"\n    )\n'
    assert texts_at(source, {5}) == {"one two three four", "five six seven eight"}, "the text, not its line alone"
    assert texts_at(source, {2}) == set() and functions_at(source, {2}) == set()


@pytest.mark.parametrize("kinds", [("kill-one",), pytest.param(("kill-one", "interrupt"), marks=pytest.mark.storm)])
def test_injected_faults_are_counted(kinds: tuple[str, ...]) -> None:
    """``make faults``, small: no hang, no wrong answer, nothing left behind."""
    command = [sys.executable, "-m", "benchmarks.faults", "--count", "2", "--workers", "2"]
    command += ["--only", *kinds]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ran.stdout.splitlines() if "|" in line][2:]
    assert [(row[1], *row[3:6]) for row in rows] == [("2", "0", "0", "0")] * len(kinds)
