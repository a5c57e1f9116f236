"""The collectives of a rank by NCCL, with NumPy's rules.

NCCL drops NaN in min and max, sums 16-bit floats without a wider accumulator, and has neither weights nor 16-bit
integers nor products of complex numbers. This file makes up for that, on the device. NCCL does not compare what the
ranks ask for either. So they agree in host memory before each collective of a function.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from synk._pure.dtypes import dtype_name
from synk._pure.ops import REDUCTIONS
from synk.communicators._collectives import Collectives
from synk.communicators._schedule import Steps
from synk.communicators._shm import ShmCommunicator
from synk.communicators._user_arrays import UserArrays
from synk.cuda._cupy import CupyBackend
from synk.cuda._group import WorkerGroup
from synk.cuda._nccl import Buffer, NcclCommunicator

# The dtypes that NCCL lacks, or in which it would round too much, and the dtypes in which they are reduced instead.
WIDENED = {"float16": "float32", "bfloat16": "float32", "int16": "int32", "uint16": "uint32"}

Item = tuple[Any, str, float | None]


@dataclass
class Beside:
    """The result of a collective on a stream of its own. It is valid once the event is done."""

    result: Any
    event: Any


def parts_of(xp: Any, array: Any, op: str, weight: float | None) -> list[tuple[Any, str]]:
    """Return what NCCL can reduce of one reduction, as arrays and ops. ``whole_of`` makes the result of them."""
    array = array.astype(WIDENED.get(array.dtype.name, array.dtype), copy=False)
    if weight is not None:
        array, op = array * array.dtype.type(weight), "sum"
    if op in ("min", "max") and array.dtype.kind == "f":
        return [(array, op), (xp.isnan(array).astype(np.uint8), "max")]
    return [(array, op)]


def whole_of(xp: Any, reduced: Sequence[Any], dtype: Any) -> Any:
    array = reduced[0]
    if len(reduced) > 1:
        array = xp.where(reduced[1].astype(bool), array.dtype.type(np.nan), array)
    return array.astype(dtype, copy=False)


class NcclCollectives(Collectives):
    """The collectives between all ranks of a group, for the program or for a function.

    Parameters
    ----------
    group : WorkerGroup
        Which this rank has joined.
    backend : CupyBackend
    framework : tuple
        Of the function; see ``UserArrays``.
    host : ShmCommunicator, optional
        By which the ranks of a call agree, and for messages and rows. None for what the program asks for: it has
        compared what the ranks do.
    """

    def __init__(
        self,
        group: WorkerGroup,
        backend: CupyBackend,
        framework: tuple[Any, Any] = (None, None),
        host: ShmCommunicator | None = None,
    ) -> None:
        assert group.communicator is not None
        super().__init__(host, UserArrays(backend, framework), group.world_size)
        self._communicator: NcclCommunicator = group.communicator
        self.guard: Callable[[], AbstractContextManager[None]] = group.giving_up_on_failure
        """A context for the body in which the other ranks wait for this one. It tells them if the body fails."""
        self._device = backend
        self._xp = backend.xp
        self._agree = None if host is None else host.agree_steps
        self._beside: deque[tuple[Any, Any, Any]] = deque()  # events, and the arrays that a stream uses until then
        self._num_launched = 0  # on the function's own stream

    # -- of a function -------------------------------------------------------------------------------------------------

    def reduce(
        self, kind: str, array: Any, op: str, weight: float | None, root: int, out: Any, is_started: bool
    ) -> Steps:
        """With ``is_started`` and ``out``, an ``all_reduce`` runs on a stream of its own if NCCL can do all of it.

        Then nothing is allocated there. It begins after the work that the function has queued by now.
        """
        memory = self.arrays.memory(out)
        if kind != "all_reduce" or not is_started or not isinstance(memory, self._xp.ndarray):
            return (yield from super().reduce(kind, array, op, weight, root, out, is_started))
        send = self.arrays.apart(self.arrays.take(memory if array is out else array), memory, is_in_place=True)
        self._check(op, send, weight)
        place = self._place(memory, send.shape, send.dtype)
        if not _is_taken_whole(send, op):
            result = yield from self._reduced(kind, send, send.shape, op, weight, place)
            return self._given(result, place, memory, out)
        mark, num_launched = self._device.mark(), self._num_launched
        yield from self.agree_steps(kind, dtype_name(send.dtype), send.size, op, weight=weight)
        if weight is not None:
            place[...] = send * send.dtype.type(weight)
            send, op = place, "sum"
        if weight is not None or self._num_launched != num_launched:  # begin also after what was queued since
            mark = self._device.mark()
        reduce = functools.partial(self._communicator.all_reduce, self._buffer(send), self._buffer(place), op)
        with self.guard():
            event = self._device.communicate(mark, lambda stream: reduce(stream=stream))
        # The stream reads and writes these arrays until the event is done, so they must not be freed before.
        self._beside.append((event, send, place))
        return Beside(out, event)

    def agree_steps(self, *args: Any, **options: Any) -> Steps:
        assert self._agree is not None
        yield from self._agree(*args, **options)

    def _reduced(
        self, kind: str, send: Any, shape: tuple[int, ...], op: str, weight: float | None, place: Any, *root: int
    ) -> Steps:
        count = send.size // self._size if kind == "reduce_scatter" else send.size
        yield from self.agree_steps(kind, dtype_name(send.dtype), count, op, *root, weight=weight)
        with self.guard():
            result = self._reduce(kind, [(send.reshape(-1), op, weight)], place, *root)[0].reshape(shape)
        is_there = place is not None and self._device.address(result) == self._device.address(place)
        return place if is_there else result

    def _copied(self, kind: str, send: Any, shape: tuple[int, ...], place: Any, root: int) -> Steps:
        yield from self.agree_steps(kind, dtype_name(send.dtype), send.size, peer=root)
        with self.guard():
            return (self.gather_all([send], place) if root < 0 else self.broadcast_all([send], root, place))[0]

    def joined(self, value: Any) -> Any:
        if type(value) is not Beside:
            return value
        self._device.join(value.event)
        while any(event is value.event for event, _, _ in self._beside):
            self._beside.popleft()  # the stream finishes them in this order
        return value.result

    def is_there(self, value: Any) -> bool:
        return type(value) is not Beside or self._device.is_done(value.event)

    def join_communication(self) -> None:
        self._device.join_communication()
        self._beside.clear()

    def _check(self, op: str, array: Any, weight: float | None) -> None:
        super()._check(op, array, weight)
        REDUCTIONS[op].check(array.dtype, "the array of a collective")

    # -- several arrays of the backend at once ------------------------------------------------------------------------

    def _buffer(self, array: Any) -> Buffer:
        return Buffer(self._device.address(array), int(array.size), dtype_name(array.dtype))

    def _launch(self, kind: str, *args: Any) -> None:
        self.join_communication()  # a communicator must run its operations one after the other
        self._num_launched += 1
        getattr(self._communicator, kind)(*args, stream=self._device.stream_handle)

    def reduce_all(self, items: Sequence[Item]) -> list[Any]:
        """Reduce contiguous arrays of all ranks, each ``(array, op, weight)``. Return the results."""
        return self._reduce("all_reduce", items)

    def reduce_blocks(self, items: Sequence[Item]) -> list[Any]:
        """Reduce flat arrays, each ``(array, op, weight)``, and return this rank's block of each.

        If the number of elements is not a multiple of the number of ranks, the end of the last block is meaningless.
        """
        return self._reduce("reduce_scatter", [(self._padded(array), op, weight) for array, op, weight in items])

    def gather_all(self, arrays: Sequence[Any], place: Any = None) -> list[Any]:
        """Return contiguous arrays of all ranks stacked, shape ``(size, *shape)``; ``place``: where one result goes."""
        outs = [place] if place is not None else [self._xp.empty((self._size, *a.shape), a.dtype) for a in arrays]
        with self._communicator.group():
            for array, out in zip(arrays, outs):
                self._launch("all_gather", self._buffer(array), self._buffer(out))
        return outs

    def broadcast_all(self, arrays: Sequence[Any], root: int, place: Any = None) -> list[Any]:
        """Return copies of rank ``root``'s contiguous arrays; ``place``: where a single one goes."""
        outs = [place] if place is not None else [self._xp.empty(array.shape, array.dtype) for array in arrays]
        for array, out in zip(arrays, outs):
            if self._communicator.rank == root and out is not array:
                out[...] = array
        with self._communicator.group():
            for out in outs:
                self._launch("broadcast", self._buffer(out), root)
        return outs

    def _reduce(self, kind: str, items: Sequence[Item], place: Any = None, *root: int) -> list[Any]:
        """Reduce all items in one launch. A single result goes to ``place`` if NCCL can write it there."""
        num_blocks = self._size if kind == "reduce_scatter" else 1
        products = {k: self._product(a, num_blocks) for k, (a, op, _) in enumerate(items) if _is_complex(a, op)}
        parts = [[] if k in products else parts_of(self._xp, *item) for k, item in enumerate(items)]
        outs = [[self._xp.empty(a.size // num_blocks, a.dtype) for a, _ in each] for each in parts]
        if place is not None and [array.dtype for array, _ in parts[0]] == [place.dtype]:
            outs = [[place.reshape(-1)]]
        with self._communicator.group():
            for each, targets in zip(parts, outs):
                for (array, op), target in zip(each, targets):
                    self._launch(kind, self._buffer(array), self._buffer(target), op, *root)
        results = []
        for k, (array, _, _) in enumerate(items):
            flat = products[k] if k in products else whole_of(self._xp, outs[k], array.dtype)
            results.append(flat if num_blocks > 1 else flat.reshape(array.shape))
        return results

    def _product(self, array: Any, num_blocks: int) -> Any:
        """Return the product of complex arrays of all ranks, or this rank's block of it. NCCL lacks it."""
        (stack,) = self.gather_all([array.reshape(-1)])
        product = functools.reduce(lambda x, y: x * y, stack)
        return product if num_blocks == 1 else product.reshape(num_blocks, -1)[self._communicator.rank]

    def _padded(self, array: Any) -> Any:
        length = -(-array.size // self._size) * self._size
        if length == array.size:
            return array
        padded = self._xp.zeros(length, dtype=array.dtype)
        padded[: array.size] = array
        return padded


def _is_complex(array: Any, op: str) -> bool:
    return op == "prod" and array.dtype.kind == "c"


def _is_taken_whole(array: Any, op: str) -> bool:
    """Whether NCCL reduces such an array as it is."""
    is_of_nan = op in ("min", "max") and array.dtype.kind == "f"
    return not (is_of_nan or array.dtype.kind == "c" or array.dtype.name in WIDENED)
