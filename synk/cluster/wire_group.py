"""The wires between the ranks of all nodes, in the head: when they are joined, and whether a call may use them.

The ranks join before the first call, and again after any failure, because an interrupt may have left a message half
sent. Each group has a new number, and a rank uses only the wires of the number that came with the call. Without pyzmq
the runtime goes on without wires, and functions that communicate get an error that says so.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

from synk._master.state.nccl_group import Group
from synk._master.workers.failures import raise_failures
from synk._master.workers.workers import Workers
from synk._wire.messages import Kind, WireOrder
from synk.cluster.ranks import NodeRanks
from synk.cluster.split import Topology


class WireGroup(Group):
    """The group of the ranks of all nodes.

    Parameters
    ----------
    ranks : NodeRanks
    topology : Topology
    on_restarts : callable
        Called when a node has replaced workers: the resident objects must be brought into line.
    """

    name = "synk.comm between nodes"

    def __init__(self, ranks: NodeRanks, topology: Topology, on_restarts: Callable[[], None]) -> None:
        super().__init__(len(topology.counts) > 1)
        self._ranks, self._topology, self._on_restarts = ranks, topology, on_restarts
        self._joined: dict[int, int] = {}  # how many workers each node had replaced when its ranks were joined

    @property
    def is_settled(self) -> bool:
        return self._is_joined or not self._is_wanted

    @property
    def number(self) -> int:
        """The number of the group that calls may use; 0 if there is none."""
        return self._number if self._is_joined else 0

    def prepare(self, workers: Workers, deadline: float | None) -> None:
        """Join the ranks unless they are joined.

        Joining takes two messages to each rank: the first returns the place where it listens, the second has it connect
        to the places of all others. ``_is_joined`` is set only after both, so a join that is broken off is done again.

        Raises
        ------
        WorkerDied, CallTimeout, CallCancelled, KeyboardInterrupt
        """
        if not self._is_wanted or (self._is_joined and self._num_restarts == workers.counters["restarts"]):
            return
        # Ranks that an earlier attempt has joined keep their wires until this one replaces them. Their number is an
        # older one, so no call uses them.
        self._is_joined = False
        self._number += 1
        if self._ranks.prepare(deadline):  # replaces workers that have ended
            self._on_restarts()
        self._num_restarts, self._joined = workers.counters["restarts"], self._ranks.num_restarts
        # A worker that dies between the two messages makes the second fail; one that dies later raises the node's
        # count, so ``note_restarts`` notices, or the rank itself, which has no group of this number.
        answers = self._ask({}, deadline)
        self.problem = next((answer["problem"] for answer in answers.values() if "problem" in answer), "")
        if self.problem:
            self._is_wanted = False
            return
        self.library = answers[0]["library"]
        self._ask({rank: answer["place"] for rank, answer in answers.items()}, deadline)
        self._is_joined = True

    def break_up(self, workers: Workers) -> None:
        """Have the ranks join again, as another group, before the next call."""
        self._is_joined = False

    def note_restarts(self, node: int, num_restarts: int) -> None:
        """Note how many workers a node has replaced. If the number has changed, the ranks join again before the next
        call.
        """
        if num_restarts != self._joined.get(node):
            self._is_joined = False

    def _ask(self, table: dict[int, tuple[str, bytes]], deadline: float | None) -> dict[int, dict[str, Any]]:
        order, what = WireOrder(self._number, self._topology.counts, table), "join the nodes"
        contents = dict.fromkeys(range(self._topology.total_ranks), order)
        replies = self._ranks.ask(Kind.GROUP, contents, deadline, "join", what)
        raise_failures(replies, self._topology.total_ranks, what)
        return {rank: pickle.loads(reply.body) for rank, reply in replies.items()}
