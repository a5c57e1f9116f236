"""The communicator of one rank in a call over several nodes: its collectives, requests and messages.

The ranks of a node meet in shared memory and send messages through its mailbox. All else goes by wires between nodes.

Small arrays travel with what the ranks ask for (``_agreement``). Each rank then has the arrays of all ranks, and
reduces them by itself in rank order, with the bits of one machine.

A large array is reduced to the first rank of each node, as a partial result, neither divided nor rounded. Each first
rank then folds its part of the elements in the order of the nodes, finishes it, and sends it to the others. All ranks
get the same bits, each time.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from synk._pure.dtypes import dtype_name
from synk._pure.ops import REDUCTIONS, accumulator_dtype
from synk._pure.ranges import chunk_bounds
from synk.communicators._agreement import OWN_TAG, NodeAgreement
from synk.communicators._exchange import DIVIDED, asked_for
from synk.communicators._far_exchange import FarExchange
from synk.communicators._mailbox import Mailbox
from synk.communicators._messages import Incoming, Outgoing
from synk.communicators._results import Place
from synk.communicators._schedule import Operation, Steps
from synk.communicators._shm_collectives import NOTHING, StreamReading, flat_bytes
from synk.communicators._wire_mail import WireMailbox

# How much is folded at once: the next part arrives meanwhile.
FOLD_NBYTES = 1 << 20


class TwoLevel(NodeAgreement):
    """The collectives and messages of one rank in one call over several nodes. Parameters: see ``NodeAgreement``."""

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

    # What waits takes in what comes by wire; see WiredRendezvous. These two do not wait.

    def test(self, operation: Operation) -> bool:
        if not operation.is_done:
            with self._rendezvous.operation:
                self._mail.progress()
        return super().test(operation)

    def test_message(self, message: Incoming) -> bool:
        if not message.is_done:
            with self._rendezvous.operation:
                self._mail.progress()
                self._mailbox.progress()
        return super().test_message(message)

    # -- reductions ----------------------------------------------------------------------------------------------------

    def all_reduce_steps(self, source: np.ndarray, target: np.ndarray, op: str, weight: float | None) -> Steps:
        is_small = self._is_small(source.nbytes)
        carried = source if is_small else NOTHING
        dtype = dtype_name(source.dtype)
        found = yield from self._agree("all_reduce", dtype, source.size, op, weight=weight, carried=carried)
        if is_small:
            self._fold(found, op, target)
            return
        partial = yield from self._partial(source, target, op, weight)
        if self._is_leader:
            bounds = chunk_bounds(source.size, source.itemsize, len(self._groups))
            yield from self._fold_nodes(partial, bounds, op, target, self._leaders)
        yield from self._from_rank(self._group[0], flat_bytes(target), self._group)

    def reduce_steps(self, source: np.ndarray, target: np.ndarray, op: str, weight: float | None, root: int) -> Steps:
        is_small, is_root = self._is_small(source.nbytes), self.rank == root
        carried = source if is_small else NOTHING
        found = yield from self._agree("reduce", dtype_name(source.dtype), source.size, op, root, weight, carried)
        if is_small:
            if is_root:
                self._fold(found, op, target)
            return
        if not is_root:
            target = self.results.empty(source.shape, source.dtype) if self._is_leader else source
        partial = yield from self._partial(source, target if self._is_leader else None, op, weight)
        group = next(group for group in self._groups if root in group)
        if self._is_leader:
            bounds = chunk_bounds(source.size, source.itemsize, len(self._groups))
            yield from self._fold_nodes(partial, bounds, op, target, group[:1])
        if self._group == group:
            yield from self._from_rank(group[0], flat_bytes(target), (root,))

    def reduce_scatter_steps(self, source: np.ndarray, target: np.ndarray, op: str, weight: float | None) -> Steps:
        count, is_small = target.size, self._is_small(source.nbytes)
        carried = source if is_small else NOTHING
        dtype = dtype_name(source.dtype)
        found = yield from self._agree("reduce_scatter", dtype, count, op, weight=weight, carried=carried)
        if is_small:
            start = self._all.index(self.rank) * target.nbytes
            self._fold([each[start : start + target.nbytes] for each in found], op, target)
            return
        partial = yield from self._partial(source, None, op, weight)
        whole = NOTHING
        if self._is_leader:
            ends = list(itertools.accumulate((len(group) * count for group in self._groups), initial=0))
            bounds = list(itertools.pairwise(ends))
            whole = np.empty(source.size, source.dtype)  # only the blocks of this node are filled
            yield from self._fold_nodes(partial, bounds, op, whole, ())
            whole = whole[slice(*bounds[self._node])]
        blocks = list(flat_bytes(whole).reshape(len(self._group), -1)) if whole.size else []
        own = self._group.index(self.rank)
        if self._is_leader and count:
            target[:] = whole[own * count : own * count + count]
        streams = {k: block for k, block in enumerate(blocks) if k != own}
        readings = [] if self._is_leader else [StreamReading(self._group[0], own, flat_bytes(target))]
        yield from self._local.copy_steps(streams, readings, target.nbytes, len(self._group))

    def _fold(self, found: Sequence[np.ndarray], op: str, target: np.ndarray) -> None:
        """Reduce small arrays of all ranks, given as bytes, in rank order."""
        values = [np.frombuffer(each.tobytes(), target.dtype) for each in found]
        with np.errstate(all="ignore"):
            REDUCTIONS[op].reduce_into(values, self._weights, target)

    def _partial(self, source: np.ndarray, target: np.ndarray | None, op: str, weight: float | None) -> Steps:
        """Reduce ``source`` to the first rank of the node. Return there the partial result of the node.

        ``target``: memory that the first rank may use for it.
        """
        reduction, wide = REDUCTIONS[op], accumulator_dtype(source.dtype)
        with np.errstate(all="ignore"):
            lifted = reduction.lift(source, weight if self._is_weighted and weight is not None else 1)
        if len(self._group) == 1:
            return lifted
        partial = lifted
        if self._is_leader:
            is_fit = target is not None and target.dtype == wide
            partial = target if is_fit and target is not None else self.results.empty(source.shape, wide)
        # Values that were lifted are added up: the average is divided once, at the end.
        yield from self._local.fold_steps(lifted, partial, "sum" if op == "avg" else op, self._is_leader)
        return partial

    @property
    def _is_weighted(self) -> bool:
        """Whether the values of an average must be multiplied: not all weigh the same."""
        return self._weights is not None and len(set(self._weights)) > 1

    def _fold_nodes(
        self,
        partial: np.ndarray,
        bounds: Sequence[tuple[int, int]],
        op: str,
        target: np.ndarray,
        receivers: Sequence[int],
    ) -> Steps:
        """On a first rank: fold one part of the nodes' partial results, and get the finished parts of the others.

        Parameters
        ----------
        partial : ndarray
            Of this node.
        bounds : sequence of (start, stop)
            Which part of the elements the first rank of each node folds.
        target : ndarray
            Gets this node's part; on receivers, all of them. It may be ``partial``: a part of it is overwritten only
            after it was sent.
        receivers : sequence of int
            The first ranks that get all parts.
        """
        mail, reduction = self._mail, REDUCTIONS[op]
        divisor = sum(self._weights) if self._is_weighted and self._weights else len(self._all)
        pieces = [_pieces(*each, FOLD_NBYTES // partial.itemsize) for each in bounds]
        outgoing: list[Outgoing] = []
        for position, rank in enumerate(self._leaders):
            if rank != self.rank:
                outgoing += [mail.put(partial[low:high], rank, OWN_TAG) for low, high in pieces[position]]
        own = pieces[self._node]
        incoming = {rank: [mail.irecv(None, rank, OWN_TAG) for _ in own] for rank in self._leaders if rank != self.rank}
        finished: list[Incoming] = []
        if self.rank in receivers:
            for position, rank in enumerate(self._leaders):
                if rank != self.rank:
                    finished += [mail.irecv(target[low:high], rank, OWN_TAG) for low, high in pieces[position]]
        for index, (low, high) in enumerate(own):
            yield from self._there([each[index] for each in incoming.values()])
            values = [
                partial[low:high] if rank == self.rank else incoming[rank][index].array() for rank in self._leaders
            ]
            for each in incoming.values():
                each[index] = _DONE  # frees its memory
            folded = np.empty(high - low, partial.dtype)
            with np.errstate(all="ignore"):
                reduction.merge(values[0], values[1], out=folded)
                for value in values[2:]:
                    reduction.merge(folded, value, out=folded)
                reduction.finish_into(folded, divisor, target[low:high])
            outgoing += [mail.put(target[low:high], rank, OWN_TAG) for rank in receivers if rank != self.rank]
        yield from self._there(finished, outgoing)
        for message in finished:
            message.array()

    # -- copies --------------------------------------------------------------------------------------------------------

    def _from_rank(self, source: int, whole: np.ndarray, readers: Sequence[int]) -> Steps:
        """Copy the bytes of one rank of the node to others, all of the node taking part."""
        if self._group == (source,) or tuple(readers) == (source,):
            return
        is_source = self.rank == source
        readings = [StreamReading(source, 0, whole)] if self.rank in readers and not is_source else []
        yield from self._local.copy_steps({0: whole} if is_source else {}, readings, whole.size)

    def broadcast_steps(self, array: np.ndarray, root: int) -> Steps:
        whole = flat_bytes(array)
        self.check_member("broadcast", "root", root)
        is_small, is_root = self._is_small(whole.size), self.rank == root
        carried = whole if is_small and is_root else NOTHING
        found = yield from self._agree("broadcast", dtype_name(array.dtype), array.size, peer=root, carried=carried)
        if is_small:
            if not is_root:
                whole[:] = found[self._all.index(root)]
            return
        if is_root:
            leaders = [group[0] for group in self._groups if root not in group]
            yield from self._there((), [self._mail.put(whole, rank, OWN_TAG) for rank in leaders])
        elif self._is_leader and root not in self._group:
            yield from self._received({root: whole})
        yield from self._from_rank(root if root in self._group else self._group[0], whole, self._group)

    def _received(self, targets: dict[int, np.ndarray]) -> Steps:
        """Wait for an array from each of some ranks."""
        incoming = [self._mail.irecv(target, rank, OWN_TAG) for rank, target in targets.items()]
        yield from self._there(incoming)
        for message in incoming:
            message.array()

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
        readings = [StreamReading(rank, 0, blocks[rank]) for rank in self._group if rank != self.rank]
        yield from self._local.copy_steps({0: source}, readings, source.size)
        blocks[self.rank][:] = source
        if self._is_leader:
            ends = itertools.accumulate((len(group) * source.size for group in self._groups), initial=0)
            parts = [whole[low:high] for low, high in itertools.pairwise(ends)]
            outgoing = [self._mail.put(parts[self._node], rank, OWN_TAG) for rank in self._other_leaders]
            yield from self._received({rank: part for rank, part in zip(self._leaders, parts) if rank != self.rank})
            yield from self._there((), outgoing)
        yield from self._from_rank(self._group[0], whole, self._group)

    def exchange_steps(
        self, kind: str, rows: np.ndarray | None, sizes: list[int] | None, root: int, place: Place
    ) -> Steps:
        """Take the steps of an exchange of rows; see ``Exchange``. Large blocks are messages from rank to rank."""
        exchange = FarExchange(self._all, self.rank, kind, rows, sizes, root)
        dtype, row_size = asked_for(kind, exchange.head)
        head = b"" if exchange.head is None else exchange.head.words().tobytes()
        rest = NOTHING if rows is None else flat_bytes(rows)
        is_small = self._is_small(len(head) + rest.size)
        carried = np.frombuffer(head + (rest.tobytes() if is_small else b""), np.uint8)
        found = yield from self._agree(kind, dtype, row_size, peer=root, carried=carried)
        small = exchange.read([each.copy() for each in found])
        joined, targets = exchange.open(place)
        for rank in [rank for rank in targets if rank in small]:
            targets.pop(rank)[:] = exchange.block_of(small[rank], rank)
        outgoing, incoming = [], []
        if exchange.is_sender and not is_small:
            for rank in exchange.receivers:
                block = exchange.own_block(rank)
                if rank not in self._group and block.size:
                    outgoing.append(self._mail.put(block, rank, OWN_TAG))
        for rank, target in targets.items():
            if rank not in self._group and target.size:
                incoming.append(self._mail.irecv(target, rank, OWN_TAG))
        local = [rank for rank in self._group if rank in exchange.heads and rank not in small]
        if local and len(self._group) > 1:
            streams: dict[int, np.ndarray] = {}
            num_streams = len(self._group) if kind in DIVIDED else 1  # one stream is for all others
            if self.rank in local:
                readers = self._group[:num_streams]
                streams = {k: exchange.own_block(rank) for k, rank in enumerate(readers)}
            index = self._group.index(self.rank) if kind in DIVIDED else 0
            readings = [StreamReading(rank, index, target) for rank, target in targets.items() if rank in local]
            longest = max(exchange.heads[rank].longest for rank in local)
            yield from self._local.copy_steps(streams, readings, longest, num_streams)
        yield from self._there(incoming, outgoing)
        for message in incoming:
            message.array()
        return joined


_DONE = Incoming()


def _pieces(start: int, stop: int, length: int) -> list[tuple[int, int]]:
    """Return the bounds of pieces of at most ``length`` elements."""
    return [(low, min(low + length, stop)) for low in range(start, stop, length)]
