"""Collectives on a rank: between a user's arrays and a communicator of raw buffers, with NumPy's rules.

NCCL drops NaN in min and max, sums 16-bit floats as they are, and knows neither 16-bit integers nor products of complex
numbers. What it lacks is made up for here, on the device. Nor does it compare what the ranks ask for: it is asked
only after they have agreed (``agree``).
"""

from __future__ import annotations

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from synk._pure.dtypes import dtype_name
from synk._pure.ops import REDUCTIONS
from synk._worker.comm.messages import Messages
from synk._worker.comm.user_arrays import UserArrays
from synk.backends import Backend, DeviceBackend
from synk.communicators import Buffer, Communicator
from synk.communicators._checks import check_reduction
from synk.communicators._schedule import Steps
from synk.communicators._shm import ShmCommunicator

# How many elements of which dtype stand for one that the communicator does not have, or has with too few bits.
_WIDENED = {"float16": "float32", "bfloat16": "float32", "int16": "int32", "uint16": "uint32"}

Agree = Callable[..., Iterable[None]]


@dataclass
class _Part:
    """An array to be reduced as it is, by an op that the communicator has for its dtype."""

    array: Any
    op: str
    weight: float | None


class _Reduction:
    """One reduction as the communicator can do it: parts before it, and the result from the reduced parts."""

    def __init__(self, xp: Any, array: Any, op: str, weight: float | None, capabilities: Any) -> None:
        self._xp = xp
        self._dtype = array.dtype
        is_exact = getattr(capabilities, "nan_propagates", True)
        if not is_exact and array.dtype.name in _WIDENED:
            array = array.astype(_WIDENED[array.dtype.name])
        if op == "avg" and weight is not None and not getattr(capabilities, "has_weighted_avg", True):
            array, op, weight = array * array.dtype.type(weight), "sum", None
        self.parts = [_Part(array, op, weight)]
        if not is_exact and op in ("min", "max") and array.dtype.kind == "f":
            self.parts.append(_Part(xp.isnan(array).astype(np.uint8), "max", None))

    def result(self, reduced: Sequence[Any]) -> Any:
        array = reduced[0]
        if len(reduced) > 1:
            array = self._xp.where(reduced[1].astype(bool), array.dtype.type(np.nan), array)
        return array.astype(self._dtype, copy=False)


@dataclass
class Beside:
    """The result of a collective on a stream of its own, which is there when the event is."""

    result: Any
    event: Any


