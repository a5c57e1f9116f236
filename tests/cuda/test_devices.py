"""Devices from recorded NVML answers: an eight-GPU server, two models in one workstation, GPUs cut by MIG."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from synk.cuda import _nvml
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
GT_1030 = Gpu("GPU-1a2b3c4d-1111-2222-3333-444455556666", "NVIDIA GeForce GT 1030", 2_147_483_648, "00000000:01:00.0")
RTX_4090 = Gpu(
    "GPU-9f8e7d6c-aaaa-bbbb-cccc-ddddeeeeffff", "NVIDIA GeForce RTX 4090", 25_757_220_864, "00000000:41:00.0"
)
WORKSTATION = NvmlSnapshot(
    gpus=(GT_1030, RTX_4090),
    driver_version="570.133.20",
    cuda_version=(12, 8),
    cuda_order=(RTX_4090.uuid, GT_1030.uuid),
)
MIG_UUIDS = tuple(f"MIG-{start}-58c2-5f0e-8ad9-2b8a4d2d77c1" for start in ("c6d4f1ef", "cba663e8", "4e1a7f20"))
MIG_SERVER = NvmlSnapshot(
    gpus=(
        Gpu(
            "GPU-d7ad23a8-8d2c-0b93-8a5c-0f0b26b2a5a1",
            "NVIDIA A100-SXM4-80GB",
            85_899_345_920,
            "00000000:07:00.0",
            NEAR,
            is_mig_enabled=True,
            mig_instances=(
                MigInstance(MIG_UUIDS[0], "NVIDIA A100-SXM4-80GB MIG 3g.40gb", 42_412_802_048),
                MigInstance(MIG_UUIDS[1], "NVIDIA A100-SXM4-80GB MIG 3g.40gb", 42_412_802_048),
            ),
        ),
        Gpu(
            "GPU-06fb6ff8-7d7a-4b3e-9d60-3c0a1f2e3d4c",
            "NVIDIA A100-SXM4-80GB",
            85_899_345_920,
            "00000000:0B:00.0",
            NEAR,
            is_mig_enabled=True,
            mig_instances=(MigInstance(MIG_UUIDS[2], "NVIDIA A100-SXM4-80GB MIG 7g.80gb", 84_557_168_640),),
        ),
        Gpu(
            "GPU-b1c2d3e4-0f1e-2d3c-4b5a-69788796a5b4", "NVIDIA A100-SXM4-80GB", 85_899_345_920, "00000000:48:00.0", FAR
        ),
        Gpu(
            "GPU-88990011-aabb-ccdd-eeff-001122334455",
            "NVIDIA A100-SXM4-80GB",
            85_899_345_920,
            "00000000:4C:00.0",
            FAR,
            is_mig_enabled=True,
        ),
    ),
    driver_version="550.163.01",
    cuda_version=(12, 4),
)


def visible(snapshot: NvmlSnapshot, value: str | None = None, **environ: str) -> list[str]:
    """Return the uuids that are visible with CUDA_VISIBLE_DEVICES=``value``."""
    if value is not None:
        environ["CUDA_VISIBLE_DEVICES"] = value
    return [device.uuid for device in visible_devices(snapshot, environ)]


def uuids(*indices: int) -> list[str]:
    return [H200_UUIDS[index] for index in indices]


# ----- CUDA_VISIBLE_DEVICES


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, uuids(*range(8))),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("0", uuids(0)),
        ("1,0", uuids(1, 0)),
        (" 3 , 2 ", uuids(3, 2)),
        ("0,1,", uuids(0, 1)),
        ("0,2,-1,1", uuids(0, 2)),  # the example of the CUDA programming guide
        (H200_UUIDS[4], uuids(4)),
        ("GPU-77d0,GPU-0b7d83f1", uuids(4, 1)),
        ("GPU-5e1f9,3", uuids(2, 3)),
    ],
)
def test_the_list_is_read_as_cuda_reads_it(value: str | None, expected: list[str]) -> None:
    assert visible(H200_SERVER, value) == expected


@pytest.mark.parametrize("entry", ["8", "-2", "0x1", "1.0", "gpu-5e1f02aa", "GPU-ffff", "all", "MIG-c6d4f1ef", "", "²"])
def test_an_unknown_entry_is_named(entry: str) -> None:
    value = f"0,{entry},1"
    with pytest.raises(ValueError) as info:
        visible(H200_SERVER, value)
    assert f"CUDA_VISIBLE_DEVICES={value!r}: got the entry {entry!r}, expected an index from 0 to 7" in str(info.value)


def test_an_ambiguous_uuid_is_named() -> None:
    with pytest.raises(ValueError, match=r"got the entry 'GPU-5e1f', which fits 2 devices"):
        visible(H200_SERVER, "GPU-5e1f")


@pytest.mark.parametrize("value", ["0,0", "1,GPU-0b7d", "GPU-5e1f9,2", "GPU-0b7d83f1,GPU-0b7d"])
def test_a_repeated_device_is_refused(value: str) -> None:
    """CUDA shows no device at all then; a worker per entry is what ``devices=[0, 0]`` is for."""
    with pytest.raises(ValueError, match=r"in the list already.*devices=\[0, 0\]"):
        visible(H200_SERVER, value)


def test_nothing_is_kept_and_nothing_is_changed() -> None:
    environ = {"CUDA_VISIBLE_DEVICES": "1,0"}
    first = visible_devices(H200_SERVER, environ)
    assert visible_devices(H200_SERVER, environ) == first
    assert environ == {"CUDA_VISIBLE_DEVICES": "1,0"}
    assert [str(device) for device in first] == ["cuda:0", "cuda:1"]


def test_equal_gpus_are_numbered_by_their_slot() -> None:
    shuffled = dataclasses.replace(H200_SERVER, gpus=H200_SERVER.gpus[::-1])
    assert visible(shuffled) == uuids(*range(8))
    assert visible(shuffled, "2") == uuids(2)


# ----- several models


def test_cudas_order_counts_where_it_differs_from_the_slots() -> None:
    assert visible(WORKSTATION) == [RTX_4090.uuid, GT_1030.uuid]
    assert visible(WORKSTATION, "0") == [RTX_4090.uuid]
    assert visible(WORKSTATION, "1") == [GT_1030.uuid]
    assert visible(WORKSTATION, "0", CUDA_DEVICE_ORDER="FASTEST_FIRST") == [RTX_4090.uuid]


def test_the_slots_count_if_the_user_says_so() -> None:
    assert visible(WORKSTATION, "0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == [GT_1030.uuid]
    assert visible(WORKSTATION, CUDA_DEVICE_ORDER="PCI_BUS_ID") == [GT_1030.uuid, RTX_4090.uuid]


def test_a_number_without_a_known_order_is_refused() -> None:
    unknown = dataclasses.replace(WORKSTATION, cuda_order=())
    with pytest.raises(ValueError, match="Name them by uuid"):
        visible(unknown, "0")
    assert visible(unknown, "GPU-9f8e") == [RTX_4090.uuid]
    assert len(visible(unknown)) == 2


def test_what_cuda_does_not_list_is_not_visible() -> None:
    assert visible(dataclasses.replace(WORKSTATION, cuda_order=(RTX_4090.uuid,))) == [RTX_4090.uuid]


# ----- MIG


def test_instances_are_devices_of_their_own() -> None:
    devices = visible_devices(MIG_SERVER, {})
    assert [device.uuid for device in devices] == [*MIG_UUIDS, MIG_SERVER.gpus[2].uuid]
    assert devices[0].name.endswith("3g.40gb") and devices[0].cpu_affinity == NEAR
    assert ranks_per_device(devices) == 2  # two instances of the first GPU


def test_instances_are_named_by_uuid() -> None:
    assert visible(MIG_SERVER, f"{MIG_UUIDS[1]},MIG-4e1a") == [MIG_UUIDS[1], MIG_UUIDS[2]]
    assert visible(MIG_SERVER, "MIG-c6d4,2") == [MIG_UUIDS[0], MIG_SERVER.gpus[2].uuid]
    with pytest.raises(ValueError, match="fits 2 devices"):
        visible(MIG_SERVER, "MIG-c")


def test_a_gpu_in_mig_mode_stands_for_its_only_instance() -> None:
    assert visible(MIG_SERVER, "1") == [MIG_UUIDS[2]]
    with pytest.raises(ValueError, match=r"got the entry '0', a GPU in MIG mode with 2 instances"):
        visible(MIG_SERVER, "0")
    with pytest.raises(ValueError, match="MIG mode with 0 instances"):
        visible(MIG_SERVER, "GPU-8899")


# ----- ranks


def test_ranks_follow_the_visible_devices() -> None:
    devices = visible_devices(H200_SERVER, {"CUDA_VISIBLE_DEVICES": "3,1,2"})
    assert choose_devices(devices) == devices
    assert choose_devices(devices, num_workers=2) == devices[:2]
    assert [device.uuid for device in choose_devices(devices, devices=[1, "cuda:0", "GPU-5e1f9"])] == uuids(1, 3, 2)


def test_several_workers_may_share_a_gpu() -> None:
    devices = visible_devices(H200_SERVER, {})
    chosen = choose_devices(devices, devices=[0, 0, 1])
    assert [str(device) for device in chosen] == ["cuda:0", "cuda:0", "cuda:1"]
    assert ranks_per_device(chosen) == 2
    assert ranks_per_device(devices) == 1


@pytest.mark.parametrize(
    ("num_workers", "chosen", "error", "message"),
    [
        (9, None, ValueError, r"got num_workers=9 with 8 visible GPUs, expected 1 to 8\. Pass devices=\[0, 0\]"),
        (0, None, ValueError, "got num_workers=0"),
        (3, [0, 1], ValueError, "got num_workers=3 and 2 devices"),
        (None, [], ValueError, "0 devices"),
        (None, [8], ValueError, r"got 8 in devices, expected one of the visible GPUs: cuda:0 \(GPU-5e1f02aa"),
        (None, [-1], ValueError, "got -1 in devices"),
        (None, ["cuda:9"], ValueError, "got 'cuda:9' in devices"),
        (None, ["GPU-5e1f"], ValueError, "got 'GPU-5e1f' in devices"),
        (None, ["0"], ValueError, "got '0' in devices"),
        (None, [True], TypeError, "expected indices"),
        (None, [0.0], TypeError, "expected indices"),
        (None, "cuda:0", TypeError, r"Pass devices=\['cuda:0'\]"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(
    num_workers: int | None, chosen: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        choose_devices(visible_devices(H200_SERVER, {}), num_workers, chosen)


def test_a_worker_sees_its_device_alone() -> None:
    """Its environment, read again, shows that device and no other: nothing is lost on the way."""
    for snapshot in (H200_SERVER, WORKSTATION, MIG_SERVER):
        for device in visible_devices(snapshot, {}):
            environ = worker_environment(device)
            assert list(environ) == ["CUDA_VISIBLE_DEVICES"]
            assert visible(snapshot, environ["CUDA_VISIBLE_DEVICES"]) == [device.uuid]


@pytest.mark.parametrize("value", ["1,0", " 3 , 2 ,", "0,2,-1,1", f"{H200_UUIDS[4]},3", "GPU-77d0,GPU-0b7d83f1", "7"])
def test_a_worker_finds_its_device_in_the_form_that_the_user_has_written(value: str) -> None:
    """Libraries that read numbers only work on in workers, and each sees the device that the user's order gives it."""
    devices = visible_devices(H200_SERVER, {"CUDA_VISIBLE_DEVICES": value})
    entries = [worker_environment(device)["CUDA_VISIBLE_DEVICES"] for device in devices]
    written = [entry.strip() for entry in value.partition(",-1")[0].split(",") if entry]
    assert entries == written
    for device, entry in zip(devices, entries, strict=True):
        assert visible(H200_SERVER, entry) == [device.uuid]


