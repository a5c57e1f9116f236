"""Devices from recorded NVML answers: an eight-GPU server, two models in one workstation, GPUs cut by MIG."""

from __future__ import annotations

import dataclasses
import sys
import types
from typing import Any

import pytest
from support import fake_gpus

import synk
from synk.cuda import _nvml
from synk.cuda._devices import choose_devices, cpu_mask, explain_absence, visible_devices, worker_environment
from synk.cuda._nvml import NO_DRIVER, NO_PACKAGE, Gpu, MigInstance, NvmlSnapshot, read_snapshot

H200_NBYTES = 150_754_820_096
H200_BUSES = ("0F", "2D", "44", "5B", "89", "A8", "C0", "D8")
H200_UUIDS = tuple(f"GPU-{start}-5bc1-2c5f-9f39-0a3ed1c8a6{start[:2]}" for start in (
    "5e1f02aa", "0b7d83f1", "5e1f9c40", "a2c4e6b8", "77d0f3e2", "c91a5b6d", "3f8e2d1c", "e4b7a9f0"
))  # fmt: skip
NEAR, FAR = frozenset(range(48)), frozenset(range(48, 96))

H200_SERVER = NvmlSnapshot(
    gpus=tuple(
        Gpu(gpu_uuid, "NVIDIA H200", H200_NBYTES, f"00000000:{bus}:00.0", NEAR if bus < "80" else FAR)
        for gpu_uuid, bus in zip(H200_UUIDS, H200_BUSES, strict=True)
    ),
    driver_version="580.95.05",
    cuda_version=(13, 0),
)
# The slow card sits in the first slot: CUDA calls it number 1, NVML number 0.
GT_1030 = Gpu("GPU-1a2b3c4d-1111-2222-3333-444455556666", "NVIDIA GeForce GT 1030", 2 << 30, "00000000:01:00.0")
RTX_4090 = Gpu("GPU-9f8e7d6c-aaaa-bbbb-cccc-ddddeeeeffff", "NVIDIA GeForce RTX 4090", 24 << 30, "00000000:41:00.0")
WORKSTATION = NvmlSnapshot((GT_1030, RTX_4090), "570.133.20", (12, 8), cuda_order=(RTX_4090.uuid, GT_1030.uuid))
MIG_UUIDS = tuple(f"MIG-{start}-58c2-5f0e-8ad9-2b8a4d2d77c1" for start in ("c6d4f1ef", "cba663e8"))


A100 = ("NVIDIA A100-SXM4-80GB", 80 << 30)
MIG_SERVER = NvmlSnapshot(
    (
        Gpu(
            "GPU-d7ad23a8-8d2c-0b93-8a5c-0f0b26b2a5a1", *A100, "00000000:07:00.0", NEAR, is_mig_enabled=True,
            mig_instances=tuple(MigInstance(each, f"{A100[0]} MIG 3g.40gb", 40 << 30) for each in MIG_UUIDS),
        ),
        Gpu("GPU-b1c2d3e4-0f1e-2d3c-4b5a-69788796a5b4", *A100, "00000000:48:00.0", FAR),
        Gpu("GPU-88990011-aabb-ccdd-eeff-001122334455", *A100, "00000000:4C:00.0", FAR, is_mig_enabled=True),
    ),
    driver_version="550.163.01",
    cuda_version=(12, 4),
)  # fmt: skip


def visible(snapshot: NvmlSnapshot, value: str | None = None, **environ: str) -> list[str]:
    """Return the uuids that are visible with CUDA_VISIBLE_DEVICES=``value``."""
    if value is not None:
        environ["CUDA_VISIBLE_DEVICES"] = value
    return [device.uuid for device in visible_devices(snapshot, environ)]


def uuids(*indices: int) -> list[str]:
    return [H200_UUIDS[index] for index in indices]


# ----- CUDA_VISIBLE_DEVICES

SLOTS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
VISIBLE: list[tuple[NvmlSnapshot, str | None, dict[str, str], list[str]]] = [
    (H200_SERVER, None, {}, uuids(*range(8))),
    (H200_SERVER, "", {}, []),
    (H200_SERVER, " 3 , 2 ,", {}, uuids(3, 2)),
    (H200_SERVER, "0,2,-1,1", {}, uuids(0, 2)),  # the example of the CUDA programming guide
    (H200_SERVER, "GPU-77d0,GPU-0b7d83f1", {}, uuids(4, 1)),
    # The fastest comes first, or the first slot if the user says so.
    (WORKSTATION, None, {}, [RTX_4090.uuid, GT_1030.uuid]),
    (WORKSTATION, "0", SLOTS, [GT_1030.uuid]),
    # Instances are devices of their own.
    (MIG_SERVER, None, {}, [*MIG_UUIDS, MIG_SERVER.gpus[1].uuid]),
    (MIG_SERVER, "MIG-cba6,1,MIG-c6d4", {}, [MIG_UUIDS[1], MIG_SERVER.gpus[1].uuid, MIG_UUIDS[0]]),
]
REFUSED = [
    *((H200_SERVER, f"0,{each},1", f"got the entry {each!r}, expected an index") for each in ("8", "GPU-ffff", "")),
    (H200_SERVER, "GPU-5e1f", "got the entry 'GPU-5e1f', which fits 2 devices"),
    # CUDA shows no device at all then; a worker per entry is what ``devices=[0, 0]`` is for.
    (H200_SERVER, "0,0", "devices=[0, 0]"),
    (MIG_SERVER, "0", "got the entry '0', a GPU in MIG mode with 2 instances"),
]


