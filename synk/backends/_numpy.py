"""The CPU backend. Its arrays are NumPy views of shared memory, so most transfers do nothing.

The functions are those that each backend's file has. Only ``open_device`` and ``on_host``, on a worker, need the array
library.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._pure.arrays import address_of, as_plain_array
from synk._pure.environment import num_cores
from synk._pure.exact import has_own_meaning
from synk._wire.memory import Segment
from synk.backends._assignment import DeviceAssignment
from synk.backends._frameworks import Converter, host_converters


def is_usable() -> bool:
    """Whether ``backend="auto"`` may choose it: a device is there and the library is installed."""
    return True


def place(num_workers: int | None, devices: Sequence[Any] | None) -> DeviceAssignment:
    """Choose the devices of ``num_workers`` ranks, in the program. None means one rank for each device or core.

    The ranks on the CPU share all of its cores.

    Raises
    ------
    UnsupportedError
        If there is no such device. The message says why, and what to install.
    ValueError, TypeError
        If an argument, or an environment variable, has no valid value.
    """
    if devices is not None:
        raise ValueError(f"cannot fork: got devices={devices!r} with backend 'numpy', expected None.")
    count = num_workers or num_cores()
    return DeviceAssignment(tuple(f"cpu:{rank}" for rank in range(count)))


def open_device(device: str) -> NumpyBackend:
    """Open one of the devices that ``place`` returned, on a worker."""
    return NumpyBackend(device)


def on_host(obj: Any) -> Any:
    """Return an array of the library that lies on a device as a host array; any other object unchanged."""
    return obj


def report() -> list[str]:
    """Return the lines of ``synk.info()`` about the devices, if any."""
    return [f"CPU: {num_cores()} of {os.cpu_count()} cores usable"]


class NumpyBackend:
    """The arrays of one CPU worker, and what a backend is: those of devices override what is different there.

    Host arrays here are NumPy arrays, mostly views of shared segments. Device arrays belong to the backend's library. A
    backend raises ``UnsupportedError`` for an operation or a dtype that it lacks.

    Copies to and from a device may be queued. Until ``synchronize`` has returned, host memory that a copy reads must
    not be changed or unmapped, and host memory that a copy writes must not be read. On the CPU arrays are the host
    memory itself, and nothing is queued.

    Attributes
    ----------
    name : str
    device : str
        On the CPU only a name, for instance ``"cpu:0"``.
    is_device : bool
        Whether arrays lie in a memory of their own, so that the host sees only copies.
    xp : module
        The namespace with NumPy's functions for the backend's arrays.
    """

    name = "numpy"
    is_device = False
    xp: Any = np

    def __init__(self, device: str) -> None:
        self.device = device

    def note_segment(self, segment: Segment) -> None:
        """Note a shared segment, from which and to which arrays will be copied. Most libraries copy from any memory."""

    def forget_segment(self, segment: Segment) -> None:
        """Forget a segment that is about to be unmapped. No call that is in flight uses it."""

    def is_array(self, value: Any) -> bool:
        """Whether the methods below accept ``value`` as an array: an array of the backend or of NumPy."""
        return isinstance(value, np.ndarray)

    def address(self, array: Any) -> int:
        """Return where an array of the backend begins."""
        return address_of(array)

    def from_host(self, host: np.ndarray) -> Any:
        """Return a device array with the values of ``host``. On the CPU it is ``host`` itself (a read-only view)."""
        return host

    def take_rows(self, host: np.ndarray, indices: np.ndarray) -> Any:
        """Return a device array of the rows ``host[indices]``, shape ``(len(indices), *rest)`` (a copy)."""
        return self.from_host(host.take(indices, axis=0))

    def take(self, array: Any, indices: np.ndarray) -> Any:
        """Return a new array with the rows of an array of the backend at ``indices``, a host array of positions."""
        rows = array.take(indices, axis=0)
        rows.flags.writeable = False  # the value of a variable is read-only, also if its rows are copies
        return rows

    def from_objects(self, value: Any) -> Any:
        """Return a broadcast object for functions, with the arrays in its tuples, lists and dicts converted."""
        return value

    def as_output(self, value: Any) -> Any:
        """Return an array or scalar that a function returned as an array of the backend; None if it is neither.

        None also for an array of a class with a meaning of its own, such as a matrix: it would lose it. A number may
        stay a NumPy array on any backend.
        """
        if type(value) is np.ndarray:
            return None if value.dtype.hasobject else _native(value)  # pointers to objects are valid here only
        if isinstance(value, (np.ndarray, np.generic, bool, int, float, complex)) and not has_own_meaning(value):
            array = np.asarray(value)
            return None if array.dtype.hasobject else _native(array)
        return None

    def as_array(self, value: Any, what: str) -> Any:
        """Return ``value`` (an array of any library, a number, a list) as an array of the backend.

        Raises
        ------
        TypeError
            If ``value`` cannot be converted. The text names ``what``.
        """
        return _native(as_plain_array(value, what))

    def flat(self, array: Any) -> Any:
        """Return the elements in C order with one axis, as a view if possible."""
        return np.ascontiguousarray(array).reshape(-1)

    def to_host(self, array: Any, out: np.ndarray) -> None:
        """Copy an array into the host array ``out`` of the same shape and dtype. ``synchronize`` waits for it."""
        np.copyto(out, array)

    def host_copy(self, array: Any) -> np.ndarray:
        """Return the values on the host, after waiting for them. An array that lies on the host is returned itself."""
        found: np.ndarray = array
        return found

    def own_copy(self, array: Any) -> Any:
        """Return a copy in the same memory, to which nobody else refers."""
        return np.array(array)

    def enter_thread(self) -> None:
        """Make the current thread, for instance one of autograd's, queue its work on the stream of the function.

        With most libraries every thread queues in the same order.
        """

    def torch_device(self) -> str:
        """Return the kind of device on which torch computes beside this backend: ``"cpu"`` or ``"cuda"``."""
        return "cpu"

    def converters(self, framework: str) -> tuple[Converter, Converter]:
        """Return functions that convert to arrays of ``"torch"`` or ``"jax"`` and back, if possible without a copy."""
        return host_converters(framework)

    def running(self) -> contextlib.AbstractContextManager[Any]:
        """Make the backend's device and stream current while the body runs."""
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """Return when everything queued on the device is done."""

    def explain(self, error: BaseException, what: str) -> BaseException:
        """Return the error to report for an error that ended ``what``, for instance a MemoryError with advice.

        If torch ran out of host memory, it raised a RuntimeError, not a MemoryError.
        """
        if type(error) is not RuntimeError or "DefaultCPUAllocator: can't allocate memory" not in str(error):
            return error
        explained = MemoryError(f"cannot run {what} on {self.device}: out of memory ({error}).")
        explained.__cause__ = error
        return explained

    def recover(self) -> bool:
        """Wait for work that an exception left on the device, and clean up. Return whether the device still works."""
        return True

    def describe(self) -> str:
        """Return one line: library, version, device, memory."""
        return f"numpy {np.__version__}, {num_cores()} cores usable"

    def close(self) -> None:
        """Release the device."""


def _native(array: np.ndarray) -> np.ndarray:
    """Return ``array`` in the machine's byte order, which all inputs have."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
