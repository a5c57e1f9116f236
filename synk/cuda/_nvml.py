"""NVML's report about the machine's GPUs: read without a CUDA call, kept as plain data.

NVML makes no CUDA context, so the master stays free to fork, and the user's program keeps its choice of devices. NVML
ignores ``CUDA_VISIBLE_DEVICES``; ``_devices`` knows what the user sees.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

VISIBLE_VARIABLE = "CUDA_VISIBLE_DEVICES"
ORDER_VARIABLE = "CUDA_DEVICE_ORDER"

NO_PACKAGE = "nvidia-ml-py is not installed"
NO_DRIVER = "no NVIDIA driver is loaded"

_CUDA_ORDER_TIMEOUT_S = 30.0
_CUDA_ORDER_PROGRAM = """
import ctypes
cuda = ctypes.CDLL("libcuda.so.1")
count, device, uuid = ctypes.c_int(), ctypes.c_int(), (ctypes.c_ubyte * 16)()
status = cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count))
for index in range(0 if status else count.value):
    if cuda.cuDeviceGet(ctypes.byref(device), index) or cuda.cuDeviceGetUuid(uuid, device):
        raise SystemExit(1)
    print(bytes(uuid).hex())
"""


@dataclass(frozen=True)
class MigInstance:
    """A slice of a GPU that CUDA sees as a device of its own."""

    uuid: str
    name: str
    memory_nbytes: int


@dataclass(frozen=True)
class Gpu:
    """One physical GPU as NVML describes it. ``cpu_affinity`` has the CPUs nearest to it; empty if unknown."""

    uuid: str
    name: str
    memory_nbytes: int
    pci_bus_id: str
    cpu_affinity: frozenset[int] = frozenset()
    is_mig_enabled: bool = False
    mig_instances: tuple[MigInstance, ...] = ()


@dataclass(frozen=True)
class NvmlSnapshot:
    """NVML's answers at one moment.

    Attributes
    ----------
    gpus : tuple of Gpu
        All GPUs that this process may open, in any order.
    driver_version : str
    cuda_version : tuple of int
        The newest CUDA that the driver supports, as (major, minor).
    problem : str
        Why there is no answer: ``NO_PACKAGE``, ``NO_DRIVER`` or NVML's own words. Empty if NVML answered.
    cuda_order : tuple of str
        Uuids in CUDA's order, if it had to be queried (see ``discover``).
    """

    gpus: tuple[Gpu, ...] = ()
    driver_version: str = ""
    cuda_version: tuple[int, int] = (0, 0)
    problem: str = ""
    cuda_order: tuple[str, ...] = ()


def _cpus_of_words(words: Iterable[int]) -> frozenset[int]:
    """Return the CPUs in NVML's answer: 64-bit words, with the lowest CPU in the lowest bit of the first word."""
    return frozenset(64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1)


def _read_gpu(pynvml: Any, handle: Any) -> Gpu:
    """Return NVML's report about one GPU. Facts that it cannot report, for this model or in a container, stay empty."""

    def ask(default: Any, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except pynvml.NVMLError_NoPermission:
            raise
        except pynvml.NVMLError:
            return default

    def memory_nbytes(device: Any) -> int:
        memory = ask(None, pynvml.nvmlDeviceGetMemoryInfo, device)  # unsupported if GPU and CPU share memory
        return int(memory.total) if memory is not None else 0

    instances = []
    mig_mode, _ = ask((0, 0), pynvml.nvmlDeviceGetMigMode, handle)
    if mig_mode:
        for index in range(ask(0, pynvml.nvmlDeviceGetMaxMigDeviceCount, handle)):
            with contextlib.suppress(pynvml.NVMLError_NotFound):  # the numbers need not be contiguous
                mig = pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
                name = pynvml.nvmlDeviceGetName(mig)
                instances.append(MigInstance(pynvml.nvmlDeviceGetUUID(mig), name, memory_nbytes(mig)))
    num_words = os.sysconf("SC_NPROCESSORS_CONF") // 64 + 1
    return Gpu(
        uuid=pynvml.nvmlDeviceGetUUID(handle),
        name=pynvml.nvmlDeviceGetName(handle),
        memory_nbytes=memory_nbytes(handle),
        pci_bus_id=pynvml.nvmlDeviceGetPciInfo(handle).busId,
        cpu_affinity=_cpus_of_words(ask((), pynvml.nvmlDeviceGetCpuAffinity, handle, num_words)),
        is_mig_enabled=bool(mig_mode),
        mig_instances=tuple(instances),
    )


def read_snapshot() -> NvmlSnapshot:
    """Ask NVML for the GPUs of this machine. If there are none, nothing is raised: ``problem`` says why."""
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError:
        return NvmlSnapshot(problem=NO_PACKAGE if os.path.exists("/proc/driver/nvidia/version") else NO_DRIVER)
    try:
        pynvml.nvmlInit()
    except (pynvml.NVMLError_LibraryNotFound, pynvml.NVMLError_DriverNotLoaded):
        return NvmlSnapshot(problem=NO_DRIVER)
    except pynvml.NVMLError as error:
        return NvmlSnapshot(problem=f"NVML does not answer: {error}")
    try:
        cuda_version = pynvml.nvmlSystemGetCudaDriverVersion_v2()
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            # A GPU without permission belongs to another job, and CUDA does not see it either.
            with contextlib.suppress(pynvml.NVMLError_NoPermission):
                gpus.append(_read_gpu(pynvml, pynvml.nvmlDeviceGetHandleByIndex(index)))
        return NvmlSnapshot(
            gpus=tuple(gpus),
            driver_version=pynvml.nvmlSystemGetDriverVersion(),
            cuda_version=(cuda_version // 1000, cuda_version % 1000 // 10),
        )
    except pynvml.NVMLError as error:
        return NvmlSnapshot(problem=f"NVML does not answer: {error}")
    finally:
        pynvml.nvmlShutdown()


def query_cuda_order(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the uuids of all GPUs in CUDA's order, queried in a separate process; empty if that fails."""
    environment = {name: value for name, value in environ.items() if name != VISIBLE_VARIABLE}
    command = [sys.executable, "-I", "-S", "-c", _CUDA_ORDER_PROGRAM]
    try:
        answer = subprocess.run(
            command,
            env=environment,
            check=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            timeout=_CUDA_ORDER_TIMEOUT_S,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return tuple(f"GPU-{uuid.UUID(line)}" for line in answer.split())


def needs_cuda_order(snapshot: NvmlSnapshot, environ: Mapping[str, str]) -> bool:
    """Whether CUDA's numbers do not follow from NVML's answer: by default CUDA counts the fastest GPU first."""
    is_mixed = len({gpu.name for gpu in snapshot.gpus}) > 1
    return is_mixed and environ.get(ORDER_VARIABLE) != "PCI_BUS_ID"


def discover(environ: Mapping[str, str] = os.environ) -> NvmlSnapshot:
    """Return the snapshot of this machine, with CUDA's order if several models make it uncertain."""
    snapshot = read_snapshot()
    if needs_cuda_order(snapshot, environ):
        snapshot = dataclasses.replace(snapshot, cuda_order=query_cuda_order(environ))
    return snapshot
