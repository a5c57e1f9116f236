"""The GPUs that the user's environment makes visible, and their assignment to workers.

Pure functions of NVML's answers (``_nvml``) and of an environment: no CUDA call, no process, no state.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from synk.cuda._nvml import (
    NO_DRIVER,
    NO_PACKAGE,
    ORDER_VARIABLE,
    VISIBLE_VARIABLE,
    Gpu,
    NvmlSnapshot,
    needs_cuda_order,
)

# Slurm sets this value for a job without GPUs.
_SLURM_NO_DEVICES = "NoDevFiles"
_MIN_CUDA_MAJOR, _MAX_CUDA_MAJOR = 12, 13


@dataclass(frozen=True)
class Device:
    """The device of a worker: a GPU or a MIG instance.

    ``index`` is its position among the visible ones. ``entry`` names it as the user's CUDA_VISIBLE_DEVICES does, by a
    number or a uuid; empty if that is not set.
    """

    index: int
    uuid: str
    name: str
    memory_nbytes: int
    gpu_uuid: str
    cpu_affinity: frozenset[int] = frozenset()
    entry: str = ""

    def __str__(self) -> str:
        return f"cuda:{self.index}"


def _ordered_gpus(snapshot: NvmlSnapshot, environ: Mapping[str, str]) -> list[Gpu]:
    """Return the GPUs in the order of CUDA's numbers, as far as it is known."""
    gpus = sorted(snapshot.gpus, key=lambda gpu: gpu.pci_bus_id)
    if needs_cuda_order(snapshot, environ) and snapshot.cuda_order:
        rank = {gpu_uuid: index for index, gpu_uuid in enumerate(snapshot.cuda_order)}
        gpus = sorted((gpu for gpu in gpus if gpu.uuid in rank), key=lambda gpu: rank[gpu.uuid])
    return gpus


def _devices_of(gpu: Gpu) -> list[Device]:
    """Return the GPU as a device or, if it is partitioned, its MIG instances."""
    if gpu.is_mig_enabled:
        return [
            Device(0, mig.uuid, mig.name, mig.memory_nbytes, gpu.uuid, gpu.cpu_affinity) for mig in gpu.mig_instances
        ]
    return [Device(0, gpu.uuid, gpu.name, gpu.memory_nbytes, gpu.uuid, gpu.cpu_affinity)]


def _matches(entry: str, gpus: Sequence[Gpu]) -> list[list[Device]]:
    """Return the possible meanings of an entry of CUDA_VISIBLE_DEVICES, each as the devices of one GPU."""
    if entry.isdecimal():
        return [_devices_of(gpus[int(entry)])] if int(entry) < len(gpus) else []
    if entry.startswith("GPU-"):
        return [_devices_of(gpu) for gpu in gpus if gpu.uuid.startswith(entry)]
    if entry.startswith("MIG-"):
        return [[device] for gpu in gpus for device in _devices_of(gpu) if device.uuid.startswith(entry)]
    return []


def _resolve(entry: str, value: str, gpus: Sequence[Gpu]) -> Device:
    """Return the one device that an entry means."""
    problem = f"cannot read {VISIBLE_VARIABLE}={value!r}: got the entry {entry!r}"
    matches = _matches(entry, gpus)
    if not matches:
        raise ValueError(
            f"{problem}, expected an index from 0 to {len(gpus) - 1}, the uuid of a GPU or MIG instance, or -1 to end "
            "the list. See `nvidia-smi -L`."
        )
    if len(matches) > 1:
        raise ValueError(f"{problem}, which fits {len(matches)} devices. Write more of the uuid (`nvidia-smi -L`).")
    if len(matches[0]) != 1:
        raise ValueError(
            f"{problem}, a GPU in MIG mode with {len(matches[0])} instances, expected exactly one. Name instances by "
            "their MIG uuids (`nvidia-smi -L`)."
        )
    return matches[0][0]


