"""Decides which rank runs on which device, in the program and without a CUDA call."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from synk._processes.output import warn_at_users_line
from synk._pure.environment import num_cores
from synk.backends import backend_module
from synk.backends._assignment import DeviceAssignment

_THREAD_VARIABLES = (
    "OMP_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
)

HASH_SEED = "PYTHONHASHSEED"


@dataclass(frozen=True)
class Placement:
    """Backend and devices of the ranks.

    Attributes
    ----------
    is_on_cpu_by_default : bool
        Whether the user has left the choice of the backend to synk, and got CPU workers.
    """

    backend: str
    assignment: DeviceAssignment
    is_on_cpu_by_default: bool = False

    @property
    def devices(self) -> tuple[str, ...]:
        return self.assignment.devices

    def among_all(self, ranks: Iterable[int]) -> str:
        """Return the names of ranks in errors, and how many there are: "rank 4, 5 of 8"."""
        return f"rank {', '.join(map(str, ranks))} of {len(self.devices)}"

    def environment(self, rank: int) -> dict[str, str]:
        """Return the whole environment of a rank: its device's, and a thread limit unless the user has set one."""
        environment = dict(self.assignment.environments[rank] if self.assignment.environments else os.environ)
        return environment | num_threads_set(environment, self._num_threads(rank))

    def _num_threads(self, rank: int) -> int:
        """Return how many threads a library may start on a rank: its cores, divided by the ranks that share them."""
        if not self.assignment.cpus:
            return max(num_cores() // len(self.devices), 1)
        cpus = set(self.cpus_of(rank))
        return max(len(cpus) // sum(not cpus.isdisjoint(others) for others in self.assignment.cpus), 1)

    def cpus_of(self, rank: int) -> tuple[int, ...]:
        return self.assignment.cpus[rank] if self.assignment.cpus else ()


def num_threads_set(environment: Mapping[str, str], num_threads: int) -> dict[str, str]:
    """Return the variables that limit the threads of libraries; none if the user has set one."""
    if any(name in environment for name in _THREAD_VARIABLES):
        return {}
    return dict.fromkeys(_THREAD_VARIABLES, str(num_threads))


def hash_seed_of(environment: Mapping[str, str], seed: int) -> str:
    """Return the seed of hashes of all processes of a runtime: the user's, else one that follows from its ``seed``.

    Python gives each process a seed of its own. Then the hash of a text, and with it the order of a set, would differ
    between ranks.
    """
    own = environment.get(HASH_SEED, "")
    return own if own not in ("", "random") else str(seed % 2**32)


def place(num_workers: Any, backend: str, devices: Sequence[Any] | None) -> Placement:
    """Choose backend and devices.

    Raises
    ------
    UnsupportedError
        If the backend has no device here. The message says why, and what to install.
    ValueError
        If an argument makes no sense. The message names it.
    TypeError
        If ``num_workers`` is not an integer.
    """
    is_chosen_here = backend == "auto"
    if is_chosen_here:
        backend = "cupy" if devices is not None or backend_module("cupy").is_usable() else "numpy"
    module = backend_module(backend)
    if num_workers is not None:
        if isinstance(num_workers, bool) or not hasattr(num_workers, "__index__"):
            raise TypeError(f"cannot fork: got num_workers={num_workers!r}, expected an integer or None.")
        num_workers = int(num_workers)
        if num_workers < 0:
            raise ValueError(
                f"cannot fork: got num_workers={num_workers}, expected 1 or more, or 0 for one rank in the "
                "program itself."
            )
    assignment = module.place(1 if num_workers == 0 else num_workers, devices)
    if assignment.notice and num_workers != 0:  # there the program itself is the worker
        warn_at_users_line(assignment.notice, RuntimeWarning)
    return Placement(backend, assignment, is_on_cpu_by_default=is_chosen_here and not assignment.has_devices)
