"""What a worker needs of an array library: the protocol, and the one place where a backend is chosen by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, Protocol, cast

import numpy as np

from synk._wire.memory import Segment
from synk.backends._places import Places

_MODULES = {"numpy": "synk.backends._numpy", "cupy": "synk.cuda._cupy"}
BACKENDS = tuple(_MODULES)


class Backend(Protocol):
    """One device and its arrays.

    Host arrays at this seam are NumPy arrays, mostly views of shared segments; device arrays are of the backend's own
    library. A backend raises ``UnsupportedError`` for what it lacks.
    """

    name: str
    device: str
    is_device: bool
    """Whether arrays lie in a memory of their own, so that the host sees only copies."""

    stream_handle: int
    """The stream on which all work of this process is queued; 0 where nothing is queued."""

    xp: Any
    """The namespace with NumPy's functions for the backend's arrays."""

    def note_segment(self, segment: Segment) -> None:
        """Take note of a shared segment: arrays will be copied from and to it."""

    def forget_segment(self, segment: Segment) -> None:
        """Let go of a segment that is about to be unmapped."""

    def is_array(self, value: Any) -> bool:
        """Whether ``value`` is what the methods below take as an array: one of the backend's own, or of NumPy's."""

    def address(self, array: Any) -> int:
        """Return where the first element of a contiguous array lies."""

    def from_host(self, host: np.ndarray) -> Any:
        """Return a device array with the values of ``host``; on the CPU ``host`` itself (a read-only view)."""

    def take_rows(self, host: np.ndarray, indices: np.ndarray) -> Any:
        """Return a device array of the rows ``host[indices]``, shape ``(len(indices), *rest)`` (a copy)."""

    def take(self, array: Any, indices: np.ndarray) -> Any:
        """Return the rows ``indices`` (positions on the host) of an array of the backend, as a new one."""

    def from_objects(self, value: Any) -> Any:
        """Return a broadcast object as functions see it: arrays in a nesting of tuples, lists and dicts converted."""

    def as_output(self, value: Any) -> Any:
        """Return an array or scalar that a function returned as an array of the backend, or None if it is neither.

        A number may stay a NumPy array on any backend.
        """

    def as_array(self, value: Any, what: str) -> Any:
        """Return ``value`` (an array of any library, a number, a list) as an array of the backend.

        Raises
        ------
        TypeError
            Naming ``what``, if it is none.
        """

    def flat(self, array: Any) -> Any:
        """Return the elements in C order with one axis; a view where possible."""

    def to_host(self, array: Any, out: np.ndarray) -> None:
        """Copy an array into the host array ``out`` of the same shape and dtype; done when ``synchronize`` returns."""

    def host_copy(self, array: Any) -> np.ndarray:
        """Return the values on the host, now; of an array that lies there the array itself."""

    def own_copy(self, array: Any) -> Any:
        """Return a new array where the given one lies, which only the caller has."""

    def converters(self, framework: str) -> tuple[Callable[[Any], Any], Callable[[Any], Any]]:
        """Return functions that hand arrays over to ``"torch"`` or ``"jax"``, and take values back, without a copy."""

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """Make the backend's device and stream current while the body runs."""

    def synchronize(self) -> None:
        """Return when everything queued on the device is done."""

    def explain(self, error: BaseException, what: str) -> BaseException:
        """Return the error to report for one that ended ``what``."""

    def recover(self) -> bool:
        """Clean up after an exception; return whether the device still works."""

    def describe(self) -> str:
        """Return one line: library, version, device, memory."""

    def close(self) -> None:
        """Release the device."""


class DeviceBackend(Backend, Protocol):
    """A backend whose arrays lie in a memory of their own; addresses are plain integers."""

    def beside(self) -> contextlib.AbstractContextManager[Any]:
        """Have ``from_host`` and ``take_rows`` in the body bring arrays beside the work under way; yields an event.

        The arrays may be used after ``join(event)``.
        """

    def join(self, event: Any) -> None:
        """Have all later work wait for what was brought; the host does not."""

    def enter_thread(self) -> None:
        """Have what this thread queues go to the stream of the function, whose own thread is left as it is."""

    def mark(self) -> Any:
        """Return an event: what has been queued so far."""

    def communicate(self, after: Any, launch: Callable[[int], Any]) -> Any:
        """Call ``launch(stream)`` with a stream beside that of the work under way, which goes on from ``after``.

        Returns the event of its end. Work that is queued meanwhile runs beside it, until ``join(event)`` or
        ``join_communication()``.
        """

    def join_communication(self) -> None:
        """Have all later work wait for what was launched beside it; the host does not."""

    def is_pinned(self, host: np.ndarray) -> bool:
        """Whether bringing a host array to the device does not hold up the host."""

    def is_idle(self) -> bool:
        """Whether everything queued is done; does not wait."""

    def scratch_address(self) -> int:
        """Return the address of a few bytes of device memory that stay allocated."""

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Copy between host and device memory, in either direction, ordered on the stream."""


class BackendModule(Protocol):
    """What the file of a backend holds. Its array library is imported by ``open_device`` alone, in a worker."""

    def is_usable(self) -> bool:
        """Whether ``backend="auto"`` may choose it: a device is there, and the library installed."""

    def place(self, num_workers: int | None, devices: Sequence[Any] | None) -> Places:
        """Choose the devices of ``num_workers`` ranks (None: as many as make sense), in the master.

        Raises
        ------
        UnsupportedError
            If there is no such device; the message says why, and what to install.
        ValueError, TypeError
            If the arguments, or variables of the environment, make no sense here.
        """

    def open_device(self, device: str) -> Backend:
        """Open one of the devices that ``place`` has named, in a worker."""


def backend_module(name: str) -> BackendModule:
    """Return the file of the backend ``name``, one of ``BACKENDS``."""
    return cast(BackendModule, import_module(_MODULES[name]))