def visible_devices(snapshot: NvmlSnapshot, environ: Mapping[str, str]) -> tuple[Device, ...]:
    """Return the devices that a CUDA program would see in ``environ``, in its order. All MIG instances count.

    ``CUDA_VISIBLE_DEVICES`` is read as CUDA reads it: unset means all, empty means none, ``-1`` ends the list, uuids
    may be shortened. If CUDA would silently hide devices, an error names the entry instead.

    Raises
    ------
    ValueError
        For an entry that is unknown, ambiguous or repeated, and for a number if CUDA's order is unknown.

    Notes
    -----
    Source: "CUDA environment variables" in the CUDA C++ Programming Guide.
    """
    gpus = _ordered_gpus(snapshot, environ)
    value = environ.get(VISIBLE_VARIABLE)
    if not gpus or value == _SLURM_NO_DEVICES:
        return ()
    if value is None:
        return _numbered(device for gpu in gpus for device in _devices_of(gpu))
    found: list[Device] = []
    entries = [entry.strip() for entry in value.split(",")]
    for entry in entries if entries[-1] else entries[:-1]:
        if entry == "-1":
            break
        if entry.isdecimal() and needs_cuda_order(snapshot, environ) and not snapshot.cuda_order:
            raise ValueError(
                f"cannot read {VISIBLE_VARIABLE}={value!r}: got a number, but there are GPUs of several models and "
                f"CUDA did not tell its order. Name them by uuid (`nvidia-smi -L`), or set {ORDER_VARIABLE}=PCI_BUS_ID."
            )
        device = _resolve(entry, value, gpus)
        if device.uuid in (each.uuid for each in found):
            raise ValueError(
                f"cannot read {VISIBLE_VARIABLE}={value!r}: got {entry!r}, which is in the list already. For several "
                "workers on one GPU list it once and pass devices=[0, 0]."
            )
        found.append(dataclasses.replace(device, entry=entry))
    return _numbered(found)


def _numbered(devices: Iterable[Device]) -> tuple[Device, ...]:
    return tuple(dataclasses.replace(device, index=index) for index, device in enumerate(devices))


def _choose(choice: Any, visible: Sequence[Device], devices: Sequence[Any]) -> Device:
    """Return the visible device that one element of ``devices`` names."""
    if isinstance(choice, str):
        is_uuid = choice.startswith(("GPU-", "MIG-"))
        found = [device for device in visible if str(device) == choice or (is_uuid and device.uuid.startswith(choice))]
    elif isinstance(choice, bool) or not hasattr(choice, "__index__"):
        raise TypeError(f"cannot fork: got devices={devices!r}, expected indices, uuids or names like 'cuda:0'.")
    else:
        found = [device for device in visible if device.index == choice.__index__()]
    if len(found) != 1:
        names = ", ".join(f"{device} ({device.uuid})" for device in visible) or "none"
        raise ValueError(f"cannot fork: got {choice!r} in devices, expected one of the visible GPUs: {names}.")
    return found[0]


def choose_devices(
    visible: Sequence[Device], num_workers: int | None = None, devices: Sequence[Any] | None = None
) -> tuple[Device, ...]:
    """Return the device of each rank.

    Parameters
    ----------
    visible : sequence of Device
        From ``visible_devices``.
    num_workers : int, optional
        Use the first ``num_workers`` visible devices. By default all of them, or one worker for each of ``devices``.
    devices : sequence, optional
        One device for each rank: an index among the visible devices, ``"cuda:<index>"``, or a (shortened) uuid. A
        device may appear several times. Then its workers share it.

    Raises
    ------
    ValueError
        If there are fewer devices than workers, or a device is not visible.
    TypeError
        If ``devices`` holds anything else.
    """
    if devices is None:
        count = len(visible) if num_workers is None else num_workers
        if not 1 <= count <= len(visible):
            raise ValueError(
                f"cannot fork: got num_workers={num_workers} with {len(visible)} visible GPUs, expected 1 to "
                f"{len(visible)}. Pass devices=[0, 0] for two workers on one GPU, or backend='numpy'."
            )
        return tuple(visible[:count])
    if isinstance(devices, str):
        raise TypeError(f"cannot fork: got devices={devices!r}, expected a sequence. Pass devices=[{devices!r}].")
    chosen = tuple(_choose(choice, visible, devices) for choice in devices)
    if not chosen or num_workers not in (None, len(chosen)):
        raise ValueError(
            f"cannot fork: got num_workers={num_workers} and {len(chosen)} devices, expected one device for each "
            "worker. Leave num_workers out."
        )
    return chosen


