"""Backends: the protocol for an array library on a worker, and the one place where a backend is chosen by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np

from synk._wire.memory import Segment
from synk.backends._assignment import DeviceAssignment

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


class Backend(Protocol):
    """One device and its arrays.

    Host arrays here are NumPy arrays, mostly views of shared segments. Device arrays belong to the backend's library. A
    backend raises ``UnsupportedError`` for an operation or a dtype that it lacks.

    Copies to and from a device may be queued. Until ``synchronize`` has returned, host memory that a copy reads must
    not be changed or unmapped, and host memory that a copy writes must not be read. On the CPU arrays are the host
    memory itself, and nothing is queued.
    """

    name: str
    device: str
    is_device: bool
    """Whether arrays lie in a memory of their own, so that the host sees only copies."""

    xp: Any
    """The namespace with NumPy's functions for the backend's arrays."""

    def note_segment(self, segment: Segment) -> None:
        """Note a shared segment, from which and to which arrays will be copied."""

    def forget_segment(self, segment: Segment) -> None:
        """Forget a segment that is about to be unmapped. No call that is in flight uses it."""

    def is_array(self, value: Any) -> bool:
        """Whether the methods below accept ``value`` as an array: an array of the backend or of NumPy."""

    def from_host(self, host: np.ndarray) -> Any:
        """Return a device array with the values of ``host``. On the CPU it is ``host`` itself (a read-only view)."""

    def take_rows(self, host: np.ndarray, indices: np.ndarray) -> Any:
        """Return a device array of the rows ``host[indices]``, shape ``(len(indices), *rest)`` (a copy)."""

    def take(self, array: Any, indices: np.ndarray) -> Any:
        """Return a new array with the rows of an array of the backend at ``indices``, a host array of positions."""

    def from_objects(self, value: Any) -> Any:
        """Return a broadcast object for functions, with the arrays in its tuples, lists and dicts converted."""

    def as_output(self, value: Any) -> Any:
        """Return an array or scalar that a function returned as an array of the backend; None if it is neither.

        None also for an array of a class with a meaning of its own, such as a matrix: it would lose it. A number may
        stay a NumPy array on any backend.
        """

    def as_array(self, value: Any, what: str) -> Any:
        """Return ``value`` (an array of any library, a number, a list) as an array of the backend.

        Raises
        ------
        TypeError
            If ``value`` cannot be converted. The text names ``what``.
        """

    def flat(self, array: Any) -> Any:
        """Return the elements in C order with one axis, as a view if possible."""

    def to_host(self, array: Any, out: np.ndarray) -> None:
        """Copy an array into the host array ``out`` of the same shape and dtype. ``synchronize`` waits for it."""

    def host_copy(self, array: Any) -> np.ndarray:
        """Return the values on the host, after waiting for them. An array that lies on the host is returned itself."""

    def own_copy(self, array: Any) -> Any:
        """Return a copy in the same memory, to which nobody else refers."""

    def torch_device(self) -> str:
        """Return the kind of device on which torch computes beside this backend: ``"cpu"`` or ``"cuda"``."""

    def converters(self, framework: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        """Return functions that convert to arrays of ``"torch"`` or ``"jax"`` and back, if possible without a copy."""

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """Make the backend's device and stream current while the body runs."""

    def synchronize(self) -> None:
        """Return when everything queued on the device is done."""

    def explain(self, error: BaseException, what: str) -> BaseException:
        """Return the error to report for an error that ended ``what``, for instance a MemoryError with advice."""

    def recover(self) -> bool:
        """Wait for work that an exception left on the device, and clean up. Return whether the device still works."""

    def describe(self) -> str:
        """Return one line: library, version, device, memory."""

    def close(self) -> None:
        """Release the device."""


class DeviceBackend(Backend, Protocol):
    """A backend whose arrays lie in a memory of their own."""

    def beside(self) -> contextlib.AbstractContextManager[Any]:
        """Make ``from_host`` and ``take_rows`` in the body copy beside the work in flight. Yield an event.

        The arrays may be used after ``join(event)``.
        """

    def join(self, event: Any) -> None:
        """Make all later device work wait for the copies of this event. The host does not wait."""

    def enter_thread(self) -> None:
        """Make the current thread, for instance one of autograd's, queue its work on the stream of the function."""

    def is_pinned(self, host: np.ndarray) -> bool:
        """Whether copying a host array to the device does not block the host."""

    def take_copied(self) -> tuple[int, int, int]:
        """Return the bytes copied to the device, and back, since the last call of this method.

        The third number says how many of them went by way of pageable memory, though registered memory is faster.
        """

    def note_begin(self) -> None:
        """Note on the device that the function of a call begins, in one of its slices."""

    def note_end(self) -> None:
        """Note on the device that it has ended."""

    def take_work_ns(self) -> int:
        """Return the time on the device from the first begin to the last end since the last call of this method.

        0 if it is not known: the device keeps no time, or has not done its work.
        """


class NcclBackend(DeviceBackend, Protocol):
    """A backend with devices between which NCCL communicates."""

    stream_handle: int
    """The stream on which all work of this process is queued."""

    def address(self, array: Any) -> int:
        """Return the address of the first element of a contiguous array."""

    def mark(self) -> Any:
        """Return an event that follows everything queued so far."""

    def communicate(self, after: Any, launch: Callable[[int], Any]) -> Any:
        """Call ``launch(stream)`` with another stream than that of the function. It starts after the event ``after``.

        Return the event of its end. Work that is queued in the meantime runs beside it, until ``join(event)`` or
        ``join_communication()``.
        """

    def join_communication(self) -> None:
        """Make all later device work wait for the operations of ``communicate``. The host does not wait."""


class BackendModule(Protocol):
    """The functions of a backend's file. Only ``open_device`` and ``on_host``, on a worker, need the array library."""

    def is_usable(self) -> bool:
        """Whether ``backend="auto"`` may choose it: a device is there and the library is installed."""

    def place(self, num_workers: int | None, devices: Sequence[Any] | None) -> DeviceAssignment:
        """Choose the devices of ``num_workers`` ranks, in the program. None means one rank for each device or core.

        Raises
        ------
        UnsupportedError
            If there is no such device. The message says why, and what to install.
        ValueError, TypeError
            If an argument, or an environment variable, has no valid value.
        """

    def open_device(self, device: str) -> Backend:
        """Open one of the devices that ``place`` returned, on a worker."""

    def on_host(self, obj: Any) -> Any:
        """Return an array of the library that lies on a device as a host array; any other object unchanged."""

    def report(self) -> list[str]:
        """Return the lines of ``synk.info()`` about the devices, if any."""


def backend_module(name: str) -> BackendModule:
    """Return the file of a backend.

    Raises
    ------
    ValueError
        If there is no backend with this name.
    """
    if name not in BACKENDS:
        instead = _INSTEAD.get(str(name))
        hint = "" if instead is None else f" For {name} use {instead}."
        raise ValueError(f"cannot fork: got backend={name!r}, expected one of {('auto', *BACKENDS)}.{hint}")
    return cast(BackendModule, import_module(_MODULES[name]))


def unused_gpus() -> str:
    """Return why workers on the CPU were chosen although GPUs are there, and what to install; empty if none are."""
    return str(import_module(_MODULES["cupy"]).unused_gpus())


def on_host(obj: Any) -> Any:
    """Return an array of any library that lies on a device as a host array; any other object unchanged.

    The program must not touch a device: a context there costs memory on every GPU, and ends the use of ``os.fork``.
    """
    module = _LIBRARIES.get(type(obj).__module__.partition(".")[0])
    return obj if module is None else import_module(module).on_host(obj)
