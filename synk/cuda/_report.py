"""The lines of ``synk.info()`` about GPUs, from NVML and package metadata: no CUDA call, no import of a library."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from synk.cuda import _nvml
from synk.cuda._devices import Device, describe, explain_absence, install_command, visible_devices
from synk.cuda._nvml import NvmlSnapshot

# NVML_P2P_CAPS_INDEX_READ; pynvml's own constant is a tuple by mistake.
_P2P_READ = 0

# The distributions that a user may install for each purpose. The first that is installed counts.
_PACKAGES = {
    "CuPy": ("cupy-cuda13x", "cupy-cuda12x", "cupy"),
    "NCCL": ("nvidia-nccl-cu13", "nvidia-nccl-cu12"),
}


def _installed(names: Sequence[str]) -> str:
    """Return the first of the distributions that is installed, with its version, or an empty string."""
    from importlib import metadata  # takes a tenth of the time in which synk is imported

    for name in names:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    return ""


def _package_line(snapshot: NvmlSnapshot) -> str:
    found = {title: _installed(names) for title, names in _PACKAGES.items()}
    missing = [title for title, name in found.items() if not name]
    line = "packages: " + (", ".join(name for name in found.values() if name) or "none")
    return f"{line}. Missing: {', '.join(missing)}. {install_command(snapshot.cuda_version)}" if missing else line


def _peer_line(devices: Sequence[Device]) -> str:
    """Return a line about GPUs that can read each other's memory directly; empty if nothing is known."""
    if len({device.gpu_uuid for device in devices}) < 2:
        return ""
    try:
        pynvml: Any = importlib.import_module("pynvml")
    except ImportError:
        return ""
    try:
        pynvml.nvmlInit()
        handles = {device.index: pynvml.nvmlDeviceGetHandleByUUID(device.gpu_uuid) for device in devices}
        without = [
            f"{a}-{b}"
            for a, b in itertools.combinations(handles, 2)
            if pynvml.nvmlDeviceGetP2PStatus(handles[a], handles[b], _P2P_READ) != pynvml.NVML_P2P_STATUS_OK
        ]
        pynvml.nvmlShutdown()
    except pynvml.NVMLError as error:
        return f"peer access: NVML does not say ({error})"
    return f"peer access: none between {', '.join(without)}" if without else "peer access: between all of them"


def gpu_lines(environ: Mapping[str, str] = os.environ, *, has_cupy: bool) -> list[str]:
    """Return lines about this machine's GPUs, and about packages that are missing to use them."""
    snapshot = _nvml.discover(environ)
    try:
        problem = explain_absence(snapshot, environ, has_cupy=has_cupy)
        devices = visible_devices(snapshot, environ) if not snapshot.problem else ()
    except ValueError as error:
        return [f"GPU: {error}"]
    lines = [f"GPU: {problem.removeprefix('no GPU: ')}"] if problem else []
    if devices:
        major, minor = snapshot.cuda_version
        lines += [f"GPU: driver {snapshot.driver_version} (CUDA {major}.{minor})"]
        lines += [f"  {describe(device)}" for device in devices]
        lines += [f"  {line}" for line in (_peer_line(devices), _package_line(snapshot)) if line]
    return lines
