"""What NVML says against what CUDA says."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pytest

from synk.cuda._devices import explain_absence, visible_devices, worker_environment
from synk.cuda._nvml import discover

pytestmark = pytest.mark.gpu
discover()  # NVML keeps descriptors, which a census is to know of

LIST_UUIDS = """
from cupy.cuda import runtime
for index in range(runtime.getDeviceCount()):
    print(bytes(runtime.getDeviceProperties(index)["uuid"]).hex())
"""


def uuids_of_cuda(**environ: str) -> list[str]:
    """Return the uuids that a CUDA program sees, in its order, as hex; CuPy cuts them at a zero byte."""
    answer = subprocess.check_output([sys.executable, "-c", LIST_UUIDS], env=os.environ | environ, text=True)
    return answer.split()


def are_the_same(device_uuids: list[str], cuda_uuids: list[str]) -> bool:
    pairs = zip(device_uuids, cuda_uuids, strict=True)
    return all(uuid.UUID(mine.removeprefix("GPU-")).hex.startswith(theirs) for mine, theirs in pairs)


def test_the_devices_and_their_order_are_cudas() -> None:
    devices = visible_devices(discover(), os.environ)
    assert are_the_same([device.gpu_uuid for device in devices], uuids_of_cuda())


def test_a_worker_sees_its_device_alone() -> None:
    for device in visible_devices(discover(), os.environ):
        assert are_the_same([device.gpu_uuid], uuids_of_cuda(**worker_environment(device)))


def test_nothing_is_missing() -> None:
    assert explain_absence(discover(), os.environ, has_cupy=True) == ""


def test_the_cpus_near_a_device_exist() -> None:
    for device in visible_devices(discover(), os.environ):
        assert device.cpu_affinity <= set(range(os.sysconf("SC_NPROCESSORS_CONF")))
        assert device.memory_nbytes > 0
