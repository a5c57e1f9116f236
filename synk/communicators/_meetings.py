"""What a rank keeps of collectives that one meeting was enough for: a later one of the same form needs no preparation.

The first of a form goes step by step (``_shm_collectives``, ``_exchange``), which checks it and keeps its meeting.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._pure.ops import REDUCTIONS, accumulator_dtype
from synk.communicators._rendezvous import CommRequest, packed

LONGER = object()
"""Returned by a method that has done nothing, because the collective must go step by step."""

_MAX_KEPT = 1 << 10
_WEIGHT = struct.Struct("=d")  # the end of a request


class Meeting:
    """One form of collectives.

    Parameters
    ----------
    request : CommRequest
    dtype : dtype
    own : list of ndarray
        For each half, where this rank shows what it has. Empty if it shows nothing.
    parts : list of list of ndarray
        For each half, what this rank reads, in rank order.

    Attributes
    ----------
    head : memoryview or None
        What the senders of rows say of them; see ``_exchange``.
    own_heads : list of memoryview
        For each half, where this rank shows its head.
    heads : list of list of memoryview
        For each half, the heads of the other senders, cut to the length of ``head``.
    shape : tuple of int
        The form of the result, for rows.
    """

    __slots__ = (
        *("_combine", "_divisor", "_op", "_shown", "dtype", "head", "heads"),
        *("own", "own_heads", "parts", "request", "shape"),
    )

    def __init__(
        self, request: CommRequest, dtype: np.dtype, own: list[np.ndarray], parts: list[list[np.ndarray]]
    ) -> None:
        self.request, self.dtype, self.own, self.parts = packed(request), dtype, own, parts
        self.head: memoryview | None = None
        self.own_heads: list[memoryview] = []
        self.heads: list[list[memoryview]] = [[], []]
        self.shape: tuple[int, ...] = ()
        self._shown = own[0].shape if own else ()
        self._op = op = request.op
        # A quicker way to reduce parts of equal weight, for dtypes that need no wider accumulator.
        is_plain = op and accumulator_dtype(dtype) == dtype
        self._combine: np.ufunc | None = getattr(np, REDUCTIONS[op].ufunc) if is_plain else None
        self._divisor = dtype.type(len(parts[0])) if op == "avg" else None

    def request_of(self, weight: float) -> bytes:
        """Return the request with this rank's weight."""
        return self.request[: -_WEIGHT.size] + _WEIGHT.pack(weight)

    def show(self, half: int, array: np.ndarray) -> None:
        """Put an array, and its head, into this rank's half."""
        if self.own:
            self.own[half][...] = array if array.shape == self._shown else array.reshape(self._shown)
        if self.head is not None and self.own_heads:
            self.own_heads[half][:] = self.head

    def finish(self, half: int, weights: Sequence[float] | None, target: np.ndarray) -> None:
        """Reduce or join what the ranks have shown into ``target``."""
        parts = self.parts[half]
        if len(parts) == 1:
            target[...] = parts[0]
        elif not self._op:
            np.concatenate(parts, out=target)
        elif self._combine is None or (weights is not None and weights.count(weights[0]) < len(weights)):
            REDUCTIONS[self._op].reduce_into(parts, weights, target)
        else:
            self._combine(parts[0], parts[1], out=target)
            for part in parts[2:]:
                self._combine(target, part, out=target)
            if self._divisor is not None:
                np.divide(target, self._divisor, out=target)


class Meetings(dict[tuple[Any, ...], Meeting]):
    """The meetings of one rank, by kind, dtype, size or shape, op, peer, and whether there are no weights.

    They are valid for the ranks of one call and of those after it with the same ranks.
    """

    _ranks: tuple[int, ...] = ()

    def begin(self, ranks: tuple[int, ...]) -> None:
        """Get ready for a call of ``ranks``."""
        if ranks != self._ranks:
            self.clear()
            self._ranks = ranks

    def keep(self, key: tuple[Any, ...], meeting: Meeting) -> Meeting:
        """Keep a meeting, and return it."""
        if len(self) >= _MAX_KEPT:
            self.clear()
        self[key] = meeting
        return meeting
