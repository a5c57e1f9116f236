"""The ledger: where the time and the bytes of calls go, by function, argument and rank.

The plan of a call says what the call transfers, so a call only adds to a few numbers. They are multiplied by the bytes
of the plan when the plan changes, or when the totals are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from synk._wire.control import Up

_FUNCTION_NS, _WAIT_NS = int(Up.FUNCTION_NS), int(Up.WAIT_NS)

_DIRECTIONS = {
    "output": "to master",
    "data": "none",
    "shared": "none",
    "h2d": "to devices",
    "d2h": "from devices",
    "pageable": "none",
}
"""Of the kinds of transfers that do not go to the workers."""


class Transfer(NamedTuple):
    """What each call of a plan transfers for one argument, or for the outputs.

    Attributes
    ----------
    argument : str
    kind : str
        See :class:`TransferTotal`.
    nbytes : int
        How much the master copies, or all ranks read or write, in one call.
    row_nbytes : int
        How much of it is one row of an array that is divided; else 0.
    """

    argument: str
    kind: str
    nbytes: int
    row_nbytes: int = 0


class TransferTotal(NamedTuple):
    """What all calls of a function have transferred for one argument, or for its outputs.

    Attributes
    ----------
    function : str
    argument : str
    kind : str
        ``"staged"``: an array that the master copied into shared memory. ``"pickled"``: objects. ``"data"``,
        ``"shared"``: data in shared memory or already on the ranks, so that nothing was copied. ``"captured"``: the
        function and what it captured, when it was sent, and again for changes. ``"items"``: items of a map.
        ``"output"``: outputs of calls, results of a map. ``"h2d"``, ``"d2h"``: what all ranks copied to their devices
        and back, counted with the call in which they copied it, which for inputs may be the one before. ``"pageable"``:
        what part of it lay in host memory that CUDA had not registered, and took the slower way.
    direction : str
        ``"to workers"``, ``"to master"``, ``"to devices"``, ``"from devices"``, or ``"none"`` if nothing was copied.
    calls : int
        For ``"h2d"``, ``"d2h"`` and ``"pageable"``, how many calls of single ranks.
    nbytes : int
        In all calls together. For ``"data"``, the rows that were read in place; 0 for ``"shared"``.
    seconds : float
        How long the master copied. Measured from 64 KB per call on, and 0 below.
    """

    function: str
    argument: str
    kind: str
    direction: str
    calls: int
    nbytes: int
    seconds: float


class RankTotal(NamedTuple):
    """What one rank has done in all calls of a function.

    Attributes
    ----------
    function : str
    rank : int
    calls : int
    function_s, wait_s : float
        Time in the user's function, and the part of it spent waiting in ``synk.comm``.
    share : float
        The part of the calls' time in which it worked: in the function, and not waiting.
    """

    function: str
    rank: int
    calls: int
    function_s: float
    wait_s: float
    share: float


class _Rank:
    """The calls and times of one rank."""

    __slots__ = ("calls", "wait_ns", "work_ns")

    def __init__(self) -> None:
        self.calls = self.work_ns = self.wait_ns = 0


class _Sums:
    """How many calls there were, and what they have transferred.

    A call that is like the one before replaces one tuple. To add up is to make another object. So the profile may be
    read in any thread at any moment: it adds up what it finds, and no call is counted twice or lost.

    Attributes
    ----------
    transfers : tuple of Transfer
        Of the last call.
    counted : (int, int)
        The calls since the transfers changed last, and their rows.
    calls : int
        The calls before.
    totals : dict of (str, str) to list of int
        Calls and bytes before, by argument and kind.
    ranks : dict of int to _Rank
        In all calls.
    last : tuple
        Of the last call: its ranks, its rows, the ranks' own counts, and the number of rows.
    """

    def __init__(self) -> None:
        self.transfers: tuple[Transfer, ...] = ()
        self.counted = (0, 0)
        self.calls = 0
        self.totals: dict[tuple[str, str], list[int]] = {}
        self.ranks: defaultdict[int, _Rank] = defaultdict(_Rank)
        self.last: tuple[Any, Any, Sequence[tuple[int, _Rank]], int] = (None, None, (), 0)

    def added_up(self) -> _Sums:
        """Return the sums with all calls among the totals."""
        found = _Sums()
        count, num_rows = self.counted
        found.transfers, found.calls = self.transfers, self.calls + count
        found.ranks, found.last = self.ranks, self.last
        found.totals = {key: [*total] for key, total in self.totals.copy().items()}
        counted: set[tuple[str, str]] = set()  # the parts of a table or a sparse matrix are one argument
        for each in self.transfers if count else ():
            # What is copied is copied whole. In place, only the rows of the batch are read.
            is_in_rows = each.kind == "data" and each.row_nbytes
            nbytes = num_rows * each.row_nbytes if is_in_rows else count * each.nbytes
            key = each.argument, each.kind
            found.add(*key, 0 if key in counted else count, nbytes)
            counted.add(key)
        return found

    def add(self, argument: str, kind: str, calls: int, nbytes: int) -> None:
        total = self.totals.setdefault((argument, kind), [0, 0])
        total[0] += calls
        total[1] += nbytes


class Record:
    """What the calls of one function have cost so far.

    Attributes
    ----------
    name, place : str
        The function's name, and where its code is.
    num_calls : int
    wall_ns : int
        Time from the user's call to its result.
    function_ns : int
        Time in the user's function, on the rank that worked longest in each call, without its waits in ``synk.comm``.
    wait_ns : int
        How long this rank waited in ``synk.comm``.
    staged_ns : int
        How long the master copied arrays, in calls that copy 64 KB or more.
    """

    def __init__(self, name: str, place: str = "") -> None:
        self.name, self.place = name, place
        self.reset()

    def reset(self) -> None:
        """Start over, in any thread or signal handler. A call that is being added at that moment may be left out."""
        self.wall_ns = self.function_ns = self.wait_ns = self.staged_ns = 0
        self._sums = _Sums()

    @property
    def num_calls(self) -> int:
        return self._sums.calls + self._sums.counted[0]

    def known(self, transfers: tuple[Transfer, ...]) -> tuple[Transfer, ...]:
        """Return the transfers of the last call if they are equal, as they are for the plans of several lanes."""
        last = self._sums.transfers
        return last if transfers == last else transfers

    def add(
        self, transfers: tuple[Transfer, ...], ranks: Sequence[int], rows: Sequence[int], words: Any, wall_ns: int
    ) -> None:
        """Add a successful call. This is done at each call, so it only adds what differs from the one before.

        ``words`` are the control words of each rank, with the times that the rank wrote.
        """
        sums = self._sums
        if transfers is not sums.transfers:
            sums = sums.added_up()
            sums.counted, sums.transfers = (0, 0), transfers
            self._sums = sums
        last = sums.last
        if ranks is not last[0] or rows is not last[1]:
            last = sums.last = ranks, rows, [(rank, sums.ranks[rank]) for rank in ranks], sum(rows)
        count, num_rows = sums.counted
        sums.counted = count + 1, num_rows + last[3]
        self.wall_ns += wall_ns
        most = -1
        for rank, counted in last[2]:
            word = words[rank]
            work_ns = word[_FUNCTION_NS]
            counted.calls += 1
            counted.work_ns += work_ns
            if work_ns > most:
                most, its_word = work_ns, word
            if word[_WAIT_NS]:
                counted.wait_ns += word[_WAIT_NS]
        self.function_ns += most
        self.wait_ns += its_word[_WAIT_NS]

    def add_copies(self, ranks: Sequence[int], words: Any) -> None:
        """Add the copies to and from the devices of a call that was just added."""
        for rank in ranks:
            self._sums.add("to the devices", "h2d", 1, words[rank][Up.H2D_NBYTES])
            self._sums.add("from the devices", "d2h", 1, words[rank][Up.D2H_NBYTES])
            if pageable := words[rank][Up.PAGEABLE_NBYTES]:
                self._sums.add("by pageable memory", "pageable", 1, pageable)

    def add_items(
        self, rank: int, num_items: int, in_nbytes: int, out_nbytes: int, function_ns: int, wall_ns: int
    ) -> None:
        """Add a chunk of a map that a rank has finished."""
        sums = self._sums
        sums.add("items", "items", num_items, in_nbytes)
        sums.add("results", "output", num_items, out_nbytes)
        sums.calls += num_items
        self.wall_ns += wall_ns
        self.function_ns += function_ns
        sums.ranks[rank].calls += num_items
        sums.ranks[rank].work_ns += function_ns

    def add_objects(self, nbytes: int) -> None:
        """Add the pickled outputs of a call that was just added. Their sizes are in no plan."""
        self._sums.add("outputs", "output", 0, nbytes)

    def add_captured(self, nbytes: int) -> None:
        """Note that the function, or a change in what it captured, was sent."""
        self._sums.add("code and captured objects", "captured", 1, nbytes)

    # -- reports -------------------------------------------------------------------------------------------------------

    def totals(self, title: str) -> list[TransferTotal]:
        """Return what was transferred, by argument."""
        totals = self._sums.added_up().totals
        staged = sum(nbytes for (_, kind), (_, nbytes) in totals.items() if kind == "staged")
        found = []
        for (argument, kind), (calls, nbytes) in totals.items():
            seconds = self.staged_ns * nbytes / max(staged, 1) / 1e9 if kind == "staged" else 0.0
            direction = _DIRECTIONS.get(kind, "to workers")
            found.append(TransferTotal(title, argument, kind, direction, calls, nbytes, seconds))
        return found

    def rank_totals(self, title: str) -> list[RankTotal]:
        """Return what the ranks have done."""
        found = []
        for rank, each in sorted(self._sums.ranks.copy().items()):
            worked, waited = each.work_ns / 1e9, each.wait_ns / 1e9
            share = each.work_ns / max(self.wall_ns, 1)
            found.append(RankTotal(title, rank, each.calls, worked + waited, waited, share))
        return found

    def nbytes_of(self, *kinds: str) -> int:
        """Return how many bytes of these kinds were transferred."""
        return sum(each.nbytes for each in self.totals(self.name) if each.kind in kinds)

    def parts(self, title: str) -> dict[str, int]:
        """Return what the time of its calls went to, in ns, by what it is and what to do about it."""
        way_ns = self.wall_ns - self.function_ns - self.wait_ns - self.staged_ns
        parts = {
            f"waits of {title!r} in synk.comm": self.wait_ns,
            f"the way of {title!r} to the workers and back: give each call more to do": way_ns,
        }
        staged = [each for each in self.totals(title) if each.kind == "staged"]
        if staged:
            largest = max(staged, key=lambda each: each.nbytes)
            copy = f"the copy of {largest.argument} for {title!r}: keep it in synk.data"
            parts[copy] = int(largest.seconds * 1e9)
        work = {rank: each.work_ns for rank, each in self._sums.ranks.copy().items()}
        if work:
            slowest = max(work, key=work.__getitem__)
            parts[f"the work of {title!r}, most of it on rank {slowest}"] = self.function_ns
        return parts
