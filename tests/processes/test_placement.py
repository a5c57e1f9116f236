"""Which environment a rank gets; no process is started."""

from __future__ import annotations

import os
import sys

import pytest
from support.harness import PACKAGE_FOLDER

from synk._processes.placement import Placement
from synk._processes.program import setup_message
from synk.backends._assignment import DeviceAssignment

VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight cores whose user has set no limit."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for variable in (*VARIABLES, "VECLIB_MAXIMUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)


def placement(count: int, cpus: tuple[tuple[int, ...], ...] = ()) -> Placement:
    """Ranks on devices that need an environment of their own."""
    environments = tuple({"DEVICE": str(rank)} for rank in range(count))
    devices = tuple(f"cuda:{rank}" for rank in range(count))
    return Placement("cupy", DeviceAssignment(devices, environments, cpus))


def on_cpu(*devices: str) -> Placement:
    return Placement("numpy", DeviceAssignment(devices))


def limits(placed: Placement) -> list[int]:
    """Return each rank's limit of threads, which all libraries must agree on."""
    found = [{int(placed.environment(rank)[name]) for name in VARIABLES} for rank in range(len(placed.devices))]
    assert all(len(each) == 1 for each in found)
    return [each.pop() for each in found]


def test_ranks_share_the_cores_and_keep_their_devices_variables() -> None:
    for count, expected in ((1, 8), (2, 4), (3, 2), (8, 1), (16, 1)):
        on_cores = on_cpu(*(f"cpu:{rank}" for rank in range(count)))
        assert limits(on_cores) == limits(placement(count)) == [expected] * count
        assert [placement(count).environment(rank)["DEVICE"] for rank in range(count)] == [*map(str, range(count))]
    for cpus, each in (  # the cores that they are bound to
        (((0, 1, 2, 3), (4, 5, 6, 7)), [4, 4]),
        (((0, 1, 2, 3), (0, 1, 2, 3), (4, 5, 6, 7)), [2, 2, 4]),
        (((0, 1, 2), (2, 3)), [1, 1]),
    ):
        assert limits(placement(len(cpus), cpus)) == each


def test_a_limit_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(variable, "3")
            on_device = Placement("cupy", DeviceAssignment(("cuda:0",), ({variable: "3"},)))
            for placed in (on_cpu("cpu:0"), on_device):
                environment = placed.environment(0)
                assert {name: environment[name] for name in VARIABLES if name in environment} == {variable: "3"}


def test_workers_search_the_folder_in_which_the_package_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the program found it by a relative path, which workers do not search; and never its inner folders."""
    rest = [entry for entry in sys.path if entry not in ("", str(PACKAGE_FOLDER))]
    monkeypatch.setattr(sys, "path", ["", *rest])
    searched = setup_message(on_cpu("cpu:0"), 0, [])["import_path"]
    assert searched[-1] == str(PACKAGE_FOLDER)
    assert str(PACKAGE_FOLDER / "synk") not in searched
