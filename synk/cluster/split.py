"""Which ranks each node plays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Topology:
    """The ranks of all nodes. The ranks of node 0 come first.

    Attributes
    ----------
    counts : tuple of int
        The number of workers of each node.
    """

    counts: tuple[int, ...]

    def ranks_of(self, node: int) -> range:
        """Return the ranks that a node plays.

        Examples
        --------
        >>> [list(Topology((1, 3)).ranks_of(node)) for node in range(2)]
        [[0], [1, 2, 3]]
        """
        first = sum(self.counts[:node])
        return range(first, first + self.counts[node])

    def node_of(self, rank: int) -> int:
        return next(node for node in range(len(self.counts)) if rank in self.ranks_of(node))


def counts_of(num_workers: int | Sequence[int], num_nodes: int) -> tuple[int, ...]:
    """Return the number of workers of each node: the same number for all, or one number for each.

    Raises
    ------
    ValueError, TypeError
        If there is not one number for each node, or a node would have no worker.
    """
    counts = tuple(num_workers) if isinstance(num_workers, Sequence) else (num_workers,) * num_nodes
    for count in counts:
        if isinstance(count, (bool, str)) or not hasattr(count, "__index__"):
            raise TypeError(f"cannot fork: got num_workers={num_workers!r}, expected an integer, or one for each node.")
    if len(counts) != num_nodes or min(counts) < 1:
        raise ValueError(
            f"cannot fork: got num_workers={num_workers!r} for {num_nodes} nodes, expected 1 or more, or a sequence "
            "with such a number for each node."
        )
    return tuple(map(int, counts))
