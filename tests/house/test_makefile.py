"""What make would run is a program that the shell understands; what ``make test`` makes of tests that fail.

Nothing else is run but the faults of the documentation.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pip
import pytest

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


@pytest.mark.parametrize(("chosen", "status", "flaky"), [("::test_luck", 0, ["luck"]), ("", 2, ["luck"])])
def test_what_fails_once_is_flaky_and_no_failure(tmp_path: Path, chosen: str, status: int, flaky: list[str]) -> None:
    stamp = tmp_path / ".test-{}.{}".format(*sys.version_info)  # the environment is up to date
    make = f"make -o {stamp} test PYTHON={sys.executable} PY={sys.executable} VENV={tmp_path} JOBS=1"
    arguments = f"tests/house/luck.py{chosen} -o cache_dir={tmp_path}/cache"
    environment = {**os.environ, "SYNK_TEST_LUCK": str(tmp_path / "luck")}
    command = [*make.split(), f"ARGS={arguments}"]
    done = subprocess.run(command, cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
    assert done.returncode == status, done.stdout
    assert re.findall(r"^FLAKY tests/house/luck.py::test_(\w+)", done.stdout, re.MULTILINE) == flaky, done.stdout


@pytest.mark.parametrize("kinds", [("kill-one",), pytest.param(("kill-one", "interrupt"), marks=pytest.mark.storm)])
def test_injected_faults_are_counted(kinds: tuple[str, ...]) -> None:
    """``make faults``, small: no hang, no wrong answer, nothing left behind."""
    command = [sys.executable, "-m", "benchmarks.faults", "--count", "2", "--workers", "2"]
    command += ["--only", *kinds]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in ran.stdout.splitlines() if "|" in line][2:]
    assert [(row[1], *row[3:6]) for row in rows] == [("2", "0", "0", "0")] * len(kinds)
