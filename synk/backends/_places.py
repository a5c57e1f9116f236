"""What a backend's ``place`` returns: where the ranks of a runtime run."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Places:
    """The device of each rank, and what a process needs to have it.

    Attributes
    ----------
    devices : tuple of str
    environments : tuple of dict
        Variables to be set for each rank; empty where there are none.
    cpus : tuple of tuple of int
        The CPUs near each rank's device; empty where a rank may run on any.
    ranks_per_device : int
        The most ranks that share a device that NCCL knows; 0 where it knows none.
    """

    devices: tuple[str, ...]
    environments: tuple[dict[str, str], ...] = ()
    cpus: tuple[tuple[int, ...], ...] = ()
    ranks_per_device: int = 0
