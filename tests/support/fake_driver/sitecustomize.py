"""A stand-in for CUDA's driver, in every Python process that finds this file: it reads what CUDA would read.

``SYNK_FAKE_GPUS`` is how many GPUs there are. With ``SYNK_FAKE_PEERS=none`` none reaches another. ``SYNK_FAKE_DRIVER``
is the error with which the driver begins, or ``hang``.
"""

from __future__ import annotations

import ctypes
import os
import time
from typing import Any


class Driver:
    def __getattr__(self, name: str) -> Any:
        return lambda answer, *arguments: ANSWERS[name](answer, *arguments) or 0


def begin(flags: int) -> int:
    if os.environ.get("SYNK_FAKE_DRIVER") == "hang":
        time.sleep(1000)
    return int(os.environ.get("SYNK_FAKE_DRIVER", 0)) or (0 if visible() else 100)


def visible() -> list[int]:
    """Return the GPUs that are visible. Of a UUID its first digits count."""
    value = os.environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return list(range(int(os.environ["SYNK_FAKE_GPUS"])))
    return [int(entry.strip().removeprefix("GPU-")[:8]) for entry in value.split(",") if entry.strip()]


def put(make: Any) -> Any:
    """Return a function of the driver: it writes what ``make`` returns to where its first argument points."""

    def function(answer: Any, *arguments: Any) -> None:
        made = make(*arguments)
        if isinstance(made, bytes):
            answer.raw = made.ljust(len(answer), b"\0")
        else:
            answer[0] = made

    return function


ANSWERS = {
    "cuInit": begin,
    "cuDriverGetVersion": put(lambda: 13000),
    "cuDeviceGetCount": put(lambda: len(visible())),
    "cuDeviceGet": put(lambda place: visible()[place]),
    "cuDeviceGetUuid_v2": put(lambda gpu: bytes.fromhex(f"{gpu:08d}aaaabbbbccccdddddddddddd")),
    "cuDeviceGetName": put(lambda length, gpu: b"Fake GPU"),
    "cuDeviceGetPCIBusId": put(lambda length, gpu: b"0000:%02X:00.0" % gpu),
    "cuDeviceTotalMem_v2": put(lambda gpu: 1 << 34),
    "cuDeviceCanAccessPeer": put(lambda gpu, peer: os.environ.get("SYNK_FAKE_PEERS") != "none"),
}


class Libraries(ctypes.CDLL):
    def __new__(cls, name: Any = None, *args: Any, **options: Any) -> Any:
        return Driver() if name == "libcuda.so.1" else super().__new__(cls)


if "SYNK_FAKE_GPUS" in os.environ:
    exists = os.path.exists
    os.path.exists = lambda path: path == "/dev/nvidiactl" or exists(path)
    ctypes.CDLL = Libraries  # type: ignore[misc]
