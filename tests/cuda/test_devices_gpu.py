"""The child that asks CUDA, against CuPy in another one."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pytest

from synk.cuda._devices import VISIBLE_VARIABLE, Gpus, cpus_near, explain_absence, visible_gpus

pytestmark = pytest.mark.gpu

LIST = """
from cupy.cuda import runtime
for index in range(runtime.getDeviceCount()):
    known = runtime.getDeviceProperties(index)
    bus = runtime.deviceGetPCIBusId(index)
    print(bytes(known["uuid"]).hex(), bus.lower(), known["totalGlobalMem"], known["name"].decode(), sep="|")
"""


def devices_of_cupy(**environ: str) -> list[list[str]]:
    """Return the devices that a CUDA program sees, in its order; CuPy cuts their uuids at a zero byte."""
    answer = subprocess.check_output([sys.executable, "-c", LIST], env=os.environ | environ, text=True)
    return [line.split("|") for line in answer.splitlines()]


def assert_alike(gpus: Gpus, others: list[list[str]]) -> None:
    for device, (number, bus, nbytes, name) in zip(gpus.devices, others, strict=True):
        assert uuid.UUID(device.uuid.removeprefix("GPU-")).hex.startswith(number)
        assert (device.bus.lower(), device.memory_nbytes, device.name) == (bus, int(nbytes), name)


def test_the_devices_are_cupys_and_nothing_is_missing() -> None:
    gpus = visible_gpus()
    assert gpus.devices and explain_absence(gpus, has_cupy=True) == ""
    assert_alike(gpus, devices_of_cupy())


def test_a_worker_sees_its_device_alone_in_the_users_form(monkeypatch: pytest.MonkeyPatch) -> None:
    first = visible_gpus().devices[0]
    for value in ("0", first.uuid, first.uuid[:12]):
        monkeypatch.setenv(VISIBLE_VARIABLE, value)
        (device,) = visible_gpus().devices
        assert (device.entry, device.uuid) == (value, first.uuid)
        assert_alike(visible_gpus(), devices_of_cupy(**{VISIBLE_VARIABLE: device.entry}))
    for value in ("", "-1"):
        monkeypatch.setenv(VISIBLE_VARIABLE, value)
        assert (visible_gpus().devices, visible_gpus().failure) == ((), "")


def test_the_cpus_near_a_device_exist() -> None:
    for device in visible_gpus().devices:
        assert cpus_near(device) <= set(range(os.sysconf("SC_NPROCESSORS_CONF")))
