"""Pickles of the user's objects that leave a worker: arrays on a device travel as arrays of the host.

The master must not touch a device: a context there costs memory on every GPU, and ends the use of ``os.fork``.
"""

from __future__ import annotations

import io
import sys
from typing import Any

import numpy as np

from synk._wire.parcels import Pickler


class HostPickler(Pickler):
    """Pickles what cloudpickle does; arrays of CuPy, torch and JAX that lie on a device become NumPy's or torch's."""

    def reducer_override(self, obj: Any) -> Any:
        on_host = _on_host(obj)
        if on_host is not obj:
            return on_host.__reduce_ex__(5)
        return super().reducer_override(obj)


def _on_host(obj: Any) -> Any:
    package = type(obj).__module__.partition(".")[0]
    if package == "cupy" and hasattr(obj, "__cuda_array_interface__"):
        return obj.get()
    if package == "torch" and isinstance(obj, sys.modules["torch"].Tensor) and obj.is_cuda:
        return obj.detach().cpu()
    if package in ("jax", "jaxlib") and any(device.platform != "cpu" for device in _devices(obj)):
        return np.asarray(obj)
    return obj


def _devices(obj: Any) -> Any:
    devices = getattr(obj, "devices", None)
    return devices() if callable(devices) else ()


def dumps(obj: Any) -> bytes:
    """Return ``obj`` pickled for the master."""
    file = io.BytesIO()
    HostPickler(file, protocol=5).dump(obj)
    return file.getvalue()
