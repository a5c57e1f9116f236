"""Collectives on a rank: from a user's arrays to a communicator of raw buffers, with NumPy's rules.

NCCL drops NaN in min and max, sums 16-bit floats without a wider accumulator, and has neither 16-bit integers nor
products of complex numbers. This file makes up for that, on the device. NCCL does not compare what the ranks ask for
either. So they agree in host memory (``agree``) before each of its collectives.
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

from synk._pure.dtypes import dtype_name
from synk._pure.ops import REDUCTIONS
from synk._worker.comm.messages import Messages
from synk._worker.comm.reduction import WIDENED, SplitReduction
from synk._worker.comm.rows import RowCollectives
from synk._worker.comm.user_arrays import UserArrays
from synk.backends import BufferBackend, NcclBackend
from synk.communicators import Buffer, Communicator
from synk.communicators._checks import check_reduction
from synk.communicators._host import HostCommunicator
from synk.communicators._schedule import Steps

Agree = Callable[..., Iterable[None]]


@dataclass
class Beside:
    """The result of a collective on a stream of its own. It is valid once the event is done."""

    result: Any
    event: Any


class Collectives:
    """The collectives of a rank, on a device or on the host.

    Parameters
    ----------
    communicator : Communicator
        For reductions and copies among all ranks.
    backend : BufferBackend
        Of the arrays that the communicator gets.
    size : int
        Ranks that take part.
    arrays : UserArrays
        Takes arrays from the function that runs, and gives it arrays.
    agree : callable
        Steps in which the ranks agree before each collective of a function: ``ShmCommunicator.agree_steps``, if the
        communicator does not compare what the ranks ask for itself.
    guard : callable
        Returns a context for the body in which the other ranks wait for this one. It tells them if the body fails.
    host : HostCommunicator, optional
        For messages between two ranks, and for the order of collectives in flight. None for collectives of the master.
    """

    def __init__(
        self,
        communicator: Communicator,
        backend: BufferBackend,
        size: int,
        arrays: UserArrays,
        agree: Agree = lambda *args, **kwargs: (),
        guard: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        host: HostCommunicator | None = None,
    ) -> None:
        self._communicator = communicator
        self._backend = backend
        self._xp = backend.xp
        self._size = size
        self.arrays = arrays
        self._agree = agree
        self.guard = guard
        self._shared = host
        self._messages = None if host is None else Messages(host, self.arrays)
        self._rows = None if host is None else RowCollectives(host, self.arrays)
        self._stream = backend.stream_handle
        self._capabilities = communicator.capabilities()
        self._is_exact = self._capabilities.nan_propagates  # all but NCCL
        self._beside: deque[tuple[Any, Any, Any]] = deque()  # events, and the arrays that a stream uses until then
        self._num_launched = 0  # on the function's own stream

    @property
    def host(self) -> HostCommunicator:
        """The communicator of host memory in which the current call has begun."""
        assert self._shared is not None
        return self._shared

    @property
    def messages(self) -> Messages:
        """The messages of the current call."""
        assert self._messages is not None
        return self._messages

    @property
    def rows(self) -> RowCollectives:
        """The collectives of rows of the current call."""
        assert self._rows is not None
        return self._rows

    @property
    def _device(self) -> NcclBackend:
        return cast(NcclBackend, self._backend)

    # -- of a function -------------------------------------------------------------------------------------------------

    def _buffer(self, array: Any) -> Buffer:
        return Buffer(self._backend.address(array), int(array.size), dtype_name(array.dtype))

    def all_reduce(self, array: Any, op: str, weight: float | None, out: Any, is_started: bool = False) -> Steps:
        """Take the steps of an ``all_reduce``. Here and below, everything that can be refused is refused first.

        With ``is_started`` and ``out``, it runs on a stream of its own if the communicator can do all of it, because
        then nothing is allocated. It begins after the work that the function has queued by now.
        """
        send = self.arrays.apart(self.arrays.take(array), out, is_in_place=True)
        self._check(op, send, weight)
        place = self._place(out, send.shape, send.dtype)
        runs_beside = is_started and place is not None and self._takes_as_it_is(send, op, weight)
        mark = self._device.mark() if runs_beside else None
        num_launched = self._num_launched
        yield from self._agree("all_reduce", dtype_name(send.dtype), send.size, op, weight=weight)
        if runs_beside:
            reduce = functools.partial(
                self._communicator.all_reduce, self._buffer(send), self._buffer(place), op, weight=weight
            )
            if self._num_launched != num_launched:  # it must also begin after the collectives launched since
                mark = self._device.mark()
            with self.guard():
                event = self._device.communicate(mark, lambda stream: reduce(stream=stream))
            # The stream reads and writes these arrays until the event is done, so they must not be freed before.
            self._beside.append((event, send, place))
            return Beside(out, event)
        with self.guard():
            result = (yield from self.reduce_steps([(send, op, weight)], place=place))[0]
        return self._given(result, place, out)

    def reduce(self, array: Any, op: str, root: int, weight: float | None, out: Any) -> Steps:
        send, root = self.arrays.take(array), self.host.member("reduce", "root", root)
        send = self.arrays.apart(send, out, is_in_place=True)
        self._check(op, send, weight)
        is_root = self._communicator.rank == root
        place = self._place(out, send.shape, send.dtype) if is_root else None
        yield from self._agree("reduce", dtype_name(send.dtype), send.size, op, root, weight=weight)
        with self.guard():
            result = (yield from self.reduce_steps([(send, op, weight)], root, place=place))[0]
        return self._given(result, place, out) if is_root else None

    def broadcast(self, array: Any, root: int, out: Any) -> Steps:
        send, root = self.arrays.take(array), self.host.member("broadcast", "root", root)
        place = self._place(out, send.shape, send.dtype)
        yield from self._agree("broadcast", dtype_name(send.dtype), send.size, peer=root)
        with self.guard():
            result = (yield from self.broadcast_steps([send], root, place=place))[0]
        return self._given(result, place, out)

    def all_gather(self, array: Any, out: Any) -> Steps:
        send = self.arrays.apart(self.arrays.take(array), out)
        place = self._place(out, (self._size, *send.shape), send.dtype)
        yield from self._agree("all_gather", dtype_name(send.dtype), send.size)
        with self.guard():
            result = (yield from self.gather_steps([send], place=place))[0]
        return self._given(result, place, out)

    def reduce_scatter(self, array: Any, op: str, weight: float | None, out: Any) -> Steps:
        send = self.arrays.apart(self.arrays.take(array), out)
        self._check(op, send, weight)
        if send.ndim == 0 or len(send) % self._size:
            raise ValueError(
                f"cannot reduce_scatter: got shape {send.shape}, expected a multiple of {self._size} rows (the ranks "
                "of the call)."
            )
        shape = (len(send) // self._size, *send.shape[1:])
        place = self._place(out, shape, send.dtype)
        yield from self._agree("reduce_scatter", dtype_name(send.dtype), send.size // self._size, op, weight=weight)
        with self.guard():
            block = (yield from self.block_steps([(send.reshape(-1), op, weight)], place=place))[0]
        return self._given(block.reshape(shape), place, out)

    def _place(self, out: Any, shape: tuple[int, ...], dtype: Any) -> Any:
        return None if out is None else self.arrays.place(out, shape, dtype)

    def _given(self, result: Any, place: Any, out: Any) -> Any:
        """Return a result in the function's framework, or in ``out`` if the function gave one."""
        if place is None:
            return self.arrays.give(result)
        if self._backend.address(result) != self._backend.address(place):  # the communicator could not write it there
            place[...] = result
        return self.arrays.filled(place, out)

    def joined(self, value: Any) -> Any:
        """Return the result of a collective that was started. Later work on the function's stream may use it."""
        if type(value) is not Beside:
            return value
        self._device.join(value.event)
        while any(event is value.event for event, _, _ in self._beside):
            self._beside.popleft()  # the stream finishes them in this order
        return value.result

    def is_there(self, value: Any) -> bool:
        """Whether the device has finished a collective that was started."""
        return type(value) is not Beside or bool(value.event.done)

    def join_communication(self) -> None:
        """Let later work use all collectives that were started. The function has returned, or another one begins."""
        if not self._is_exact:
            self._device.join_communication()
            self._beside.clear()

    def _check(self, op: str, array: Any, weight: float | None) -> None:
        """Refuse an op that the dtype does not have, before the ranks agree on it."""
        if not self._is_exact:
            REDUCTIONS[op].check(array.dtype, "the array of a collective")
        check_reduction(op, dtype_name(array.dtype), weight)

    def _takes_as_it_is(self, array: Any, op: str, weight: float | None) -> bool:
        """Whether NCCL itself reduces such an array, without the extra steps of ``SplitReduction``."""
        return not (
            self._is_exact
            or array.dtype.kind == "c"
            or array.dtype.name in WIDENED
            or (op in ("min", "max") and array.dtype.kind == "f")
            or (weight is not None and not self._capabilities.has_weighted_avg)
        )

    def _steps(self, kind: str, *args: Any, **options: Any) -> Steps:
        """Take the steps of an operation of the communicator. NCCL has none: it only queues work on the stream."""
        steps = getattr(self._communicator, f"{kind}_steps", None)
        if steps is None:
            self.join_communication()  # a communicator must run its operations one after the other
            self._num_launched += 1
            getattr(self._communicator, kind)(*args, stream=self._stream, **options)
        else:
            yield from steps(*args, **options)

    # -- several arrays of the backend at once ------------------------------------------------------------------------

    def reduce_all(self, items: Sequence[tuple[Any, str, float | None]]) -> list[Any]:
        """Reduce contiguous arrays of all ranks, each ``(array, op, weight)``. Return the results."""
        return _taken(self.reduce_steps(items))

    def reduce_blocks(self, items: Sequence[tuple[Any, str, float | None]]) -> list[Any]:
        """Reduce flat arrays, each ``(array, op, weight)``, and return this rank's block of each.

        If the number of elements is not a multiple of the number of ranks, the end of the last block is meaningless.
        """
        return _taken(self.block_steps(items))

    def gather_all(self, arrays: Sequence[Any]) -> list[Any]:
        """Return contiguous arrays of all ranks stacked, shape ``(size, *shape)``."""
        return _taken(self.gather_steps(arrays))

    def broadcast_all(self, arrays: Sequence[Any], root: int) -> list[Any]:
        """Return copies of rank ``root``'s contiguous arrays."""
        return _taken(self.broadcast_steps(arrays, root))

    # The steps of the four methods above, which the collectives of a function use.

    def reduce_steps(
        self, items: Sequence[tuple[Any, str, float | None]], root: int | None = None, place: Any = None
    ) -> Steps:
        """Take the steps of ``reduce_all``.

        ``root``: the only rank that gets results; what the others get is meaningless. ``place``: where the result of a
        single item goes, if the communicator can write it there.
        """
        folded = yield from self._fold_complex(items)
        if root is None:
            return (yield from self._split_steps("all_reduce", items, folded, 1, place))
        return (yield from self._split_steps("reduce", items, folded, 1, place, root))

    def block_steps(self, items: Sequence[tuple[Any, str, float | None]], place: Any = None) -> Steps:
        size = self._size
        padded = [(self._pad(array), op, weight) for array, op, weight in items]
        folded = yield from self._fold_complex(padded)
        for k, product in folded.items():
            length = product.size // size
            start = self._communicator.rank * length
            folded[k] = product[start : start + length]
        place = None if place is None else place.reshape(-1)
        return (yield from self._split_steps("reduce_scatter", padded, folded, size, place))

    def _split_steps(
        self,
        kind: str,
        items: Sequence[tuple[Any, str, float | None]],
        folded: dict[int, Any],
        num_blocks: int,
        place: Any,
        *roots: int,
    ) -> Steps:
        """Reduce all items that are not in ``folded``, by the communicator's ``kind``. Return the results of all."""
        reductions = [
            None if k in folded else SplitReduction(self._xp, array, op, weight, self._capabilities)
            for k, (array, op, weight) in enumerate(items)
        ]
        outs = [self._outs(r, num_blocks, place) for r in reductions]
        with self._communicator.group():
            for reduction, out in zip(reductions, outs):
                for part, target in zip(reduction.parts if reduction is not None else (), out):
                    send, recv = self._buffer(part.array), self._buffer(target)
                    yield from self._steps(kind, send, recv, part.op, *roots, weight=part.weight)
        return [folded[k] if r is None else r.result(out) for k, (r, out) in enumerate(zip(reductions, outs))]

    def _outs(self, reduction: SplitReduction | None, num_blocks: int, place: Any) -> list[Any]:
        """Return arrays for the reduced parts: whole ones, or one of ``num_blocks`` blocks of each."""
        if reduction is None:
            return []
        arrays = [part.array for part in reduction.parts]
        if place is not None and [array.dtype for array in arrays] == [place.dtype]:
            return [place]
        if num_blocks == 1:
            return [self.arrays.empty(array.shape, array.dtype) for array in arrays]
        return [self.arrays.empty((array.size // num_blocks,), array.dtype) for array in arrays]

    def gather_steps(self, arrays: Sequence[Any], place: Any = None) -> Steps:
        outs = [self.arrays.empty((self._size, *array.shape), array.dtype) for array in arrays]
        if place is not None:
            outs = [place]
        with self._communicator.group():
            for array, out in zip(arrays, outs):
                yield from self._steps("all_gather", self._buffer(array), self._buffer(out))
        return outs

    def broadcast_steps(self, arrays: Sequence[Any], root: int, place: Any = None) -> Steps:
        outs = [self.arrays.empty(array.shape, array.dtype) for array in arrays] if place is None else [place]
        if self._communicator.rank == root:
            for array, out in zip(arrays, outs):
                if out is not array:
                    out[...] = array
        with self._communicator.group():
            for out in outs:
                yield from self._steps("broadcast", self._buffer(out), root)
        return outs

    def _pad(self, array: Any) -> Any:
        length = -(-array.size // self._size) * self._size
        if length == array.size:
            return array
        padded = self._xp.zeros(length, dtype=array.dtype)
        padded[: array.size] = array
        return padded

    def _fold_complex(self, items: Sequence[tuple[Any, str, float | None]]) -> Steps:
        """Return the products of complex arrays, by position in ``items``. NCCL lacks them: gather, then multiply."""
        if self._is_exact:
            return {}
        wanted = [k for k, (array, op, _) in enumerate(items) if op == "prod" and array.dtype.kind == "c"]
        gathered = (yield from self.gather_steps([items[k][0] for k in wanted])) if wanted else []
        folded = {}
        for k, stack in zip(wanted, gathered):
            product = stack[0]
            for position in range(1, self._size):
                product = product * stack[position]
            folded[k] = product
        return folded


def _taken(steps: Steps) -> list[Any]:
    """Take all steps of a collective that never yields, as with NCCL. Return what they return."""
    try:
        next(steps)
    except StopIteration as end:
        return list(end.value)
    raise AssertionError("only a function starts collectives that wait in host memory")
