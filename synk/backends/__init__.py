"""Backends: an array library on a worker, and the one place where a backend is chosen by name."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from synk.backends._numpy import NumpyBackend

_MODULES = {
    "numpy": "synk.backends._numpy",
    "cupy": "synk.cuda._placement",
    "dpnp": "synk.backends._dpnp",
}
BACKENDS = tuple(_MODULES)
"""The backends by name. A backend is named like the package of its arrays."""

# The module with `on_host` for the objects of each package.
_LIBRARIES = {name: module for name, module in _MODULES.items() if name != "numpy"} | dict.fromkeys(
    ("torch", "jax", "jaxlib"), "synk.backends._frameworks"
)
_INSTEAD = dict.fromkeys(("opencl", "sycl", "oneapi"), "backend='dpnp' (pip install \"synkhronos[dpnp]\")") | {
    "cuda": "backend='cupy' (pip install \"synkhronos[cuda13]\")",
    "cpu": "backend='numpy'",
    "torch": "synk.function(fn, framework='torch') on any backend",
}


Backend = NumpyBackend
"""What all backends are: the one of the CPU, of which those of devices override a part."""


def backend_module(name: str) -> Any:
    """Return the file of a backend, which has the functions of ``_numpy``.

    Raises
    ------
    ValueError
        If there is no backend with this name.
    """
    if name not in BACKENDS:
        instead = _INSTEAD.get(str(name))
        hint = "" if instead is None else f" For {name} use {instead}."
        raise ValueError(f"cannot fork: got backend={name!r}, expected one of {('auto', *BACKENDS)}.{hint}")
    return import_module(_MODULES[name])


def unused_gpus() -> str:
    """Return why workers on the CPU were chosen although GPUs are there, and what to install; empty if none are."""
    return str(import_module(_MODULES["cupy"]).unused_gpus())


def on_host(obj: Any) -> Any:
    """Return an array of any library that lies on a device as a host array; any other object unchanged.

    The program must not touch a device: a context there costs memory on every GPU, and ends the use of ``os.fork``.
    """
    module = _LIBRARIES.get(type(obj).__module__.partition(".")[0])
    return obj if module is None else import_module(module).on_host(obj)
