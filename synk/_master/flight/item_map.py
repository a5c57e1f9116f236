"""A function over items: items are pulled from the user's iterable, sent in chunks, and their results given lazily.

The iterable, and the classes of results, are the user's code, which may use the runtime: the lock is not held then.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

from synk._master.calls.callee import Callee
from synk._master.flight.chunks import LONG_NS, Chunk, Chunks
from synk._master.session import Session
from synk._master.state.item_pickles import ItemPickler
from synk._pure.interrupts import as_operation, safe_point
from synk._pure.texts import short_repr
from synk._pure.tracebacks import outline
from synk.errors import SerializationError

_SHORT_NS = 20_000_000
"""Chunks that take less time are made larger: they cost messages. Those that are long are made smaller."""

_LARGE_NBYTES = 1 << 23
"""From this size on a chunk gets no more items, nor the next one more than it had."""

_PULL_S = 0.02
"""A chunk is sent as it is where its items take longer than that to come."""

_PER_RANK = 4
"""Chunks per rank whose results have not been taken: more than are in flight, because the oldest may be the slowest."""


class ItemMap:
    """One map of a function over items.

    Parameters
    ----------
    session : Session
    function : Callee
    items : iterable
    batch_size : int or None
        Items in a chunk; None: by the time that they take.
    is_ordered : bool
    """

    def __init__(
        self, session: Session, function: Callee, items: Iterable[Any], batch_size: int | None, is_ordered: bool
    ) -> None:
        self._name = function.name
        self._items = iter(items)
        self._is_ordered = is_ordered
        self._chunks = Chunks(session, function)
        self._pickler = ItemPickler(session.memory.copies)
        self._is_adaptive = batch_size is None
        self._size = batch_size or 1
        self._position = 0
        self._is_at_end = False
        self._error: Exception | None = None  # what the iterable has ended with
        self._unconsumed: deque[Chunk] = deque()
        self._unseen: list[Chunk] = []  # those of which the time they took has not been looked at
        self._most = session.world_size * (1 if session.workers.is_inline else _PER_RANK)

    def results(self) -> Iterator[Any]:
        """Yield the results, and raise what ends them."""
        try:
            chunk: Chunk | None
            while (chunk := self._next_chunk()) is not None:
                while chunk.values:
                    yield chunk.value(self._name)
                if chunk.error is not None:
                    self._error = chunk.error
                    break
            if self._error is not None:
                outline(self._error)
                raise self._error
        finally:  # also where the caller drops this iterator, in any thread: the next operation ends what is in flight
            self._chunks.is_abandoned = True
            chunk = self._error = None  # whose traceback holds this frame

    @as_operation
    def _next_chunk(self) -> Chunk | None:
        """Return the next chunk that has an outcome, while the workers are kept busy; None at the end."""
        chunks = self._chunks
        if chunks.are_under_way:
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
        """Return a chunk of the next items, none at the end of the iterable."""
        chunk = Chunk(self._position)
        began = time.monotonic()
        while chunk.num_items < self._size and not self._is_at_end:
            self._pull_one(chunk)
            if self._is_adaptive and (chunk.nbytes >= _LARGE_NBYTES or time.monotonic() - began > _PULL_S):
                break
        self._position += chunk.num_items
        return chunk

    def _pull_one(self, chunk: Chunk) -> None:
        """Pull an item; what fails here comes out behind the results of the items before it."""
        try:
            item = safe_point(next, self._items)
        except Exception as error:
            self._is_at_end = True
            self._error = None if isinstance(error, StopIteration) else error
            return
        try:
            data, copies = self._pickler.dumps(item)
        except Exception as error:
            self._is_at_end = True
            position = self._position + chunk.num_items
            self._error = SerializationError(
                f"cannot send item {position} ({short_repr(item)}) of the map of {self._name!r} to a worker: "
                f"{type(error).__name__}: {str(error).rstrip('.')}."
            )
            self._error.__cause__ = error
            return
        chunk.add(data, copies)

    def _adapt(self) -> None:
        """Make chunks larger or smaller, by the time that those took which were answered."""
        if not self._is_adaptive:
            return
        for chunk in [chunk for chunk in self._unseen if chunk.is_done]:
            self._unseen.remove(chunk)
            if chunk.duration_ns < _SHORT_NS and chunk.num_items >= self._size and chunk.nbytes < _LARGE_NBYTES:
                self._size *= 2
            elif chunk.duration_ns > LONG_NS or chunk.nbytes >= _LARGE_NBYTES:
                self._size = max(1, min(self._size, chunk.num_items) // 2)
