"""The NCCL library: its path, its status codes, and the environment in which it starts.

This file owns no communicator and calls no collective. Importing it loads nothing; ``find_library`` may map the
library.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import re
from collections.abc import Mapping
from pathlib import Path

from synk.errors import SynkError, UnsupportedError

LIBRARY_VARIABLE = "SYNK_NCCL_LIB"
SONAME = "libnccl.so.2"

SUCCESS = 0
INTERNAL_ERROR = 3
REMOTE_ERROR = 6
IN_PROGRESS = 7
TIMEOUT = 8

STATUS_NAMES = (
    "ncclSuccess",
    "ncclUnhandledCudaError",
    "ncclSystemError",
    "ncclInternalError",
    "ncclInvalidArgument",
    "ncclInvalidUsage",
    "ncclRemoteError",
    "ncclInProgress",
    "ncclTimeout",
)

# Files such as libnccl-net.so and libnccl-tuner.so are plug-ins, not the library.
_LIBRARY_FILE = re.compile(r"libnccl\.so(\.\d+)*$")


def status_name(code: int) -> str:
    """Return NCCL's name for a status code."""
    return STATUS_NAMES[code] if 0 <= code < len(STATUS_NAMES) else f"ncclResult {code}"


class NcclError(SynkError):
    """NCCL refused or lost an operation.

    Attributes
    ----------
    code : int
        NCCL's status: 1 CUDA, 2 system, 3 internal, 4 argument, 5 usage, 6 a peer or the group is gone, 8 time limit.
    name : str
        NCCL's name for the status.
    last_error : str
        NCCL's message about it, or synk's own.
    action : str
        The operation that failed, as in "cannot <action>".
    """

    def __init__(self, code: int, last_error: str = "", action: str = "") -> None:
        # All fields are arguments, so that the default pickling of exceptions keeps them.
        super().__init__(code, last_error, action)
        self.code = code
        self.name = status_name(code)
        self.last_error = last_error
        self.action = action

    def __str__(self) -> str:
        cause = f": {self.last_error}" if self.last_error else ". Set NCCL_DEBUG=WARN to see NCCL's own message"
        return f"cannot {self.action or 'run an NCCL operation'}: got {self.name} ({self.code}){cause}."


def mapped_library() -> str:
    """Return the path of the NCCL library that this process has already mapped, or an empty string.

    A process must not hold two NCCL libraries. The first one that torch, CuPy or synk loads is used by all of them.
    """
    try:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:  # no /proc: the later steps of the search still work
        return ""
    for line in maps.splitlines():
        path = line.partition("/")[2]
        if path and _LIBRARY_FILE.search(path.rpartition("/")[2]):
            return "/" + path
    return ""


def _library_of_variable(value: str) -> str:
    """Return the library that ``SYNK_NCCL_LIB`` names: a file, or a folder that holds one."""
    path = Path(value)
    if path.is_dir():
        candidates = sorted(entry for entry in path.iterdir() if _LIBRARY_FILE.fullmatch(entry.name))
        if candidates:
            return str(candidates[-1])
    elif path.is_file():
        return str(path)
    raise ValueError(
        f"cannot load NCCL: got {LIBRARY_VARIABLE}={value!r}, expected the path of {SONAME} or of its folder. "
        f"Correct or unset {LIBRARY_VARIABLE}."
    )


def _library_of_wheel() -> str:
    """Return the library of NVIDIA's wheel or toolkit that ``cuda.pathfinder`` finds, or an empty string."""
    try:
        pathfinder = importlib.import_module("cuda.pathfinder")
    except ImportError:  # It comes with CuPy 14 and nccl4py. Without it only the linker's search is left.
        return ""
    try:
        return str(pathfinder.load_nvidia_dynamic_lib("nccl").abs_path or "")
    except RuntimeError:  # DynamicLibNotFoundError
        return ""


def find_library(environ: Mapping[str, str] = os.environ) -> str:
    """Return the absolute path of the NCCL library to use.

    The order is: ``SYNK_NCCL_LIB``, the library that the process has already mapped, the one that ``cuda.pathfinder``
    finds (the NVIDIA wheel), the one that the dynamic linker finds.

    Raises
    ------
    ValueError
        If ``SYNK_NCCL_LIB`` names no library, or a library other than the mapped one.
    UnsupportedError
        If there is no NCCL library.
    """
    mapped = mapped_library()
    if value := environ.get(LIBRARY_VARIABLE):
        path = os.path.abspath(_library_of_variable(value))
        if mapped and not os.path.samefile(mapped, path):
            raise ValueError(
                f"cannot load NCCL: got {LIBRARY_VARIABLE}={value!r}, but the process has {mapped} loaded already. "
                f"A process can hold one NCCL only: unset {LIBRARY_VARIABLE} or name that file."
            )
        return path
    if mapped:
        return mapped
    if path := _library_of_wheel():
        return path
    try:
        ctypes.CDLL(SONAME)
    except OSError as error:
        raise UnsupportedError(
            f"cannot load NCCL: got {error}, expected {SONAME} from NVIDIA's wheel or the system. Install it "
            f'(pip install "synkhronos[cuda12]" or "synkhronos[cuda13]") or set {LIBRARY_VARIABLE} to its path.'
        ) from error
    return mapped_library() or SONAME


def version_text(version: int) -> str:
    """Return ``ncclGetVersion``'s number as text.

    Examples
    --------
    >>> version_text(23203), version_text(2708)
    ('2.32.3', '2.7.8')
    """
    base = 10_000 if version >= 10_000 else 1_000
    return f"{version // base}.{version % base // 100}.{version % 100}"


def nccl_environment(environ: Mapping[str, str], *, ranks_per_device: int = 1) -> dict[str, str]:
    """Return the environment for a GPU worker: ``environ`` with NCCL restricted to this machine's loopback.

    NCCL opens TCP listeners even between the GPUs of one machine. The user's own settings stay, except for those that
    would let anybody join, or keep the worker from noticing a dead peer.

    Parameters
    ----------
    environ : mapping
        The environment to start from. It is not changed.
    ranks_per_device : int
        How many workers share one GPU. More than one need NCCL 2.30.3 or later.

    Returns
    -------
    dict
        A complete environment.

    Notes
    -----
    ``NCCL_COMM_ID`` is dropped: with it NCCL's handshake is a constant, and two groups would meet at one address.
    ``NCCL_COMM_BLOCKING=0`` is dropped: synk itself asks for a non-blocking start of the releases in which it is sound.
    Source: the environment chapter of the NCCL user guide, ``src/bootstrap.cc`` and ``src/init.cc``.
    """
    result = dict(environ)
    result.pop("NCCL_COMM_ID", None)
    if result.get("NCCL_COMM_BLOCKING") == "0":
        del result["NCCL_COMM_BLOCKING"]
    result.setdefault("NCCL_SOCKET_IFNAME", "lo")
    result.setdefault("NCCL_RAS_ENABLE", "0")
    # Plug-ins of a cluster's image and InfiniBand cards are for other machines, and looking for them can fail or hang.
    result.setdefault("NCCL_NET_PLUGIN", "none")
    result.setdefault("NCCL_IB_DISABLE", "1")
    if ranks_per_device > 1:
        # Ranks on one GPU share its processors. With too many channels each they would wait for each other for ever.
        result.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        result.setdefault("NCCL_MAX_CTAS", str(max(1, 8 // ranks_per_device)))
        result["NCCL_NVLS_ENABLE"] = "0"  # NCCL refuses to start with it when ranks share a GPU
    return result
