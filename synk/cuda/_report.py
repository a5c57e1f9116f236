"""The lines of ``synk.info()`` about GPUs, from what CUDA told a child and from package metadata."""

from __future__ import annotations

from collections.abc import Sequence

from synk.cuda._devices import Device, Gpus, explain_absence, install_command, visible_gpus

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


def _package_line(gpus: Gpus) -> str:
    found = {title: _installed(names) for title, names in _PACKAGES.items()}
    missing = [title for title, name in found.items() if not name]
    line = "packages: " + (", ".join(name for name in found.values() if name) or "none")
    return f"{line}. Missing: {', '.join(missing)}. {install_command(gpus)}" if missing else line


def _peer_line(devices: Sequence[Device]) -> str:
    """Return a line about GPUs that can read each other's memory directly; empty for one."""
    pairs = [(a, b) for a in devices for b in devices[a.number + 1 :] if a.bus != b.bus]
    without = ", ".join(f"{a.number}-{b.number}" for a, b in pairs if b.number not in a.peers)
    return "peer access: " + (f"none between {without}" if without else "between all of them") if pairs else ""


def _describe(device: Device) -> str:
    return f"{device}  {device.name}, {device.memory_nbytes / 2**30:.1f} GiB, {device.uuid}"


def gpu_lines(*, has_cupy: bool) -> list[str]:
    """Return lines about this machine's GPUs, and about packages that are missing to use them."""
    gpus = visible_gpus()
    problem = explain_absence(gpus, has_cupy=has_cupy)
    lines = [f"GPU: {problem.removeprefix('no GPU: ')}"] if problem else []
    if gpus.devices:
        major, minor = gpus.cuda_version
        lines += [f"GPU: a driver for CUDA {major}.{minor}", *(f"  {_describe(device)}" for device in gpus.devices)]
        lines += [f"  {line}" for line in (_peer_line(gpus.devices), _package_line(gpus)) if line]
    return lines
