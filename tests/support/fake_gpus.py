"""A machine with GPUs that does not exist: recorded NVML answers and a stand-in for CuPy, for runtimes of a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import synk
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
    monkeypatch.setenv("SYNK_FAKE_NCCL", "1" if has_nccl else "")


class Gpus:
    """Runtimes on GPUs that do not exist."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, has_nccl: bool, reuse: Any = None) -> None:
        install(monkeypatch, 3, has_nccl=has_nccl)
        self._reuse = reuse
        self.has_nccl = has_nccl
        self.opened: list[synk.Runtime] = []

    def __call__(self, num_workers: int | None = 3, **options: Any) -> synk.Runtime:
        self.opened.append(synk.Runtime(num_workers, **options))
        return self.opened[-1]

    def reused(self, num_workers: int) -> synk.Runtime:
        """Return a runtime that may have served other tests."""
        kind = "gpus", self.has_nccl, num_workers
        return self._reuse(kind, lambda: synk.Runtime(num_workers, max_restarts=10**9))

    def close(self) -> None:
        """Close those that serve no other tests."""
        while self.opened:
            self.opened.pop().close()
