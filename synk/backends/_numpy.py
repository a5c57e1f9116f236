"""The CPU backend: arrays are NumPy views of shared memory, so most of a transfer is nothing at all."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._pure.arrays import as_plain_array, is_masked
from synk._pure.cores import num_cores
from synk._wire.memory import Segment
from synk.backends._frameworks import Converter, host_converters
from synk.backends._places import Places


def is_usable() -> bool:
    return True


def place(num_workers: int | None, devices: Sequence[Any] | None) -> Places:
    """Give every rank the whole machine: its cores are shared."""
    if devices is not None:
        raise ValueError(f"cannot fork: got devices={devices!r} with backend 'numpy', expected None.")
    count = num_workers or num_cores()
    return Places(tuple(f"cpu:{rank}" for rank in range(count)))


def open_device(device: str) -> NumpyBackend:
    return NumpyBackend(device)


class NumpyBackend:
    """One CPU worker's view of its arrays; ``device`` is only a name, as ``"cpu:0"``."""

    name = "numpy"
    is_device = False
    stream_handle = 0
    xp: Any = np

    def __init__(self, device: str) -> None:
        self.device = device

    def note_segment(self, segment: Segment) -> None:
        """Segments are read where they are."""

    def forget_segment(self, segment: Segment) -> None:
        """Nothing refers to it here."""

    def is_array(self, value: Any) -> bool:
        return isinstance(value, np.ndarray)

    def address(self, array: np.ndarray) -> int:
        return int(array.__array_interface__["data"][0])

    def from_host(self, host: np.ndarray) -> np.ndarray:
        return host

    def take(self, array: np.ndarray, indices: np.ndarray) -> np.ndarray:
        return self.take_rows(array, indices)

    def from_objects(self, value: Any) -> Any:
        return value

    def take_rows(self, host: np.ndarray, indices: np.ndarray) -> np.ndarray:
        rows = host.take(indices, axis=0)
        rows.flags.writeable = False  # inputs are read-only however their rows were picked
        return rows

    def as_output(self, value: Any) -> np.ndarray | None:
        if type(value) is np.ndarray:
            return None if value.dtype.hasobject else _native(value)  # pointers mean nothing in another process
        if is_masked(value):
            raise TypeError(
                "cannot return a masked array: the mask would be lost. Return value.filled(...), or data and mask."
            )
        if isinstance(value, (np.ndarray, np.generic, bool, int, float, complex)):
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

    def converters(self, framework: str) -> tuple[Converter, Converter]:
        return host_converters(framework)

    def running(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext()

    def synchronize(self) -> None:
        """Nothing is queued on a CPU."""

    def explain(self, error: BaseException, what: str) -> BaseException:
        return error

    def recover(self) -> bool:
        return True

    def describe(self) -> str:
        return f"numpy {np.__version__}, {num_cores()} cores usable"

    def close(self) -> None:
        """Nothing is held."""


def _native(array: np.ndarray) -> np.ndarray:
    """Return ``array`` in the machine's byte order, in which all inputs are too."""
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
