"""Lines about the machine: versions, cores and memory, and which GPUs can be used. They start no worker."""

from __future__ import annotations

import os
import platform
from importlib import metadata

from synk._pure.environment import num_cores
from synk._version import __version__
from synk._wire.memory import available_nbytes
from synk.check._found import Broken, Found
from synk.cuda._devices import explain_absence, gpu_lines, visible_gpus
from synk.cuda._placement import has_cupy

_NEEDED = ("numpy", "cloudpickle", "optree")
_OPTIONAL = (
    "torch", "cupy-cuda12x", "cupy-cuda13x", "cupy", "nvidia-nccl-cu12", "nvidia-nccl-cu13", "pynccl",
    "jax", "dpnp", "pandas", "polars", "ray",
)  # fmt: skip
_VARIABLES = ("CUDA_", "NCCL_", "SYNK_", "OMP_", "MKL_", "OPENBLAS_")


def versions() -> Found:
    found = {name: _version(name) for name in (*_NEEDED, *_OPTIONAL)}
    missing = [name for name in _NEEDED if not found[name]]
    if missing:
        raise Broken(f"{', '.join(missing)} cannot be found among the installed packages")
    installed = {name: version for name, version in found.items() if version}
    known = {"synk": __version__, "python": platform.python_version(), **installed}
    names = ", ".join(f"{name} {version}" for name, version in known.items())
    return Found(names, facts={"versions": known, "platform": platform.platform()})


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def machine() -> Found:
    allowed, usable = len(os.sched_getaffinity(0)), num_cores()
    memory, available = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"), available_nbytes()
    facts = {
        "cores": os.cpu_count(), "allowed_cores": allowed, "usable_cores": usable, "memory_nbytes": memory,
        "memory_available_nbytes": available,
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
    }  # fmt: skip
    memory_text = f"{available / 2**30:.1f} of {memory / 2**30:.1f} GiB of memory are free"
    return Found(f"{usable} of {os.cpu_count()} cores are usable, {memory_text}", facts=facts)


def devices() -> Found:
    gpus = visible_gpus()
    lines = gpu_lines(has_cupy=has_cupy())
    problem = explain_absence(gpus, has_cupy=has_cupy())
    if problem and (gpus.devices or gpus.failure):
        raise Broken(problem)
    names = [device.name for device in gpus.devices]
    text = problem or f"{len(names)} GPUs ({', '.join(sorted(set(names)))}), {lines[0].removeprefix('GPU: ')}"
    # NCCL then copies between them through the memory of the host.
    apart = next((line.strip() for line in lines if "peer access: none" in line), "")
    return Found(text.removesuffix("."), slow=apart, facts={"num_gpus": len(names), "lines": lines})
