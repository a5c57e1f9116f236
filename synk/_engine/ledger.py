"""The ledger: where the time and the bytes of calls go, by function, argument and rank.

The plan of a call says what the call transfers, and the replies bring the times of the ranks. So a call adds to a few
numbers; they are multiplied by the bytes of the plan when a call transfers something else, or when somebody reads.

An array that is passed again and again earns one hint: it belongs in ``synk.data``, over nodes in
``synk.shared``, which is copied once.
"""

from __future__ import annotations

import weakref
from typing import Any, NamedTuple

import numpy as np

from synk._processes.output import report

_LARGE_NBYTES = 1 << 20
_NUM_CALLS = 4
_NUM_SAMPLES = 64


class _Passed(NamedTuple):
    array: weakref.ref[np.ndarray]
    samples: bytes
    times: int


class Repeated:
    """The large arrays that one function is passed, and how often each was passed in a row.

    Parameters
    ----------
    name : str
        Name of the function.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._passed: dict[str, _Passed] = {}
        self._has_told = False

    def note(self, label: str, value: np.ndarray, keeper: str) -> None:
        """Note an array that is about to be copied. One that has changed in some samples counts as another one."""
        if self._has_told or value.nbytes < _LARGE_NBYTES:
            return
        samples = value.flat[:: max(value.size // _NUM_SAMPLES, 1)].tobytes()
        before = self._passed.get(label)
        is_same = before is not None and before.array() is value and before.samples == samples
        count = before.times + 1 if before is not None and is_same else 1
        self._passed[label] = _Passed(weakref.ref(value), samples, count)
        if count == _NUM_CALLS:
            self._has_told = True
            self._passed.clear()
            is_data = keeper == "synk.data"
            also = f"; where it does change, write into a Data: d[:] = {label}" if is_data else ", rows by sharded=True"
            report(
                "%s of %r, %.2g MB, was the same array in %d calls and was copied in each. If that is not meant: "
                "%s(%s) is copied once%s.", label, self._name, value.nbytes / 1e6, count, keeper, label, also,
            )  # fmt: skip


_DIRECTIONS = {
    "output": "to program", "data": "none", "shared": "none", "h2d": "to devices", "d2h": "from devices",
    "pageable": "none",
}  # fmt: skip
"""Of the kinds of transfers that do not go to the workers."""


class Transfer(NamedTuple):
    """What a call transfers for one argument, or for the outputs.

    Attributes
    ----------
    argument : str
    kind : str
        See :class:`TransferTotal`.
    nbytes, row_nbytes : int
        How many bytes in each call, and in addition for each of its rows.
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
        ``"staged"``: an array that the program copied into shared memory. ``"pickled"``: objects. ``"data"``,
        ``"shared"``: data in shared memory or already on the ranks, so that nothing was copied. ``"captured"``: the
        function and what it captured, when it was sent, and again for changes. ``"items"``: items of a map.
        ``"output"``: outputs of calls, results of a map. ``"h2d"``, ``"d2h"``: what all ranks copied to their devices
        and back, counted with the call in which they copied it, which for inputs may be the one before. ``"pageable"``:
        what part of it lay in host memory that CUDA had not registered, and took the slower way.
    direction : str
        ``"to workers"``, ``"to program"``, ``"to devices"``, ``"from devices"``, or ``"none"`` if nothing was copied.
    calls : int
        For ``"h2d"``, ``"d2h"`` and ``"pageable"``, how many calls of single ranks.
    nbytes : int
        In all calls together. For ``"data"``, the rows that were read in place; 0 for ``"shared"``.
    seconds : float
        How long the program copied. Measured from 64 KB per call on, and 0 below.
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


Totals = dict[tuple[str, str], tuple[int, int]]
"""Calls and bytes by argument and kind."""


