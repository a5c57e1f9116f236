"""The other ranks of a runtime over several nodes, as one rank sees them.

The head decides when the ranks are joined by wires, and numbers that group. A rank opens an inlet, says where it is,
and gets the table of all. A call names the group that it uses; 0 stands for none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from synk._wire.control import Down
from synk._wire.memory import Segment
from synk._wire.messages import WireOrder
from synk._worker.call.execute import WorkerLane
from synk._worker.call.peers import Peers
from synk._worker.held.plans import LoadedFunction
from synk.communicators._collectives import Collectives
from synk.communicators._shm import ShmCommunicator
from synk.communicators._two_level import TwoLevel
from synk.communicators._wire_mail import WireMailbox
from synk.communicators._wired import WiredRendezvous
from synk.errors import UnsupportedError, WorkerDied

NO_WIRES = (
    "cannot communicate over several nodes: got no pyzmq on a rank, without which the ranks cannot be joined. Install "
    "it: pip install 'synkhronos[cluster]'. Or combine by outputs=."
)


class FarPeers(Peers):
    """The other ranks, of this node and of others.

    In shared memory the ranks of this node have the numbers that they have among all nodes.

    Parameters
    ----------
    first_rank, total_ranks : int
        The number of this node's first rank, and how many ranks all nodes have.
    """

    def __init__(self, first_rank: int, total_ranks: int, *others: Any) -> None:
        super().__init__(*others)
        self._first_rank, self._total_ranks = first_rank, total_ranks
        num_after = total_ranks - first_rank - self._world_size
        self._eventfds = (*[-1] * first_rank, *self._eventfds, *[-1] * num_after)
        self._number = 0
        self._nodes: list[range] = []
        self._mail: WireMailbox | None = None
        self._two_level: TwoLevel | None = None

    def close(self) -> None:
        super().close()
        self._cut()

    def _cut(self) -> None:
        """Leave the group."""
        mail, self._mail, self._number = self._mail, None, 0
        if mail is not None:
            mail.wires.close()

    def connect(self, lane: WorkerLane, segment: Segment) -> None:
        lane.collective = segment
        own = self._first_rank + self._rank
        communicator = lane.communicator = ShmCommunicator(
            segment, own, self._total_ranks, self._eventfds, self._awake_s(), WiredRendezvous
        )
        # Calls index these words by the rank's number on this node, the communicator by its number among all nodes.
        here = slice(self._first_rank, self._first_rank + self._world_size)
        lane.left, lane.sleeps = (words[here] for words in communicator.skip_words())

    def join(self, order: Any, lanes: Sequence[WorkerLane]) -> dict[str, Any]:
        """Open an inlet and say where it is, or learn where the inlets of all ranks are."""
        if not isinstance(order, WireOrder):
            return super().join(order, lanes)
        if order.table:
            assert self._mail is not None
            self._mail.wires.connect(order.table)
            ends = itertools.accumulate(order.counts, initial=0)
            self._nodes = [range(low, high) for low, high in itertools.pairwise(ends)]
            self._number = order.number
            return {}
        self._cut()
        try:
            from synk.communicators import _wires
        except ImportError:
            return {"problem": NO_WIRES}
        wires = _wires.Wires(order.host)
        self._mail = WireMailbox(self._first_rank + self._rank, self._total_ranks, wires)
        return {"place": (wires.address, wires.key), "library": _wires.version()}

    def ranks(self, lane: WorkerLane) -> tuple[int, ...]:
        """Return the ranks of all nodes that run the current call; if its message could not be read, all there are."""
        return tuple(range(self._total_ranks)) if lane.called is None else lane.called.plan.all_ranks

    def collectives(self, lane: WorkerLane, function: LoadedFunction) -> Collectives:
        if self.current is not None:
            return self.current
        assert lane.communicator is not None
        call, ranks = lane.first_down[Down.CALL], self.ranks(lane)
        own = tuple(self._first_rank + rank for rank in lane.ranks)
        if own == ranks:
            lane.communicator.begin(own, call)
            return self._opened(lane.communicator, own, function)
        groups = [tuple(rank for rank in ranks if rank in node) for node in self._checked_group(lane)]
        groups = [group for group in groups if group]
        assert self._mail is not None
        two_level = self._two_level = TwoLevel(lane.communicator, self._mail, groups)
        two_level.begin(call)
        return self._opened(two_level, two_level.ranks, function)

    def _checked_group(self, lane: WorkerLane) -> list[range]:
        """Return the ranks of the nodes, which are joined by wires."""
        number = lane.first_down[Down.ALL_GROUP]
        if not number:
            raise UnsupportedError(NO_WIRES)
        if number != self._number:
            raise WorkerDied(
                f"cannot communicate on rank {self._first_rank + self._rank}: its worker ended while idle and was "
                "replaced after the ranks were joined. They are joined anew before the next call. Call again.",
                phase="idle",
            )
        return self._nodes

    def complete(self, lane: WorkerLane) -> None:
        if self._two_level is not None:
            self._two_level.complete()
        else:
            super().complete(lane)

    def leave_call(self, lane: WorkerLane) -> None:
        """Say that this rank has left the call, by wire first: whoever sees it in shared memory can count on that."""
        two_level, self._two_level = self._two_level, None
        if two_level is not None:
            two_level.end()
        elif self._number and lane.first_down[Down.ALL_GROUP] == self._number and self._mail is not None:
            ranks = self.ranks(lane)
            if len(ranks) > len(lane.ranks):
                self._mail.begin(ranks, lane.first_down[Down.CALL])
                self._mail.leave()
                self._mail.progress()
        super().leave_call(lane)
