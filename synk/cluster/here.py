"""Nodes as child processes of the program, on its own machine: to try a program, or to break it, without a cluster."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

from synk._master.processes.placement import Placement, num_threads_set
from synk._master.processes.worker_process import WorkerProcess
from synk._pure.cores import num_cores
from synk._wire.messages import Body
from synk.cluster.channel import NodeChannel, Parts
from synk.cluster.split import Layout

ONE_NODE = Layout((1,))


@dataclass(frozen=True)
class NodePlacement(Placement):
    """The placement of the head, whose processes are the agents of nodes.

    Attributes
    ----------
    layout : Layout
    """

    has_shared_memory: ClassVar[bool] = False
    unit: str = "node"
    layout: Layout = ONE_NODE

    @property
    def total_ranks(self) -> int:
        return self.layout.total_ranks

    def among_all(self, ranks: Iterable[int]) -> str:
        return f"{self.named(ranks)} of {len(self.layout.counts)}"

    def ranks_of(self, position: int) -> tuple[int, ...]:
        return tuple(self.layout.ranks_of(position))

    def environment(self, rank: int) -> dict[str, str]:
        """Return the environment of an agent and its workers: the cores are divided among the workers of all nodes."""
        environment = dict(os.environ)
        return environment | num_threads_set(environment, max(num_cores() // self.total_ranks, 1))


class AgentProcess(WorkerProcess):
    """The agent of a node, a child of the program: no socket listens, for its ends of pipes are inherited.

    Like a worker it ends when the program does, however that ends; and its own workers end with it.

    Attributes
    ----------
    layout, max_restarts, seed
        Of the runtime. Set in a subclass for each.
    """

    layout: ClassVar[Layout]
    max_restarts: ClassVar[int]
    seed: ClassVar[int]
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
        """Start the agent; the first message also says which ranks it plays."""
        ranks = self.layout.ranks_of(self.rank)
        own = {
            "num_workers": len(ranks),
            "first_worker": ranks[0],
            "ranks_elsewhere": self.layout.total_ranks - len(ranks),
            "max_restarts": self.max_restarts,
            "runtime_seed": self.seed,
        }
        super().start(setup | own, *others)


def agents(layout: Layout, max_restarts: int, seed: int) -> type[AgentProcess]:
    """Return the type of the agents of one runtime."""
    return type("AgentProcess", (AgentProcess,), {"layout": layout, "max_restarts": max_restarts, "seed": seed})
