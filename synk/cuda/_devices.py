"""The GPUs that CUDA shows to the user's program, and their assignment to workers.

A child process asks CUDA itself, in the user's environment: so CUDA reads ``CUDA_VISIBLE_DEVICES``, and this process
stays free to fork. The child answers within a limit, or fails.
"""

from __future__ import annotations

import functools
import os
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from synk._pure.environment import imported_late
from synk.backends._listing import list_devices
from synk.errors import UnsupportedError

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
DRIVER_FILES = ("/dev/nvidiactl", "/proc/driver/nvidia/version", "/dev/dxg")
"""One of them is there where a driver is loaded: Linux's, whose device may be made later, or Windows' below Linux."""

_MIN_CUDA_MAJOR, _MAX_CUDA_MAJOR = 12, 13

# All functions of libcuda write their answer to where the first argument points. Error 100: no device is visible.
_LIST = """
import ctypes, json, sys
cuda, Number, Text = ctypes.CDLL("libcuda.so.1"), ctypes.c_size_t * 1, ctypes.c_char * 256
def ask(name, kind, *arguments):
    answer = kind()
    if status := getattr(cuda, name)(answer, *arguments):
        sys.exit(f"{name} answers with error {status}")
    return answer[0] if kind is Number else answer.raw
if (status := cuda.cuInit(0)) not in (0, 100):
    sys.exit(f"cuInit answers with error {status}")
devices = [ask("cuDeviceGet", Number, place) for place in range(0 if status else ask("cuDeviceGetCount", Number))]
found = [ask("cuDriverGetVersion", Number)]
for device in devices:
    number = ask("cuDeviceGetUuid_v2", Text, device)[:16].hex()
    texts = [ask(f"cuDeviceGet{what}", Text, 256, device) for what in ("Name", "PCIBusId")]
    name, bus = (text.split(b"\\0")[0].decode() for text in texts)
    others = [(place, peer) for place, peer in enumerate(devices) if peer != device]
    reads = [place for place, peer in others if ask("cuDeviceCanAccessPeer", Number, device, peer)]
    found.append([number, name, bus, ask("cuDeviceTotalMem_v2", Number, device), reads])
print(json.dumps(found))
"""


class Device(NamedTuple):
    """A GPU or a MIG instance that CUDA shows.

    Attributes
    ----------
    number : int
        Its place in CUDA's order.
    entry : str
        What ``CUDA_VISIBLE_DEVICES`` must be for it alone to be visible: in the form that the user has written, because
        there are libraries that read numbers only; its uuid if the user has written nothing.
    bus : str
        Its place on the PCI bus. MIG instances of one GPU share it.
    peers : tuple of int
        The devices whose memory it reads directly.
    """

    number: int
    entry: str
    uuid: str
    name: str
    bus: str
    memory_nbytes: int
    peers: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"cuda:{self.number}"


class Gpus(NamedTuple):
    """What CUDA answered. ``cuda_version`` is the newest that the driver runs, as (major, minor)."""

    devices: tuple[Device, ...] = ()
    cuda_version: tuple[int, int] = (0, 0)
    failure: str = ""


def visible_gpus() -> Gpus:
    """Return the GPUs that a CUDA program would see here, in its order. A failure is an answer, too."""
    if not any(map(os.path.exists, DRIVER_FILES)):
        return Gpus()
    return _asked(os.environ.get(VISIBLE_VARIABLE), os.environ.get("CUDA_DEVICE_ORDER"))


