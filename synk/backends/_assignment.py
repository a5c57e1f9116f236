"""The result of a backend's ``place``: the devices of a runtime's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class DeviceAssignment:
    """The device of each rank, and the environment in which its process can use it.

    Attributes
    ----------
    devices : tuple of str
        The name of each rank's device.
    environments : tuple of dict
        The whole environment of each rank. Empty if the ranks use the master's.
    cpus : tuple of tuple of int
        The CPUs that each rank is bound to. Empty if all ranks may run on any.
    has_devices : bool
        Whether the arrays of the workers lie in a memory of their own, which the master cannot see.
    can_use_nccl : bool
        Whether NCCL can join the ranks: there are several, each on its own GPU.
    torch_device : str
        The kind of device on which torch computes on the ranks.
    notice : str
        What the user is told when the runtime is made; empty for nothing.
    """

    devices: tuple[str, ...]
    environments: tuple[dict[str, str], ...] = ()
    cpus: tuple[tuple[int, ...], ...] = ()
    has_devices: bool = False
    can_use_nccl: bool = False
    torch_device: str = "cpu"
    notice: str = ""


def check_names(devices: Any) -> None:
    """Raise TypeError unless ``devices`` is None or a sequence of names."""
    is_sequence = isinstance(devices, Sequence) and not isinstance(devices, str)
    if devices is not None and not (is_sequence and all(isinstance(device, str) for device in devices)):
        raise TypeError(f"cannot fork: got devices={devices!r}, expected a sequence of names, such as ['cpu', 'cpu'].")


def choose_named(found: Sequence[str], num_workers: int | None, devices: Sequence[str] | None) -> list[str]:
    """Return the device of each rank, by name.

    Parameters
    ----------
    found : sequence of str
        The names of the devices that are there.
    num_workers : int, optional
        Use the first ``num_workers`` devices. By default all of them, or one worker for each of ``devices``.
    devices : sequence of str, optional
        The name of each rank's device. A device may appear several times, and ``"cpu"`` is always allowed.

    Raises
    ------
    ValueError
        If there are fewer devices than workers, or no device has one of the names.
    """
    names = ", ".join(found)
    if devices is None:
        if num_workers is None or num_workers <= len(found):
            return list(found[:num_workers])
        raise ValueError(
            f"cannot fork: got num_workers={num_workers}, expected at most {len(found)}, one for each device "
            f"({names}). Pass devices=[{found[0]!r}, {found[0]!r}] for two workers on one device, or 'cpu' for each "
            "that is to run on the CPU."
        )
    for device in devices:
        if device not in found and device != "cpu":
            raise ValueError(f"cannot fork: got {device!r} in devices, expected one of: {names}.")
    if not devices or num_workers not in (None, len(devices)):
        raise ValueError(
            f"cannot fork: got num_workers={num_workers} and {len(devices)} devices, expected one device for each "
            "worker. Leave num_workers out."
        )
    return list(devices)
