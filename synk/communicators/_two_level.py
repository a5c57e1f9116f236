"""The communicator of one rank in a call over several nodes: its collectives, requests and messages.

The ranks of a node meet in shared memory and send messages through its mailbox. All else goes by wires between nodes.

Small arrays travel with what the ranks ask for (``_agree``). Each rank then has the arrays of all ranks, and
reduces them by itself in rank order, with the bits of one machine.

Of a large array each rank gets its share of every rank, folds them in rank order, and sends the result to the others:
the bits of one machine, too. Blocks go from rank to rank, by the halves within a node and by wire between nodes.

The first rank of a node speaks for it. What the ranks ask for goes through the halves to the first ranks, by wires
between these, and through the halves again. So each rank sees what every other one asks for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._pure.dtypes import dtype_name
from synk._pure.ops import REDUCTIONS
from synk._pure.ranges import LINE_NBYTES, chunk_bounds
from synk.communicators._checks import named_dtype
from synk.communicators._exchange import DIVIDED, TO_ROOT, Head, asked_for, check_shapes, joined_rows
from synk.communicators._host import HostCommunicator
from synk.communicators._layout import WORD_NBYTES
from synk.communicators._mailbox import Mailbox
from synk.communicators._messages import Incoming, Outgoing
from synk.communicators._rendezvous import CommRequest, agreed_weights, packed
from synk.communicators._schedule import Steps
from synk.communicators._shm import ShmCommunicator
from synk.communicators._shm_collectives import NOTHING, StreamReading, flat_bytes
from synk.communicators._user_arrays import Place
from synk.communicators._wire_mail import WireMailbox
from synk.communicators._wired import WiredRendezvous

# Up to this size an array travels with what its rank asks for.
SMALL_NBYTES = 1 << 15

OWN_TAG = -1
"""The tag of what collectives send."""


class TwoLevel(HostCommunicator):
    """The collectives and messages of one rank in one call over several nodes.

    Parameters
    ----------
    local : ShmCommunicator
        Of the ranks of this node, under the numbers that they have among all nodes. It waits by a `WiredRendezvous`.
    mail : WireMailbox
    groups : sequence of tuple of int
        The ranks of each node that take part, ascending. This rank is one of them.

    """

    _rendezvous: WiredRendezvous

    def __init__(self, local: ShmCommunicator, mail: WireMailbox, groups: Sequence[tuple[int, ...]]) -> None:
        self._local, self._mail = local, mail
        rendezvous, self._schedule, self._mailbox = local.parts()
        self._boxes = self._mailbox, mail
        assert isinstance(rendezvous, WiredRendezvous)
        self._rendezvous = rendezvous
        self.rank, self.world_size = local.rank, local.world_size
        self.patience, self.results = local.patience, local.results
        self._groups = tuple(groups)
        self._all = tuple(itertools.chain.from_iterable(groups))
        self._node = next(node for node, group in enumerate(groups) if self.rank in group)
        self._group = self._groups[self._node]
        self._leaders = tuple(group[0] for group in groups)
        self._is_leader = self.rank == self._group[0]
        self._other_leaders = tuple(rank for rank in self._leaders if rank != self.rank)
        self._weights: list[float] | None = None

    @property
    def ranks(self) -> tuple[int, ...]:
        return self._all if self._local.ranks else ()

    # -- the call --------------------------------------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """Enter the call with this number, which is larger than those of all earlier ones."""
        self._mail.begin(self._all, number)
        self._rendezvous.attach(self._mail, self._mailbox, self._schedule)
        self._local.begin(self._group, number)

    def _leave(self) -> None:
        self._mail.leave()
        self._local.end()

    def end(self) -> None:
        super().end()
        self._rendezvous.detach()

    def _box(self, peer: int) -> Mailbox | WireMailbox:
        return self._mailbox if peer in self._group else self._mail

    def _progress(self) -> None:
        self._mail.progress()
        self._mailbox.progress()

    # -- what the ranks ask for ----------------------------------------------------------------------------------------

    def _is_small(self, nbytes: int) -> bool:
        """Whether arrays of this size travel with what the ranks ask for: there is room for one of each rank."""
        room = self._local.half_nbytes // len(self._all) // WORD_NBYTES * WORD_NBYTES - WORD_NBYTES - LINE_NBYTES
        return nbytes <= min(SMALL_NBYTES, room)

    def _agree(
        self,
        kind: str,
        dtype: str = "",
        count: int = 0,
        op: str = "",
        peer: int = -1,
        weight: float | None = None,
        carried: np.ndarray = NOTHING,
    ) -> Steps:
        """Yield, then show all ranks what this one asks for, with a small flat array. Return the arrays of all ranks.

        The arrays are in the order of the ranks. They are views of memory that is valid until the next meeting.

        Raises
        ------
        CollectiveMismatch
            On every rank of all nodes, if any two requests differ.
        """
        self._check_active(kind)
        if dtype:
            named_dtype(dtype)  # raises if the others could not read it
        yield None
        local, request = self._local, CommRequest(kind, op, dtype, count, peer, 0, weight)
        self._mail.num_joined += 1
        self._rendezvous.post(request)
        local.has_agreed = True  # the requests of all nodes are compared below
        carried = flat_bytes(carried)
        padding = bytes(-carried.nbytes % WORD_NBYTES)
        size = np.array([carried.nbytes], np.int64).tobytes()
        parts = [np.frombuffer(size + packed(request) + carried.tobytes() + padding, np.uint8)]
        if len(self._group) > 1:
            half = local.next_half()
            local.part(self.rank, half, 0, parts[0])[:] = parts[0]
            yield from local.meet_steps()
            parts = [_entry(local.half(rank, half)) for rank in self._group] if self._is_leader else []
        if self._is_leader:
            parts = yield from self._bundles(np.concatenate(parts))
        whole = np.concatenate(parts) if parts else NOTHING
        if len(self._group) > 1:
            half = local.next_half()
            if self._is_leader:
                local.part(self.rank, half, 0, whole)[:] = whole
            yield from local.meet_steps()
            whole = local.half(self._group[0], half)
        entries = []
        for _ in self._all:
            entries.append(_entry(whole))
            whole = whole[entries[-1].size :]
        lines = [entry[WORD_NBYTES : WORD_NBYTES + LINE_NBYTES].tobytes() for entry in entries]
        self._weights = agreed_weights(dict(zip(self._all, lines)))
        return [entry[WORD_NBYTES + LINE_NBYTES :][: _size(entry)] for entry in entries]

    def _bundles(self, own: np.ndarray) -> Steps:
        """Exchange what the ranks of the nodes ask for. Return it in the order of the nodes."""
        outgoing = [self._mail.put(own, rank, OWN_TAG) for rank in self._other_leaders]
        incoming = {rank: self._mail.irecv(None, rank, OWN_TAG) for rank in self._other_leaders}
        yield from self._there(incoming.values(), outgoing)
        return [own if rank == self.rank else incoming[rank].array() for rank in self._leaders]

    def _there(self, incoming: Any = (), outgoing: Any = ()) -> Steps:
        """Wait until messages have come, and others are on their way."""
        mail = self._mail
        arriving: list[Incoming] = list(incoming)
        leaving: list[Outgoing] = list(outgoing)

        def is_ready() -> bool:
            return all(mail.is_there(each) for each in arriving) and all(mail.is_sent(each) for each in leaving)

        if not is_ready():
            yield is_ready

    def barrier_steps(self) -> Steps:
        yield from self._agree("barrier")

    # -- reductions ----------------------------------------------------------------------------------------------------

    def reduce_steps(
        self, kind: str, source: np.ndarray, target: np.ndarray, op: str, weight: float | None, root: int = -1
    ) -> Steps:
        is_divided, is_small = kind == "reduce_scatter", self._is_small(source.nbytes)
        count = target.size if is_divided else source.size
        carried = source if is_small else NOTHING
        found = yield from self._agree(kind, dtype_name(source.dtype), count, op, root, weight, carried)
        bounds = chunk_bounds(source.size, source.itemsize, len(self._all))
        if is_divided:
            bounds = [(k * count, (k + 1) * count) for k in range(len(self._all))]
        shares = {rank: slice(*each) for rank, each in zip(self._all, bounds)}
        receivers = self._all if root < 0 else (root,)
        is_receiver = self.rank in receivers
        if is_small:
            if is_receiver:
                own = shares[self.rank] if is_divided else slice(None)
                self._fold([each.view(source.dtype)[own] for each in found], op, target)
            return
        share: np.ndarray = yield from self._share(source, shares, op)
        if is_divided:
            target[:] = share
            return
        if is_receiver:
            target[shares[self.rank]] = share
        places = {rank: target[each] for rank, each in shares.items()} if is_receiver else {}
        yield from self._move(dict.fromkeys(receivers, share), places, _longest(shares, source))

    def _share(self, source: np.ndarray, shares: dict[int, slice], op: str) -> Steps:
        """Fold this rank's share of the arrays of all ranks, in rank order. Return it."""
        own = source[shares[self.rank]]
        parts = {rank: own if rank == self.rank else self.results.empty(own.shape, own.dtype) for rank in self._all}
        outgoing = {rank: source[each] for rank, each in shares.items()}
        yield from self._move(outgoing, parts, _longest(shares, source))
        result = self.results.empty(own.shape, own.dtype)
        self._fold(list(parts.values()), op, result)
        return result

    def _fold(self, parts: Sequence[np.ndarray], op: str, target: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            REDUCTIONS[op].reduce_into(parts, self._weights, target)

    # -- copies --------------------------------------------------------------------------------------------------------

    def _move(self, outgoing: dict[int, np.ndarray], incoming: dict[int, np.ndarray], longest: int) -> Steps:
        """Send an array to each of some ranks, and fill an array from each of some. A rank's own are left out.

        ``longest``: the size in bytes of the largest that goes within this node; 0 if none does.
        """
        group, mail = self._group, self._mail
        far = [rank for rank in self._all if rank not in group]
        sent = [mail.put(outgoing[rank], rank, OWN_TAG) for rank in far if rank in outgoing and outgoing[rank].size]
        asked = [mail.irecv(incoming[rank], rank, OWN_TAG) for rank in far if rank in incoming and incoming[rank].size]
        if longest and len(group) > 1:
            others = [(index, rank) for index, rank in enumerate(group) if rank != self.rank]
            streams = {index: flat_bytes(outgoing[rank]) for index, rank in others if rank in outgoing}
            own = group.index(self.rank)
            readings = [StreamReading(rank, own, flat_bytes(incoming[rank])) for _, rank in others if rank in incoming]
            yield from self._local.copy_steps(streams, readings, longest, len(group))
        yield from self._there(asked, sent)
        for message in asked:
            message.array()

    def broadcast_steps(self, array: np.ndarray, root: int) -> Steps:
        whole = flat_bytes(array)
        is_small, is_root = self._is_small(whole.size), self.rank == root
        carried = whole if is_small and is_root else NOTHING
        found = yield from self._agree("broadcast", dtype_name(array.dtype), array.size, peer=root, carried=carried)
        if is_small:
            if not is_root:
                whole[:] = found[self._all.index(root)]
            return
        # To the first rank of each other node by wire, and from there to the ranks of the node.
        is_far = self._is_leader and root not in self._group
        leaders = [group[0] for group in self._groups if root not in group] if is_root else []
        yield from self._move(dict.fromkeys(leaders, whole), {root: whole} if is_far else {}, 0)
        source = root if root in self._group else self._group[0]
        outgoing = dict.fromkeys(self._group, whole) if self.rank == source else {}
        yield from self._move(outgoing, {} if outgoing else {source: whole}, whole.size)

    def all_gather_steps(self, source: np.ndarray, target: np.ndarray) -> Steps:
        dtype, count = dtype_name(source.dtype), source.size
        source, whole = flat_bytes(source), flat_bytes(target)
        is_small = self._is_small(source.size)
        carried = source if is_small else NOTHING
        found = yield from self._agree("all_gather", dtype, count, carried=carried)
        if is_small:
            if source.size:
                np.concatenate(found, out=whole)
            return
        blocks = dict(zip(self._all, whole.reshape(len(self._all), -1)))
        yield from self._move(dict.fromkeys(self._all, source), blocks, source.size)
        blocks[self.rank][:] = source

    def exchange_steps(
        self, kind: str, rows: np.ndarray | None, sizes: list[int] | None, root: int, place: Place
    ) -> Steps:
        """Take the steps of an exchange of rows; see ``Exchange``. Few rows travel with the head that tells of them."""
        head = None if rows is None else Head.of(rows, sizes)
        dtype, row_size = asked_for(kind, head)
        words = b"" if head is None else head.words().tobytes()
        whole = NOTHING if rows is None else flat_bytes(rows)
        is_small = self._is_small(len(words) + whole.size)
        carried = np.frombuffer(words + (whole.tobytes() if is_small else b""), np.uint8)
        found = yield from self._agree(kind, dtype, row_size, peer=root, carried=carried)
        heads, small = {}, {}
        for rank, entry in zip(self._all, found):
            if entry.size:  # of a sender
                stop = WORD_NBYTES * (1 + int(entry[:WORD_NBYTES].view(np.int64)[0]))
                heads[rank] = Head.read(entry[WORD_NBYTES:stop].view(np.int64).tolist())
                if entry.size - stop == sum(heads[rank].sizes) * heads[rank].row_nbytes:
                    small[rank] = entry[stop:].copy()
        check_shapes(kind, heads)
        index = {rank: k if kind in DIVIDED else 0 for k, rank in enumerate(self._all)}
        receivers = (root,) if kind in TO_ROOT else self._all
        joined, targets = joined_rows(heads, index[self.rank], place) if self.rank in receivers else (None, {})
        blocks = {} if head is None else {rank: whole[head.block(index[rank])] for rank in receivers}
        if self.rank in targets:
            targets.pop(self.rank)[:] = blocks[self.rank]
        for rank in [rank for rank in targets if rank in small]:
            targets.pop(rank)[:] = small[rank][heads[rank].block(index[self.rank])]
        local = [rank for rank in self._group if rank in heads and rank not in small]
        longest = max((heads[rank].longest for rank in local), default=0)
        yield from self._move({} if is_small else blocks, targets, longest)
        return joined


def _longest(shares: dict[int, slice], array: np.ndarray) -> int:
    """Return the size of the largest share in bytes."""
    return max(each.stop - each.start for each in shares.values()) * array.itemsize


def _size(entry: np.ndarray) -> int:
    return int(entry[:WORD_NBYTES].view(np.int64)[0])


def _entry(memory: np.ndarray) -> np.ndarray:
    """Return what a rank asks for, with its array, from memory that begins with it."""
    return memory[: WORD_NBYTES + LINE_NBYTES + -(-_size(memory) // WORD_NBYTES) * WORD_NBYTES]