@functools.cache
def _asked(visible: str | None, order: str | None) -> Gpus:
    try:
        version, *found = list_devices(_LIST, "CUDA", os.environ, trial="nvidia-smi")
    except UnsupportedError as error:
        return Gpus(failure=str(error))
    devices = []
    for number, (digits, name, bus, memory_nbytes, peers) in enumerate(found):
        own = f"{'MIG' if ' MIG ' in name else 'GPU'}-{uuid.UUID(digits)}"
        entry = own if visible is None else visible.split(",")[number].strip()
        devices.append(Device(number, entry, own, name, bus, memory_nbytes, tuple(peers)))
    return Gpus(tuple(devices), (version // 1000, version % 1000 // 10))


def is_named(device: Device, given: Any) -> bool:
    """Whether a device is meant by an index among the visible devices, ``"cuda:<index>"``, or a (shortened) uuid.

    Raises
    ------
    TypeError
        If it is anything else.
    """
    if isinstance(given, str):
        return str(device) == given or (given.startswith(("GPU-", "MIG-")) and device.uuid.startswith(given))
    if isinstance(given, bool) or not hasattr(given, "__index__"):
        raise TypeError(f"cannot fork: got {given!r} in devices, expected indices, uuids or names like 'cuda:0'.")
    return bool(device.number == given.__index__())


def cpus_near(device: Device) -> set[int]:
    """Return the CPUs nearest to a device, as the kernel lists them (``0-15,32-47``); none if it does not say."""
    try:
        listed = Path(f"/sys/bus/pci/devices/{device.bus.lower()}/local_cpulist").read_text(encoding="ascii").split(",")
    except OSError:
        return set()
    bounds = [part.split("-") for part in listed if part.strip()]
    return {cpu for each in bounds for cpu in range(int(each[0]), int(each[-1]) + 1)}


# ----- for people


def explain_absence(gpus: Gpus, *, has_cupy: bool) -> str:
    """Return the reason why no GPU can be used, with a remedy; an empty string if GPUs can be used."""
    major, minor = gpus.cuda_version
    if gpus.failure:
        return f"no GPU in use: {gpus.failure}"
    if not major:
        return "no GPU: no NVIDIA driver is loaded. synk runs on the CPU cores."
    if not gpus.devices:
        value = os.environ.get(VISIBLE_VARIABLE)
        return "no GPU: CUDA shows none" + ("." if value is None else f" with {VISIBLE_VARIABLE}={value!r}. Unset it.")
    if major < _MIN_CUDA_MAJOR:
        return f"no GPU in use: the driver runs CUDA {major}.{minor}, synk needs {_MIN_CUDA_MAJOR} or later."
    newest = f"cupy-cuda{_MAX_CUDA_MAJOR}x"
    if has_cupy and major < _MAX_CUDA_MAJOR and _is_installed(newest) and not _is_installed(f"cupy-cuda{major}x"):
        return (
            f"no GPU in use: the driver runs CUDA {major}.{minor}, too old for the {newest} that is installed. "
            f'pip uninstall {newest}, and pip install "synkhronos[cuda{major}]", or update the driver.'
        )
    if not has_cupy:
        return f'no GPU in use: CuPy is not installed. pip install "synkhronos[cuda{min(major, _MAX_CUDA_MAJOR)}]"'
    return ""


def _is_installed(distribution: str) -> bool:
    return any(imported_late("importlib.metadata").distributions(name=distribution))


def _peer_line(devices: Sequence[Device]) -> str:
    """Return a line about GPUs that can read each other's memory directly; empty for one."""
    pairs = [(a, b) for a in devices for b in devices[a.number + 1 :] if a.bus != b.bus]
    without = ", ".join(f"{a.number}-{b.number}" for a, b in pairs if b.number not in a.peers)
    return "peer access: " + (f"none between {without}" if without else "between all of them") if pairs else ""


def gpu_lines(*, has_cupy: bool) -> list[str]:
    """Return the lines of ``synk.info()`` about this machine's GPUs."""
    gpus = visible_gpus()
    problem = explain_absence(gpus, has_cupy=has_cupy)
    lines = [f"GPU: {problem.removeprefix('no GPU: ')}"] if problem else []
    if gpus.devices:
        lines.append("GPU: a driver for CUDA {}.{}".format(*gpus.cuda_version))
        lines += [f"  {each}  {each.name}, {each.memory_nbytes / 2**30:.1f} GiB, {each.uuid}" for each in gpus.devices]
        lines += [f"  {line}" for line in [_peer_line(gpus.devices)] if line]
    return lines
