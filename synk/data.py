"""``Data``: an array in shared memory that workers read in place.

Owns one segment at a time. Makes no message: workers learn of a segment with the next call that uses it.
"""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from synk._arrays import as_plain_array, check_shareable
from synk._interrupts import deferred
from synk._memory import Segment
from synk.errors import ClosedError

if TYPE_CHECKING:
    from synk.runtime import Runtime


class Data:
    """An array in shared memory, of fixed dtype and number of axes; axis 0 is the rows that calls scatter.

    Made by :func:`synk.data`. Reads like a NumPy array: indexing gives views, assignment writes through to where the
    workers read. Nothing is copied to the workers, who map the same memory read-only.

    Attributes
    ----------
    data : ndarray
        The whole array, a view.
    minibatch : bool
        Whether the object holds only the rows of the current batch, in its order: row j belongs to the j-th row that
        ``batch`` picks; see :class:`synk.Function`.
    name : str or None
    """

    def __init__(
        self,
        runtime: Runtime,
        value: Any = None,
        *,
        dtype: npt.DTypeLike | None = None,
        shape: Sequence[int] | int | None = None,
        ndim: int | None = None,
        minibatch: bool = False,
        force_cast: bool = False,
        oversize: float = 1.0,
        name: str | None = None,
    ) -> None:
        self._runtime = runtime
        self._segment: Segment | None = None
        self.name = name
        self.minibatch = bool(minibatch)
        label = self._label
        shape = (int(shape),) if isinstance(shape, (int, np.integer)) else None if shape is None else tuple(shape)
        if value is not None:
            array = as_plain_array(value, label)
            self._dtype = check_shareable(np.dtype(dtype) if dtype is not None else array.dtype, label)
            if shape is not None and shape != array.shape:
                raise ValueError(f"cannot make {label}: got a value of shape {array.shape} and shape={shape}.")
            self._ndim = array.ndim if ndim is None else ndim
            self._array = np.empty((0,) * self._ndim, self._dtype)
            if dtype is not None and not hasattr(value, "dtype"):
                # Whoever names a dtype for a list of Python numbers means NumPy's conversion, with its errors.
                array = np.array(value, dtype=self._dtype)
            self.set_value(array, force_cast=force_cast, oversize=oversize)
            return
        if dtype is None or (shape is None and ndim is None):
            raise TypeError(f"cannot make {label}: got no value, expected dtype and one of shape and ndim.")
        if shape is not None and ndim is not None and len(shape) != ndim:
            raise ValueError(f"cannot make {label}: got shape={shape} and ndim={ndim}.")
        self._dtype = check_shareable(np.dtype(dtype), label)
        self._ndim = len(shape) if shape is not None else int(ndim or 0)
        self._array = np.empty((0,) * self._ndim, self._dtype)
        self.set_shape(shape if shape is not None else (0,) * self._ndim, oversize=oversize)

    @property
    def _label(self) -> str:
        return f"Data {self.name!r}" if self.name else "Data"

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def data(self) -> np.ndarray:
        """The array, a view of the shared memory; shape as ``shape``."""
        self._runtime.check_open(f"use {self._label}")
        self._await_readers()
        return self._array

    @property
    def shape(self) -> tuple[int, ...]:
        return self._array.shape

    @property
    def dtype(self) -> np.dtype:
        return self._dtype

    @property
    def ndim(self) -> int:
        return self._ndim

    @property
    def size(self) -> int:
        return self._array.size

    @property
    def nbytes(self) -> int:
        return self._array.nbytes

    @property
    def alloc_size(self) -> int:
        """How many elements fit without a new allocation."""
        return self._segment.nbytes // self._dtype.itemsize if self._segment is not None else 0

    def __len__(self) -> int:
        if self._ndim == 0:
            raise TypeError(f"len() of {self._label} with no axes")
        return len(self._array)

    def __getitem__(self, index: Any) -> Any:
        return self.data[index]

    def __setitem__(self, index: Any, value: Any) -> None:
        self.data[index] = value

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        if copy:
            return np.array(self.data, dtype=dtype)
        array = np.asarray(self.data, dtype=dtype)
        if copy is False and array is not self._array:
            raise ValueError(f"cannot view {self._label} as {np.dtype(dtype)} without a copy: it holds {self._dtype}.")
        return array

    def __iter__(self) -> Any:
        return iter(self.data)

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"<synk.Data{name} shape={self.shape} dtype={self._dtype}{' minibatch' if self.minibatch else ''}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"cannot pickle {self._label}: it lives in shared memory. Pass it as an argument of the function, or close "
            "over its .data[...] copy."
        )

    # -- writing ------------------------------------------------------------------------------------------------------

    def set_value(self, value: Any, *, force_cast: bool = False, oversize: float = 1.0) -> None:
        """Replace the whole contents, reallocating where the value does not fit.

        Parameters
        ----------
        value : array-like
            Of the same number of axes.
        force_cast : bool
            Allow casts that can lose information.
        oversize : float
            Memory to take when it must grow, as a factor of 1 or more.

        Raises
        ------
        TypeError
            If the dtype differs and casting could lose information.
        ValueError
            If the number of axes differs.
        SharedMemoryError
            If the memory does not suffice; the old contents stay.
        """
        self._runtime.check_open(f"set {self._label}")
        array = as_plain_array(value, self._label)
        if array.ndim != self._ndim:
            raise ValueError(f"cannot set {self._label}: got {array.ndim} axes, expected {self._ndim}.")
        if not force_cast and not np.can_cast(array.dtype, self._dtype, "safe"):
            raise TypeError(
                f"cannot set {self._label}: got dtype {array.dtype}, expected {self._dtype}. "
                "Convert it with astype, or pass force_cast=True."
            )
        self._await_readers()
        self._resize(array.shape, oversize, keep=False)
        with np.errstate(invalid="ignore" if force_cast else "warn"):
            np.copyto(self._array, array, casting="unsafe")

    def set_length(self, length: int, *, oversize: float = 1.0) -> None:
        """Change the number of rows; the rows that fit are kept, new ones hold zeros or old contents."""
        if self._ndim == 0:
            raise ValueError(f"cannot set the length of {self._label}: it has no axes.")
        self.set_shape((operator.index(length), *self.shape[1:]), oversize=oversize)

    def set_shape(self, shape: Sequence[int] | int, *, oversize: float = 1.0) -> None:
        """Change the shape; rows are kept where only axis 0 changes, otherwise the contents are undefined."""
        self._runtime.check_open(f"resize {self._label}")
        shape = (shape,) if isinstance(shape, (int, np.integer)) else shape
        shape = tuple(operator.index(length) for length in shape)
        if len(shape) != self._ndim:
            raise ValueError(f"cannot resize {self._label}: got shape {shape}, expected {self._ndim} axes.")
        if any(length < 0 for length in shape):
            raise ValueError(f"cannot resize {self._label}: got shape {shape}, expected lengths of zero or more.")
        self._resize(shape, oversize, keep=shape[1:] == self.shape[1:])

    def free_memory(self) -> None:
        """Give the memory back; the length becomes 0. Views that exist keep theirs until they are gone.

        Raises
        ------
        ValueError
            If it has no axes.
        """
        self._runtime.check_open(f"free {self._label}")
        if self._ndim == 0:
            raise ValueError(f"cannot free {self._label}: it has no axes, so it cannot get a length of 0. Use del.")
        self._array = np.empty((0, *self.shape[1:]), self._dtype)
        self._drop_segment()

    def _resize(self, shape: tuple[int, ...], oversize: float, *, keep: bool) -> None:
        _check_oversize(oversize, self._label)
        count = 1
        for length in shape:
            count *= length
        nbytes = count * self._dtype.itemsize
        if nbytes == 0:
            self._array = np.empty(shape, self._dtype)
            return
        if self._segment is None or nbytes > self._segment.nbytes:
            segment = Segment.create(int(nbytes * oversize))
            array = segment.view(0, shape, self._dtype)
            if keep and self._array.size:
                rows = min(len(self._array), shape[0])
                array[:rows] = self._array[:rows]
            with deferred():
                old, self._segment, self._array = self._segment, segment, array
                if old is not None:
                    self._runtime.release(old)
            return
        self._array = self._segment.view(0, shape, self._dtype)

    def _await_readers(self) -> None:
        """Wait for submitted calls that read this: they must see it as it was."""
        if self._segment is not None:
            self._runtime.queue.release(self._segment)

    def _drop_segment(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            self._runtime.release(segment)

    def __del__(self) -> None:
        # Finalizers run anywhere, also in the middle of a call: the segment is only queued.
        runtime = getattr(self, "_runtime", None)
        segment = getattr(self, "_segment", None)
        if runtime is not None and segment is not None and not runtime.is_closed:
            runtime._released.append(segment)


def _check_oversize(oversize: Any, label: str) -> None:
    if not isinstance(oversize, numbers.Real) or not 1.0 <= float(oversize) <= 2.0:
        raise ValueError(f"cannot resize {label}: got oversize={oversize!r}, expected 1.0 to 2.0.")


def check_same_runtime(data: Data, runtime: Runtime, what: str) -> None:
    """Raise where ``data`` belongs to another runtime."""
    if data._runtime is not runtime:
        if data._runtime.is_closed:
            raise ClosedError(f"cannot pass {what}: its runtime was closed. Make it again with synk.data(...).")
        raise ValueError(f"cannot pass {what}: it belongs to another runtime. Make it with this runtime's data(...).")
