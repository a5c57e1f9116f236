"""The result of a backend's ``place``: the devices of a runtime's ranks."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
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
        The whole environment of each rank. Empty if the ranks use the program's.
    cpus : tuple of tuple of int
        The CPUs that each rank is bound to. Empty if all ranks may run on any.
    has_devices : bool
        Whether the arrays of the workers lie in a memory of their own, which the program cannot see.
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


def choose(
    found: Sequence[Any],
    num_workers: int | None,
    devices: Any,
    is_named: Callable[[Any, Any], bool] = operator.eq,
) -> list[Any]:
    """Return the device of each rank.

    Parameters
    ----------
    found : sequence
        The devices that are there. ``str`` of each is its name.
    num_workers : int, optional
        Use the first ``num_workers`` devices. By default all of them, or one worker for each of ``devices``.
    devices : iterable, optional
        What names each rank's device. A device may appear several times.
    is_named : callable
        ``is_named(device, given)`` says whether a device is meant.

    Raises
    ------
    ValueError
        If there are fewer devices than workers, or not one device of a name.
    TypeError
        If ``devices`` is no sequence.
    """
    names = ", ".join(map(str, found))
    if devices is None:
        if num_workers is None or 1 <= num_workers <= len(found):
            return list(found[:num_workers])
        pair = [str(found[0])] * 2
        raise ValueError(
            f"cannot fork: got num_workers={num_workers}, expected 1 to {len(found)}, one for each device ({names}). "
            f"Pass devices={pair} for two workers on one device, or backend='numpy'."
        )
    if isinstance(devices, (str, dict)) or not isinstance(devices, Iterable):
        raise TypeError(f"cannot fork: got devices={devices!r}, expected a sequence of devices: {names}.")
    chosen = []
    for given in devices:
        named = [device for device in found if is_named(device, given)]
        if len(named) != 1:
            raise ValueError(f"cannot fork: got {given!r} in devices, expected one of: {names}.")
        chosen += named
    if not chosen or num_workers not in (None, len(chosen)):
        raise ValueError(
            f"cannot fork: got num_workers={num_workers} and {len(chosen)} devices, expected one device for each "
            "worker. Leave num_workers out."
        )
    return chosen
