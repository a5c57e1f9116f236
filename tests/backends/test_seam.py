"""What each backend brings, and that nobody else knows the array libraries."""

from __future__ import annotations

import os
import re

import pytest
from support.harness import PACKAGE_FOLDER

from synk.backends import _dpnp
from synk.backends._listing import list_devices
from synk.errors import UnsupportedError


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


def test_only_the_backends_know_the_array_libraries() -> None:
    """What a device array is, where it lies and how it gets to the host is asked of the backend."""
    words = re.compile(r"""__cuda_array_interface__|\.data\.ptr\b|[!=]= ["'](numpy|cupy|dpnp)["']""")
    for path in sorted((PACKAGE_FOLDER / "synk").rglob("*.py")):
        name = str(path.relative_to(PACKAGE_FOLDER / "synk"))
        if name.startswith(("backends/", "cuda/")):
            continue
        assert not words.search(path.read_text(encoding="utf-8")), name
