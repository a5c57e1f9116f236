"""What CUDA answers about the GPUs, from a child with a stand-in for its driver, and who gets which.

Which shared memory is registered with the driver; and that a program which computes with torch on CPU workers, beside
GPUs that are not used, is told so once.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import fake_gpus

import synk
from synk._pure.arrays import address_of
from synk._wire.memory import PAGE_NBYTES, Segment
from synk.backends import _listing
from synk.backends._assignment import choose
from synk.cuda import _devices, _placement
from synk.cuda._devices import Device, Gpus, cpus_near, explain_absence, is_named, visible_gpus
from synk.cuda._pinned import PinnedSegments

UUIDS = [f"GPU-0000000{k}-aaaa-bbbb-cccc-dddddddddddd" for k in range(4)]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Have children find a stand-in for CUDA's driver, which knows four GPUs."""
    folder = str(Path(__file__).parents[1] / "support" / "fake_driver")
    monkeypatch.setenv("PYTHONPATH", folder, prepend=os.pathsep)
    monkeypatch.setenv("SYNK_FAKE_GPUS", "4")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(_devices, "DRIVER_FILES", ("/",))
    monkeypatch.setattr(_devices, "_asked", _devices._asked.__wrapped__)
    return monkeypatch


def test_cuda_itself_reads_what_the_user_has_set(driver: pytest.MonkeyPatch) -> None:
    """The form in which a worker sees its device is the user's: a number or a UUID. There are no peers but those."""
    gpus = visible_gpus()
    assert [(device.uuid, device.entry) for device in gpus.devices] == [(uuid, uuid) for uuid in UUIDS]
    assert (gpus.cuda_version, gpus.failure) == ((13, 0), "")
    assert gpus.devices[1][3:] == ("Fake GPU", "0000:01:00.0", 1 << 34, (0, 2, 3))
    driver.setenv("CUDA_VISIBLE_DEVICES", " 3 ,GPU-00000001,")
    assert [(str(device), device.uuid, device.entry) for device in visible_gpus().devices] == [
        ("cuda:0", UUIDS[3], "3"), ("cuda:1", UUIDS[1], "GPU-00000001"),
    ]  # fmt: skip
    driver.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == Gpus(cuda_version=(13, 0))


@pytest.mark.parametrize(
    ("fault", "text"),
    [("999", "cuInit answers with error 999"), ("hang", "no answer in 2 s"), ("x", "ValueError: invalid literal")],
)
def test_a_driver_that_fails_or_hangs_is_one_line(driver: pytest.MonkeyPatch, fault: str, text: str) -> None:
    driver.setattr(_listing, "LIMIT_S", 2.0 if fault == "hang" else 60.0)
    driver.setenv("SYNK_FAKE_DRIVER", fault)
    gpus = visible_gpus()
    assert text in gpus.failure and gpus.failure.endswith("Does `nvidia-smi` work?")
    assert "\n" not in gpus.failure and not gpus.devices
    assert gpus.failure in explain_absence(gpus, has_cupy=True)


