"""The CPU backend. Its arrays are NumPy views of shared memory, so most transfers do nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._pure.arrays import as_plain_array
from synk._pure.cores import num_cores
from synk._pure.exact import has_own_meaning
from synk._wire.memory import Segment
from synk.backends._assignment import DeviceAssignment
from synk.backends._frameworks import Converter, host_converters


def is_usable() -> bool:
    return True


def place(num_workers: int | None, devices: Sequence[Any] | None) -> DeviceAssignment:
    """Give every rank the whole machine, since the ranks share its cores. By default there is a rank for each core."""
    if devices is not None:
        raise ValueError(f"cannot fork: got devices={devices!r} with backend 'numpy', expected None.")
    count = num_workers or num_cores()
    return DeviceAssignment(tuple(f"cpu:{rank}" for rank in range(count)))


def open_device(device: str) -> NumpyBackend:
    return NumpyBackend(device)


def on_host(obj: Any) -> Any:
    return obj


def report() -> list[str]:
    return [f"CPU: {num_cores()} of {os.cpu_count()} cores usable"]


class NumpyBackend:
    """The arrays of one CPU worker. ``device`` is only a name, for instance ``"cpu:0"``."""

    name = "numpy"
    is_device = False
    xp: Any = np

    def __init__(self, device: str) -> None:
        self.device = device

    def note_segment(self, segment: Segment) -> None:
        """Do nothing: segments are read in place."""

    def forget_segment(self, segment: Segment) -> None:
        """Do nothing: the backend keeps no reference to segments."""

    def is_array(self, value: Any) -> bool:
        return isinstance(value, np.ndarray)

    def from_host(self, host: np.ndarray) -> np.ndarray:
        return host

    def take(self, array: np.ndarray, indices: np.ndarray) -> np.ndarray:
        rows = self.take_rows(array, indices)
        rows.flags.writeable = False  # the value of a variable is read-only, also if its rows are copies
        return rows

    def from_objects(self, value: Any) -> Any:
        return value

    def take_rows(self, host: np.ndarray, indices: np.ndarray) -> np.ndarray:
        return host.take(indices, axis=0)

    def as_output(self, value: Any) -> np.ndarray | None:
        if type(value) is np.ndarray:
            return None if value.dtype.hasobject else _native(value)  # pointers to objects are valid here only
        if isinstance(value, (np.ndarray, np.generic, bool, int, float, complex)) and not has_own_meaning(value):
            array = np.asarray(value)
            return None if array.dtype.hasobject else _native(array)
        return None

    def as_array(self, value: Any, what: str) -> np.ndarray:
        return _native(as_plain_array(value, what))

    def flat(self, array: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(array).reshape(-1)

    def to_host(self, array: np.ndarray, out: np.ndarray) -> None:
        np.copyto(out, array)

    def host_copy(self, array: np.ndarray) -> np.ndarray:
        return array

    def own_copy(self, array: np.ndarray) -> np.ndarray:
        return np.array(array)

    def torch_device(self) -> str:
        return "cpu"

    def converters(self, framework: str) -> tuple[Converter, Converter]:
        return host_converters(framework)

    def running(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """Do nothing: nothing is queued on a CPU."""

    def explain(self, error: BaseException, what: str) -> BaseException:
        """Return the error to report. If torch ran out of host memory, it raised a RuntimeError, not a MemoryError."""
        if type(error) is not RuntimeError or "DefaultCPUAllocator: can't allocate memory" not in str(error):
            return error
        explained = MemoryError(f"cannot run {what} on {self.device}: out of memory ({error}).")
        explained.__cause__ = error
        return explained

    def recover(self) -> bool:
        return True

    def describe(self) -> str:
        return f"numpy {np.__version__}, {num_cores()} cores usable"

    def close(self) -> None:
        """Do nothing: there is no device to release."""


def _native(array: np.ndarray) -> np.ndarray:
    """Return ``array`` in the machine's byte order, which all inputs have."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
