"""A stand-in for nvidia-ml-py: ``SYNK_FAKE_GPUS`` GPUs. With ``SYNK_FAKE_PEERS=none`` none reaches another."""

from __future__ import annotations

import os
import types
from typing import Any

NVML_P2P_STATUS_OK = 0


class NVMLError(Exception):
    pass


class NVMLError_LibraryNotFound(NVMLError):
    pass


class NVMLError_DriverNotLoaded(NVMLError):
    pass


class NVMLError_NoPermission(NVMLError):
    pass


class NVMLError_NotFound(NVMLError):
    pass


def nvmlInit() -> None:
    pass


def nvmlShutdown() -> None:
    pass


def nvmlSystemGetCudaDriverVersion_v2() -> int:
    return 13000


def nvmlSystemGetDriverVersion() -> str:
    return "580.1"


def nvmlDeviceGetCount() -> int:
    return int(os.environ["SYNK_FAKE_GPUS"])


def nvmlDeviceGetHandleByIndex(index: int) -> int:
    return index


def nvmlDeviceGetHandleByUUID(uuid: str) -> int:
    return int(uuid[4:12], 16)


def nvmlDeviceGetUUID(handle: int) -> str:
    return f"GPU-{handle:08x}-aaaa-bbbb-cccc-dddddddddddd"


def nvmlDeviceGetName(handle: int) -> str:
    return "Fake GPU"


def nvmlDeviceGetMemoryInfo(handle: int) -> Any:
    return types.SimpleNamespace(total=1 << 34)


def nvmlDeviceGetPciInfo(handle: int) -> Any:
    return types.SimpleNamespace(busId=f"00000000:{handle:02x}:00.0")


def nvmlDeviceGetCpuAffinity(handle: int, num_words: int) -> Any:
    raise NVMLError("not supported")


def nvmlDeviceGetMigMode(handle: int) -> tuple[int, int]:
    return 0, 0


def nvmlDeviceGetP2PStatus(a: int, b: int, kind: int) -> int:
    return NVML_P2P_STATUS_OK if os.environ.get("SYNK_FAKE_PEERS") != "none" else 1
