"""A machine with GPUs that does not exist: what CUDA answers, and a stand-in for CuPy, for runtimes of a test."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

import synk
from synk.cuda import _devices

FAKES = Path(__file__).resolve().parent / "fakes"


def found(num_gpus: int) -> list[list[Any]]:
    """Return what CUDA's child says of the GPUs that are visible here; of a UUID its first digits count."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(num_gpus))))
    gpus = [int(entry.strip().removeprefix("GPU-")[:8]) for entry in value.split(",") if entry.strip()]
    return [
        [f"{gpu:08d}aaaabbbbccccdddddddddddd", "Fake GPU", f"0000:{gpu:02X}:00.0", 1 << 34, list(range(len(gpus)))]
        for gpu in gpus
    ]


def install_driver(monkeypatch: pytest.MonkeyPatch, num_gpus: int, *, version: int = 13000) -> None:
    """Have CUDA answer this process that there are ``num_gpus`` GPUs."""
    monkeypatch.setattr(_devices, "DRIVER_FILES", ("/",))
    monkeypatch.setattr(_devices, "_asked", _devices._asked.__wrapped__)
    monkeypatch.setattr(_devices, "list_devices", lambda *args, **options: [version, *found(num_gpus)])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def install(monkeypatch: pytest.MonkeyPatch, num_gpus: int, *, has_nccl: bool = False) -> None:
    """Have this process, and the workers that it starts, see ``num_gpus`` GPUs, with a stand-in for NCCL or none."""
    monkeypatch.syspath_prepend(str(FAKES))
    install_driver(monkeypatch, num_gpus)
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