def test_the_list_is_read_as_cuda_reads_it(subtests: pytest.Subtests) -> None:
    """A worker's environment, read again, shows its device and no other, in the form that the user has written."""
    for snapshot, value, environ, expected in VISIBLE:
        with subtests.test(name=snapshot.gpus[0].name, value=value, **environ):
            assert visible(snapshot, value, **environ) == expected
            given = environ if value is None else {**environ, "CUDA_VISIBLE_DEVICES": value}
            for device in visible_devices(snapshot, given):
                own = worker_environment(device)
                assert list(own) == ["CUDA_VISIBLE_DEVICES"]
                assert value is None or own["CUDA_VISIBLE_DEVICES"] in value
                assert visible(snapshot, **own, **environ) == [device.uuid]
    for snapshot, value, text in REFUSED:
        with subtests.test(value=value), pytest.raises(ValueError) as info:
            visible(snapshot, value)
        assert f"CUDA_VISIBLE_DEVICES={value!r}" in str(info.value) and text in str(info.value)


def test_ranks_follow_the_visible_devices(subtests: pytest.Subtests) -> None:
    all_devices = visible_devices(H200_SERVER, {})
    devices = visible_devices(H200_SERVER, {"CUDA_VISIBLE_DEVICES": "3,1,2"})
    assert choose_devices(devices) == devices
    assert choose_devices(devices, num_workers=2) == devices[:2]
    assert [device.uuid for device in choose_devices(devices, devices=[1, "cuda:0", "GPU-5e1f9"])] == uuids(1, 3, 2)
    shared = choose_devices(all_devices, devices=[0, 0, 1])
    assert [str(device) for device in shared] == ["cuda:0", "cuda:0", "cuda:1"]
    refused: list[tuple[int | None, Any, type[Exception], str]] = [
        (9, None, ValueError, r"got num_workers=9 with 8 visible GPUs, expected 1 to 8\. Pass devices=\[0, 0\]"),
        (3, [0, 1], ValueError, "got num_workers=3 and 2 devices"),
        (None, [8], ValueError, r"got 8 in devices, expected one of the visible GPUs: cuda:0 \(GPU-5e1f02aa"),
        (None, "cuda:0", TypeError, r"Pass devices=\['cuda:0'\]"),
    ]
    for num_workers, chosen, error, text in refused:
        with subtests.test(text=text), pytest.raises(error, match=text):
            choose_devices(all_devices, num_workers, chosen)
    assert cpu_mask(all_devices[7], {1, 50, 51}) == {50, 51}
    assert cpu_mask(all_devices[7], {1, 2}) == {1, 2}  # none is near: what is allowed counts more


# ----- asking NVML, and words


def test_the_snapshot_is_what_nvml_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is no GPU."""
    monkeypatch.setenv("SYNK_FAKE_GPUS", "2")
    pynvml: Any = types.ModuleType("pynvml")
    exec((fake_gpus.FAKES.parent / "fake_nvml" / "pynvml.py").read_text(), vars(pynvml))
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    assert read_snapshot() == fake_gpus.snapshot(2)
    for error, problem in (
        (pynvml.NVMLError, "NVML does not answer: no"),
        (pynvml.NVMLError_DriverNotLoaded, NO_DRIVER),
    ):
        monkeypatch.setattr(pynvml, "nvmlInit", lambda error=error: raises(error("no")))
        assert read_snapshot() == NvmlSnapshot(problem=problem)


def raises(error: Exception) -> None:
    raise error


ABSENT: list[tuple[NvmlSnapshot, dict[str, str], bool, str]] = [
    (NvmlSnapshot(problem=NO_DRIVER), {}, True, "no NVIDIA driver is loaded. synk runs on the CPU cores."),
    (NvmlSnapshot(problem=NO_PACKAGE), {}, True, 'is not installed. pip install "synkhronos[cuda13]" (or'),
    (NvmlSnapshot(problem="NVML does not answer: x"), {}, True, "Does `nvidia-smi` work?"),
    (H200_SERVER, {"CUDA_VISIBLE_DEVICES": ""}, True, "CUDA_VISIBLE_DEVICES='' hides all 8"),
    (NvmlSnapshot(MIG_SERVER.gpus[2:]), {}, True, "all are in MIG mode and have no instance"),
    (dataclasses.replace(H200_SERVER, cuda_version=(11, 8)), {}, True, "runs CUDA 11.8, synk needs a driver"),
    (MIG_SERVER, {}, False, 'CuPy is not installed. pip install "synkhronos[cuda12]"'),
    (H200_SERVER, {}, True, ""),
]


def test_an_absence_is_explained_and_info_describes_devices(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    for snapshot, environ, has_cupy, expected in ABSENT:
        with subtests.test(expected=expected):
            text = explain_absence(snapshot, environ, has_cupy=has_cupy)
            assert expected in text and bool(expected) == bool(text)
    monkeypatch.setattr(_nvml, "read_snapshot", lambda: H200_SERVER)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    text = synk.info()
    assert "driver 580.95.05 (CUDA 13.0)" in text
    assert text.count("NVIDIA H200, 140.4 GiB") == 8