def test_ranks_follow_the_visible_devices(subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus.install_driver(monkeypatch, 4)
    devices = list(visible_gpus().devices)
    assert choose(devices, None, None, is_named) == devices
    assert choose(devices, 2, None, is_named) == devices[:2]
    chosen = choose(devices, None, [1, "cuda:0", "GPU-00000003", 1], is_named)
    assert [str(device) for device in chosen] == ["cuda:1", "cuda:0", "cuda:3", "cuda:1"]
    refused: list[tuple[int | None, Any, type[Exception], str]] = [
        (9, None, ValueError, r"got num_workers=9, expected 1 to 4, .* Pass devices=\['cuda:0', 'cuda:0'\]"),
        (3, [0, 1], ValueError, "got num_workers=3 and 2 devices"),
        (None, [8], ValueError, "got 8 in devices, expected one of: cuda:0, cuda:1"),
        (None, ["GPU-0000"], ValueError, "got 'GPU-0000' in devices"),
        (None, "cuda:0", TypeError, "expected a sequence of devices: cuda:0"),
        (None, [], ValueError, "0 devices"),
        (None, {"cuda:0": 1}, TypeError, "expected a sequence of devices: cuda:0"),
        (None, [1.0], TypeError, "expected indices, uuids or names"),
    ]
    for num_workers, given, error, text in refused:
        with subtests.test(text=text), pytest.raises(error, match=text):
            choose(devices, num_workers, given, is_named)
    names = ("gpu:0", "gpu:1")  # as of other backends, without other names
    assert choose(names, 2, ["gpu:1", "gpu:1"]) == ["gpu:1", "gpu:1"]
    with pytest.raises(ValueError, match="got 'gpu:2' in devices, expected one of: gpu:0, gpu:1"):
        choose(names, None, ["gpu:2"])


def test_the_cpus_near_a_device_are_those_of_the_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    device = Device(0, "0", "GPU-0", "A GPU", "0000:0F:00.0", 1)
    asked: list[Path] = []

    for text, expected in (("0-3,8,10-11\n", {0, 1, 2, 3, 8, 10, 11}), ("5\n", {5}), ("\n", set())):

        def read_text(path: Path, text: str = text, **options: Any) -> str:
            asked.append(path)
            return text

        monkeypatch.setattr(Path, "read_text", read_text)
        assert cpus_near(device) == expected
    assert set(asked) == {Path("/sys/bus/pci/devices/0000:0f:00.0/local_cpulist")}
    monkeypatch.undo()
    assert cpus_near(device._replace(bus="no such place")) == set()


ABSENT: list[tuple[Gpus, bool, str]] = [
    (Gpus(), True, "no NVIDIA driver is loaded. synk runs on the CPU cores."),
    (Gpus(failure="it hangs."), True, "no GPU in use: it hangs."),
    (Gpus((), (13, 0)), True, "CUDA shows none with CUDA_VISIBLE_DEVICES='-1'"),
    (Gpus((Device(0, "", "", "", "", 1),), (11, 8)), True, "the driver runs CUDA 11.8, synk needs 12"),
    (Gpus((Device(0, "", "", "", "", 1),), (12, 4)), False, 'CuPy is not installed. pip install "synkhronos[cuda12]"'),
    (Gpus((Device(0, "", "", "", "", 1),), (12, 4)), True, "CUDA 12.4, too old for the cupy-cuda13x that is installed"),
    (Gpus((Device(0, "", "", "", "", 1),), (14, 0)), True, ""),
]


def test_an_absence_is_explained_and_info_describes_devices(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    monkeypatch.setattr(_devices, "_is_installed", "cupy-cuda13x".__eq__)
    for gpus, has_cupy, expected in ABSENT:
        with subtests.test(expected=expected):
            text = explain_absence(gpus, has_cupy=has_cupy)
            assert expected in text and bool(expected) == bool(text)
    fake_gpus.install_driver(monkeypatch, 3)
    text = synk.info()
    assert "a driver for CUDA 13.0" in text and "peer access: between all of them" in text
    assert text.count("Fake GPU, 16.0 GiB, GPU-0000000") == 3


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield the stand-in for CuPy."""
    monkeypatch.syspath_prepend(str(fake_gpus.FAKES))
    import cupy

    yield cupy
    assert cupy.cuda.runtime.registered() == {}
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        del sys.modules[name]  # not by monkeypatch, which would put it back


@pytest.fixture
def segment() -> Iterator[Segment]:
    """Yield a segment as a worker maps what it only reads."""
    made = Segment.create(8 * PAGE_NBYTES)
    mapped = Segment(os.dup(made.fd), made.nbytes, is_writable=False, segment_id=1)
    yield mapped
    mapped.close()
    made.close()


def test_a_segment_is_registered_when_it_is_used(cupy: Any, segment: Segment) -> None:
    """As a whole, and writable below NumPy's flags. Memory that is no segment is never."""
    pinned, registered = PinnedSegments(cupy.cuda.runtime), cupy.cuda.runtime.registered
    array, start = np.zeros(10 * PAGE_NBYTES, np.uint8), address_of(segment.buffer)
    for _ in range(2):
        assert pinned.on_device(address_of(array), array.nbytes) == 0
        pinned.add(segment)
        assert pinned.on_device(start + 10, segment.nbytes) == 0  # it is not all in the segment
        assert (registered(), pinned.is_pinned(start, 1), pinned.is_pinned(start, 0)) == ({}, False, True)
    assert pinned.on_device(start + 100, 50) == start + 100
    assert registered() == {start: segment.nbytes}
    assert pinned.is_pinned(start, segment.nbytes) and not pinned.is_pinned(start, segment.nbytes + 1)
    assert not segment.buffer.flags.writeable
    pinned.forget(segment)
    assert registered() == {}
    pinned.forget(segment)
    assert (pinned.on_device(start, 100), pinned.refusal) == (0, "")


def test_a_segment_that_lies_where_another_lay_is_registered_anew(cupy: Any) -> None:
    """The pages that the driver knows are no longer those of the file."""
    pinned = PinnedSegments(cupy.cuda.runtime)
    arena = Segment.create(8 * PAGE_NBYTES, is_worker_writable=True, segment_id=1, is_arena=True)
    for nbytes in (PAGE_NBYTES, 2 * PAGE_NBYTES):
        part = arena.create_part(1 + nbytes, 0, nbytes)
        pinned.add(part)
        assert cupy.cuda.runtime.registered() == {}
        assert pinned.on_device(address_of(part.buffer), nbytes)
        assert cupy.cuda.runtime.registered() == {address_of(part.buffer): nbytes}
    pinned.close()
    arena.close()


torch = pytest.importorskip("torch")

MACHINES = {
    "no CuPy": (Gpus((Device(0, "0", "GPU-0", "A GPU", "0", 1),), (13, 0)), 'CuPy is not installed. pip install "synk'),
    "no answer": (Gpus(failure="cannot list the devices of CUDA"), "cannot list the devices of CUDA"),
    "hidden": (Gpus((), (13, 0)), ""),
    "no driver": (Gpus(), ""),
}


def framework(rt: synk.Runtime) -> None:
    rt.function(lambda x: x.sum(0), framework="torch", outputs="sum")(np.ones((4, 2)))


def tensors(rt: synk.Runtime) -> None:
    rt.function(lambda x: x.sum(0), outputs="sum").submit(torch.ones(4, 2)).result()


def training(rt: synk.Runtime) -> None:
    model = torch.nn.Linear(2, 1)
    rep = synk.torch.replicate(model, torch.optim.SGD(model.parameters(), 0.1), runtime=rt)
    rep.function(lambda model, optimizer, x: model(x).mean(), trains=False, outputs="avg")(torch.ones(4, 2))


CASES = [(machine, framework) for machine in MACHINES] + [("no CuPy", use) for use in (tensors, training)]


def test_who_computes_with_torch_is_told_why_on_the_cpu(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_placement, "has_cupy", lambda: False)
    for machine, use in CASES:
        gpus, expected = MACHINES[machine]
        monkeypatch.setattr(_placement, "visible_gpus", lambda gpus=gpus: gpus)
        with (
            subtests.test(machine=machine, use=use.__name__),
            synk.Runtime(1) as rt,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            rt.function(lambda x: x.sum(), outputs="sum")(np.ones(3))  # nothing of torch
            assert not caught
            for _ in range(2):
                use(rt)
            assert len(caught) == bool(expected)
            for each in caught:
                assert "torch on CPU workers" in str(each.message) and expected in str(each.message)
                assert each.filename == __file__


def test_who_has_chosen_the_cpu_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus.install_driver(monkeypatch, 2)
    with synk.Runtime(1, backend="numpy") as rt:
        framework(rt)
