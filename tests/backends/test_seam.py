"""What each backend brings, and that nobody else knows the array libraries."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import fake_gpus
import numpy as np
import pytest
from harness import PACKAGE_FOLDER

from synk.backends import BACKENDS, Backend, DeviceBackend, backend_module


@pytest.fixture(params=BACKENDS)
def opened(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A backend on the first device that it places a rank on; of CuPy there is a stand-in."""
    before = {name for name in sys.modules if name.partition(".")[0] == "cupy"}
    fake_gpus.install(monkeypatch, 2)
    module = backend_module(request.param)
    backend = module.open_device(module.place(1, None).devices[0])
    yield backend
    backend.close()
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        if name not in before:
            del sys.modules[name]


def test_arrays_of_the_backend_and_of_numpy_are_known(opened: Backend) -> None:
    host = np.arange(6.0).reshape(2, 3)
    array = opened.from_host(host)
    assert opened.is_array(array)
    assert opened.is_array(host)
    assert not any(opened.is_array(value) for value in (1.0, np.float64(1), [1.0], "text", None))


def test_copies(opened: Backend) -> None:
    host = np.arange(6.0).reshape(2, 3)
    array = opened.from_host(host)
    with opened.running():
        own = opened.own_copy(array)
        assert type(own) is type(array)
        array = opened.xp.zeros((2, 3), dtype=np.float32)
        assert np.array_equal(opened.host_copy(own), host)
        assert opened.host_copy(host) is host
        assert opened.host_copy(array).dtype == np.float32


@pytest.mark.parametrize("opened", ["cupy"], indirect=True)
def test_addresses_of_a_device(opened: Backend) -> None:
    backend: Any = opened
    device: DeviceBackend = backend
    array = backend.from_host(np.arange(8.0))
    assert device.address(array[2:]) - device.address(array) == 16
    assert device.scratch_address() != 0


@pytest.mark.parametrize("name", BACKENDS)
def test_places(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decided in the master, where no array library is imported."""
    fake_gpus.install(monkeypatch, 2)
    module = backend_module(name)
    assert module.is_usable()
    before = set(sys.modules)
    places = module.place(2, None)
    assert {module.partition(".")[0] for module in set(sys.modules) - before} <= {"synk"}
    assert len(places.devices) == 2
    assert all(set(cpus) <= os.sched_getaffinity(0) for cpus in places.cpus)
    if name == "cupy":
        assert places.ranks_per_device == 1
        seen = [environment["CUDA_VISIBLE_DEVICES"] for environment in places.environments]
        assert len(set(seen)) == 2, "each worker sees its own device only"
    else:
        assert (places.environments, places.ranks_per_device) == ((), 0)
        with pytest.raises(ValueError, match="devices"):
            module.place(2, [0, 1])


def test_only_the_backends_know_the_array_libraries() -> None:
    """What a device array is, where it lies and how it gets to the host is asked of the backend."""
    words = re.compile(r"__cuda_array_interface__|\.data\.ptr\b")
    known = {
        "_worker/held/pickling.py",  # takes objects of any library apart, whatever the backend
    }
    for path in sorted((PACKAGE_FOLDER / "synk").rglob("*.py")):
        name = str(path.relative_to(PACKAGE_FOLDER / "synk"))
        if name.startswith(("backends/", "cuda/")) or name in known:
            continue
        assert not words.search(path.read_text(encoding="utf-8")), name