def test_cpus_near_the_device() -> None:
    device = visible_devices(H200_SERVER, {"CUDA_VISIBLE_DEVICES": "7"})[0]
    assert cpu_mask(device, range(96)) == set(range(48, 96))
    assert cpu_mask(device, {1, 50, 51}) == {50, 51}
    assert cpu_mask(device, {1, 2}) == {1, 2}  # none is near: what is allowed counts more
    assert cpu_mask(dataclasses.replace(device, cpu_affinity=frozenset()), {3}) == {3}


# ----- asking NVML


class FakeNvml(types.ModuleType):
    """``pynvml`` that replays a snapshot, with its errors; ``failing`` maps a function's name to what it raises."""

    def __init__(self, snapshot: NvmlSnapshot, failing: dict[str, str] | None = None) -> None:
        super().__init__("pynvml")
        self.calls: list[str] = []
        self.NVMLError = type("NVMLError", (Exception,), {})
        for name in ("LibraryNotFound", "DriverNotLoaded", "NotSupported", "NotFound", "NoPermission", "Unknown"):
            setattr(self, f"NVMLError_{name}", type(f"NVMLError_{name}", (self.NVMLError,), {}))
        answers: dict[str, Callable[..., Any]] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: snapshot.driver_version,
            "nvmlSystemGetCudaDriverVersion_v2": lambda: (
                snapshot.cuda_version[0] * 1000 + snapshot.cuda_version[1] * 10
            ),
            "nvmlDeviceGetCount": lambda: len(snapshot.gpus),
            "nvmlDeviceGetHandleByIndex": lambda index: snapshot.gpus[index],
            "nvmlDeviceGetUUID": lambda device: device.uuid,
            "nvmlDeviceGetName": lambda device: device.name,
            "nvmlDeviceGetMemoryInfo": lambda device: types.SimpleNamespace(total=device.memory_nbytes),
            "nvmlDeviceGetPciInfo": lambda gpu: types.SimpleNamespace(busId=gpu.pci_bus_id),
            "nvmlDeviceGetCpuAffinity": self.cpu_affinity,
            "nvmlDeviceGetMigMode": self.mig_mode,
            "nvmlDeviceGetMaxMigDeviceCount": lambda gpu: 7,
            "nvmlDeviceGetMigDeviceHandleByIndex": self.mig_handle,
        }
        for name, answer in answers.items():
            setattr(self, name, self.recorded(name, answer, (failing or {}).get(name)))

    def recorded(self, name: str, answer: Callable[..., Any], error: str | None) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            if error:
                raise getattr(self, f"NVMLError_{error}")(name)
            return answer(*arguments)

        return call

    def cpu_affinity(self, gpu: Gpu, num_words: int) -> Any:
        words = [sum(1 << cpu % 64 for cpu in gpu.cpu_affinity if cpu // 64 == place) for place in range(num_words)]
        return (ctypes.c_ulonglong * num_words)(*words)

    def mig_mode(self, gpu: Gpu) -> list[int]:
        if "A100" not in gpu.name:
            raise self.NVMLError_NotSupported
        return [int(gpu.is_mig_enabled), int(gpu.is_mig_enabled)]

    def mig_handle(self, gpu: Gpu, index: int) -> MigInstance:
        place = index - 2  # the first two numbers are free, as after instances were deleted
        if not 0 <= place < len(gpu.mig_instances):
            raise self.NVMLError_NotFound
        return gpu.mig_instances[place]


@pytest.mark.parametrize("snapshot", [H200_SERVER, WORKSTATION, MIG_SERVER])
def test_the_snapshot_is_what_nvml_says(snapshot: NvmlSnapshot, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(snapshot)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(os, "sysconf", lambda name: 96)
    assert read_snapshot() == dataclasses.replace(snapshot, cuda_order=())
    assert nvml.calls[0] == "nvmlInit" and nvml.calls[-1] == "nvmlShutdown"


@pytest.mark.parametrize(
    ("failing", "problem"),
    [
        ({"nvmlInit": "LibraryNotFound"}, NO_DRIVER),
        ({"nvmlInit": "DriverNotLoaded"}, NO_DRIVER),
        ({"nvmlInit": "Unknown"}, "NVML does not answer: nvmlInit"),
        ({"nvmlDeviceGetUUID": "Unknown"}, "NVML does not answer: nvmlDeviceGetUUID"),
    ],
)
def test_no_answer_is_no_gpu(failing: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = FakeNvml(H200_SERVER, failing)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    snapshot = read_snapshot()
    assert snapshot == NvmlSnapshot(problem=problem)
    assert visible_devices(snapshot, {"CUDA_VISIBLE_DEVICES": "0"}) == ()


def test_what_a_model_does_not_support_stays_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = {"nvmlDeviceGetMemoryInfo": "NotSupported", "nvmlDeviceGetCpuAffinity": "NotSupported"}
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(H200_SERVER, failing))
    gpu = read_snapshot().gpus[0]
    assert gpu.memory_nbytes == 0 and gpu.cpu_affinity == frozenset()
    assert "memory shared with the CPU" in describe(visible_devices(NvmlSnapshot((gpu,)), {})[0])


def test_gpus_of_other_jobs_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(H200_SERVER, {"nvmlDeviceGetHandleByIndex": "NoPermission"}))
    assert read_snapshot().gpus == ()


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    for has_driver, problem in ((True, NO_PACKAGE), (False, NO_DRIVER)):
        monkeypatch.setattr(os.path, "exists", lambda path, answer=has_driver: answer)
        assert read_snapshot() == NvmlSnapshot(problem=problem)


def test_this_machine_answers_without_an_exception() -> None:
    snapshot = discover()
    assert bool(snapshot.gpus) or bool(snapshot.problem) or bool(snapshot.driver_version)


def test_importing_asks_nothing() -> None:
    program = (
        "import sys\n"
        "import synk.cuda._devices\n"
        "print(sorted({'pynvml', 'cupy', 'cuda', 'numba'} & {name.partition('.')[0] for name in sys.modules}))\n"
    )
    environ = {"PYTHONPATH": str(Path(_nvml.__file__).parents[2]), "PATH": os.environ["PATH"]}
    assert subprocess.check_output([sys.executable, "-c", program], env=environ, text=True).strip() == "[]"


# ----- asking CUDA, in another process


LIBCUDA = r"""
#include <string.h>
#include <stdlib.h>
int cuInit(unsigned flags) { return getenv("CUDA_VISIBLE_DEVICES") ? 100 : 0; }
int cuDeviceGetCount(int *count) { *count = 2; return 0; }
int cuDeviceGet(int *device, int index) { *device = 10 + index; return 0; }
int cuDeviceGetUuid(unsigned char *uuid, int device) {
  const char *fast = "\x9f\x8e\x7d\x6c\xaa\xaa\xbb\xbb\xcc\xcc\xdd\xdd\xee\xee\xff\xff";
  const char *slow = "\x1a\x2b\x3c\x4d\x11\x11\x22\x22\x33\x33\x44\x44\x55\x55\x66\x66";
  memcpy(uuid, device == 10 ? fast : slow, 16);
  return 0;
}
"""


def test_cudas_order_is_asked_where_models_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "cuda.c"
    source.write_text(LIBCUDA)
    library = str(tmp_path / "libcuda.so.1")
    subprocess.run([os.environ.get("CC", "cc"), "-shared", "-fPIC", "-o", library, str(source)], check=True)
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(WORKSTATION))
    environ = {"LD_LIBRARY_PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "1"}
    assert discover(environ).cuda_order == (RTX_4090.uuid, GT_1030.uuid)
    assert environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert discover(environ | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}).cuda_order == ()
    assert library not in Path("/proc/self/maps").read_text()  # the master itself has not loaded it


def test_cudas_order_is_not_asked_where_models_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml(H200_SERVER))
    monkeypatch.setattr(_nvml, "query_cuda_order", lambda environ: pytest.fail("asked"))
    discover({})


