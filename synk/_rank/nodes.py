"""The other ranks of a runtime over several nodes, as one rank sees them: by shared memory here, by wires elsewhere.

The program decides when the ranks are joined by wires, and numbers that group. A rank opens an inlet, says where it is,
and gets the table of all. The words of a call name the group that it uses; 0 stands for none.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from synk._pure.environment import num_cores
from synk._rank.functions import LoadedFunction
from synk._rank.peers import AWAKE_S, Peers
from synk._wire.memory import Segment
from synk._wire.orders import Down
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


class Wiring(NamedTuple):
    """What joins the ranks: first without a table, which the answers make; then with it.

    Attributes
    ----------
    number : int
    table : dict of int to (str, bytes)
        Where the inlet of each rank is, and its key.
    """

    number: int
    table: dict[int, tuple[str, bytes]]


class FarPeers(Peers):
    """The other ranks, of this node and of others.

    Parameters
    ----------
    counts : sequence of int
        How many ranks each node has.
    host : str
        The address of this machine for other ones; empty if all nodes are here.
    """

    def __init__(self, counts: Sequence[int], host: str, *others: Any) -> None:
        super().__init__(*others)
        ends = itertools.accumulate(counts, initial=0)
        self._nodes = [range(low, high) for low, high in itertools.pairwise(ends)]
        self._own = next(node for node in self._nodes if self._rank in node)
        self._host = host
        self._number = 0
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

    def _awake_s(self) -> float:
        return min(self.patience_s, AWAKE_S) if len(self._own) <= num_cores() else 0.0

    def connect(self, lane: Any, segment: Segment) -> None:
        lane.collective = segment
        lane.communicator = ShmCommunicator(
            segment, self._rank, self._world_size, self._eventfds, self._awake_s(), WiredRendezvous
        )
        lane.left, lane.sleeps = lane.communicator.skip_words()

    def wire(self, told: Wiring) -> dict[str, Any]:
        """Open an inlet and say where it is, or learn where the inlets of all ranks are."""
        if told.table:
            assert self._mail is not None
            self._mail.wires.connect(told.table)
            self._number = told.number
            return {}
        self._cut()
        try:
            from synk.communicators import _wires
        except ImportError:
            return {"problem": NO_WIRES}
        wires = _wires.Wires(self._host)
        self._mail = WireMailbox(self._rank, self._world_size, wires)
        return {"place": (wires.address, wires.key), "library": _wires.version()}

    def collectives(self, lane: Any, function: LoadedFunction) -> Collectives:
        if self.current is not None:
            return self.current
        call, ranks = lane.first_down[Down.CALL], lane.ranks
        if all(rank in self._own for rank in ranks):
            lane.communicator.begin(ranks, call)
            return self._opened(lane.communicator, ranks, function)
        self._check_group(lane)
        groups = [group for node in self._nodes if (group := tuple(rank for rank in ranks if rank in node))]
        assert self._mail is not None
        two_level = self._two_level = TwoLevel(lane.communicator, self._mail, groups)
        two_level.begin(call)
        return self._opened(two_level, two_level.ranks, function)

    def _check_group(self, lane: Any) -> None:
        """Raise unless this rank is joined by the wires that the call uses."""
        number = lane.first_down[Down.ALL_GROUP]
        if not number:
            raise UnsupportedError(NO_WIRES)
        if number != self._number:
            raise WorkerDied(
                f"cannot communicate on rank {self._rank}: its worker ended while idle and was replaced after the "
                "ranks were joined. They are joined anew before the next call. Call again.",
                phase="idle",
            )

    def complete(self, lane: Any) -> None:
        if self._two_level is not None:
            self._two_level.complete()
        else:
            super().complete(lane)

    def leave_call(self, lane: Any) -> None:
        """Say that this rank has left the call, by wire first: whoever sees it in shared memory can count on that."""
        two_level, self._two_level = self._two_level, None
        if two_level is not None:
            two_level.end()
        elif self._number and lane.first_down[Down.ALL_GROUP] == self._number and self._mail is not None:
            ranks = lane.ranks
            if not all(rank in self._own for rank in ranks):
                self._mail.begin(ranks, lane.first_down[Down.CALL])
                self._mail.leave()
                self._mail.progress()
        super().leave_call(lane)