class Record:
    """What the calls of one function have cost so far.

    Attributes
    ----------
    name, place : str
        The function's name, and where its code is.
    num_calls : int
    num_chunks : int
        In how many chunks the items of maps were sent; 0 for calls.
    wall_ns : int
        Time from the user's call to its result. Of a submitted call, without its wait for its turn and without what the
        program did before it asked. Of maps, the time of the rank that had chunks longest.
    function_ns : int
        Time in the user's function, on the rank that worked longest in each call, or in all maps, without its waits in
        ``synk.comm``.
    wait_ns : int
        How long this rank waited in ``synk.comm``.
    staged_ns : int
        How long the program copied arrays, in calls that copy 64 KB or more.
    """

    def __init__(self, name: str, place: str = "") -> None:
        self.name, self.place = name, place
        self.reset()

    def reset(self) -> None:
        """Start over, in any thread or signal handler. A call that is being added at that moment may be left out."""
        self.wall_ns = self.function_ns = self.wait_ns = self.staged_ns = self.num_chunks = 0
        self._ranks: dict[int, list[int]] = {}
        self._maps: dict[int, tuple[int, int]] = {}  # by rank: the time of its chunks, and in the function
        self._longest = 0, 0
        # What calls like the last one transfer, how many there were and of how many rows; the calls before, and what
        # they transferred. It is replaced as a whole: who reads in another thread sees a call whole or not at all.
        self._sums: tuple[tuple[Transfer, ...], int, int, int, Totals] = ((), 0, 0, 0, {})

    def add(self, transfers: tuple[Transfer, ...], num_rows: int, replies: Any, wall_ns: int) -> None:
        """Add a call that succeeded."""
        last, calls, rows, before, totals = self._sums
        if transfers is not last and transfers != last:
            before, totals = before + calls, self._totals()
            calls = rows = 0
        self._sums = transfers, calls + 1, rows + num_rows, before, totals
        self.wall_ns += wall_ns
        ranks = self._ranks
        most = its_wait = 0
        for rank, (_, _, (_, began, ended, _, waited)) in replies.items():
            worked = ended - began - waited
            own = ranks.get(rank) or ranks.setdefault(rank, [0, 0, 0])
            own[0] += 1
            own[1] += worked
            own[2] += waited
            if worked > most:
                most, its_wait = worked, waited
        self.function_ns += most
        self.wait_ns += its_wait

    def add_items(
        self, rank: int, num_items: int, in_nbytes: int, out_nbytes: int, function_ns: int, wall_ns: int
    ) -> None:
        """Add a chunk of a map that a rank has finished."""
        self.num_chunks += 1
        self.add_moved("items", "items", num_items, in_nbytes)
        self.add_moved("results", "output", num_items, out_nbytes)
        last, calls, rows, before, totals = self._sums
        self._sums = last, calls, rows, before + num_items, totals
        wall, worked = self._maps.get(rank, (0, 0))
        self._maps[rank] = wall, worked = wall + wall_ns, worked + function_ns
        longest_wall, longest_worked = self._longest
        self._longest = max(wall, longest_wall), max(worked, longest_worked)
        self.wall_ns += self._longest[0] - longest_wall
        self.function_ns += self._longest[1] - longest_worked
        own = self._ranks.setdefault(rank, [0, 0, 0])
        own[0] += num_items
        own[1] += function_ns

    def add_moved(self, argument: str, kind: str, calls: int, nbytes: int) -> None:
        """Add what was transferred besides the arguments and outputs of calls."""
        last, now, rows, before, totals = self._sums
        self._sums = last, now, rows, before, _added(totals, argument, kind, calls, nbytes)

    # -- reports ------------------------------------------------------------------------------------------------------

    @property
    def num_calls(self) -> int:
        return self._sums[1] + self._sums[3]

    def _totals(self) -> Totals:
        transfers, calls, rows, _, totals = self._sums
        met = set()  # the parts of a table or a sparse matrix are one argument
        for each in transfers if calls else ():
            argument, kind = each.argument, each.kind
            count = 0 if (argument, kind) in met else calls
            totals = _added(totals, argument, kind, count, calls * each.nbytes + rows * each.row_nbytes)
            met.add((argument, kind))
        return totals

    def totals(self, title: str) -> list[TransferTotal]:
        """Return what was transferred, by argument."""
        totals = self._totals()
        staged = sum(nbytes for (_, kind), (_, nbytes) in totals.items() if kind == "staged")
        return [
            TransferTotal(
                title, argument, kind, _DIRECTIONS.get(kind, "to workers"), calls, nbytes,
                self.staged_ns * nbytes / max(staged, 1) / 1e9 if kind == "staged" else 0.0,
            )
            for (argument, kind), (calls, nbytes) in totals.items()
        ]  # fmt: skip

    def rank_totals(self, title: str) -> list[RankTotal]:
        """Return what the ranks have done."""
        return [
            RankTotal(title, rank, calls, (worked + waited) / 1e9, waited / 1e9, worked / max(self.wall_ns, 1))
            for rank, (calls, worked, waited) in sorted(self._ranks.copy().items())
        ]

    def nbytes_of(self, *kinds: str) -> int:
        """Return how many bytes of these kinds were transferred."""
        return sum(each.nbytes for each in self.totals(self.name) if each.kind in kinds)

    @property
    def way_ns(self) -> int:
        """The rest of the time: the way to the workers and back."""
        return max(self.wall_ns - self.function_ns - self.wait_ns - self.staged_ns, 0)


def _added(totals: Totals, argument: str, kind: str, calls: int, nbytes: int) -> Totals:
    before = totals.get((argument, kind), (0, 0))
    return {**totals, (argument, kind): (before[0] + calls, before[1] + nbytes)}
