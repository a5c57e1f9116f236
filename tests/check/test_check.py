"""``python -m synk.check``: here, and on machines with GPUs that do not exist, whole and broken in one place."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from support import fake_gpus
from support.harness import PACKAGE_FOLDER

from synk.check.__main__ import main
from synk.check._found import Figure, Found
from synk.check._lines import LINES
from synk.check._places import without_places
from synk.check._run import TOTAL_S, answer
from synk.check._run import run as run_line

SUPPORT = Path(__file__).resolve().parent.parent / "support"


Ended = subprocess.CompletedProcess[str]
Run = Callable[..., Ended]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Return ``run(*options, folders=(), **environ)``: runs the command in an empty folder, in this process.

    The processes of the lines find folders of ``support`` before all others.
    """

    def command(*options: str, folders: tuple[str, ...] = (), **environ: str) -> Ended:
        path = os.pathsep.join([*(str(SUPPORT / name) for name in folders), str(PACKAGE_FOLDER)])
        for variable, value in {**environ, "PYTHONPATH": path}.items():
            monkeypatch.setenv(variable, value)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["synk.check", *options])
        with pytest.raises(SystemExit) as ended:
            sys.exit(main())
        return Ended(options, int(ended.value.code or 0), *capfd.readouterr())

    return command


def lines(
    run: Run, *names: str, limit: str = "60", file: str = "synk-check.json", **options: Any
) -> tuple[Ended, dict[str, Any]]:
    """Run the lines of these names. Return what ended, and their records by name."""
    elsewhere = [f"--output={file}"] if file != "synk-check.json" else []
    ended = run(*(f"--only={name}" for name in names), f"--limit={limit}", *elsewhere, **options)
    report = json.loads(Path(file).read_text())
    assert not ended.stderr and {"synk", "made", "lines"} == set(report)
    return ended, {record["name"]: record for record in report["lines"]}


def on_gpus(run: Run, *names: str, **options: Any) -> tuple[Ended, dict[str, Any]]:
    """Run lines where there are GPUs, with stand-ins for their libraries."""
    return lines(run, *names, folders=("fake_driver", "fakes"), **options)


def outcomes(records: dict[str, Any]) -> dict[str, str]:
    """Return what came of each line. A machine that has other things to do is slow, and not broken."""
    return {name: record["outcome"] for name, record in records.items()}


# ----- the command, which runs each line in a process of its own


def test_each_line_is_printed_and_recorded(run: Run) -> None:
    """What is slow works: the status is 0."""
    names = ("versions", "machine", "GPUs", "workers")
    ended, records = on_gpus(run, *names, file="here.json", SYNK_FAKE_GPUS="2", SYNK_FAKE_PEERS="none")
    assert tuple(records) == names
    assert "broken" not in outcomes(records).values() and outcomes(records)["GPUs"] == "slow"
    assert "peer access: none between 0-1" in records["GPUs"]["text"]
    assert "2 GPUs (Fake GPU), a driver for CUDA 13.0" in records["GPUs"]["text"]
    assert ended.returncode == 0
    assert len(ended.stdout.splitlines()) == len(records) + 2
    for name, record in records.items():
        assert f" {name}: {record['text']}. {record['next_step']}" in ended.stdout
        assert set(record) >= {"question", "figures", "facts", "seconds"}
        assert record["seconds"] <= TOTAL_S


def test_options_that_are_wrong(run: Run, tmp_path: Path) -> None:
    ended = run("--only=nothing")
    assert "there is no line 'nothing', but versions, machine" in ended.stderr
    assert ended.returncode == 2 and not [*tmp_path.iterdir()]
    for limit in ("0", "-1", "nan"):
        ended = run("--only=versions", f"--limit={limit}")
        assert f"a limit of {limit} s, expected more than 0" in ended.stderr and ended.returncode == 2
    ended = run("--only=versions", "--output=nowhere/report.json")
    assert "cannot write the file for a bug report" in ended.stderr
    assert ended.returncode == 2 and not ended.stdout


def test_libraries_that_are_missing_or_broken(run: Run, tmp_path: Path) -> None:
    """A driver and GPUs without CuPy; a torch that cannot be imported."""
    _, records = lines(run, "GPUs", "training", folders=("fake_driver", "broken_torch"), SYNK_FAKE_GPUS="2")
    assert outcomes(records) == {"GPUs": "broken", "training": "broken"}
    assert 'CuPy is not installed. pip install "synkhronos[cuda13]"' in records["GPUs"]["text"]
    assert "ImportError: libcudart.so.13: cannot open shared object file" in records["training"]["text"]
    text = (tmp_path / "synk-check.json").read_text()
    assert records["training"]["printed"]
    for place in (str(PACKAGE_FOLDER), sys.prefix, str(tmp_path), str(Path.home()) + "/", platform.node()):
        assert place not in text or len(place) < 3


def test_a_line_that_hangs_costs_its_time_only(run: Run) -> None:
    """On one GPU, where there is no group."""
    ended, records = on_gpus(
        run, "versions", "NCCL", "bandwidth", limit="10", SYNK_FAKE_GPUS="1", SYNK_FAKE_DELAY_S="1000"
    )
    assert outcomes(records) == {"versions": "ok", "bandwidth": "broken"}
    assert records["bandwidth"]["text"] == "no answer in 10 s: it hangs, or is much slower than expected"
    assert ended.returncode == 1


