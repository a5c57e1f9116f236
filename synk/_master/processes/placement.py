"""Which rank runs on which device, decided in the master without a CUDA call."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from synk._pure.cores import num_cores
from synk.backends import BACKENDS, backend_module
from synk.cuda._nccl_library import nccl_environment

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
    first_rank, ranks_elsewhere : int
        The rank of the first worker here, and how many there are on other machines. Nothing fills them yet: all ranks
        are here.
    """

    backend: str
    devices: tuple[str, ...]
    environments: tuple[dict[str, str], ...] = ()
    cpus: tuple[tuple[int, ...], ...] = ()
    can_use_nccl: bool = False
    first_rank: int = 0
    ranks_elsewhere: int = 0

    @property
    def total_ranks(self) -> int:
        return len(self.devices) + self.ranks_elsewhere

    def environment(self, rank: int) -> dict[str, str]:
        """Return the whole environment of a rank: the device's, and a limit of threads unless the user has set one."""
        environment = dict(self.environments[rank] if self.environments else os.environ)
        if not any(name in environment for name in _THREAD_VARIABLES):
            environment.update(dict.fromkeys(_THREAD_VARIABLES, str(self._num_threads(rank))))
        return environment

    def _num_threads(self, rank: int) -> int:
        """Return how many threads a library of a rank may start: its cores, divided by the ranks that share them."""
        if not self.cpus:
            return max(num_cores() // len(self.devices), 1)
        cpus = set(self.cpus[rank])
        return max(len(cpus) // sum(not cpus.isdisjoint(others) for others in self.cpus), 1)

    def cpus_of(self, rank: int) -> tuple[int, ...]:
        return self.cpus[rank] if self.cpus else ()


def place(num_workers: int | None, backend: str, devices: Sequence[Any] | None, inline: bool) -> Placement:
    """Choose backend and devices.

    Raises
    ------
    UnsupportedError
        If the backend has no device here; the message says why, and what to install.
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
    if backend == "auto":
        backend = "cupy" if devices is not None or backend_module("cupy").is_usable() else "numpy"
    places = backend_module(backend).place(num_workers, devices)
    sharing = places.ranks_per_device
    if not sharing:
        return Placement(backend, places.devices, cpus=places.cpus)
    environment = nccl_environment(os.environ, ranks_per_device=sharing)
    return Placement(
        backend,
        places.devices,
        tuple(environment | own for own in places.environments),
        places.cpus,
        # Ranks that share a GPU take turns on it, and NCCL before 2.30.3 refuses them: only if the user asks for it.
        len(places.devices) > 1 and (sharing == 1 or os.environ.get(_SHARING_VARIABLE) == "1"),
    )