class Collectives:
    """The collectives of a rank, on a device or on the host.

    Parameters
    ----------
    communicator : Communicator
        For reductions and copies among all ranks.
    backend : Backend
    size : int
        Ranks that take part.
    framework : tuple
        ``(to_framework, from_framework)`` of the function under way, or None for each.
    agree : callable
        As ``ShmCommunicator.agree_steps``; taken before each collective of a function. Needed where the communicator
        does not compare what the ranks ask for.
    host : ShmCommunicator, optional
        For messages between two ranks, and for the order of what a function starts; None for what the master asks for.
    guard : callable
        Returns the context in which the other ranks wait for this one; it tells them where the body fails.
    """

    def __init__(
        self,
        communicator: Communicator,
        backend: Backend,
        size: int,
        framework: tuple[Any, Any] = (None, None),
        agree: Agree = lambda *args, **kwargs: (),
        guard: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        host: ShmCommunicator | None = None,
    ) -> None:
        self._communicator = communicator
        self._backend = backend
        self._xp = backend.xp
        self._size = size
        self.arrays = UserArrays(backend, framework)
        self._agree = agree
        self.guard = guard
        self._shared = host
        self._messages = None if host is None else Messages(host, self.arrays)
        self._stream = backend.stream_handle
        self._capabilities = communicator.capabilities()
        self._is_exact = getattr(self._capabilities, "nan_propagates", True)  # all but NCCL
        self._beside: deque[tuple[Any, Any, Any]] = deque()  # events, and the arrays that a stream uses until then
        self._num_launched = 0  # on the function's own stream

    @property
    def host(self) -> ShmCommunicator:
        """The communicator of host memory in which the call under way has begun."""
        assert self._shared is not None
        return self._shared

    @property
    def messages(self) -> Messages:
        """The messages of the call under way."""
        assert self._messages is not None
        return self._messages

    @property
    def _device(self) -> DeviceBackend:
        return cast(DeviceBackend, self._backend)

    # -- of a function -------------------------------------------------------------------------------------------------

    def _buffer(self, array: Any) -> Buffer:
        return Buffer(self._backend.address(array), int(array.size), dtype_name(array.dtype))

    def all_reduce(self, array: Any, op: str, weight: float | None, out: Any, is_started: bool = False) -> Steps:
        """Return the steps of a collective; like those below, all of it that can be refused is refused first.

        One that is started, into ``out``, runs on a stream of its own where the communicator can do all of it:
        nothing is allocated then. It goes on from what has been queued now.
        """
        send = self.arrays.take(array)
        self._check(op, send, weight)
        place = None if out is None else self.arrays.place(out, send)
        if self._communicator is self._shared:  # in host memory: nothing between its arrays and these
            result = np.empty_like(send) if place is None else place
            yield from self.host.all_reduce_arrays(send.reshape(-1), result.reshape(-1), op, weight)
            return self.arrays.give(result) if place is None else out
        runs_beside = is_started and place is not None and self._takes_as_it_is(send, op, weight)
        mark = self._device.mark() if runs_beside else None
        num_launched = self._num_launched
        yield from self._agree("all_reduce", dtype_name(send.dtype), send.size, op, weight=weight)
        if runs_beside:
            reduce = functools.partial(
                self._communicator.all_reduce, self._buffer(send), self._buffer(place), op, weight=weight
            )
            if self._num_launched != num_launched:  # the communicator goes on from those, too
                mark = self._device.mark()
            with self.guard():
                event = self._device.communicate(mark, lambda stream: reduce(stream=stream))
            self._beside.append((event, send, place))
            return Beside(out, event)
        with self.guard():
            result = (yield from self.reduce_steps([(send, op, weight)], place=place))[0]
        if place is None:
            return self.arrays.give(result)
        if result is not place:
            place[...] = result
        return out

    def reduce(self, array: Any, op: str, root: int, weight: float | None) -> Steps:
        send, root = self.arrays.take(array), self.host.member("reduce", "root", root)
        self._check(op, send, weight)
        yield from self._agree("reduce", dtype_name(send.dtype), send.size, op, root, weight=weight)
        with self.guard():
            result = (yield from self.reduce_steps([(send, op, weight)], root))[0]
        return self.arrays.give(result) if self._communicator.rank == root else None

    def broadcast(self, array: Any, root: int) -> Steps:
        send, root = self.arrays.take(array), self.host.member("broadcast", "root", root)
        yield from self._agree("broadcast", dtype_name(send.dtype), send.size, peer=root)
        with self.guard():
            result = (yield from self.broadcast_steps([send], root))[0]
        return self.arrays.give(result)

    def all_gather(self, array: Any) -> Steps:
        send = self.arrays.take(array)
        yield from self._agree("all_gather", dtype_name(send.dtype), send.size)
        with self.guard():
            result = (yield from self.gather_steps([send]))[0]
        return self.arrays.give(result)

    def reduce_scatter(self, array: Any, op: str, weight: float | None) -> Steps:
        send = self.arrays.take(array)
        self._check(op, send, weight)
        if send.ndim == 0 or len(send) % self._size:
            raise ValueError(
                f"cannot reduce_scatter: got shape {send.shape}, expected a multiple of {self._size} rows (the ranks "
                "of the call)."
            )
        yield from self._agree("reduce_scatter", dtype_name(send.dtype), send.size // self._size, op, weight=weight)
        with self.guard():
            block = (yield from self.block_steps([(send.reshape(-1), op, weight)]))[0]
        return self.arrays.give(block.reshape(len(send) // self._size, *send.shape[1:]))

    def joined(self, value: Any) -> Any:
        """Return the result of what was started, which later work of the function may use."""
        if type(value) is not Beside:
            return value
        self._device.join(value.event)
        while any(event is value.event for event, _, _ in self._beside):
            self._beside.popleft()  # the stream comes to them in this order
        return value.result

    def is_there(self, value: Any) -> bool:
        """Whether the device has come to the end of what was started."""
        return type(value) is not Beside or bool(value.event.done)

    def join_communication(self) -> None:
        """As ``joined``, of all that was started: the function has returned, or another collective begins."""
        if not self._is_exact:
            self._device.join_communication()
            self._beside.clear()

    def barrier(self) -> Steps:
        yield from self.host.barrier_steps()

    def _check(self, op: str, array: Any, weight: float | None) -> None:
        """Refuse what has no meaning, before the ranks agree on it."""
        if not self._is_exact:
            REDUCTIONS[op].check(array.dtype, "the array of a collective")
        check_reduction(op, dtype_name(array.dtype), weight)

    def _takes_as_it_is(self, array: Any, op: str, weight: float | None) -> bool:
        """Whether NCCL reduces such an array itself, with nothing before or after it (as ``_Reduction`` would have)."""
        return not (
            self._is_exact
            or array.dtype.kind == "c"
            or array.dtype.name in _WIDENED
            or (op in ("min", "max") and array.dtype.kind == "f")
            or (weight is not None and not getattr(self._capabilities, "has_weighted_avg", True))
        )

    def _steps(self, kind: str, *args: Any, **options: Any) -> Steps:
        """Take the steps of an operation of the communicator; NCCL has none, the stream takes them."""
        steps = getattr(self._communicator, f"{kind}_steps", None)
        if steps is None:
            self.join_communication()  # one communicator takes its operations one after the other
            self._num_launched += 1
            getattr(self._communicator, kind)(*args, stream=self._stream, **options)
        else:
            yield from steps(*args, stream=self._stream, **options)

    # -- several arrays of the backend at once ------------------------------------------------------------------------

    def reduce_all(self, items: Sequence[tuple[Any, str, float | None]]) -> list[Any]:
        """Reduce contiguous arrays of all ranks, each ``(array, op, weight)``; return the results."""
        return _taken(self.reduce_steps(items))

    def reduce_blocks(self, items: Sequence[tuple[Any, str, float | None]]) -> list[Any]:
        """Reduce flat arrays, each ``(array, op, weight)``, and return the rank's own block of each.

        Where the elements are no multiple of the ranks, the last block ends with elements of no meaning.
        """
        return _taken(self.block_steps(items))

    def gather_all(self, arrays: Sequence[Any]) -> list[Any]:
        """Return contiguous arrays of all ranks stacked, shape ``(size, *shape)``."""
        return _taken(self.gather_steps(arrays))

    def broadcast_all(self, arrays: Sequence[Any], root: int) -> list[Any]:
        """Return contiguous arrays of rank ``root``, as new ones."""
        return _taken(self.broadcast_steps(arrays, root))

    # Their steps, for those of a function.

    def reduce_steps(
        self, items: Sequence[tuple[Any, str, float | None]], root: int | None = None, place: Any = None
    ) -> Steps:
        """Take the steps of ``reduce_all``.

        ``root``: the only rank that gets them. What the others get has no meaning. ``place``: where the result of the
        only one goes, if the communicator can bring it there.
        """
        comm, xp = self._communicator, self._xp
        folded = yield from self._fold_complex(items)
        reductions = [
            None if k in folded else _Reduction(xp, array, op, weight, self._capabilities)
            for k, (array, op, weight) in enumerate(items)
        ]
        outs = [[xp.empty_like(part.array) for part in r.parts] if r is not None else [] for r in reductions]
        if place is not None and [out.dtype for out in outs[0]] == [place.dtype]:
            outs[0] = [place]
        with comm.group():
            for reduction, out in zip(reductions, outs):
                for part, target in zip(reduction.parts if reduction is not None else (), out):
                    send, recv = self._buffer(part.array), self._buffer(target)
                    if root is None:
                        yield from self._steps("all_reduce", send, recv, part.op, weight=part.weight)
                    else:
                        yield from self._steps("reduce", send, recv, part.op, root, weight=part.weight)
        return [folded[k] if r is None else r.result(out) for k, (r, out) in enumerate(zip(reductions, outs))]

    def block_steps(self, items: Sequence[tuple[Any, str, float | None]]) -> Steps:
        comm, xp, size = self._communicator, self._xp, self._size
        padded = [(self._pad(array), op, weight) for array, op, weight in items]
        folded = yield from self._fold_complex(padded)
        reductions = [
            None if k in folded else _Reduction(xp, array, op, weight, self._capabilities)
            for k, (array, op, weight) in enumerate(padded)
        ]
        outs = [
            [xp.empty(part.array.size // size, dtype=part.array.dtype) for part in r.parts] if r is not None else []
            for r in reductions
        ]
        with comm.group():
            for reduction, out in zip(reductions, outs):
                for part, target in zip(reduction.parts if reduction is not None else (), out):
                    send, recv = self._buffer(part.array), self._buffer(target)
                    yield from self._steps("reduce_scatter", send, recv, part.op, weight=part.weight)
        results = []
        for k, (reduction, out) in enumerate(zip(reductions, outs)):
            if reduction is None:
                length = folded[k].size // size
                start = self._communicator.rank * length
                results.append(folded[k][start : start + length])
            else:
                results.append(reduction.result(out))
        return results

    def gather_steps(self, arrays: Sequence[Any]) -> Steps:
        outs = [self._xp.empty((self._size, *array.shape), dtype=array.dtype) for array in arrays]
        with self._communicator.group():
            for array, out in zip(arrays, outs):
                yield from self._steps("all_gather", self._buffer(array), self._buffer(out))
        return outs

    def broadcast_steps(self, arrays: Sequence[Any], root: int) -> Steps:
        outs = [array.copy() for array in arrays]
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
        """Return the products of complex arrays, which NCCL has not: all values gathered, then multiplied."""
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
    """Take steps that wait for nobody: those of NCCL."""
    try:
        next(steps)
    except StopIteration as end:
        return list(end.value)
    raise AssertionError("only a function starts collectives that wait in host memory")
