"""Converts between the arrays of a function and the arrays of a communicator: frameworks, devices, layouts.

A rank uses the memory of large results again, because the kernel must make the pages of a new large array, which
takes longer than filling them. It belongs to a result and all views of it, as long as anybody refers to one of them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from synk._pure.arrays import address_of
from synk._pure.dtypes import assign
from synk.backends import Backend
from synk.communicators._checks import check_out

# From this size on NumPy gets the memory of each new array from the kernel, and gives it back with the array.
MIN_NBYTES = 1 << 17
# How much memory that is not in use a rank keeps between calls.
KEPT_NBYTES = 1 << 27


Place = Callable[[tuple[int, ...], np.dtype], np.ndarray]
"""Returns the array for a result of a shape and a dtype."""


class ResultMemory:
    """One rank's memory for results."""

    def __init__(self) -> None:
        self._blocks: list[np.ndarray] = []

    def empty(self, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return an array with undefined contents, in new memory or in memory that nobody refers to any more."""
        array: np.ndarray
        nbytes = math.prod(shape) * np.dtype(dtype).itemsize
        if nbytes < MIN_NBYTES:
            return np.empty(shape, dtype)
        # A view refers to the block itself, however it was made. So the number of references tells whether the function
        # still holds anything of a result.
        blocks = self._blocks
        for position in range(len(blocks)):
            if blocks[position].size == nbytes and _num_references(blocks, position) == _UNUSED:
                blocks.append(blocks.pop(position))  # in order of use: trim keeps the end of the list
                break
        else:
            blocks.append(np.empty(nbytes, np.uint8))
        array = blocks[-1].view(dtype).reshape(shape)
        return array

    def trim(self) -> None:
        """Drop the memory that results still use, and of the rest what exceeds ``KEPT_NBYTES``, oldest first."""
        blocks, kept = self._blocks, 0
        for position in reversed(range(len(blocks))):
            kept += blocks[position].size
            if kept > KEPT_NBYTES or _num_references(blocks, position) != _UNUSED:
                kept -= blocks[position].size
                del blocks[position]


def _num_references(blocks: list[np.ndarray], position: int) -> int:
    return sys.getrefcount(blocks[position])


# Measured, because interpreters differ in the references that they add themselves.
_UNUSED = _num_references([np.empty(1, np.uint8)], 0)


class UserArrays:
    """Turns the arrays of the function that runs into arrays that a communicator can use, and back.

    Parameters
    ----------
    backend : Backend
    framework : tuple
        ``(to_framework, from_framework)`` of the function, or None for each.
    results : ResultMemory, optional
        Where results of NumPy are to lie.
    """

    def __init__(
        self, backend: Backend, framework: tuple[Any, Any] = (None, None), results: ResultMemory | None = None
    ) -> None:
        self._backend = backend
        self.empty = backend.xp.empty if results is None else results.empty
        self.host_empty = np.empty if results is None else results.empty
        self._to_framework, self._from_framework = framework

    def own(self, array: Any) -> Any:
        """Return a contiguous array of the backend."""
        if type(array) is np.ndarray and self._backend.xp is np and _is_plain(array):
            return array
        if self._from_framework is not None:
            array = self._from_framework(array)
        xp = self._backend.xp
        return xp.asarray(self._backend.as_array(array, "the array of a collective"), order="C")  # 0-d stays 0-d

    def shown(self, array: Any) -> Any:
        """Return an array of the backend as the function knows it."""
        return array if self._to_framework is None else self._to_framework(array)

    def checked(self, out: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return the memory of ``out``, into which an array of this shape and dtype is to go."""
        place = self.memory(out)
        return check_out(place, shape, dtype, type(place) if self._backend.is_array(place) else ())

    take, give = own, shown  # what a communicator gets of an array, and a function of what came: the same arrays

    def place(self, out: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        """Return where a communicator is to write what goes to ``out``: its memory, if that lies where arrays do."""
        place = self.checked(out, shape, dtype)
        return place if self.lies_here(place) else self.empty(shape, dtype)

    def lies_here(self, out: Any) -> bool:
        """Whether an array of the function lies in the memory of the backend's arrays."""
        return isinstance(self.memory(out), self._backend.xp.ndarray)

    def filled(self, place: Any, out: Any) -> Any:
        """Return ``out``, now that what was to go there is in the memory that ``place`` returned."""
        if not isinstance(place, np.ndarray) and not self.lies_here(out):
            assign(self.memory(out), self._backend.host_copy(place))
        return out

    def memory(self, out: Any) -> Any:
        """Return the memory of an ``out`` of the function, and what is memory already as it is."""
        return out if self._from_framework is None else self._from_framework(out)

    def apart(self, array: Any, out: Any, *, is_in_place: bool = False) -> Any:
        """Return an array, or a copy of it where ``out``, which is written before all of it was read, overlaps it.

        ``is_in_place``: ``out`` may begin where the array begins.
        """
        if out is None or (is_in_place and out is array):
            return array
        on_host, place = isinstance(array, np.ndarray), self.memory(out)
        xp, address = (np, address_of) if on_host else (self._backend.xp, self._backend.address)
        if not isinstance(place, xp.ndarray) or not xp.may_share_memory(array, place):
            return array
        return array if is_in_place and address(place) == address(array) else array.copy()

    def to_host(self, array: Any) -> np.ndarray:
        """Return an array of the function in host memory, contiguous."""
        return self._backend.host_copy(self.own(array))

    def from_host(self, array: np.ndarray) -> Any:
        """Return an array of host memory as the function knows it."""
        return self.shown(self._backend.from_host(array))

    def host_target(self, like: Any, out: Any) -> np.ndarray | None:
        """Return the host array for what comes: the memory of ``out``, one like another array, or any (None)."""
        if like is None and out is None:
            return None
        array = self.own(out if like is None else like)
        return self.host_place(out, array.shape, array.dtype)

    def host_place(self, out: Any, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
        """Return the host array into which something is to go: the memory of ``out``, where that is there."""
        if out is not None:
            place = self.checked(out, shape, dtype)
            if isinstance(place, np.ndarray):
                return place
            return np.empty(shape, dtype)
        return self.host_empty(shape, dtype)

    def received(self, array: np.ndarray, out: Any) -> Any:
        """Return what has come into the array of ``host_place``."""
        if out is None:
            return self.from_host(array)
        place = self.memory(out)
        if not isinstance(place, np.ndarray):
            place[...] = self._backend.from_host(array)
        return out


class StagedArrays(UserArrays):
    """The arrays of a function on a device whose communicator reaches host memory only: copies go there and back."""

    def __init__(self, backend: Backend, framework: tuple[Any, Any] = (None, None)) -> None:
        super().__init__(backend, framework)
        self.empty = np.empty

    def take(self, array: Any) -> Any:
        return self.to_host(array)

    def give(self, array: Any) -> Any:
        return self.from_host(array)

    def place(self, out: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        return self.host_place(out, shape, dtype)

    def filled(self, place: Any, out: Any) -> Any:
        return self.received(place, out)


def _is_plain(array: np.ndarray) -> bool:
    """Whether an array is communicated as it is."""
    return array.flags.c_contiguous and array.dtype.isnative and not array.dtype.hasobject
