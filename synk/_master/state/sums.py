"""Sums of what the calls of one function have transferred. The ledger shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Transfer(NamedTuple):
    """What each call of a plan transfers for one argument, or for the outputs.

    Attributes
    ----------
    argument : str
    kind : str
        See :class:`TransferTotal`.
    nbytes : int
        How much the master copies, or reads, in one call.
    by_rank : tuple of int, or None
        How much each rank writes; None for arguments.
    row_nbytes : int
        How much a rank reads of one row; 0 if each rank reads the whole.
    """

    argument: str
    kind: str
    nbytes: int
    row_nbytes: int = 0
    by_rank: tuple[int, ...] | None = None


class Sums:
    """How many calls there were, and what they have transferred.

    A call adds to the numbers of one object. To add up is to make another one. So the profile may be read in any thread
    at any moment: it adds up what it finds, and no call is counted twice or lost.

    Attributes
    ----------
    transfers : tuple of Transfer
        Of the last call.
    ranks, rows : sequence of int
        Of the last call: the ranks that ran it, and the number of rows of each.
    calls, calls_of_plan, calls_since : int
        Before the transfers changed last; since then, before the ranks or their rows changed last; since then.
    since : dict of int to (int, int)
        By rank: calls and rows since the transfers changed.
    by_rank : dict of int to list of int
        By rank, before that: calls, bytes read, bytes written.
    totals : dict of (str, str) to list of int
        By argument and kind: calls, bytes.
    """

    def __init__(self) -> None:
        self.transfers: tuple[Transfer, ...] = ()
        self.ranks: Sequence[int] = ()
        self.rows: Sequence[int] = ()
        self.calls = self.calls_of_plan = self.calls_since = 0
        self.since: dict[int, tuple[int, int]] = {}
        self.by_rank: dict[int, list[int]] = {}
        self.totals: dict[tuple[str, str], list[int]] = {}

    @property
    def num_calls(self) -> int:
        return self.calls + self.calls_of_plan + self.calls_since

    def turned_to(self, ranks: Sequence[int], rows: Sequence[int]) -> Sums:
        """Return the sums with the calls so far counted by rank. The next calls are on these ranks, with these rows."""
        found = Sums.__new__(Sums)
        vars(found).update(vars(self))  # one step, in which no call is added
        count, found.calls_since = found.calls_since, 0
        found.calls_of_plan += count
        found.since = self.since.copy()
        for rank, num_rows in zip(self.ranks, self.rows):
            calls, rows_before = found.since.get(rank, (0, 0))
            found.since[rank] = calls + count, rows_before + count * num_rows
        found.ranks, found.rows = ranks, rows
        return found

    def added_up(self) -> Sums:
        """Return the sums with what was transferred since the transfers changed among the totals."""
        found = self.turned_to(self.ranks, self.rows)
        count, found.calls_of_plan = found.calls_of_plan, 0
        found.calls += count
        found.totals = {key: [*total] for key, total in self.totals.copy().items()}
        num_rows = sum(of_rank for _, of_rank in found.since.values())
        nbytes_of: dict[tuple[str, str], int] = {}  # the parts of a table or a sparse matrix are one argument
        for each in self.transfers if count else ():
            # What is copied is copied whole. In place, only the rows of the batch are read.
            is_in_rows = each.kind == "data" and each.row_nbytes
            nbytes = num_rows * each.row_nbytes if is_in_rows else count * each.nbytes
            nbytes_of[each.argument, each.kind] = nbytes_of.get((each.argument, each.kind), 0) + nbytes
        for (argument, kind), nbytes in nbytes_of.items():
            found.add_total(argument, kind, count, nbytes)
        row_nbytes = sum(each.row_nbytes for each in self.transfers)
        whole_nbytes = sum(each.nbytes for each in self.transfers if not each.row_nbytes and each.by_rank is None)
        found.by_rank = {rank: [*sums] for rank, sums in self.by_rank.copy().items()}
        for rank, (calls, rows) in found.since.items():
            written = sum(each.by_rank[rank] for each in self.transfers if each.by_rank is not None)
            found.add_to_rank(rank, calls, rows * row_nbytes + calls * whole_nbytes, calls * written)
        found.since = {}
        return found

    def add_to_rank(self, rank: int, calls: int, in_nbytes: int, out_nbytes: int) -> None:
        sums = self.by_rank.setdefault(rank, [0, 0, 0])
        sums[0] += calls
        sums[1] += in_nbytes
        sums[2] += out_nbytes

    def add_total(self, argument: str, kind: str, calls: int, nbytes: int) -> None:
        total = self.totals.setdefault((argument, kind), [0, 0])
        total[0] += calls
        total[1] += nbytes
