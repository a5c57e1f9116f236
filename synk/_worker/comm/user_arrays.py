"""Between the arrays of a function and those that are communicated: frameworks, devices, layouts."""

from __future__ import annotations

from typing import Any

import numpy as np

from synk.backends import Backend


class UserArrays:
    """How the arrays of the function under way are taken and given.

    Parameters
    ----------
    backend : Backend
    framework : tuple
        ``(to_framework, from_framework)`` of the function, or None for each.
    """

    def __init__(self, backend: Backend, framework: tuple[Any, Any]) -> None:
        self._backend = backend
        self._to_framework, self._from_framework = framework

    def take(self, array: Any) -> Any:
        """Return a contiguous array of the backend."""
        if type(array) is np.ndarray and self._backend.xp is np and _is_plain(array):
            return array
        if self._from_framework is not None:
            array = self._from_framework(array)
        xp = self._backend.xp
        return xp.asarray(self._backend.as_array(array, "the array of a collective"), order="C")  # 0-d stays 0-d

    def give(self, array: Any) -> Any:
        """Return an array of the backend as the function knows it."""
        return array if self._to_framework is None else self._to_framework(array)

    def place(self, out: Any, like: Any) -> Any:
        """Return the memory of ``out``, into which an array like another one is to go."""
        if out is like and out.flags.writeable:  # what ``take`` has found to be as it must
            return out
        place = out if self._from_framework is None else self._from_framework(out)
        if not self._backend.is_array(place) or place.shape != like.shape or place.dtype != like.dtype:
            got = f"{getattr(place, 'dtype', type(place).__name__)} of shape {getattr(place, 'shape', ())}"
            raise ValueError(f"cannot write to out: got {got}, expected {like.dtype} of shape {like.shape}.")
        if not place.flags.c_contiguous or not getattr(place.flags, "writeable", True):
            raise ValueError("cannot write to out: got an array that is read-only or not contiguous.")
        return place

    def to_host(self, array: Any) -> np.ndarray:
        """Return an array of the function in host memory, contiguous."""
        return self._backend.host_copy(self.take(array))

    def from_host(self, array: np.ndarray) -> Any:
        """Return an array of host memory as the function knows it."""
        return self.give(self._backend.from_host(array))

    def host_target(self, like: Any, out: Any) -> np.ndarray | None:
        """Return the host array for what comes: the memory of ``out``, one like another array, or any (None)."""
        if out is not None:
            like = self.place(out, self.take(out if like is None else like))
            if isinstance(like, np.ndarray):
                return like
        elif like is not None:
            like = self.take(like)
        return None if like is None else np.empty(like.shape, like.dtype)

    def received(self, array: np.ndarray, out: Any) -> Any:
        """Return what has come into the array of ``host_target``."""
        if out is None:
            return self.from_host(array)
        place = out if self._from_framework is None else self._from_framework(out)
        if not isinstance(place, np.ndarray):
            place[...] = self._backend.from_host(array)
        return out


def _is_plain(array: np.ndarray) -> bool:
    """Whether an array is communicated as it is."""
    return array.flags.c_contiguous and array.dtype.isnative and not array.dtype.hasobject
