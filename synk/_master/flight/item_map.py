"""A function over items: items are pulled from the user's iterable and sent in chunks, and results come lazily.

The iterable, and the classes of results, are user code that may use the runtime, so the lock is not held while they
run.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from synk._master.calls.callee import Callee
from synk._master.flight.chunks import LONG_NS, Chunk, Chunks
from synk._master.session import Session
from synk._pure.texts import short_repr
from synk.errors import SerializationError

_SHORT_NS = 20_000_000
"""Chunks that take less time are made larger, because messages cost. Long chunks are made smaller."""

_LARGE_NBYTES = 1 << 23
"""A chunk of at least this size gets no more items, and the next one is not made larger."""

_PULL_S = 0.02
"""A chunk is sent as it is if pulling its items takes longer than this."""

_PER_RANK = 4
"""How many chunks per rank may be sent before their results are taken: the oldest may be the slowest."""


class ItemMap:
    """One map of a function over items.

    Parameters
    ----------
    session : Session
    function : Callee
    items : iterable
    batch_size : int or None
        Items in a chunk; None: as many as suit the time that items take.
    is_ordered : bool
    """

    def __init__(
        self, session: Session, function: Callee, items: Iterable[Any], batch_size: int | None, is_ordered: bool
    ) -> None:
        self._name = function.name
        self._items = iter(items)
        self._is_ordered = is_ordered
        self._chunks = Chunks(session, function)
        self._is_adaptive = batch_size is None
        self._size = batch_size or 1
        self._position = 0
        self._is_at_end = False
        self._error: Exception | None = None  # what the iterable raised
        self._unconsumed: deque[Chunk] = deque()
        self._unseen: list[Chunk] = []  # chunks whose duration was not evaluated yet
        self._most = session.world_size * (1 if session.workers.is_inline else _PER_RANK)

    def results(self) -> Iterator[Any]:
        """Yield the results, and raise the error that ends them."""
        try:
            chunk: Chunk | None
            while (chunk := self._next_chunk()) is not None:
                while chunk.values:
                    yield from chunk.take(self._name)
                if chunk.error is not None:
                    self._error = chunk.error
                    break
            if self._error is not None:
                raise self._error
        finally:  # also if the caller drops this iterator, in any thread: the next operation ends the chunks in flight
            self._chunks.is_abandoned = True
            chunk = self._error = None  # its traceback holds this frame

    def _next_chunk(self) -> Chunk | None:
        """Return the next chunk that has an outcome, and keep the workers busy meanwhile; None at the end."""
        chunks = self._chunks
        if chunks.are_in_flight:
            chunks.step(None, is_waiting=False)
        while True:
            if self._wants_more():
                chunk = self._pull()
                if chunk.num_items:
                    self._unconsumed.append(chunk)
                    self._unseen.append(chunk)
                    chunks.step(chunk, is_waiting=False)
            self._adapt()
            done = self._done()
            if done is not None:
                self._unconsumed.remove(done)
                return done
            if self._wants_more():
                continue
            if not self._unconsumed:
                return None
            chunks.step(None, is_waiting=True)

    def _wants_more(self) -> bool:
        return not self._is_at_end and self._chunks.has_room and len(self._unconsumed) < self._most

    def _done(self) -> Chunk | None:
        candidates = list(self._unconsumed)[: 1 if self._is_ordered else None]
        return next((chunk for chunk in candidates if chunk.is_done), None)

    # -- items --------------------------------------------------------------------------------------------------------

    def _pull(self) -> Chunk:
        """Return a chunk of the next items; it is empty at the end of the iterable."""
        chunk = Chunk(self._position)
        began = time.monotonic()
        while chunk.num_items < self._size and not self._is_at_end:
            self._pull_one(chunk)
            if self._is_adaptive and (chunk.nbytes >= _LARGE_NBYTES or time.monotonic() - began > _PULL_S):
                break
        self._position += chunk.num_items
        return chunk

    def _pull_one(self, chunk: Chunk) -> None:
        """Pull one item. An error here is raised after the results of the items before it."""
        try:
            item = next(self._items)
        except Exception as error:
            self._is_at_end = True
            self._error = None if isinstance(error, StopIteration) else error
            return
        try:
            packed = self._chunks.pickler.dumps(item)
        except Exception as error:
            self._is_at_end = True
            position = self._position + chunk.num_items
            self._error = SerializationError(
                f"cannot send item {position} ({short_repr(item)}) of the map of {self._name!r} to a worker: "
                f"{type(error).__name__}: {str(error).rstrip('.')}."
            )
            self._error.__cause__ = error
            return
        chunk.add(*packed)

    def _adapt(self) -> None:
        """Make chunks larger or smaller, depending on how long the answered chunks took."""
        if not self._is_adaptive:
            return
        for chunk in [chunk for chunk in self._unseen if chunk.is_done]:
            self._unseen.remove(chunk)
            if chunk.duration_ns < _SHORT_NS and chunk.num_items >= self._size and chunk.nbytes < _LARGE_NBYTES:
                self._size *= 2
            elif chunk.duration_ns > LONG_NS or chunk.nbytes >= _LARGE_NBYTES:
                self._size = max(1, min(self._size, chunk.num_items) // 2)
