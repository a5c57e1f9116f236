"""The part of a node: its ranks, its rows of a call, and its search path."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from synk._pure.shards import Assignment, Selection


@dataclass(frozen=True)
class Topology:
    """The ranks of all nodes. The ranks of node 0 come first.

    Attributes
    ----------
    counts : tuple of int
        The number of workers of each node.
    """

    counts: tuple[int, ...]

    @property
    def total_ranks(self) -> int:
        return sum(self.counts)

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

    def described(self, node: int) -> str:
        """Return the ranks of a node in words.

        Examples
        --------
        >>> [Topology((1, 3)).described(node) for node in range(2)]
        ['rank 0', 'ranks 1 to 3']
        """
        ranks = self.ranks_of(node)
        return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


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


def own_bounds(bounds: Sequence[tuple[int, int]], ranks: range) -> tuple[int, int, list[tuple[int, int]]]:
    """Return the first and the last position of a node's rows in the selection, and the bounds of its ranks in them.

    Examples
    --------
    >>> own_bounds([(0, 3), (3, 6), (6, 8)], range(1, 3))
    (3, 8, [(0, 3), (3, 5)])
    """
    low, high = bounds[ranks[0]][0], bounds[ranks[-1]][1]
    return low, high, [(start - low, stop - low) for start, stop in bounds[ranks[0] : ranks[-1] + 1]]


def own_rows(owned: Assignment, ranks: range) -> Assignment:
    """Return where the rows of a node's ranks lie in their shards."""
    low, high, bounds = own_bounds(owned.bounds, ranks)
    indices = None if owned.local_indices is None else owned.local_indices[low:high]
    return Assignment(Selection(high - low), bounds, owned.local_ranges[ranks[0] : ranks[-1] + 1], indices)
