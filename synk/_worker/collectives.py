"""Collectives on a rank: between a user's arrays and a communicator of raw buffers, with NumPy's rules.

NCCL drops NaN in min and max, sums 16-bit floats as they are, and knows neither 16-bit integers nor products of complex
numbers. What it lacks is made up for here, on the device. Nor does it compare what the ranks ask for: it is asked
only after they have agreed (``agree``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from synk._pure.dtypes import dtype_name
from synk._pure.ops import check_op
from synk.backends import Backend
from synk.communicators import Buffer, Communicator

# How many elements of which dtype stand for one that the communicator does not have, or has with too few bits.
_WIDENED = {"float16": "float32", "bfloat16": "float32", "int16": "int32", "uint16": "uint32"}

Agree = Callable[..., None]


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


class Collectives:
    """The collectives of a rank, on a device or on the host.

    Parameters
    ----------
    communicator : Communicator
        For reductions and copies among all ranks.
    messages : Communicator
        For messages between two ranks, and barriers.
    backend : Backend
    size : int
        Ranks that take part.
    framework : tuple
        ``(to_framework, from_framework)`` of the function under way, or None for each.
    agree : callable
        As ``ShmCommunicator.agree``; called before each collective of a function. Needed where the communicator does
        not compare what the ranks ask for.
    guard : callable
        Returns the context in which the other ranks wait for this one; it tells them where the body fails.
    """

    def __init__(
        self,
        communicator: Communicator,
        messages: Communicator,
        backend: Backend,
        size: int,
        framework: tuple[Any, Any] = (None, None),
        agree: Agree = lambda *args, **kwargs: None,
        guard: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._communicator = communicator
        self._messages = messages
        self._backend = backend
        self._xp = backend.xp
        self._size = size
        self._to_framework, self._from_framework = framework
        self._agree = agree
        self.guard = guard
        self._stream = backend.stream_handle
        self._capabilities = communicator.capabilities()
        self._is_exact = getattr(self._capabilities, "nan_propagates", True)  # all but NCCL

    # -- arrays of the user's ------------------------------------------------------------------------------------------

    def _take(self, array: Any) -> Any:
        if self._from_framework is not None:
            array = self._from_framework(array)
        return self._xp.asarray(self._backend.as_array(array, "the array of a collective"), order="C")  # 0-d stays 0-d

    def _give(self, array: Any) -> Any:
        return array if self._to_framework is None else self._to_framework(array)

    def _buffer(self, array: Any) -> Buffer:
        return Buffer(self._backend.address(array), int(array.size), dtype_name(array.dtype))

    def all_reduce(self, array: Any, op: str, weight: float | None, out: Any) -> Any:
        send = self._take(array)
        self._check(op, send)
        self._agree("all_reduce", dtype_name(send.dtype), send.size, op, weight=weight)
        place = None if out is None else self._place(out, send)
        with self.guard():
            result = self.reduce_all([(send, op, weight)], place=place)[0]
        if place is None:
            return self._give(result)
        if result is not place:
            place[...] = result
        return out

    def _place(self, out: Any, like: Any) -> Any:
        """Return the memory of ``out``, into which an array like another one is to go."""
        place = out if self._from_framework is None else self._from_framework(out)
        if not self._backend.is_array(place) or place.shape != like.shape or place.dtype != like.dtype:
            got = f"{getattr(place, 'dtype', type(place).__name__)} of shape {getattr(place, 'shape', ())}"
            raise ValueError(f"cannot write to out: got {got}, expected {like.dtype} of shape {like.shape}.")
        if not place.flags.c_contiguous or not getattr(place.flags, "writeable", True):
            raise ValueError("cannot write to out: got an array that is read-only or not contiguous.")
        return place

    def reduce(self, array: Any, op: str, root: int, weight: float | None) -> Any:
        send = self._take(array)
        self._check(op, send)
        self._agree("reduce", dtype_name(send.dtype), send.size, op, root, weight=weight)
        with self.guard():
            result = self.reduce_all([(send, op, weight)], root)[0]
        return self._give(result) if self._communicator.rank == root else None

    def broadcast(self, array: Any, root: int) -> Any:
        send = self._take(array)
        self._agree("broadcast", dtype_name(send.dtype), send.size, peer=root)
        with self.guard():
            result = self.broadcast_all([send], root)[0]
        return self._give(result)

    def all_gather(self, array: Any) -> Any:
        send = self._take(array)
        self._agree("all_gather", dtype_name(send.dtype), send.size)
        with self.guard():
            result = self.gather_all([send])[0]
        return self._give(result)

    def reduce_scatter(self, array: Any, op: str, weight: float | None) -> Any:
        send = self._take(array)
        self._check(op, send)
        if send.ndim == 0 or len(send) % self._size:
            raise ValueError(
                f"cannot reduce_scatter: got shape {send.shape}, expected a multiple of {self._size} rows (the ranks "
                "of the call)."
            )
        self._agree("reduce_scatter", dtype_name(send.dtype), send.size // self._size, op, weight=weight)
        with self.guard():
            block = self.reduce_blocks([(send.reshape(-1), op, weight)])[0]
        return self._give(block.reshape(len(send) // self._size, *send.shape[1:]))

    def send(self, array: Any, peer: int, tag: int) -> None:
        send = self._take(array)  # held until it is sent
        self._messages.send(self._buffer(send), peer, tag, stream=self._stream)

    def recv(self, like: Any, peer: int, tag: int) -> Any:
        out = self._xp.empty_like(self._take(like))
        self._messages.recv(self._buffer(out), peer, tag, stream=self._stream)
        return self._give(out)

    def barrier(self) -> None:
        self._messages.barrier()

    def _check(self, op: str, array: Any) -> None:
        """Refuse what has no meaning, before the ranks agree on it; communicators other than NCCL's do it."""
        if not self._is_exact:
            check_op(op, array.dtype, "the array of a collective")

    # -- several arrays of the backend at once ------------------------------------------------------------------------

    def reduce_all(
        self, items: Sequence[tuple[Any, str, float | None]], root: int | None = None, place: Any = None
    ) -> list[Any]:
        """Reduce contiguous arrays of all ranks, each ``(array, op, weight)``; return the results.

        ``root``: the only rank that gets them. What the others get has no meaning. ``place``: where the result of the
        only one goes, if the communicator can bring it there.
        """
        comm, xp = self._communicator, self._xp
        folded = self._fold_complex(items)
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
                        comm.all_reduce(send, recv, part.op, weight=part.weight, stream=self._stream)
                    else:
                        comm.reduce(send, recv, part.op, root, weight=part.weight, stream=self._stream)
        return [folded[k] if r is None else r.result(out) for k, (r, out) in enumerate(zip(reductions, outs))]

    def reduce_blocks(self, items: Sequence[tuple[Any, str, float | None]]) -> list[Any]:
        """Reduce flat arrays, each ``(array, op, weight)``, and return the rank's own block of each.

        Where the elements are no multiple of the ranks, the last block ends with elements of no meaning.
        """
        comm, xp, size = self._communicator, self._xp, self._size
        padded = [(self._pad(array), op, weight) for array, op, weight in items]
        folded = self._fold_complex(padded)
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
                    comm.reduce_scatter(send, recv, part.op, weight=part.weight, stream=self._stream)
        results = []
        for k, (reduction, out) in enumerate(zip(reductions, outs)):
            if reduction is None:
                length = folded[k].size // size
                start = self._communicator.rank * length
                results.append(folded[k][start : start + length])
            else:
                results.append(reduction.result(out))
        return results

    def gather_all(self, arrays: Sequence[Any]) -> list[Any]:
        """Return contiguous arrays of all ranks stacked, shape ``(size, *shape)``."""
        outs = [self._xp.empty((self._size, *array.shape), dtype=array.dtype) for array in arrays]
        with self._communicator.group():
            for array, out in zip(arrays, outs):
                self._communicator.all_gather(self._buffer(array), self._buffer(out), stream=self._stream)
        return outs

    def broadcast_all(self, arrays: Sequence[Any], root: int) -> list[Any]:
        """Return contiguous arrays of rank ``root``, as new ones."""
        outs = [array.copy() for array in arrays]
        with self._communicator.group():
            for out in outs:
                self._communicator.broadcast(self._buffer(out), root, stream=self._stream)
        return outs

    def _pad(self, array: Any) -> Any:
        length = -(-array.size // self._size) * self._size
        if length == array.size:
            return array
        padded = self._xp.zeros(length, dtype=array.dtype)
        padded[: array.size] = array
        return padded

    def _fold_complex(self, items: Sequence[tuple[Any, str, float | None]]) -> dict[int, Any]:
        """Return the products of complex arrays, which NCCL has not: all values gathered, then multiplied."""
        if self._is_exact:
            return {}
        wanted = [k for k, (array, op, _) in enumerate(items) if op == "prod" and array.dtype.kind == "c"]
        gathered = self.gather_all([items[k][0] for k in wanted]) if wanted else []
        folded = {}
        for k, stack in zip(wanted, gathered):
            product = stack[0]
            for position in range(1, self._size):
                product = product * stack[position]
            folded[k] = product
        return folded
