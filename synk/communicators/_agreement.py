"""The first exchange of every collective over several nodes: all ranks show what they ask for, with small arrays.

The first rank of a node speaks for it. What the ranks ask for goes through the halves to the first ranks, by wires
between these, and through the halves again. So each rank sees what every other one asks for.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._pure.ranges import LINE_NBYTES
from synk.communicators._checks import named_dtype
from synk.communicators._host import HostCommunicator
from synk.communicators._layout import WORD_NBYTES
from synk.communicators._messages import Incoming, Outgoing
from synk.communicators._rendezvous import CommRequest, agreed_weights, packed
from synk.communicators._schedule import Steps
from synk.communicators._shm import ShmCommunicator
from synk.communicators._shm_collectives import NOTHING, flat_bytes
from synk.communicators._wire_mail import WireMailbox
from synk.communicators._wired import WiredRendezvous

# Up to this size an array travels with what its rank asks for.
SMALL_NBYTES = 1 << 15

OWN_TAG = -1
"""The tag of what collectives send."""


class NodeAgreement(HostCommunicator):
    """One rank's part in the agreement between the ranks of all nodes, in one call.

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


def _size(entry: np.ndarray) -> int:
    return int(entry[:WORD_NBYTES].view(np.int64)[0])


def _entry(memory: np.ndarray) -> np.ndarray:
    """Return what a rank asks for, with its array, from memory that begins with it."""
    return memory[: WORD_NBYTES + LINE_NBYTES + -(-_size(memory) // WORD_NBYTES) * WORD_NBYTES]