def ranks_per_device(chosen: Sequence[Device]) -> int:
    """Return the largest number of ranks that share a physical GPU. MIG instances of one GPU share it."""
    return max(collections.Counter(device.gpu_uuid for device in chosen).values(), default=1)


# ----- for the worker


def worker_environment(device: Device) -> dict[str, str]:
    """Return the environment variables that make ``device`` the only one, number 0, for every library of a worker.

    The form of the value is the user's: there are libraries that read numbers only.
    """
    return {VISIBLE_VARIABLE: device.entry or device.uuid}


def cpu_mask(device: Device, allowed: Iterable[int]) -> set[int]:
    """Return the CPUs for a worker: the allowed ones near its device, or all allowed ones if none is near."""
    allowed = set(allowed)
    return allowed & device.cpu_affinity or allowed


# ----- for people


def describe(device: Device) -> str:
    """Describe a device in one line.

    Examples
    --------
    >>> describe(Device(0, "GPU-8932f937", "NVIDIA H200", 150_754_820_096, "GPU-8932f937"))
    'cuda:0  NVIDIA H200, 140.4 GiB, GPU-8932f937'
    """
    memory = f"{device.memory_nbytes / 2**30:.1f} GiB" if device.memory_nbytes else "memory shared with the CPU"
    return f"{device}  {device.name}, {memory}, {device.uuid}"


def install_command(cuda_version: tuple[int, int] = (0, 0)) -> str:
    """Return the command that installs the GPU packages for a driver of ``cuda_version``."""
    if cuda_version[0] == 0:
        return 'pip install "synkhronos[cuda13]" (or "synkhronos[cuda12]", by the CUDA version that `nvidia-smi` shows)'
    return f'pip install "synkhronos[cuda{min(cuda_version[0], _MAX_CUDA_MAJOR)}]"'


def explain_absence(snapshot: NvmlSnapshot, environ: Mapping[str, str], *, has_cupy: bool) -> str:
    """Return the reason why no GPU can be used, with a remedy; an empty string if GPUs can be used.

    Raises
    ------
    ValueError
        As for ``visible_devices``.
    """
    if snapshot.problem == NO_DRIVER:
        return "no GPU: no NVIDIA driver is loaded. synk runs on the CPU cores."
    if snapshot.problem == NO_PACKAGE:
        return f"no GPU in use: there is an NVIDIA driver, but nvidia-ml-py is not installed. {install_command()}"
    if snapshot.problem:
        return f"no GPU: {snapshot.problem}. Does `nvidia-smi` work?"
    if not snapshot.gpus:
        return f"no GPU: the driver {snapshot.driver_version} shows none to this process."
    if not visible_devices(snapshot, environ):
        value = environ.get(VISIBLE_VARIABLE)
        if value is None:
            return "no GPU in use: all are in MIG mode and have no instance. `nvidia-smi mig -cgi` makes some."
        return f"no GPU in use: {VISIBLE_VARIABLE}={value!r} hides all {len(snapshot.gpus)}. Unset it to use them."
    major, minor = snapshot.cuda_version
    if major < _MIN_CUDA_MAJOR:
        return (
            f"no GPU in use: the driver {snapshot.driver_version} runs CUDA {major}.{minor}, synk needs a driver for "
            f"CUDA {_MIN_CUDA_MAJOR} or later."
        )
    if not has_cupy:
        return f"no GPU in use: CuPy is not installed. {install_command(snapshot.cuda_version)}"
    return ""
