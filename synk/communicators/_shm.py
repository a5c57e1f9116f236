"""Collectives between the worker processes of one machine, through one shared segment. No socket, no shared lock.

``_shm_collectives`` has the collectives, ``_schedule`` their order, ``_mailbox`` messages between two ranks, and
``_rendezvous`` the words by which ranks meet.

The program makes the segment (``required_nbytes``) and one eventfd for each rank. It hands both to the workers, and
keeps them for replacements of workers that died. When a worker failed it calls ``set_abort``, and when all workers are
idle again ``reset``.

Plain arrays between ranks that are awake take a short path, without the queues of ``_mailbox``: if the message lies in
its ring in one piece, this rank has nothing else in flight, and the other rank has begun the call. The mailbox takes
all others. Both write and read the same stream of messages.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._pure.ranges import LINE_NBYTES
from synk._wire.memory import Segment
from synk._wire.patience import Patience
from synk._wire.process_memory import let_siblings_read
from synk.communicators._checks import DTYPE_NAMES, check_out, named_dtype
from synk.communicators._exchange import DIVIDED, ROWS, TO_ROOT, Exchange
from synk.communicators._layout import SegmentLayout
from synk.communicators._mailbox import Mailbox
from synk.communicators._meetings import LONGER
from synk.communicators._messages import (
    HEADER,
    IN_RING,
    INLINE_NBYTES,
    LINE,
    MAX_INLINE_AXES,
    NUMBERS,
    SHAPES,
    prefix_nbytes,
)
from synk.communicators._rendezvous import SPIN_YIELDS, Rendezvous
from synk.communicators._schedule import Schedule, Steps
from synk.communicators._shm_collectives import ShmCollectives
from synk.communicators._user_arrays import Place, ResultMemory

# By the number of axes: what a message takes besides its array, plus what rounds the sum up to whole lines.
_OVERHEAD_NBYTES = [HEADER.size + prefix_nbytes(num_axes) + LINE_NBYTES - 1 for num_axes in range(MAX_INLINE_AXES + 1)]


_ANY = -1
"""In the place of the number of a dtype: a recv without an array accepts any."""


def _number_of(wanted: Any, like: Any, out: Any) -> int | None:
    """Return the number of the dtype of an array that a recv gives, or None if it must take the longer path."""
    if type(wanted) is not np.ndarray:
        return None
    if out is not None:
        flags = wanted.flags
        if like is not None or not flags.c_contiguous or not flags.writeable:
            return None
    return NUMBERS.get(wanted.dtype)


def _do_not_sleep() -> bool:
    """Return that sleeping is left to the mailbox, which tells the others what this rank waits for."""
    return False


class ShortPath:
    """One rank's short path for messages.

    Parameters
    ----------
    rendezvous : Rendezvous
    mailbox : Mailbox
    """

    def __init__(self, rendezvous: Rendezvous, mailbox: Mailbox) -> None:
        self._rendezvous = rendezvous
        self._mailbox = mailbox
        self._rank = rendezvous.rank
        self._capacity = mailbox.capacity
        self._to_peers = [ring.data for ring in mailbox.to_peers]
        self._from_peers = [ring.data for ring in mailbox.from_peers]
        self._written, self._read = rendezvous.written[self._rank], rendezvous.read[self._rank]

    def _free_rank(self, peer: object) -> int | None:
        """Return the number of the rank at position ``peer`` of the call, if its messages may take this path."""
        rendezvous = self._rendezvous
        if type(peer) is not int or not 0 <= peer < len(rendezvous.ranks):
            return None
        rank = rendezvous.ranks[peer]
        return rank if rank in rendezvous.begun and not rendezvous.is_unfinished and self._mailbox.is_idle() else None

    def send_now(self, array: object, peer: int, tag: int) -> bool:
        """Send a plain array if the ring has room for all of it in one piece. Return whether it was sent.

        These are the steps of ``Mailbox._write``, for a rank that is awake and a peer that has begun.
        """
        rendezvous = self._rendezvous
        if type(array) is not np.ndarray or (receiver := self._free_rank(peer)) is None:
            return False
        number, nbytes, num_axes = NUMBERS.get(array.dtype), array.nbytes, array.ndim
        if number is None or num_axes > MAX_INLINE_AXES or type(tag) is not int or not 0 <= tag < 1 << 63:
            return False
        num_more = nbytes + (8 * num_axes if num_axes > 1 else 0) - INLINE_NBYTES
        total = (
            LINE_NBYTES if num_more <= 0 else LINE_NBYTES + (num_more + LINE_NBYTES - 1) // LINE_NBYTES * LINE_NBYTES
        )
        written, ring = self._written, self._to_peers[receiver]
        end = written[receiver]
        start = end % self._capacity
        if start + total > self._capacity or total > self._capacity - end + rendezvous.read[receiver][self._rank]:
            return False
        self._mailbox.is_used = True
        if nbytes <= INLINE_NBYTES and num_axes <= 1:
            LINE.pack_into(ring, start, tag, nbytes, number, num_axes, IN_RING, array.tobytes())
        else:
            place = start + HEADER.size
            HEADER.pack_into(ring, start, tag, nbytes, number, num_axes, IN_RING)
            if num_axes > 1:
                SHAPES[num_axes].pack_into(ring, place, *array.shape)
                place += 8 * num_axes
            np.ndarray(array.shape, array.dtype, ring, place)[...] = array
        rendezvous.fence()  # the bytes must be visible before the count that announces them
        written[receiver] = end + total
        rendezvous.wake(receiver)
        return True

    def recv_now(self, peer: int, tag: int, like: object, out: object) -> np.ndarray | None:
        """Return the next message if it has this tag and is, or soon will be, in the ring in one piece; else None.

        These are the steps of ``Mailbox._take_in``, for a rank that is awake and has nothing else in flight.
        """
        rendezvous = self._rendezvous
        if (sender := self._free_rank(peer)) is None:
            return None
        wanted: Any = like if out is None else out
        number = _ANY if wanted is None else _number_of(wanted, like, out)
        if number is None:
            return None
        written, read, rank = rendezvous.written[sender], self._read, self._rank
        begin = read[sender]
        for _ in range(SPIN_YIELDS):
            if written[rank] != begin:
                break
            os.sched_yield()
        else:
            patience = rendezvous.patience
            if not (patience.pays and patience.wait_for(lambda: written[rank] != begin, _do_not_sleep)):
                return None
        rendezvous.fence()  # the bytes must be read after the count that announces them
        ring, start = self._from_peers[sender], begin % self._capacity
        # Nothing is taken out before all is known to fit. Until then the mailbox can still read the whole message.
        found, nbytes, found_number, num_axes, place = HEADER.unpack_from(ring, start)
        if found != tag or place != IN_RING or num_axes > MAX_INLINE_AXES:
            return None
        total = nbytes + _OVERHEAD_NBYTES[num_axes] & -LINE_NBYTES
        if start + total > self._capacity or total > written[rank] - begin:
            return None
        if wanted is None:
            dtype = named_dtype(DTYPE_NAMES[found_number])
            shape = (
                SHAPES[num_axes].unpack_from(ring, start + HEADER.size)
                if num_axes > 1
                else (nbytes // dtype.itemsize,) * num_axes
            )
        elif number == found_number and wanted.nbytes == nbytes:
            dtype, shape = wanted.dtype, wanted.shape
        else:
            return None
        self._mailbox.is_used = True
        place = start + HEADER.size
        array = np.ndarray(shape, dtype, ring, place if num_axes < 2 else place + 8 * num_axes)
        if out is None:
            array = array.copy()
        else:
            wanted[...] = array
            array = wanted
        rendezvous.fence()  # the bytes must be read before the count that gives their place back
        read[sender] = begin + total
        rendezvous.wake(sender)
        return array


_TO_ROOT = frozenset(("reduce", *TO_ROOT))


class ShmCommunicator(ShmCollectives):
    """Collectives of one rank. They run between ``begin`` and ``end``, over the ranks given to ``begin``.

    All ranks call the same collectives, in the same order, with equal arguments. If they do not, every rank that waits
    raises ``CollectiveMismatch``, and the rest of the call has no collectives. One thread at a time may use it.

    Parameters
    ----------
    segment : Segment
        Writable, at least ``required_nbytes(world_size)`` bytes, the same memory in all ranks.
    rank, world_size : int
    eventfds : sequence of int
        The descriptors in this process, one for each rank.
    patience_s : float
        How long a rank waits awake at most before it sleeps.
    rendezvous_type : type of Rendezvous

    Attributes
    ----------
    short_path : ShortPath
        The quick way for messages of plain arrays.

    Raises
    ------
    Aborted
        By every operation, once the program has called ``set_abort``.

    Notes
    -----
    ``send_array`` returns without waiting if the message fits into its ring. A longer message is taken in whenever the
    receiver waits for anything: what the receiver has not asked for yet, it keeps in private memory.
    """

    def __init__(
        self,
        segment: Segment,
        rank: int,
        world_size: int,
        eventfds: Sequence[int],
        patience_s: float = 0.0,
        rendezvous_type: type[Rendezvous] = Rendezvous,
    ) -> None:
        layout = SegmentLayout(segment.nbytes, world_size)
        halves = (world_size, 2, layout.half_nbytes)
        rings = (world_size, world_size, layout.ring_nbytes)
        rendezvous = rendezvous_type(segment, rank, world_size, eventfds, layout.ring_nbytes, Patience(patience_s))
        super().__init__(rendezvous, segment.view(layout.halves, halves, np.dtype(np.uint8)))
        self.world_size, self.patience = world_size, rendezvous.patience
        self._schedule, self.results = Schedule(rendezvous), ResultMemory()
        self._mailbox = Mailbox(
            rendezvous,
            self._schedule,
            segment.view(layout.rings, rings, np.dtype(np.uint8)),
            self.results,
        )
        self._boxes = (self._mailbox,)
        let_siblings_read()
        self.short_path = ShortPath(rendezvous, self._mailbox)

    # -- the call ------------------------------------------------------------------------------------------------

    def begin(self, ranks: tuple[int, ...], sequence: int) -> None:
        """Enter a call, before its first operation. Only ``ranks`` may call this. ``end`` follows.

        A rank that uses no collectives may write ``skip_words`` instead of both. No rank may enter a call before all
        ranks have left the one before. The program sees to that: it waits for their replies.

        Parameters
        ----------
        ranks : tuple of int
            The ranks that take part, ascending. This rank is one of them.
        sequence : int
            The number of the call, the same on all ranks: at least 1, and larger than in any earlier call.
        """
        # All this comes before the rendezvous begins: the number of the call, which it stores last, tells the others
        # that this rank's counts of bytes are valid.
        self._mailbox.clear()
        self._schedule.clear()
        self._rendezvous.is_unfinished = False
        self._reads_memory = True
        self.meetings.begin(ranks)
        self._rendezvous.begin(ranks, sequence)

    def _leave(self) -> None:
        self._rendezvous.end()

    def skip_words(self) -> tuple[memoryview, memoryview]:
        """Return the words by which a rank goes through a call without ``begin`` and ``end``; see ``Rendezvous``."""
        return self._rendezvous.skip_words()

    def wake_sleepers(self) -> None:
        """Wake peers that may wait for what this rank wrote to ``skip_words``."""
        self._rendezvous.wake_all()

    def at_once(
        self, kind: str, array: Any, out: Any, op: Any = "", weight: float | None = None, root: Any = -1
    ) -> Any:
        """Take a collective without generators, if the meeting of another one of its form was kept.

        The arguments are as the function gave them. Returns ``LONGER`` if the collective must go step by step; other
        ranks may do so even if this one does not.
        """
        rendezvous = self._rendezvous
        ranks = rendezvous.ranks
        if self._schedule.operations or rendezvous.is_unfinished or type(root) is not int or type(op) is not str:
            return LONGER  # in a key, True and 1.0 would be the root 1
        peer = ranks[root] if 0 <= root < len(ranks) else -1
        dtype = form = None
        if kind != "scatter" or peer == self.rank:
            if type(array) is not np.ndarray:
                return LONGER
            dtype, form = array.dtype, array.shape if kind in ROWS else array.size
        meeting = self.meetings.get((kind, dtype, form, op, peer, weight is None))
        if meeting is None or not (weight is None or 0.0 <= weight <= 1.0):
            return LONGER
        shape = meeting.shape
        if meeting.head is None:
            shape = array.shape
            if kind == "all_gather":
                shape = len(ranks), *shape
            elif kind == "reduce_scatter":
                if not shape or shape[0] % len(ranks):
                    return LONGER
                shape = shape[0] // len(ranks), *shape[1:]
        is_receiver = peer == self.rank if kind in _TO_ROOT else kind != "barrier"
        if is_receiver and out is not None and not _fits(out, shape, meeting.dtype):
            return LONGER
        half = (rendezvous.tick + 1) & 1
        meeting.show(half, array)
        # Until the caller has its result: if anything is raised before, later collectives of this call are refused.
        rendezvous.is_unfinished = True
        rendezvous.post_packed(meeting.request if weight is None else meeting.request_of(weight))
        rendezvous.arrive()
        self.meet()
        rendezvous.compare()
        result = None
        if meeting.head is not None and any(head != meeting.head for head in meeting.heads[half]):  # of other rows
            result = self._go_on(kind, array, peer, half, out)
        elif is_receiver:
            result = self.results.empty(shape, meeting.dtype) if out is None else out
            weights = None if weight is None else rendezvous.weights()
            meeting.finish(half, weights, result.reshape(-1) if meeting.head is None else result)
        rendezvous.is_unfinished = False
        return result

    def _go_on(self, kind: str, array: Any, root: int, half: int, out: Any) -> Any:
        """Take the steps of an exchange of equal blocks that follow its first meeting."""
        rows, sizes = None, None
        if kind != "scatter" or root == self.rank:
            rows = np.ascontiguousarray(array)
            if out is not None and np.may_share_memory(rows, out):  # pieces of it are shown after others have come
                rows = rows.copy()
            sizes = [len(array) // len(self.ranks)] * len(self.ranks) if kind in DIVIDED else None

        def place(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
            array: np.ndarray = self.results.empty(shape, dtype) if out is None else check_out(out, shape, dtype)
            return array

        self.has_agreed = True
        return self.go_on(Exchange(self, kind, rows, sizes, root).rest_steps(half, place))

    def exchange_steps(
        self, kind: str, rows: np.ndarray | None, sizes: list[int] | None, root: int, place: Place
    ) -> Steps:
        return Exchange(self, kind, rows, sizes, root).steps(place)


def _fits(out: Any, shape: tuple[int, ...], dtype: np.dtype) -> bool:
    """Whether a result can be written to ``out`` as it is."""
    if type(out) is not np.ndarray or out.shape != shape or out.dtype != dtype:
        return False
    flags = out.flags
    return flags.c_contiguous and flags.writeable
