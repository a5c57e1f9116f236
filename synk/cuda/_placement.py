"""The backend ``"cupy"`` in the program: the GPUs of the machine and their assignment to ranks. It imports no CuPy."""

from __future__ import annotations

import collections
import contextlib
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from synk.backends._assignment import DeviceAssignment, choose
from synk.cuda._devices import VISIBLE_VARIABLE, cpus_near, explain_absence, gpu_lines, is_named, visible_gpus
from synk.cuda._nccl import nccl_environment
from synk.errors import UnsupportedError

if TYPE_CHECKING:
    from synk.cuda._cupy import CupyBackend

_JAX_VARIABLE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_SHARING_VARIABLE = "NCCL_MULTI_RANK_GPU_ENABLE"


def has_cupy() -> bool:
    """Whether CuPy is installed. This does not import it."""
    return importlib.util.find_spec("cupy") is not None


def is_usable() -> bool:
    return has_cupy() and not explain_absence(visible_gpus(), has_cupy=True)


def unused_gpus() -> str:
    """Return why the GPUs that a program could see are not used, and what to do; empty if there are none."""
    gpus = visible_gpus()
    return explain_absence(gpus, has_cupy=has_cupy()) if gpus.devices or gpus.failure else ""


def notice_of_memory_held_here() -> str:
    """Return what to tell a program that itself holds memory of GPUs on which its workers are to compute.

    This makes no call that begins CUDA.
    """
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    nbytes = 0
    if torch is not None and torch.cuda.is_initialized():
        nbytes += sum(torch.cuda.memory_reserved(index) for index in range(torch.cuda.device_count()))
    if cupy is not None and uses_cuda():
        nbytes += cupy.get_default_memory_pool().total_bytes()
    if not nbytes:
        return ""
    return (
        f"this program itself holds {nbytes / 2**20:.0f} MiB of device memory, which its workers lack. Make tensors "
        "and models on the CPU and pass them to functions; free what is there (del, torch.cuda.empty_cache())."
    )


def uses_cuda() -> bool:
    """Whether this process has begun CUDA: it then holds the driver's file for memory open."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if os.readlink(f"/proc/self/fd/{name}") == "/dev/nvidia-uvm":
                return True
    return False


def place(num_workers: int | None, devices: Sequence[Any] | None) -> DeviceAssignment:
    """Return the device assignment, by what CUDA tells a child. This process imports no CuPy and begins no CUDA.

    Raises
    ------
    UnsupportedError
        If no GPU can be used.
    ValueError, TypeError
        As for ``choose`` and ``is_named``.
    """
    gpus = visible_gpus()
    problem = explain_absence(gpus, has_cupy=has_cupy())
    if problem:
        raise UnsupportedError(f"cannot fork with backend 'cupy': {problem}")
    chosen = choose(gpus.devices, num_workers, devices, is_named)
    sharing = max(collections.Counter(device.bus for device in chosen).values())  # also MIG instances of one GPU
    # By default JAX takes three quarters of the memory when it starts, from CuPy and from other ranks.
    shared = {_JAX_VARIABLE: "false"} | nccl_environment(os.environ, ranks_per_device=sharing)
    allowed = os.sched_getaffinity(0)
    return DeviceAssignment(
        tuple(str(device) for device in chosen),
        tuple(shared | {VISIBLE_VARIABLE: device.entry} for device in chosen),
        tuple(tuple(sorted(allowed & cpus_near(device) or allowed)) for device in chosen),
        has_devices=True,
        # Ranks that share a GPU take turns on it, and NCCL before 2.30.3 refuses such ranks. So NCCL joins them only
        # on request.
        can_use_nccl=len(chosen) > 1 and (sharing == 1 or os.environ.get(_SHARING_VARIABLE) == "1"),
        torch_device="cuda",
        notice=notice_of_memory_held_here(),
    )


def open_device(device: str) -> CupyBackend:
    from synk.cuda._cupy import CupyBackend

    return CupyBackend(device)


def on_host(obj: Any) -> Any:
    return obj.get() if isinstance(obj, sys.modules["cupy"].ndarray) else obj


def report() -> list[str]:
    return gpu_lines(has_cupy=has_cupy())
