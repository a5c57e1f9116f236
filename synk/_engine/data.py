"""``Data``: an array in shared memory that workers read in place.

It owns one segment at a time. It sends no message: workers learn of a segment with the next call that uses it.
"""

from __future__ import annotations

import math
import numbers
import operator
import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from synk._engine.array_like import ArrayLike
from synk._pure.arrays import as_held, as_plain_array, check_shareable, keeps
from synk._pure.exact import has_own_meaning
from synk._pure.nested import check_no_list
from synk._pure.tracebacks import outlined, verb
from synk._wire.memory import Segment


class Contents(NamedTuple):
    """What a ``Data`` holds at one moment.

    It is replaced as a whole, so a thread that reads it gets memory and rows of the same moment.
    """

    segment: Segment | None
    array: np.ndarray

    @property
    def segment_id(self) -> int:
        return self.segment.id if self.segment is not None else 0


class Data(ArrayLike):
    """An array in shared memory with a fixed dtype and number of axes. Axis 0 is the rows that calls scatter.

    Made by :func:`synk.data`. It reads like a NumPy array: indexing gives views, and assignment writes to the memory
    that the workers read. Nothing is copied to the workers, which map the same memory read-only. A view that a function
    keeps in a worker follows the ``Data``, as a view does in NumPy, until it is resized or freed. In a forked child of
    the program a view stays shared with the parent; it keeps its last values when the parent drops the object.

    NumPy's operators and functions accept it as an array and return ordinary arrays. So do the methods ``astype``,
    ``copy``, ``mean``, ``std``, ``var``, ``sum``, ``min``, ``max``, ``reshape`` and ``tolist`` and the attribute ``T``;
    use ``.data`` for all others. ``torch.as_tensor(d)`` is a view, without a copy. Operations in place, such as ``d +=
    1``, ``d[...] = x`` and ``np.add(d, 1, out=d)``, wait until the submitted calls that read the array have ended.
    ``==`` compares elements, but hashing goes by identity.

    Notes
    -----
    Several threads may use one object. ``set_value``, ``set_length``, ``set_shape`` and ``free_memory`` replace the
    contents in one step: a call in another thread works on all of the old rows or on all of the new ones. Writing in
    place waits only for submitted calls. If a plain call in another thread reads the array at that time, its values are
    undefined.

    Attributes
    ----------
    data : ndarray
        The whole array, a view.
    name : str or None
    """

    # So that d.value = ..., the word of shared variables, is an error.
    __slots__ = ("__weakref__", "_contents", "_dtype", "_ndim", "_session", "_writing", "name")

    def __init__(
        self,
        session: Any,
        value: Any,
        dtype: npt.DTypeLike | None,
        shape: Sequence[int] | int | None,
        ndim: int | None,
        force_cast: bool,
        oversize: float,
        name: str | None,
    ) -> None:
        self._session = session
        # Held to replace the contents, and never during a wait for the runtime: a call that converts its arguments may
        # need this lock.
        self._writing = threading.RLock()
        self.name = name
        label = self._label
        shape = (int(shape),) if isinstance(shape, (int, np.integer)) else None if shape is None else tuple(shape)
        if value is not None:
            check_no_list(value, "make", label)
            if dtype is not None and not hasattr(value, "dtype") and not has_own_meaning(value):
                # A dtype for a list asks for NumPy's conversion, with its errors.
                with np.errstate(over="ignore"):
                    converted = np.array(value, dtype=dtype)
                value = converted if force_cast or keeps(converted, value) else value
            array = as_plain_array(value, label)
            self._dtype = check_shareable(np.dtype(dtype) if dtype is not None else array.dtype, label)
            if shape is not None and shape != array.shape:
                raise ValueError(f"cannot make {label}: got a value of shape {array.shape} and shape={shape}.")
            self._ndim = array.ndim if ndim is None else ndim
            self._contents = Contents(None, np.empty((0,) * self._ndim, self._dtype))
            self.set_value(array, force_cast=force_cast, oversize=oversize)
            return
        if dtype is None or (shape is None and ndim is None):
            raise TypeError(f"cannot make {label}: got no value, expected dtype and one of shape and ndim.")
        if shape is not None and ndim is not None and len(shape) != ndim:
            raise ValueError(f"cannot make {label}: got shape={shape} and ndim={ndim}.")
        self._dtype = check_shareable(np.dtype(dtype), label)
        self._ndim = len(shape) if shape is not None else int(ndim or 0)
        self._contents = Contents(None, np.empty((0,) * self._ndim, self._dtype))
        self.set_shape(shape if shape is not None else (0,) * self._ndim, oversize=oversize)

    # -- reading ------------------------------------------------------------------------------------------------------

    @property
    def _label(self) -> str:
        return f"Data {self.name!r}" if self.name else "Data"

    def _check_open(self) -> None:
        """Raise ClosedError if the runtime is closed. A forked child reads and writes the memory without workers."""
        if self._session.is_own_process or self._session.is_closing:
            self._session.check_open(f"use {self._label}")

    @property
    @outlined
    def data(self) -> np.ndarray:
        """A view of the shared memory, with shape ``shape``."""
        self._check_open()
        return self._await_readers().array

    @property
    def ndim(self) -> int:
        return self._ndim

    def _operand(self) -> np.ndarray:
        self._check_open()
        return self._contents.array

    @property
    def shape(self) -> tuple[int, ...]:
        return self._contents.array.shape

    @property
    def dtype(self) -> np.dtype:
        return self._dtype

    @property
    def size(self) -> int:
        return self._contents.array.size

    @property
    def nbytes(self) -> int:
        return self._contents.array.nbytes

    @property
    def alloc_size(self) -> int:
        """How many elements fit without a new allocation."""
        segment = self._contents.segment
        return segment.nbytes // self._dtype.itemsize if segment is not None else 0

    def __len__(self) -> int:
        if self._ndim == 0:
            raise TypeError(f"len() of {self._label} with no axes")
        return len(self._contents.array)

    @outlined
    def __getitem__(self, index: Any) -> Any:
        return self.data[index]

    @outlined
    def __setitem__(self, index: Any, value: Any) -> None:
        self.data[index] = value

    @outlined
    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        own = self.data
        if copy:
            return np.array(own, dtype=dtype)
        array = np.asarray(own, dtype=dtype)
        if copy is False and array is not own:
            raise ValueError(f"cannot view {self._label} as {np.dtype(dtype)} without a copy: it holds {self._dtype}.")
        return array

    def __dlpack__(self, **options: Any) -> Any:
        """Share the memory with another library, as ``torch.as_tensor(data)`` and ``torch.from_dlpack(data)`` do.

        They return a view, like ``data.data``.
        """
        return self.data.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._contents.array.__dlpack_device__()

    def __iter__(self) -> Any:
        return iter(self.data)

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return f"<synk.Data{name} shape={self.shape} dtype={self._dtype}>"

    def __reduce__(self) -> Any:
        raise TypeError(
            f"cannot pickle {self._label}: it lives in shared memory. Use its .data, which is copied, or pass it as a "
            "separate argument to a synk function, which reads it in place."
        )

    # -- writing ------------------------------------------------------------------------------------------------------

    @verb
    def set_value(self, value: Any, *, force_cast: bool = False, oversize: float = 1.0) -> None:
        """Replace the whole contents.

        The new contents are written over the old ones if they fit there and no call runs in another thread. Otherwise
        they get new memory. Waits for submitted calls that read the old contents.

        Parameters
        ----------
        value : array-like
            With the same number of axes.
        force_cast : bool
            Whether to allow casts that can lose information.
        oversize : float
            How much memory to take when it must grow, as a factor of 1 to 2.

        Raises
        ------
        TypeError
            If the dtype differs and the cast could lose information, or does not hold the values of a list.
        ValueError
            If the number of axes differs.
        SharedMemoryError
            If there is not enough memory. The old contents stay.
        """
        self._session.check_open(f"set {self._label}")
        check_no_list(value, "set", self._label)
        array = as_plain_array(value if force_cast else as_held(value, self._dtype, self._label), self._label)
        if array.ndim != self._ndim:
            raise ValueError(f"cannot set {self._label}: got {array.ndim} axes, expected {self._ndim}.")
        if not force_cast and not np.can_cast(array.dtype, self._dtype, "safe"):
            raise TypeError(
                f"cannot set {self._label}: got dtype {array.dtype}, expected {self._dtype}. "
                "Convert it with astype, or pass force_cast=True."
            )
        _check_oversize(oversize, self._label)
        self._await_readers()
        with self._writing, np.errstate(invalid="ignore" if force_cast else "warn"):
            if not self._overwrite(array):
                contents = self._allocated(array.shape, oversize)
                np.copyto(contents.array, array, casting="unsafe")
                self._replace(contents)

    @verb
    def set_length(self, length: int, *, oversize: float = 1.0) -> None:
        """Change the number of rows. The rows that fit are kept; new rows hold zeros or old contents."""
        if self._ndim == 0:
            raise ValueError(f"cannot set the length of {self._label}: it has no axes.")
        with self._writing:
            self.set_shape((operator.index(length), *self.shape[1:]), oversize=oversize)

    @verb
    def set_shape(self, shape: Sequence[int] | int, *, oversize: float = 1.0) -> None:
        """Change the shape. If only axis 0 changes, rows are kept; otherwise the contents are undefined."""
        self._session.check_open(f"resize {self._label}")
        shape = (shape,) if isinstance(shape, (int, np.integer)) else shape
        shape = tuple(operator.index(length) for length in shape)
        if len(shape) != self._ndim:
            raise ValueError(f"cannot resize {self._label}: got shape {shape}, expected {self._ndim} axes.")
        if any(length < 0 for length in shape):
            raise ValueError(f"cannot resize {self._label}: got shape {shape}, expected lengths of zero or more.")
        _check_oversize(oversize, self._label)
        with self._writing:
            self._resize(shape, oversize)

    @verb
    def free_memory(self) -> None:
        """Give the memory back. The length becomes 0. Existing views keep their memory until they are gone.

        Raises
        ------
        ValueError
            If the array has no axes.
        """
        self._session.check_open(f"free {self._label}")
        if self._ndim == 0:
            raise ValueError(f"cannot free {self._label}: it has no axes, so it cannot get a length of 0. Use del.")
        with self._writing:
            self._replace(Contents(None, np.empty((0, *self.shape[1:]), self._dtype)))

    def _resize(self, shape: tuple[int, ...], oversize: float) -> None:
        segment, array = self._contents
        nbytes = self._nbytes_of(shape)
        if nbytes == 0 or (segment is not None and nbytes <= segment.nbytes):
            self._contents = self._placed(segment, shape)
            return
        contents = self._allocated(shape, oversize)
        if shape and array.size and shape[1:] == array.shape[1:]:
            rows = min(len(array), shape[0])
            contents.array[:rows] = array[:rows]
        self._replace(contents)

    def _overwrite(self, value: np.ndarray) -> bool:
        """Write ``value`` over the old contents. Return False if it does not fit there, or a call may read them."""
        segment, before = self._contents.segment, self._contents

        def overwrite() -> None:
            if not self._session.is_read(segment):
                contents = self._placed(segment, value.shape)
                np.copyto(contents.array, value, casting="unsafe")
                self._contents = contents

        if segment is not None and self._nbytes_of(value.shape) <= segment.nbytes:
            self._session.if_free(overwrite)
        return self._contents is not before

    def _nbytes_of(self, shape: tuple[int, ...]) -> int:
        return math.prod(shape) * self._dtype.itemsize

    def _placed(self, segment: Segment | None, shape: tuple[int, ...]) -> Contents:
        """Return contents of ``shape`` in ``segment``, which may be None if there are no bytes."""
        if segment is None or self._nbytes_of(shape) == 0:
            return Contents(segment, np.empty(shape, self._dtype))
        return Contents(segment, segment.view(0, shape, self._dtype))

    def _allocated(self, shape: tuple[int, ...], oversize: float) -> Contents:
        nbytes = self._nbytes_of(shape)
        return self._placed(self._session.memory.arenas.create(int(nbytes * oversize)) if nbytes else None, shape)

    def _replace(self, contents: Contents) -> None:
        """Replace the contents. The old memory is freed when no call reads it any more."""
        # A call that was bound before holds the old segment by its plan, and goes on reading the old rows.
        old, self._contents = self._contents, contents
        if old.segment is not None:
            self._session.release(old.segment)

    def __del__(self) -> None:
        # Finalizers run anywhere, even in the middle of a call, so the segment is only queued.
        session = getattr(self, "_session", None)
        contents = getattr(self, "_contents", None)
        if session is not None and contents is not None and contents.segment is not None and not session.is_closed:
            session.memory.released.append(contents.segment)

    def _await_readers(self) -> Contents:
        """Wait for submitted calls that read this array, which must not see a change. Return what to write to."""
        while True:
            contents = self._contents
            if contents.segment is not None:
                self._session.await_readers(contents.segment)
            if self._contents is contents:
                return contents


def _check_oversize(oversize: Any, label: str) -> None:
    if not isinstance(oversize, numbers.Real) or not 1.0 <= float(oversize) <= 2.0:
        raise ValueError(f"cannot resize {label}: got oversize={oversize!r}, expected 1.0 to 2.0.")
