"""What ``synk.info()`` says of GPUs, against recorded answers."""

from __future__ import annotations

import pytest
from support import fake_gpus

import synk
from synk.cuda import _nvml, _report
from synk.cuda._nvml import NO_DRIVER, NvmlSnapshot


def lines(monkeypatch: pytest.MonkeyPatch, snapshot: NvmlSnapshot, **options: bool) -> list[str]:
    monkeypatch.setattr(_nvml, "read_snapshot", lambda: snapshot)
    return _report.gpu_lines({}, **options)


def test_devices_driver_and_the_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_report, "_installed", lambda names: "cupy-cuda13x 14.2.0" if "cupy" in names else "")
    text = "\n".join(lines(monkeypatch, fake_gpus.snapshot(2), has_cupy=True))
    assert "driver 580.1 (CUDA 13.0)" in text
    assert text.count("Fake GPU, 16.0 GiB") == 2
    assert 'packages: cupy-cuda13x 14.2.0. Missing: NCCL, NCCL binding. pip install "synkhronos[cuda13]"' in text


def test_no_driver_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ["GPU: no NVIDIA driver is loaded. synk runs on the CPU cores."]
    assert lines(monkeypatch, NvmlSnapshot(problem=NO_DRIVER), has_cupy=False) == expected


def test_a_bad_variable_is_said_and_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nvml, "read_snapshot", lambda: fake_gpus.snapshot(1))
    (line,) = _report.gpu_lines({"CUDA_VISIBLE_DEVICES": "7"}, has_cupy=True)
    assert "got the entry '7'" in line


def test_info_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nvml, "read_snapshot", lambda: fake_gpus.snapshot(1))
    assert "cuda:0  Fake GPU, 16.0 GiB" in synk.info()
