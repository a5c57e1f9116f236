"""Items in the form in which they travel to the workers: pickles, and copies of their large arrays in shared memory.

An array that many items hold is copied only once. Its copy is remembered as long as the array lives, and used again if
the array still holds what was copied. To other nodes, which share no memory, an array travels with each item.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import pickle
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from synk._code.parcels import HandlePickler
from synk._pure.interrupts import deferred
from synk._pure.nested import PLAIN_TYPES
from synk._pure.tensors import recipe_of_part
from synk._wire.classes import by_word
from synk._wire.file_maps import recipe_of_map, writes_to_file
from synk._wire.memory import Segment
from synk._wire.messages import array_in_pickle, array_in_segment, fill_class_of_item
from synk.errors import SharedMemoryError

LARGE_NBYTES = 1 << 20
"""Arrays of at least this size travel through shared memory."""

_BLOCK_NBYTES = 1 << 20


class ArrayCopy:
    """The copy of one array. The array holds it, and so do items that refer to it until they are answered.

    Attributes
    ----------
    segment : Segment
    new_nbytes : int
        Its size, until the first item that refers to it takes that over into its own.
    """

    def __init__(self, segment: Segment) -> None:
        self.segment, self.new_nbytes = segment, segment.nbytes

    def take_new(self) -> int:
        """Return its size, the first time."""
        nbytes, self.new_nbytes = self.new_nbytes, 0
        return nbytes


class ArrayCopies:
    """The array copies of one runtime.

    Parameters
    ----------
    new_ids : iterator of int
        Numbers for segments.
    """

    def __init__(self, new_ids: Iterator[int]) -> None:
        self._new_ids = new_ids
        self._by_array: dict[int, tuple[weakref.ref[np.ndarray], ArrayCopy]] = {}  # by ``id()``
        self._segments: dict[int, tuple[weakref.ref[ArrayCopy], Segment]] = {}

    def copy_of(self, array: np.ndarray) -> ArrayCopy:
        """Return a copy of what a contiguous array holds now.

        Raises
        ------
        SharedMemoryError
        """
        source = _bytes_of(array)
        known, copy = self._by_array.get(id(array), (None, None))
        if known is not None and copy is not None and known() is array and _holds(copy.segment, source):
            return copy
        with deferred():  # until it is noted below, the segment has no owner
            segment = Segment.create(source.nbytes, segment_id=next(self._new_ids))
            copy = ArrayCopy(segment)
            self._segments[segment.id] = weakref.ref(copy), segment
        # Noted under its array only when it is complete. Broken off before, the copy is unknown to later items, and is
        # freed with this frame.
        segment.buffer[: source.nbytes] = source
        self._by_array[id(array)] = weakref.ref(array), copy
        return copy

    def sweep(self) -> list[Segment]:
        """Return the segments that are no longer needed: their array is gone, or has changed, and all items are."""
        for key, (array, _) in list(self._by_array.items()):
            if array() is None:
                self._by_array.pop(key, None)
        ended = [segment for copy, segment in list(self._segments.values()) if copy() is None]
        for segment in ended:
            del self._segments[segment.id]
        return ended

    def close(self) -> None:
        """Release all memory: the runtime is closed."""
        for _, segment in self._segments.values():
            segment.close()
        self._segments.clear()
        self._by_array.clear()


class ItemPickler:
    """Pickles the items of one map.

    Parameters
    ----------
    copies : ArrayCopies or None
        None where no memory is shared: large arrays lie in the pickle then.
    lacks : callable
        Whether no parcel brings what a class holds, so that the items must: one may be sent while no parcel can be.

    Attributes
    ----------
    current : dict of int to (ndarray, ArrayCopy)
        By ``id()``, arrays whose copies are known to hold what the arrays do. To be cleared when code of the user runs.
    """

    def __init__(self, copies: ArrayCopies | None, lacks: Callable[[type], bool]) -> None:
        self._copies, self._lacks = copies, lacks
        self.current: dict[int, tuple[np.ndarray, ArrayCopy]] = {}

    def dumps(self, item: Any) -> tuple[bytes, list[ArrayCopy], list[type]]:
        """Return an item pickled, the copies that it refers to, and the classes that it names.

        Raises
        ------
        TypeError
            If it holds a shared variable or a resident object.
        Exception
            Whatever pickling it raises.
        """
        if type(item) in PLAIN_TYPES:
            return pickle.dumps(item, protocol=5), [], []
        file = io.BytesIO()
        pickler = _Pickler(file, self._copies, self.current, self._lacks)
        pickler.dump(item)
        if pickler.handles:
            raise TypeError(
                f"got {type(pickler.handles[0]).__name__}, expected objects that each worker gets a copy of. Map a "
                "function that refers to it"
            )
        return file.getvalue(), pickler.used, pickler.named


class _Pickler(HandlePickler):
    def __init__(
        self,
        file: Any,
        copies: ArrayCopies | None,
        current: dict[int, tuple[np.ndarray, ArrayCopy]],
        lacks: Callable[[type], bool],
    ) -> None:
        super().__init__(file)
        self._copies, self._current, self._lacks = copies, current, lacks
        self.used: list[ArrayCopy] = []

    def reducer_override(self, obj: Any) -> Any:
        part = recipe_of_part(obj)
        if part is not None:
            return part
        is_array = type(obj) in (np.ndarray, np.memmap) and not obj.dtype.hasobject
        is_output = is_array and writes_to_file(obj)
        if is_array and (is_output or obj.nbytes >= LARGE_NBYTES):
            mapped = None if self._copies is None else recipe_of_map(obj, ("r+", "w+") if is_output else ("r",))
            if mapped is not None:
                return mapped[0], (*mapped[1], is_output)
            if is_output:  # it arrives read-only then, as all arrays below: nothing that is written is lost in silence
                obj = np.ascontiguousarray(obj)
            is_transposed = not obj.flags.c_contiguous
            if obj.flags.c_contiguous or obj.flags.f_contiguous:
                shape = obj.shape[::-1] if is_transposed else obj.shape
                if self._copies is None:
                    data = pickle.PickleBuffer(_bytes_of(obj).data.toreadonly())
                    return array_in_pickle, (data, shape, obj.dtype, is_transposed)
                with contextlib.suppress(SharedMemoryError):  # the pickle may still find room
                    _, copy = self._current.get(id(obj)) or (obj, self._copies.copy_of(obj))
                    self._current[id(obj)] = obj, copy
                    self.used.append(copy)
                    return array_in_segment, (copy.segment.id, shape, obj.dtype, is_transposed)
        elif type(obj).__module__.partition(".")[0] not in ("builtins", "numpy"):
            self._current.clear()  # the methods by which an object is pickled may change arrays
        return super().reducer_override(obj)

    def class_recipe(self, cls: type, recipe: Any) -> Any:
        return *by_word(cls, recipe, self._lacks(cls))[:-1], fill_class_of_item


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """Return the elements of a contiguous array as bytes, without a copy."""
    own = np.asarray(array if array.flags.c_contiguous else array.T)
    return own.reshape(-1).view(np.uint8)


def _holds(segment: Segment, source: np.ndarray) -> bool:
    """Whether a segment begins with these bytes. Compares blocks that stay in the cache."""
    if segment.nbytes < source.nbytes:
        return False
    held = segment.buffer[: source.nbytes]
    edges = [*range(0, source.nbytes, _BLOCK_NBYTES), source.nbytes]
    return all(np.array_equal(held[low:high], source[low:high]) for low, high in itertools.pairwise(edges))
