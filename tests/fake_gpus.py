"""A machine with GPUs that does not exist: recorded NVML answers and a stand-in for CuPy, for runtimes of a test."""

from __future__ import annotations

from pathlib import Path

import pytest

from synk.cuda import _nvml
from synk.cuda._nvml import Gpu, NvmlSnapshot

FAKES = Path(__file__).resolve().parent / "fakes"


def snapshot(num_gpus: int) -> NvmlSnapshot:
    """Return what NVML says on a machine with ``num_gpus`` GPUs of one model."""
    gpus = tuple(
        Gpu(f"GPU-0000000{k}-aaaa-bbbb-cccc-dddddddddddd", "Fake GPU", 1 << 34, f"00000000:0{k}:00.0")
        for k in range(num_gpus)
    )
    return NvmlSnapshot(gpus, "580.1", (13, 0))


def install(monkeypatch: pytest.MonkeyPatch, num_gpus: int, *, has_nccl: bool = False) -> None:
    """Have this process, and the workers that it starts, see ``num_gpus`` GPUs, with a stand-in for NCCL or none."""
    monkeypatch.syspath_prepend(str(FAKES))
    monkeypatch.setattr(_nvml, "read_snapshot", lambda: snapshot(num_gpus))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if has_nccl:
        monkeypatch.setenv("SYNK_FAKE_NCCL", "1")
