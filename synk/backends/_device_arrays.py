"""The common part of the backends whose arrays lie in a memory of their own."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np

from synk._pure.arrays import as_plain_array
from synk._pure.dtypes import BFLOAT16, describe_dtype
from synk._pure.trees import flatten, unflatten
from synk.backends._frameworks import Converter, bfloat16, host_converters
from synk.backends._numpy import NumpyBackend


class DeviceArrays(NumpyBackend):
    """The arrays of a library on one device. Numbers and text that functions return stay on the host.

    A backend adds ``has_dtype``, ``beside``, ``join`` and ``is_pinned``, its own copies to the device and back, and
    ``as_output`` if functions may return other arrays.
    """

    is_device = True

    def __init__(self, device: str, xp: Any) -> None:
        super().__init__(device)
        self.xp = xp
        self._num_copied = [0, 0, 0]  # bytes to the device, and back; and those of both by way of pageable memory

    def has_dtype(self, array: np.ndarray) -> bool:
        """Whether the library has arrays of the dtype of a host array."""
        raise NotImplementedError

    def beside(self) -> contextlib.AbstractContextManager[Any]:
        """Make ``from_host`` and ``take_rows`` in the body copy beside the work in flight. Yield an event.

        The arrays may be used after ``join(event)``, which makes all later device work wait for the copies of the
        event. The host does not wait.
        """
        raise NotImplementedError

    def is_pinned(self, host: np.ndarray) -> bool:
        """Whether copying a host array to the device does not block the host."""
        return bool(host.flags.c_contiguous)

    def as_output(self, value: Any) -> Any:
        return value if isinstance(value, self.xp.ndarray) else super().as_output(value)

    def is_array(self, value: Any) -> bool:
        return isinstance(value, (np.ndarray, self.xp.ndarray))

    def own_copy(self, array: Any) -> Any:
        return self._library_of(array).array(array)

    def flat(self, array: Any) -> Any:
        return self._library_of(array).asarray(array, order="C").reshape(-1)

    def _library_of(self, array: Any) -> Any:
        return np if isinstance(array, np.ndarray) else self.xp

    def checked(self, host: np.ndarray) -> np.ndarray:
        """Return a host array in a dtype of the library's; raise TypeError if that lacks it."""
        if not self.has_dtype(host):
            raise TypeError(
                f"cannot copy an array of dtype {describe_dtype(host.dtype)} to {self.device}: expected bools, "
                "integers, floats or complex numbers. Pass it inside a broadcast tuple, or encode it as integers."
            )
        return host.view(bfloat16()) if host.dtype == BFLOAT16 else host

    def from_objects(self, value: Any) -> Any:
        """Return a broadcast object with the arrays in its tuples, lists and dicts on the device."""
        if not isinstance(value, (tuple, list, dict, np.ndarray)):
            return value
        leaves, structure = flatten(value)
        return unflatten(structure, [self._from_leaf(leaf) for leaf in leaves])

    def _from_leaf(self, leaf: Any) -> Any:
        goes_there = type(leaf) is np.ndarray and leaf.dtype.isnative and self.has_dtype(leaf)
        return self.from_host(leaf) if goes_there else leaf

    def as_array(self, value: Any, what: str) -> Any:
        array = self.as_output(value)
        if array is None:
            array = as_plain_array(value, what)
        # The user may change the array while its copy to the device is still running, so a copy of it is the source.
        return self.from_host(np.array(array)) if isinstance(array, np.ndarray) else array

    def converters(self, framework: str) -> tuple[Converter, Converter]:
        """Return functions that convert through host memory, with copies, for what cannot read the device's memory."""
        to_framework, from_framework = host_converters(framework)
        return lambda array: to_framework(self.host_copy(array)), from_framework

    def take_copied(self) -> tuple[int, int, int]:
        """Return the bytes copied to the device, and back, since the last call of this method.

        The third number says how many of them went by way of pageable memory, though registered memory is faster.
        """
        (to_device, back, pageable), self._num_copied = self._num_copied, [0, 0, 0]
        return to_device, back, pageable

    def note_begin(self) -> None:
        """Note on the device that the function of a call begins, in one of its slices."""

    def note_end(self) -> None:
        """Note on the device that it has ended."""

    def take_work_ns(self) -> int:
        """Return the time on the device from the first begin to the last end since the last call of this method.

        0 if it is not known: the device keeps no time, or has not done its work.
        """
        return 0

    def out_of_memory(self, error: BaseException, what: str, free: str = "") -> MemoryError:
        """Return the error of a call for which the device had no room. ``free`` says how much was left."""
        explained = MemoryError(
            f"cannot run {what} on {self.device}: out of device memory{free} ({error}). Pass num_slices=2 or more, or "
            "use fewer rows per call."
        )
        explained.__cause__ = error
        explained.__dict__["is_of_device"] = True  # the program runs the call once more
        return explained
