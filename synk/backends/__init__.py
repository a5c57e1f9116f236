"""What a worker needs of an array library: the protocol, and the one place where a backend is chosen by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

BACKENDS = ("numpy", "cupy")


class Backend(Protocol):
    """One device and its arrays.

    Host arrays at this seam are NumPy arrays, mostly views of shared segments; device arrays are of the backend's own
    library. A backend raises ``UnsupportedError`` for what it lacks.
    """

    name: str
    device: str

    def from_host(self, host: np.ndarray) -> Any:
        """Return a device array with the values of ``host``; on the CPU ``host`` itself (a read-only view)."""

    def take_rows(self, host: np.ndarray, indices: np.ndarray) -> Any:
        """Return a device array of the rows ``host[indices]``, shape ``(len(indices), *rest)`` (a copy)."""

    def as_output(self, value: Any) -> Any:
        """Return an array or scalar that a function returned as an array of the backend, or None if it is neither."""

    def to_host(self, array: Any, out: np.ndarray) -> None:
        """Copy a device array into the host array ``out`` of the same shape and dtype."""

    def converters(self, framework: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        """Return functions that hand arrays over to ``"torch"`` or ``"jax"``, and take values back, without a copy."""

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """Make the backend's device and stream current while the body runs."""

    def synchronize(self) -> None:
        """Return when everything queued on the device is done."""

    def describe(self) -> str:
        """Return one line: library, version, device, memory."""

    def close(self) -> None:
        """Release the device."""


def open_backend(name: str, device: str) -> Backend:
    """Open ``device`` with the backend ``name``; imports its array library."""
    if name == "numpy":
        from synk.backends._numpy import NumpyBackend

        return NumpyBackend(device)
    if name == "cupy":
        from synk.backends._cupy import CupyBackend

        return CupyBackend(device)
    raise ValueError(f"cannot open a backend: got {name!r}, expected one of {', '.join(map(repr, BACKENDS))}.")
