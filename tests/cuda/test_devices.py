"""Devices from recorded NVML answers: an eight-GPU server, two models in one workstation, GPUs cut by MIG."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import types
from typing import Any

import pytest
from support import fake_gpus
from support.harness import PACKAGE_FOLDER

import synk
from synk.cuda import _nvml, _report
from synk.cuda._devices import (
    Device,
    choose_devices,
    cpu_mask,
    describe,
    explain_absence,
    ranks_per_device,
    visible_devices,
    worker_environment,
)
from synk.cuda._nvml import NO_DRIVER, NO_PACKAGE, Gpu, MigInstance, NvmlSnapshot, discover, read_snapshot

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
SNAPSHOTS = (H200_SERVER, WORKSTATION, MIG_SERVER)


def visible(snapshot: NvmlSnapshot, value: str | None = None, **environ: str) -> list[str]:
    """Return the uuids that are visible with CUDA_VISIBLE_DEVICES=``value``."""
    if value is not None:
        environ["CUDA_VISIBLE_DEVICES"] = value
    return [device.uuid for device in visible_devices(snapshot, environ)]


def uuids(*indices: int) -> list[str]:
    return [H200_UUIDS[index] for index in indices]


# ----- CUDA_VISIBLE_DEVICES

NO_ORDER = dataclasses.replace(WORKSTATION, cuda_order=())
SLOTS = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
VISIBLE: list[tuple[NvmlSnapshot, str | None, dict[str, str], list[str]]] = [
    (H200_SERVER, None, {}, uuids(*range(8))),
    (H200_SERVER, "", {}, []),
    (H200_SERVER, "NoDevFiles", {}, []),
    (H200_SERVER, "1,0", {}, uuids(1, 0)),
    (H200_SERVER, " 3 , 2 ,", {}, uuids(3, 2)),
    (H200_SERVER, "0,2,-1,1", {}, uuids(0, 2)),  # the example of the CUDA programming guide
    (H200_SERVER, H200_UUIDS[4], {}, uuids(4)),
    (H200_SERVER, "GPU-77d0,GPU-0b7d83f1", {}, uuids(4, 1)),
    (H200_SERVER, "GPU-5e1f9,3", {}, uuids(2, 3)),
    # The fastest comes first, or the first slot if the user says so. What CUDA does not list is not visible.
    (WORKSTATION, None, {}, [RTX_4090.uuid, GT_1030.uuid]),
    (WORKSTATION, "0", {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}, [RTX_4090.uuid]),
    (WORKSTATION, "0", SLOTS, [GT_1030.uuid]),
    (WORKSTATION, None, SLOTS, [GT_1030.uuid, RTX_4090.uuid]),
    (NO_ORDER, "GPU-9f8e", {}, [RTX_4090.uuid]),
    (NO_ORDER, None, {}, [GT_1030.uuid, RTX_4090.uuid]),
    (dataclasses.replace(WORKSTATION, cuda_order=(RTX_4090.uuid,)), None, {}, [RTX_4090.uuid]),
    # Instances are devices of their own.
    (MIG_SERVER, None, {}, [*MIG_UUIDS, MIG_SERVER.gpus[1].uuid]),
    (MIG_SERVER, "MIG-cba6,1,MIG-c6d4", {}, [MIG_UUIDS[1], MIG_SERVER.gpus[1].uuid, MIG_UUIDS[0]]),
]
UNKNOWN = "got the entry {!r}, expected an index from 0 to 7"
REFUSED = [
    *((H200_SERVER, f"0,{each},1", UNKNOWN.format(each)) for each in ("8", "-2", "0x1", "1.0", "gpu-5e1f02aa", "")),
    *((H200_SERVER, f"0,{each},1", UNKNOWN.format(each)) for each in ("GPU-ffff", "all", "MIG-c6d4f1ef", "²")),
    (H200_SERVER, "GPU-5e1f", "got the entry 'GPU-5e1f', which fits 2 devices"),
    # CUDA shows no device at all then; a worker per entry is what ``devices=[0, 0]`` is for.
    *((H200_SERVER, each, "devices=[0, 0]") for each in ("0,0", "1,GPU-0b7d", "GPU-5e1f9,2", "GPU-0b7d83f1,GPU-0b7d")),
    (NO_ORDER, "0", "Name them by uuid"),
    (MIG_SERVER, "MIG-c", "fits 2 devices"),
    (MIG_SERVER, "0", "got the entry '0', a GPU in MIG mode with 2 instances"),
    (MIG_SERVER, "GPU-8899", "MIG mode with 0 instances"),
]


def test_the_list_is_read_as_cuda_reads_it(subtests: pytest.Subtests) -> None:
    for snapshot, value, environ, expected in VISIBLE:
        with subtests.test(name=snapshot.gpus[0].name, value=value, **environ):
            before = dict(environ)
            assert visible(snapshot, value, **environ) == visible(snapshot, value, **environ) == expected
            assert environ == before
    for snapshot, value, text in REFUSED:
        with subtests.test(value=value), pytest.raises(ValueError) as info:
            visible(snapshot, value)
        assert f"CUDA_VISIBLE_DEVICES={value!r}" in str(info.value)
        assert text in str(info.value)


# ----- ranks


def test_ranks_follow_the_visible_devices(subtests: pytest.Subtests) -> None:
    all_devices = visible_devices(H200_SERVER, {})
    devices = visible_devices(H200_SERVER, {"CUDA_VISIBLE_DEVICES": "3,1,2"})
    assert choose_devices(devices) == devices
    assert choose_devices(devices, num_workers=2) == devices[:2]
    assert [device.uuid for device in choose_devices(devices, devices=[1, "cuda:0", "GPU-5e1f9"])] == uuids(1, 3, 2)
    shared = choose_devices(all_devices, devices=[0, 0, 1])
    assert [str(device) for device in shared] == ["cuda:0", "cuda:0", "cuda:1"]
    instances = visible_devices(MIG_SERVER, {})
    assert [ranks_per_device(each) for each in (shared, all_devices, instances)] == [2, 1, 2]
    assert instances[0].name.endswith("3g.40gb") and instances[0].cpu_affinity == NEAR
    refused: list[tuple[int | None, Any, type[Exception], str]] = [
        (9, None, ValueError, r"got num_workers=9 with 8 visible GPUs, expected 1 to 8\. Pass devices=\[0, 0\]"),
        (3, [0, 1], ValueError, "got num_workers=3 and 2 devices"),
        (None, [], ValueError, "0 devices"),
        (None, [8], ValueError, r"got 8 in devices, expected one of the visible GPUs: cuda:0 \(GPU-5e1f02aa"),
        (None, ["GPU-5e1f"], ValueError, "got 'GPU-5e1f' in devices"),
        (None, [True], TypeError, "expected indices"),
        (None, "cuda:0", TypeError, r"Pass devices=\['cuda:0'\]"),
    ]
    for num_workers, chosen, error, text in refused:
        with subtests.test(text=text), pytest.raises(error, match=text):
            choose_devices(all_devices, num_workers, chosen)


def test_a_worker_sees_its_device_alone() -> None:
    """Its environment, read again, shows that device and no other, in the form that the user has written.

    Libraries that read numbers only work on in workers.
    """
    written = ("1,0", " 3 , 2 ,", "0,2,-1,1", f"{H200_UUIDS[4]},3", "GPU-77d0,GPU-0b7d83f1", "7")
    for snapshot, value in (*((each, None) for each in SNAPSHOTS), *((H200_SERVER, each) for each in written)):
        devices = visible_devices(snapshot, {} if value is None else {"CUDA_VISIBLE_DEVICES": value})
        environments = [worker_environment(device) for device in devices]
        for device, environ in zip(devices, environments, strict=True):
            assert list(environ) == ["CUDA_VISIBLE_DEVICES"]
            assert visible(snapshot, environ["CUDA_VISIBLE_DEVICES"]) == [device.uuid]
        if value is not None:
            entries = [entry.strip() for entry in value.partition(",-1")[0].split(",") if entry]
            assert [environ["CUDA_VISIBLE_DEVICES"] for environ in environments] == entries


def test_cpus_near_the_device() -> None:
    device = visible_devices(H200_SERVER, {"CUDA_VISIBLE_DEVICES": "7"})[0]
    assert cpu_mask(device, range(96)) == set(range(48, 96))
    assert cpu_mask(device, {1, 50, 51}) == {50, 51}
    assert cpu_mask(device, {1, 2}) == {1, 2}  # none is near: what is allowed counts more
    assert cpu_mask(dataclasses.replace(device, cpu_affinity=frozenset()), {3}) == {3}


# ----- asking NVML


def test_the_snapshot_is_what_nvml_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer is no GPU; what a model does not support stays empty; GPUs of other jobs are left out."""
    monkeypatch.setenv("SYNK_FAKE_GPUS", "2")
    pynvml: Any = types.ModuleType("pynvml")
    exec((fake_gpus.FAKES.parent / "fake_nvml" / "pynvml.py").read_text(), vars(pynvml))
    monkeypatch.setitem(sys.modules, "pynvml", pynvml)
    assert read_snapshot() == fake_gpus.snapshot(2)
    words = [0b11, 1 << 63]  # of 64 CPUs each
    monkeypatch.setattr(pynvml, "nvmlDeviceGetCpuAffinity", lambda gpu, num_words: words)
    assert read_snapshot().gpus[0].cpu_affinity == {0, 1, 127}
    for function, error, expected in (
        ("nvmlDeviceGetMemoryInfo", pynvml.NVMLError, 0),
        ("nvmlDeviceGetHandleByIndex", pynvml.NVMLError_NoPermission, ()),
        ("nvmlDeviceGetUUID", pynvml.NVMLError, "NVML does not answer: no"),
        ("nvmlInit", pynvml.NVMLError, "NVML does not answer: no"),
        ("nvmlInit", pynvml.NVMLError_LibraryNotFound, NO_DRIVER),
        ("nvmlInit", pynvml.NVMLError_DriverNotLoaded, NO_DRIVER),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(pynvml, function, lambda *args, error=error: raises(error("no")))
            found = read_snapshot()
        assert expected in (found.problem, found.gpus, found.gpus[0].memory_nbytes if found.gpus else None)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for has_driver, problem in ((True, NO_PACKAGE), (False, NO_DRIVER)):
        monkeypatch.setattr(os.path, "exists", lambda path, answer=has_driver: answer)
        assert read_snapshot() == NvmlSnapshot(problem=problem)


def raises(error: Exception) -> None:
    raise error


def test_importing_asks_nothing() -> None:
    program = "import sys, synk.cuda._devices; assert not {'pynvml', 'cupy', 'cuda', 'numba'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], cwd=PACKAGE_FOLDER, check=True)


def test_cudas_order_is_asked_in_another_process_where_models_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA that does not answer leaves the order open. What CUDA says is in ``test_devices_gpu.py``."""
    uuids_of_cuda = [gpu.uuid.removeprefix("GPU-").replace("-", "") for gpu in (RTX_4090, GT_1030)]
    answers = f"import os; assert 'CUDA_VISIBLE_DEVICES' not in os.environ; print(*{uuids_of_cuda})"
    monkeypatch.setattr(_nvml, "_CUDA_ORDER_PROGRAM", answers)
    monkeypatch.setattr(_nvml, "read_snapshot", lambda: NO_ORDER)
    environ = {"CUDA_VISIBLE_DEVICES": "1"}
    assert discover(environ) == WORKSTATION
    assert environ == {"CUDA_VISIBLE_DEVICES": "1"}
    assert discover(environ | SLOTS) == NO_ORDER
    monkeypatch.setattr(_nvml, "_CUDA_ORDER_TIMEOUT_S", 0.5)
    for program in ("raise SystemExit(1)", "import signal; signal.pause()"):
        monkeypatch.setattr(_nvml, "_CUDA_ORDER_PROGRAM", program)
        assert discover(environ) == NO_ORDER
    monkeypatch.setattr(_nvml, "read_snapshot", lambda: H200_SERVER)
    monkeypatch.setattr(_nvml, "query_cuda_order", lambda environ: pytest.fail("asked where models agree"))
    assert discover({}) == H200_SERVER


# ----- words


ABSENT: list[tuple[NvmlSnapshot, dict[str, str], bool, str]] = [
    (NvmlSnapshot(problem=NO_DRIVER), {}, True, "no NVIDIA driver is loaded. synk runs on the CPU cores."),
    (NvmlSnapshot(problem=NO_PACKAGE), {}, True, 'is not installed. pip install "synkhronos[cuda13]" (or'),
    (NvmlSnapshot(problem="NVML does not answer: x"), {}, True, "Does `nvidia-smi` work?"),
    (NvmlSnapshot(driver_version="580.1"), {}, True, "the driver 580.1 shows none to this process"),
    (H200_SERVER, {"CUDA_VISIBLE_DEVICES": ""}, True, "CUDA_VISIBLE_DEVICES='' hides all 8"),
    (NvmlSnapshot(MIG_SERVER.gpus[2:]), {}, True, "all are in MIG mode and have no instance"),
    (
        dataclasses.replace(H200_SERVER, cuda_version=(11, 8)),
        {},
        True,
        "runs CUDA 11.8, synk needs a driver for CUDA 12",
    ),
    (H200_SERVER, {}, False, 'CuPy is not installed. pip install "synkhronos[cuda13]"'),
    (MIG_SERVER, {}, False, 'CuPy is not installed. pip install "synkhronos[cuda12]"'),
    (dataclasses.replace(H200_SERVER, cuda_version=(14, 0)), {}, False, 'pip install "synkhronos[cuda13]"'),
]


def test_an_absence_is_explained(subtests: pytest.Subtests) -> None:
    for snapshot, environ, has_cupy, expected in ABSENT:
        with subtests.test(expected=expected):
            assert expected in explain_absence(snapshot, environ, has_cupy=has_cupy)
    assert explain_absence(H200_SERVER, {}, has_cupy=True) == ""


def test_info_describes_devices_and_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def lines(snapshot: NvmlSnapshot, **environ: str) -> str:
        monkeypatch.setattr(_nvml, "read_snapshot", lambda: snapshot)
        return "\n".join(_report.gpu_lines(environ, has_cupy=True))

    monkeypatch.setattr(_report, "_installed", lambda names: "cupy-cuda13x 14.2.0" if "cupy" in names else "")
    text = lines(H200_SERVER)
    assert "driver 580.95.05 (CUDA 13.0)" in text
    assert text.count("NVIDIA H200, 140.4 GiB") == 8
    assert 'packages: cupy-cuda13x 14.2.0. Missing: NCCL, NCCL binding. pip install "synkhronos[cuda13]"' in text
    assert "got the entry '9'" in lines(H200_SERVER, CUDA_VISIBLE_DEVICES="9")
    assert "cuda:0  NVIDIA H200, 140.4 GiB" in synk.info()
    assert lines(NvmlSnapshot(problem=NO_DRIVER)) == "GPU: no NVIDIA driver is loaded. synk runs on the CPU cores."
    device = Device(0, "GPU-8932f937", "NVIDIA H200", H200_NBYTES, "GPU-8932f937")
    assert describe(device) == "cuda:0  NVIDIA H200, 140.4 GiB, GPU-8932f937"
