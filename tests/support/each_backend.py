"""A runtime on each backend that is installed here, for tests that hold on all of them.

CuPy's is on devices that do not exist. A backend that ``SYNK_TEST_BACKENDS`` names (``"dpnp"``) must be there; of
the others those that are missing are skipped.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

import synk
from support import fake_gpus
from synk.backends import BACKENDS, backend_module

PARAMETERS = [pytest.param(name, marks=pytest.mark.dpnp if name == "dpnp" else ()) for name in BACKENDS]


def require(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip the test unless the backend is there; fail it if the backend was asked for."""
    if name == "cupy":
        fake_gpus.install(monkeypatch, 2)
    elif not backend_module(name).is_usable():
        if name in os.environ.get("SYNK_TEST_BACKENDS", "").split(","):
            pytest.fail(f"SYNK_TEST_BACKENDS asks for {name}, which is not installed.")
        pytest.skip(f"{name} is not installed")


class Here:
    """A runtime of two workers on one backend."""

    def __init__(self, name: str, runtime: synk.Runtime) -> None:
        self.name = name
        self.runtime = runtime

    @property
    def has_devices(self) -> bool:
        return self.runtime._session.has_devices

    def call(self, fn: Any, *args: Any, **options: Any) -> Any:
        """Call a function on the workers; its options are those of ``function``."""
        return host(self.runtime.function(fn, **options)(*args))


def host(value: Any) -> Any:
    """Return what came back with tensors as arrays."""
    if isinstance(value, (tuple, list)):
        return type(value)(map(host, value))
    if isinstance(value, dict):
        return {key: host(each) for key, each in value.items()}
    return np.asarray(value) if type(value).__module__ == "torch" else value


def devices(name: str, num_workers: int) -> dict[str, Any]:
    """Return the option that starts workers on the CPU where a backend would look for a GPU."""
    return {"devices": ["cpu"] * num_workers if name == "dpnp" else None}
