"""Which rank runs on which device, decided in the master without a CUDA call."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from synk.backends import BACKENDS, _devices, _nvml
from synk.communicators._nccl_library import nccl_environment
from synk.errors import UnsupportedError

_SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"
_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)


@dataclass(frozen=True)
class Placement:
    """Backend and devices of the ranks.

    Attributes
    ----------
    environments : tuple of dict
        What the devices need, for each rank: a whole environment. Empty where the master's will do.
    cpus : tuple of tuple of int
        The CPUs that each rank is bound to; empty where it may run on any.
    can_use_nccl : bool
        Whether NCCL can join the ranks: there are several, on a GPU each.
    """

    backend: str
    devices: tuple[str, ...]
    environments: tuple[dict[str, str], ...] = ()
    cpus: tuple[tuple[int, ...], ...] = ()
    can_use_nccl: bool = False

    def environment(self, rank: int) -> dict[str, str]:
        """Return the whole environment of a rank: the device's, and a limit of threads unless the user has set one."""
        environment = dict(self.environments[rank] if self.environments else os.environ)
        if not any(name in environment for name in _THREAD_VARIABLES):
            environment.update(dict.fromkeys(_THREAD_VARIABLES, str(self._num_threads(rank))))
        return environment

    def _num_threads(self, rank: int) -> int:
        """Return how many threads a library of a rank may start: its cores, divided by the ranks that share them."""
        if not self.cpus:
            return max(len(os.sched_getaffinity(0)) // len(self.devices), 1)
        cpus = set(self.cpus[rank])
        return max(len(cpus) // sum(not cpus.isdisjoint(others) for others in self.cpus), 1)

    def cpus_of(self, rank: int) -> tuple[int, ...]:
        return self.cpus[rank] if self.cpus else ()


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


def has_cupy() -> bool:
    """Whether CuPy is installed; does not import it."""
    return importlib.util.find_spec("cupy") is not None


def gpus_usable() -> bool:
    """Whether a GPU is visible and CuPy is installed; imports neither CuPy nor CUDA."""
    return has_cupy() and not _devices.explain_absence(_nvml.discover(os.environ), os.environ, has_cupy=True)


def place_on_gpus(num_workers: int | None, devices: Sequence[Any] | None) -> Placement:
    """Choose GPUs by NVML.

    Raises
    ------
    UnsupportedError
        If there is none to be used; the message says why, and what to install.
    ValueError, TypeError
        If ``devices``, ``num_workers`` or CUDA_VISIBLE_DEVICES make no sense here.
    """
    snapshot = _nvml.discover(os.environ)
    problem = _devices.explain_absence(snapshot, os.environ, has_cupy=has_cupy())
    if problem:
        raise UnsupportedError(f"cannot fork with backend 'cupy': {problem}")
    chosen = _devices.choose_devices(_devices.visible_devices(snapshot, os.environ), num_workers, devices)
    sharing = _devices.ranks_per_device(chosen)
    environment = nccl_environment(os.environ, ranks_per_device=sharing)
    # JAX would take three quarters of the memory at its start, from CuPy and from its neighbours.
    environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    allowed = os.sched_getaffinity(0)
    return Placement(
        "cupy",
        tuple(str(device) for device in chosen),
        tuple(environment | _devices.worker_environment(device) for device in chosen),
        tuple(tuple(sorted(_devices.cpu_mask(device, allowed))) for device in chosen),
        # Ranks that share a GPU take turns on it, and NCCL before 2.30.3 refuses them: only if the user asks for it.
        len(chosen) > 1 and (sharing == 1 or os.environ.get(_SHARING_VARIABLE) == "1"),
    )
