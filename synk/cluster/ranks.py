"""Messages from the head to single ranks, which their nodes' agents pass on."""

from __future__ import annotations

import pickle
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from synk._master.processes.output import warn_at_users_line
from synk._master.workers.ranks import Ranks
from synk._master.workers.recovery import Recovery
from synk._master.workers.requests import Request
from synk._master.workers.workers import Workers
from synk._wire.control import Down
from synk._wire.items import Items
from synk._wire.memory import Segment
from synk._wire.messages import Kind, Reply, Status
from synk.cluster.channel import unpacked
from synk.cluster.orders import NodeReply, RankOrders, RankReplies, beside
from synk.cluster.split import Topology
from synk.errors import CallCancelled, ClosedError


class RankRequest(Request):
    """A message in flight to one rank of a node. An error of the node's session ends all messages in flight to it.

    Parameters
    ----------
    name : str
        The rank, in words, for errors.
    node : int
    recovery : Recovery
    deadline, phase, what
        As for :class:`Request`.
    """

    def __init__(self, name: str, node: int, recovery: Recovery, deadline: float | None, phase: str, what: str) -> None:
        super().__init__(0, [node], deadline, phase, what)
        self._name, self._recovery = name, recovery
        self._failed: RankReplies | None = None

    def take(self, rank: int, reply: Reply) -> None:
        """Note the reply of the node. If its session has failed, the request stays unanswered, and is late at once.

        So the failure takes the path of a time limit: all other messages in flight are settled before the error is
        raised.
        """
        if reply.status == Status.ERROR:
            self._failed, self.deadline = unpacked(reply.body), time.monotonic()
        else:
            super().take(rank, reply)

    def late(self, ranks: str) -> Exception:
        if self._failed is None:
            return super().late(self._name)
        show_warnings(self._failed)
        return error_of(self._failed, self._recovery)


class NodeRanks(Ranks):
    """The ranks of all nodes.

    Parameters
    ----------
    workers : Workers
        The agents.
    topology : Topology

    Attributes
    ----------
    num_restarts : dict of int to int
        For each node, how many workers it had replaced when :meth:`prepare` last asked. The head knows the resident
        objects of the workers that lived then. It knows nothing of later ones, so a node with another number refuses.
    down : ndarray of int64, shape (total_ranks, len(Down))
        The control block of each rank. Only ``Down.COMMITTED`` is used, and no rank reads these numbers.
    """

    def __init__(self, workers: Workers, topology: Topology) -> None:
        super().__init__(workers)
        self._topology = topology
        self.num_restarts: dict[int, int] = {}
        self.down = np.full((topology.total_ranks, len(Down)), -1, np.int64)
        self.words = self

    @property
    def num_ranks(self) -> int:
        return self._topology.total_ranks

    def prepare(self, deadline: float | None) -> bool:
        nodes = range(len(self._topology.counts))
        before, self.num_restarts = self.num_restarts, {}  # with no numbers the nodes answer instead of refusing
        request = self._sent(Kind.RESIDENT, {node: {} for node in nodes}, deadline, "restart", "replace workers")
        found = {node: reply.num_restarts for node, reply in self._answers(request).items()}
        self.num_restarts = found
        return found != before

    def committed(self, node: int, number: int) -> tuple[int, list[Segment]]:
        """Return the number of the last committed call that ran on a node, as a source of the log.

        The node keeps the back buffers of one call only, and commits them if the number is that of this call.
        """
        ranks = self._topology.ranks_of(node)
        return int(self.down[ranks[0] : ranks[-1] + 1, Down.COMMITTED].max()), []

    def send_items(
        self,
        rank: int,
        items: Items,
        segments: Sequence[Segment],
        deadline: float | None,
        what: str,
        *,
        has_residents: bool,
    ) -> Request:
        items = items._replace(pickles=[*map(beside, items.pickles)])
        ((node, contents),) = self._by_node({rank: items}).items()
        order = RankOrders(contents, self.num_restarts.get(node) if has_residents else None, "map", what, False)
        request = RankRequest(f"rank {rank} of {self.num_ranks}", node, self._workers.recovery, deadline, "map", what)
        return self._workers.send(Kind.ITEMS, [node], 0, {node: order}, [], deadline, "map", what, request=request)

    def reply(self, request: Request, rank: int) -> Reply:
        ((_, reply),) = request.replies.items()
        if reply.status == Status.INTERRUPTED:
            return reply
        answer: RankReplies = unpacked(reply.body)
        ((status, body),) = answer.replies.values()
        show_warnings(answer)
        return Reply(Status(status), 0, body)

    def ask(
        self, kind: Kind, contents: dict[int, Any], deadline: float | None, phase: str, what: str
    ) -> dict[int, Reply]:
        return self._replies(self._sent(kind, self._by_node(contents), deadline, phase, what))

    def _ask_of(
        self, processes: list[int], kind: Kind, content: Any, deadline: float, phase: str, what: str
    ) -> dict[int, Reply]:
        ranks = [rank for node in processes for rank in self._topology.ranks_of(node)]
        by_node = self._by_node(dict.fromkeys(ranks, content))
        return self._replies(self._sent(kind, by_node, deadline, phase, what, is_for_living=True))

    def _by_node(self, contents: dict[int, Any]) -> dict[int, dict[int, Any]]:
        found: dict[int, dict[int, Any]] = {}
        for rank, content in contents.items():
            node = self._topology.node_of(rank)
            found.setdefault(node, {})[rank - self._topology.ranks_of(node)[0]] = content
        return found

    def _replies(self, request: Request) -> dict[int, Reply]:
        found: dict[int, Reply] = {}
        for node, answer in self._answers(request).items():
            first = self._topology.ranks_of(node)[0]
            found |= {first + rank: Reply(Status(status), 0, body) for rank, (status, body) in answer.replies.items()}
        return found

    def _sent(
        self,
        kind: Kind,
        by_node: dict[int, dict[int, Any]],
        deadline: float | None,
        phase: str,
        what: str,
        *,
        is_for_living: bool = False,
    ) -> Request:
        orders = {
            node: RankOrders(contents, self.num_restarts.get(node), phase, what, is_for_living)
            for node, contents in by_node.items()
        }
        return self._workers.send(kind, list(orders), 0, orders, [], deadline, phase, what)

    def _answers(self, request: Request) -> dict[int, RankReplies]:
        """Wait for the answers of nodes. Raise the error of the lowest node that has one."""
        replies = self._workers.wait(request)
        if any(reply.status == Status.INTERRUPTED for reply in replies.values()):
            raise CallCancelled(f"cannot {request.what}: it was interrupted.")
        answers: dict[int, RankReplies] = {node: unpacked(reply.body) for node, reply in sorted(replies.items())}
        # All warnings come first: a node sends each of them once, and an error would hide those of later nodes.
        for answer in answers.values():
            show_warnings(answer)
        for answer in answers.values():
            if answer.error:
                raise error_of(answer, self._workers.recovery)
        return answers


def show_warnings(reply: RankReplies | NodeReply) -> None:
    """Show the user the warnings of a node's session."""
    for text, category in reply.warnings:
        warn_at_users_line(text, category)


def error_of(reply: RankReplies | NodeReply, recovery: Recovery) -> Exception:
    """Return the error that ended a message in a node's session. If the session closed itself, close the runtime."""
    error: Exception
    error, error.__cause__ = pickle.loads(reply.error)
    if isinstance(error, ClosedError):  # the workers of the node died too often
        recovery.fail(error)
    return error
