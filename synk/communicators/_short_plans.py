"""*Short plans*: what the short path of collectives prepares, once for each kind of request.

A plan has the request as other ranks read it, and views of both halves where the arrays take one meeting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from synk._pure.dtypes import dtype_name
from synk._pure.ops import REDUCE_OPS, REDUCTIONS, Reduction, accumulator_dtype
from synk.communicators._checks import check_reduction
from synk.communicators._exchange import DIVIDED, FROM_ROOT, TO_ROOT, Head
from synk.communicators._messages import NUMBERS
from synk.communicators._rendezvous import CommRequest, packed
from synk.communicators._shm_collectives import Frame, ShmCollectives

MAX_PLANS = 1 << 10

ROOTED = ("reduce", "broadcast", "gather", "scatter")
"""The kinds that have a root."""
_ROWS = ("gather", "all_gather along an axis", *DIVIDED)
_IN_PLACE = ("all_reduce", "reduce", "broadcast")


class ShortPlan:
    """Everything that is prepared for one kind of request, with arrays of one shape and dtype.

    Attributes
    ----------
    request : bytes
        The request as other ranks read it.
    own : list of ndarray
        For each half, where this rank puts what it shows. Empty if it shows nothing.
    source_shape : tuple of int
        The shape of the arrays in ``own``.
    parts : list of list of ndarray
        For each half, what this rank reads, in rank order.
    is_receiver : bool
        Whether this rank gets a result.
    head : memoryview or None
        The head that this rank shows with its rows; see ``_exchange``.
    own_heads : list of memoryview
        For each half, where this rank shows its head.
    heads : list of list of memoryview
        For each half, the heads of the other senders, cut to the length of this rank's.
    shape, dtype
        The form of the result.
    is_long : bool
        Whether the arrays take more than one meeting; then ``own`` and ``parts`` are empty.
    reduction : Reduction or None
        How the parts are reduced.
    combine : ufunc or None
        A quicker way to reduce parts of equal weight, for dtypes that need no wider accumulator.
    divisor : scalar or None
        What the combined parts are divided by at last.
    """

    __slots__ = (
        *("combine", "divisor", "dtype", "head", "heads", "own", "parts"),
        *("is_long", "is_receiver", "own_heads", "reduction", "request", "shape", "source_shape"),
    )

    def __init__(self, request: CommRequest, dtype: np.dtype) -> None:
        self.request = packed(request)
        self.own: list[np.ndarray] = []
        self.parts: list[list[np.ndarray]] = []
        self.is_receiver = True
        self.head: memoryview | None = None
        self.heads: list[list[memoryview]] = [[], []]
        self.own_heads: list[memoryview] = []
        self.shape: tuple[int, ...] = ()
        self.source_shape: tuple[int, ...] = ()
        self.dtype = dtype
        self.reduction: Reduction | None = None
        self.combine: np.ufunc | None = None
        self.divisor: Any = None
        self.is_long = False

    def fits(self, kind: str, array: np.ndarray, out: Any) -> bool:
        """Whether the result can be written to ``out`` directly, while others may still read the array."""
        if self.is_long and not array.flags.c_contiguous:
            return False
        if out is None or not self.is_receiver:
            return True
        if type(out) is not np.ndarray or out.shape != self.shape or out.dtype != self.dtype:
            return False
        flags = out.flags
        if not flags.c_contiguous or not flags.writeable:
            return False
        return not self.is_long or (out is array and kind in _IN_PLACE) or not np.may_share_memory(array, out)

    def fold(self, half: int, weights: Sequence[float] | None, out: np.ndarray) -> None:
        """Reduce what the ranks have shown into ``out``."""
        parts = self.parts[half]
        if self.combine is None or (weights is not None and weights.count(weights[0]) < len(weights)):
            assert self.reduction is not None
            self.reduction.reduce_into(parts, weights, out)
            return
        self.combine(parts[0], parts[1], out=out)
        for part in parts[2:]:
            self.combine(out, part, out=out)
        if self.divisor is not None:
            np.divide(out, self.divisor, out=out)


class ShortPlans:
    """The plans of one rank. They are valid for the ranks of one call and of those after it with the same ranks.

    Parameters
    ----------
    collectives : ShmCollectives
    """

    def __init__(self, collectives: ShmCollectives) -> None:
        self._collectives = collectives
        self._ranks: tuple[int, ...] = ()
        self._plans: dict[Any, ShortPlan | None] = {}

    def begin(self, ranks: tuple[int, ...]) -> None:
        """Get ready for a call of ``ranks``."""
        if ranks != self._ranks:
            self._plans.clear()
            self._ranks = ranks

    def find(self, key: Any, make: Callable[..., ShortPlan | None]) -> ShortPlan | None:
        """Return the plan for ``key`` from the cache, or make it. None if such requests take the longer path."""
        plans = self._plans
        try:
            return plans[key]
        except TypeError:  # part of the key is not hashable, for instance a list as op
            return None
        except KeyError:
            if len(plans) >= MAX_PLANS:
                plans.clear()
        plan = plans[key] = make(*key)
        return plan

    def reduction(
        self, kind: str, shape: tuple[int, ...], dtype: np.dtype, root: int, op: Any, is_unweighted: bool
    ) -> ShortPlan | None:
        collectives, ranks, size = self._collectives, self._ranks, len(self._ranks)
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if dtype not in NUMBERS or op not in REDUCE_OPS:
            return None
        if not self._is_root(kind, root) or (not is_unweighted and op != "avg"):
            return None
        is_divided = kind == "reduce_scatter"
        if is_divided and (not shape or shape[0] % size):
            return None
        check_reduction(op, dtype_name(dtype))
        block = (shape[0] // size, *shape[1:]) if is_divided else shape
        count = nbytes // dtype.itemsize // (size if is_divided else 1)
        number = ranks[root] if kind in ROOTED else -1
        request = CommRequest(kind, op, dtype_name(dtype), count, number, weight=None if is_unweighted else 1.0)
        plan = ShortPlan(request, dtype)
        plan.shape = block
        plan.is_receiver = kind != "reduce" or collectives.rank == number
        plan.is_long = not collectives.is_small(nbytes)
        if plan.is_long:
            return plan
        plan.own = [self._view(collectives.rank, half, 0, shape, dtype) for half in range(2)]
        offset = ranks.index(collectives.rank) * (nbytes // size) if is_divided else 0
        plan.parts = [[self._view(rank, half, offset, block, dtype) for rank in ranks] for half in range(2)]
        plan.reduction = REDUCTIONS[op]
        if size > 1 and accumulator_dtype(dtype) == dtype:
            plan.combine = getattr(np, plan.reduction.ufunc)
            plan.divisor = dtype.type(size) if op == "avg" else None
        return plan

    def copying(self, kind: str, shape: Any, dtype: Any, root: int) -> ShortPlan | None:
        collectives, ranks, size = self._collectives, self._ranks, len(self._ranks)
        own = collectives.rank
        if not self._is_root(kind, root):
            return None
        number = ranks[root] if kind in ROOTED else -1
        if shape is None:
            plan = ShortPlan(CommRequest(kind, peer=number), np.dtype(np.uint8))
            num_words = collectives.head_nbytes() // 8
            plan.heads = [[self._words(number, half, num_words)] for half in range(2)]
            return plan
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        if dtype not in NUMBERS:
            return None
        name = dtype_name(dtype)
        if kind in _ROWS:
            return self._copying_rows(kind, shape, dtype, number)
        plan = ShortPlan(CommRequest(kind, dtype=name, num_elements=nbytes // dtype.itemsize, peer=number), dtype)
        plan.shape, plan.source_shape = shape, shape
        senders: tuple[int, ...] = (number,)
        if kind == "all_gather":
            plan.shape, plan.source_shape, senders = (size, *shape), (1, *shape), ranks
        frame = collectives.frame(1)
        plan.is_long = nbytes > frame.length
        if plan.is_long:
            return plan
        shape = plan.source_shape
        if own in senders:
            plan.own = [self._view(own, half, frame.begin, shape, dtype) for half in range(2)]
        plan.parts = [[self._view(rank, half, frame.begin, shape, dtype) for rank in senders] for half in range(2)]
        return plan

    def _copying_rows(self, kind: str, shape: tuple[int, ...], dtype: np.dtype, number: int) -> ShortPlan | None:
        collectives, ranks, size = self._collectives, self._ranks, len(self._ranks)
        own, is_divided = collectives.rank, kind in DIVIDED
        num_streams = size if is_divided else 1
        if not shape or shape[0] % num_streams:
            return None
        head = Head(dtype, shape[1:], [shape[0] // num_streams] * num_streams)
        frame = collectives.frame(num_streams)
        is_agreed = kind not in FROM_ROOT
        plan = ShortPlan(
            CommRequest(kind, "", dtype_name(dtype) if is_agreed else "", head.row_size if is_agreed else 0, number),
            dtype,
        )
        block = (shape[0] // num_streams, *shape[1:])
        plan.head = memoryview(head.words().tobytes()).cast("q")
        plan.source_shape = (size, *block) if is_divided else shape
        plan.is_receiver = kind not in TO_ROOT or own == number
        senders = (number,) if kind in FROM_ROOT else ranks
        plan.own_heads = [self._words(own, half, len(plan.head)) for half in range(2)]
        others = [rank for rank in senders if rank != own]
        plan.heads = [[self._words(rank, half, len(plan.head)) for rank in others] for half in range(2)]
        plan.shape = (len(senders) * block[0], *block[1:])
        plan.is_long = head.longest > frame.length
        if plan.is_long:
            return plan
        plan.own = [self._blocks(own, half, frame, plan.source_shape, dtype, is_divided) for half in range(2)]
        offset = frame.offset(ranks.index(own) if is_divided else 0)
        plan.parts = [[self._view(rank, half, offset, block, dtype) for rank in senders] for half in range(2)]
        return plan

    def block(self, kind: str, shape: None, dtype: None, root: int, words: bytes) -> ShortPlan:
        collectives, position = self._collectives, self._ranks.index(self._collectives.rank)
        head = Head.read(np.frombuffer(words, np.int64)[1:].tolist())
        frame = collectives.frame(len(self._ranks))
        plan = ShortPlan(CommRequest("scatter", peer=self._ranks[root]), head.dtype)
        plan.shape = (head.sizes[position], *head.shape)
        plan.is_long = head.longest > frame.length
        if plan.is_long:
            return plan
        offset = frame.offset(position)
        plan.parts = [[self._view(self._ranks[root], half, offset, plan.shape, head.dtype)] for half in range(2)]
        return plan

    def _is_root(self, kind: str, root: int) -> bool:
        return kind not in ROOTED or 0 <= root < len(self._ranks)

    def _view(self, rank: int, half: int, offset: int, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        return np.ndarray(shape, dtype, self._collectives.half(rank, half), offset)

    def _blocks(
        self, rank: int, half: int, frame: Frame, shape: tuple[int, ...], dtype: np.dtype, is_divided: bool
    ) -> np.ndarray:
        """Return a view of where this rank's blocks go. Each block is the first piece of its stream."""
        first = self._view(rank, half, frame.begin, shape[1:] if is_divided else shape, dtype)
        if not is_divided:
            return first
        strides = (frame.length, *first.strides)
        return np.ndarray(shape, dtype, self._collectives.half(rank, half), frame.begin, strides)

    def _words(self, rank: int, half: int, count: int) -> memoryview:
        return self._collectives.half(rank, half)[: count * 8].data.cast("q")
