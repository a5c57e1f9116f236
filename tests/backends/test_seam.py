"""What each backend brings, and that nobody else knows the array libraries."""

from __future__ import annotations

import os
import re
import sys
from typing import Any

import pytest
from support import each_backend
from support.each_backend import PARAMETERS
from support.harness import PACKAGE_FOLDER

from synk.backends import _dpnp, backend_module
from synk.backends._assignment import choose
from synk.backends._listing import list_devices
from synk.errors import UnsupportedError


@pytest.mark.parametrize("name", PARAMETERS)
def test_places(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Decided in the master, where no array library is imported."""
    each_backend.require(name, monkeypatch)
    module = backend_module(name)
    before = set(sys.modules)
    places = module.place(2, **each_backend.devices(name, 2))
    assert {module.partition(".")[0] for module in set(sys.modules) - before} <= {"synk", *sys.stdlib_module_names}
    assert len(places.devices) == 2
    assert all(set(cpus) <= os.sched_getaffinity(0) for cpus in places.cpus)
    assert places.has_devices == (name != "numpy")
    assert places.can_use_nccl == (name == "cupy")
    if name == "cupy":
        seen = [environment["CUDA_VISIBLE_DEVICES"] for environment in places.environments]
        assert len(set(seen)) == 2, "each worker sees its own device only"
        assert all(environment["NCCL_SOCKET_IFNAME"] == "lo" for environment in places.environments)
    if name == "numpy":
        assert not places.environments
        with pytest.raises(ValueError, match="devices"):
            module.place(2, [0, 1])


FOUND = ("gpu:0", "gpu:1")
CHOSEN: list[tuple[int | None, list[str] | None, list[str]]] = [
    (None, None, ["gpu:0", "gpu:1"]),
    (1, None, ["gpu:0"]),
    (None, ["gpu:1", "gpu:1"], ["gpu:1", "gpu:1"]),
    (2, ["gpu:1", "gpu:0"], ["gpu:1", "gpu:0"]),
    (2, None, ["gpu:0", "gpu:1"]),
]
NOT_THERE: list[tuple[int | None, list[str] | None, str]] = [
    (3, None, r"num_workers=3, expected 1 to 2.*\['gpu:0', 'gpu:0'\]"),
    (None, ["gpu:2"], "got 'gpu:2' in devices, expected one of: gpu:0, gpu:1"),
    (3, ["gpu:1"], "num_workers=3 and 1 devices"),
    (None, [], "0 devices"),
]


def test_devices_by_name(subtests: Any) -> None:
    for num_workers, devices, chosen in CHOSEN:
        assert choose(FOUND, num_workers, devices) == chosen
    for num_workers, devices, message in NOT_THERE:
        with subtests.test(message=message), pytest.raises(ValueError, match=message):
            choose(FOUND, num_workers, devices)
    no_names: tuple[Any, ...] = ("gpu:0", 2, {"gpu:0": 1})
    for given in no_names:
        with (
            subtests.test(given=str(given)),
            pytest.raises(TypeError, match="expected a sequence of devices: gpu:0, gpu:1"),
        ):
            choose(FOUND, None, given)


def test_devices_of_sycl_and_opencl() -> None:
    """One device may be listed by several drivers; OpenCL's CPU is selected by its kind alone, and ranks divide it."""
    cpu, by_opencl = ("cpu", "opencl", "opencl:0"), ("gpu", "opencl", "opencl:1")
    by_level_zero = [("gpu", "level_zero", f"level_zero:{k}") for k in range(2)]
    assert _dpnp._selectors([cpu]) == {"cpu": "*:cpu"}
    assert _dpnp._selectors([cpu, by_opencl]) == {"gpu:0": "opencl:1", "cpu": "*:cpu"}
    expected = {"gpu:0": "level_zero:0", "gpu:1": "level_zero:1"}
    assert _dpnp._selectors([by_opencl, *by_level_zero]) == expected
    assert _dpnp._selectors([]) == {}
    assert _dpnp._divided([0, 1, 2, 5], ["cpu"] * 3) == ((0, 1), (2,), (5,))
    assert _dpnp._divided([3, 4], ["cpu"] * 3) == ((3,), (4,), (3,))
    assert _dpnp._divided([3, 4], ["gpu:0", "cpu"]) == ((3, 4), (3, 4))


@pytest.mark.parametrize("code", ["raise ImportError('no such library')", "import sys; sys.exit(3)"])
def test_a_library_that_does_not_answer_is_named(code: str) -> None:
    with pytest.raises(UnsupportedError, match=r"of shapes: (ImportError: no such library|exit status 3)\. Does"):
        list_devices(code, "shapes", os.environ)


def test_a_backend_that_was_asked_for_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_dpnp, "is_usable", lambda: False)
    monkeypatch.setenv("SYNK_TEST_BACKENDS", "cupy,dpnp")
    with pytest.raises(pytest.fail.Exception, match="asks for dpnp, which is not installed"):
        each_backend.require("dpnp", monkeypatch)
    monkeypatch.setenv("SYNK_TEST_BACKENDS", "cupy")
    with pytest.raises(pytest.skip.Exception):
        each_backend.require("dpnp", monkeypatch)


def test_only_the_backends_know_the_array_libraries() -> None:
    """What a device array is, where it lies and how it gets to the host is asked of the backend."""
    words = re.compile(r"""__cuda_array_interface__|\.data\.ptr\b|[!=]= ["'](numpy|cupy|dpnp)["']""")
    for path in sorted((PACKAGE_FOLDER / "synk").rglob("*.py")):
        name = str(path.relative_to(PACKAGE_FOLDER / "synk"))
        if name.startswith(("backends/", "cuda/")):
            continue
        assert not words.search(path.read_text(encoding="utf-8")), name