def test_what_there_is_no_time_for_is_not_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a Python that never answers."""
    line, python = LINES[0], tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 100\n")
    python.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(python))
    records = [run_line(line, 30.0, 0.5), run_line(line, 30.0, 1.0), run_line(line, 1.0, 30.0, "it waits for NCCL")]
    assert [record["outcome"] for record in records] == ["skipped", "skipped", "broken"]
    assert [record["text"].partition(": ")[2] for record in records] == [
        "the lines before it have taken all the time", "no more time was left", "it waits for NCCL",
    ]  # fmt: skip


# ----- what the processes of the lines do


Answers = Callable[..., dict[str, Any]]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Answers:
    """Return ``answers(*names, **environ)``: the records of these lines, which run in this process."""

    def ask(*names: str, **environ: str) -> dict[str, Any]:
        for variable, value in environ.items():
            monkeypatch.setenv(variable, value)
        records = {}
        for line in LINES:
            if line.name in names:
                capsys.readouterr()
                with warnings.catch_warnings():
                    answer(line)
                records[line.name] = json.loads(capsys.readouterr().out)
        assert len(records) == len(names)
        return records

    return ask


def test_this_machine_without_gpus(answers: Answers) -> None:
    records = answers("GPUs", "shared memory", "signals", "recovery")
    assert not {name: record for name, record in records.items() if record["outcome"] == "broken"}


def test_training_beside_ddp(kept_open: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On CPU workers, and in this process, where torch is imported. A small model: its functions travel by value."""
    pytest.importorskip("torch")
    from synk.check import _training

    for name, number in {"_ROWS": 64, "_WIDTH": 32, "_NUM_STEPS": 5}.items():
        monkeypatch.setattr(_training, name, number)
    cloudpickle.register_pickle_by_value(_training)
    try:
        assert _training.step_against_ddp().text == "replicate and DDP train alike on 2 workers"
    finally:
        cloudpickle.unregister_pickle_by_value(_training)


ON_GPUS = dict.fromkeys([line.name for line in LINES if line.min_gpus], "")
GPUS: dict[str, tuple[str, int, dict[str, str], dict[str, str]]] = {
    "whole": ("", 2, {}, ON_GPUS),
    "one, which two ranks share": ("", 1, {}, {"all-reduce": "by host memory"}),
    "slow": (
        "slow", 2, {"SYNK_FAKE_DELAY_S": "0.6", "SYNK_FAKE_GBPS": "0.1 3", "SYNK_FAKE_MEETING_S": "0.1"},
        {
            "calls on GPUs": "a small call takes",
            "bandwidth": "pinned memory goes to the device at 3 GB/s (expected at least 10)",
            "all-reduce": "1 KB takes",
        },
    ),
    "slow after a death": ("slow", 2, {"SYNK_FAKE_NCCL": "stick 3"}, {"death": "the error comes after"}),
    "broken": (
        "broken", 2, {"SYNK_FAKE_STREAM": "race", "SYNK_FAKE_OOM": "stick", "SYNK_FAKE_NCCL": "hang"},
        {
            "NCCL": "cannot finish a collective: got ncclTimeout",
            "default stream": "an output was copied while a kernel on the default stream still filled it",
            "out of memory": "the worker did not live through it",
        },
    ),
    "wrong sums": (
        "broken", 2, {"SYNK_FAKE_NCCL": "wrong 3"}, {"all-reduce": "an all-reduce of 1024 bytes gives wrong sums"},
    ),
}  # fmt: skip
"""What comes of it, unless it works; the number of GPUs; what is set; and by name of the line what it says."""


@pytest.mark.parametrize("case", GPUS)
def test_gpus_that_work_are_slow_or_broken(answers: Answers, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    outcome, num_gpus, environ, expected = GPUS[case]
    fake_gpus.install(monkeypatch, num_gpus, has_nccl=True)
    records = answers(*expected, SYNK_FAKE_PROOF_S="1", **environ)
    for name, text in expected.items():
        found = records[name]["outcome"]
        assert found == outcome or (not outcome and found != "broken"), records
        assert text in records[name]["text"]


# ----- its parts


def test_a_figure_is_judged_by_its_bound() -> None:
    for figure, is_right in (
        (Figure("f", 1.0, "s", 1.0), True),
        (Figure("f", 1.1, "s", 1.0), False),
        (Figure("f", 1.1, "GB/s", 1.0, is_more_better=True), True),
        (Figure("f", 0.9, "GB/s", 1.0, is_more_better=True), False),
        (Figure("f", float("nan"), "s", 1.0), False),
    ):
        assert figure.is_as_expected == is_right
        assert Found("text", (figure,)).outcome == ("ok" if is_right else "slow")
    assert Found("text", slow="because").outcome == "slow"
    for line in LINES:
        assert line.question.endswith("?") and 0 < line.limit_s < TOTAL_S < 120
        assert "--only" in line.next_step("skipped")
        assert line.next_step("ok") == "Nothing to do." and line.next_step("broken").endswith(".")


def test_places_are_left_out() -> None:
    before = [
        "File /home/me/lib/x.py, line 3", '"/usr/lib/libnccl.so.2" (/opt/a b/c)', "12 GB/s and 1/2",
        "cuda:0 GPU-5e1f02aa-5bc1-2c5f-9f39-0a3ed1c8a65e", ["/a/b", {"c": "/d/e/f"}, 3],
    ]  # fmt: skip
    assert without_places(before) == [
        "File .../x.py, line 3", '".../libnccl.so.2" (.../a b/c)', "12 GB/s and 1/2", "cuda:0 GPU-...",
        [".../b", {"c": ".../f"}, 3],
    ]  # fmt: skip
