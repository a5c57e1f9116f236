"""Nodes as the head sees them: each is a child process of the program.

On this machine the child is the node's agent. For a node on another machine it is a tunnel, which carries the messages
of the agent there; see ``synk.cluster.ray``.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from synk._master.processes.placement import Placement, num_threads_set
from synk._master.processes.worker_process import WorkerProcess
from synk._pure.cores import num_cores
from synk._wire.messages import Body
from synk.cluster.channel import NodeChannel, Parts
from synk.cluster.split import Topology


@dataclass(frozen=True)
class NodePlacement(Placement):
    """The placement of the head, whose processes are the agents of nodes.

    Attributes
    ----------
    topology : Topology
    """

    has_shared_memory: ClassVar[bool] = False
    unit: str = "node"
    topology: Topology = field(kw_only=True)

    @property
    def total_ranks(self) -> int:
        return self.topology.total_ranks

    def among_all(self, ranks: Iterable[int]) -> str:
        return f"{self.named(ranks)} of {len(self.topology.counts)}"

    def ranks_of(self, position: int) -> tuple[int, ...]:
        return tuple(self.topology.ranks_of(position))

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment of an agent and its workers: the cores are divided among the workers of all nodes."""
        environment = dict(os.environ)
        return environment | num_threads_set(environment, max(num_cores() // self.total_ranks, 1))


class AgentProcess(WorkerProcess):
    """The agent of a node, as a child of the program. It inherits its ends of the pipes, so no socket listens.

    Like a worker it ends when the program ends, in whatever way. Its own workers end with it, because each of them is
    tied to the agent's life as the agent is tied to the program's.

    Attributes
    ----------
    topology : Topology
    options : dict
        The options of the runtime in the first message. Both attributes are set in a subclass for each runtime.
    """

    topology: ClassVar[Topology]
    options: ClassVar[dict[str, Any]]
    _channel_type = NodeChannel
    _module, _kind = "cluster.loop", "node"

    @property
    def _title(self) -> str:
        return f"node {self.rank}"

    @property
    def _shown_rank(self) -> int | None:
        return None

    def _packed(self, body: Body) -> Parts:
        return Parts.of(body)

    def start(self, setup: dict[str, Any], *others: Any) -> None:
        """Start the agent. The first message also says which ranks it plays."""
        ranks = self.topology.ranks_of(self.rank)
        own = {
            "num_workers": len(ranks),
            "first_worker": ranks[0],
            "ranks_elsewhere": self.topology.total_ranks - len(ranks),
        }
        super().start(setup | self.options | own, *others)


class TunnelProcess(AgentProcess):
    """The tunnel to the agent of a node on another machine."""

    _module, _kind = "cluster.ray", "tunnel"