@pytest.mark.parametrize("program", ["raise SystemExit(1)", "import signal; signal.pause()"])
def test_a_cuda_that_does_not_answer_leaves_the_order_open(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_nvml, "_CUDA_ORDER_PROGRAM", program)
    monkeypatch.setattr(_nvml, "_CUDA_ORDER_TIMEOUT_S", 0.5)
    assert _nvml.query_cuda_order({}) == ()


# ----- words


@pytest.mark.parametrize(
    ("snapshot", "environ", "has_cupy", "expected"),
    [
        (NvmlSnapshot(problem=NO_DRIVER), {}, True, "no NVIDIA driver is loaded. synk runs on the CPU cores."),
        (NvmlSnapshot(problem=NO_PACKAGE), {}, True, 'is not installed. pip install "synkhronos[cuda13]" (or'),
        (NvmlSnapshot(problem="NVML does not answer: x"), {}, True, "Does `nvidia-smi` work?"),
        (NvmlSnapshot(driver_version="580.1"), {}, True, "the driver 580.1 shows none to this process"),
        (H200_SERVER, {"CUDA_VISIBLE_DEVICES": ""}, True, "CUDA_VISIBLE_DEVICES='' hides all 8"),
        (NvmlSnapshot(MIG_SERVER.gpus[3:]), {}, True, "all are in MIG mode and have no instance"),
        (
            dataclasses.replace(H200_SERVER, cuda_version=(11, 8)),
            {},
            True,
            "runs CUDA 11.8, synk needs a driver for CUDA 12",
        ),
        (H200_SERVER, {}, False, 'CuPy is not installed. pip install "synkhronos[cuda13]"'),
        (MIG_SERVER, {}, False, 'CuPy is not installed. pip install "synkhronos[cuda12]"'),
        (dataclasses.replace(H200_SERVER, cuda_version=(14, 0)), {}, False, 'pip install "synkhronos[cuda13]"'),
    ],
)
def test_an_absence_is_explained(
    snapshot: NvmlSnapshot, environ: dict[str, str], has_cupy: bool, expected: str
) -> None:
    assert expected in explain_absence(snapshot, environ, has_cupy=has_cupy)


def test_nothing_to_explain() -> None:
    assert explain_absence(H200_SERVER, {}, has_cupy=True) == ""


def test_a_device_is_described() -> None:
    device = Device(0, "GPU-8932f937", "NVIDIA H200", H200_NBYTES, "GPU-8932f937")
    assert describe(device) == "cuda:0  NVIDIA H200, 140.4 GiB, GPU-8932f937"
