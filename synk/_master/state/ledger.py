"""The ledger: where the time and the bytes of calls go, by function, argument and rank.

The plan of a call says what the call transfers, so a call only adds to a few numbers. They are multiplied by the bytes
of the plan when the plan changes, or when the totals are read.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from synk._master.state.sums import Sums, Transfer
from synk._wire.control import PHASES, Up

_FUNCTION_NS, _WAIT_NS = int(Up.FUNCTION_NS), int(Up.WAIT_NS)

_IN_PHASE = {
    "forward": "in its forward pass",
    "backward": "in its backward pass",
    "reduce": "in the reduction",
    "optimizer": "in the optimizer",
}
"""Where a rank is slow, in words."""

_DIRECTIONS = {
    "output": "to master",
    "data": "none",
    "shared": "none",
    "h2d": "to devices",
    "d2h": "from devices",
    "pageable": "none",
}
"""Of the kinds of transfers that do not go to the workers."""

_FEW = 4
"""This many calls of a function are new in any case, one or two in each lane."""

_SKEW = 1.3
"""A rank that works this many times as long as the others is mentioned."""

_SHARE = 0.3
"""Something that takes this share of a function's time is mentioned."""

_SHORT_NS = 100_000
"""A function that takes less than this on a rank costs more to divide than that gains."""

_LONG_NS = 50_000_000
"""A function that has taken less time than this gets no verdict."""


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
    in_nbytes, out_nbytes : int
        How much it read as arguments and wrote as outputs.
    num_slowest : int
        In how many calls it worked longer than all others.
    phases : dict of str to float
        Of a training step of ``synk.torch.replicate``: how long the rank worked in the ``"forward"`` pass and whatever
        else the body does, the ``"backward"`` pass, the ``"reduce"`` of gradients and the ``"optimizer"``, without its
        waits, and how long it took to ``"copy"`` its outputs to the master. Empty for other functions.
    """

    function: str
    rank: int
    calls: int
    function_s: float
    wait_s: float
    in_nbytes: int
    out_nbytes: int
    num_slowest: int
    phases: dict[str, float]


class _Rank:
    """The times of one rank."""

    __slots__ = ("num_slowest", "phases_ns", "wait_ns", "work_ns")

    def __init__(self) -> None:
        self.work_ns = self.wait_ns = self.num_slowest = 0
        self.phases_ns: dict[str, int] = {}


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
    num_new : int
        Calls that did not fit the one before and took the slow path, which costs the master ten times as much.
    why_new : str
        Why the last of them did; empty before there is one.
    """

    def __init__(self, name: str, place: str = "") -> None:
        self.name, self.place = name, place
        self._counted: Sequence[tuple[int, _Rank]] = ()  # of the ranks of the last call
        self.reset()

    def reset(self) -> None:
        """Start over, in any thread or signal handler. A call that is being added at that moment may be left out."""
        self.wall_ns = self.function_ns = self.wait_ns = self.staged_ns = self.num_new = 0
        self.why_new = ""
        self.ranks: defaultdict[int, _Rank] = defaultdict(_Rank)
        self._sums = Sums()  # of no ranks, so the next call counts anew for each of its own

    @property
    def num_calls(self) -> int:
        return self._sums.num_calls

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
            sums.transfers = transfers
            self._sums = sums
        if rows is not sums.rows and (rows != sums.rows or ranks != sums.ranks):
            if ranks != sums.ranks:
                self._counted = [(rank, self.ranks[rank]) for rank in ranks]
            sums = self._sums = sums.turned_to(ranks, rows)
        sums.calls_since += 1
        self.wall_ns += wall_ns
        most = -1
        for rank, counted in self._counted:
            word = words[rank]
            work_ns = word[_FUNCTION_NS]
            counted.work_ns += work_ns
            if work_ns > most:
                most, slowest, its_word = work_ns, counted, word
            if word[_WAIT_NS]:
                counted.wait_ns += word[_WAIT_NS]
        self.function_ns += most
        self.wait_ns += its_word[_WAIT_NS]
        slowest.num_slowest += 1

    def add_timed(self, ranks: Sequence[int], words: Any, is_step: bool, is_device: bool) -> None:
        """Add the phases of a call that was just added, if it was a training step, and copies to and from devices."""
        for rank in ranks:
            word, phases = words[rank], self.ranks[rank].phases_ns
            if is_device:
                self._sums.add_total("to the devices", "h2d", 1, word[Up.H2D_NBYTES])
                self._sums.add_total("from the devices", "d2h", 1, word[Up.D2H_NBYTES])
                if pageable := word[Up.PAGEABLE_NBYTES]:
                    self._sums.add_total("by pageable memory", "pageable", 1, pageable)
            if is_step and word[Up.FORWARD_NS]:
                for name, place in PHASES.items():
                    phases[name] = phases.get(name, 0) + word[place]
                phases["copy"] = phases.get("copy", 0) + word[Up.PUBLISHED_NS] - word[Up.ENDED_NS]

    def add_items(
        self, rank: int, num_items: int, in_nbytes: int, out_nbytes: int, function_ns: int, wall_ns: int
    ) -> None:
        """Add a chunk of a map that a rank has finished."""
        sums = self._sums
        sums.add_total("items", "items", num_items, in_nbytes)
        sums.add_total("results", "output", num_items, out_nbytes)
        sums.calls += num_items
        self.wall_ns += wall_ns
        self.function_ns += function_ns
        self.ranks[rank].work_ns += function_ns
        sums.add_to_rank(rank, num_items, in_nbytes, out_nbytes)

    def add_objects(self, ranks: Sequence[int], nbytes: Sequence[int]) -> None:
        """Add the pickled outputs of a call that was just added. Their sizes are in no plan."""
        sums = self._sums
        sums.add_total("outputs", "output", 0, sum(nbytes))
        for rank, written in zip(ranks, nbytes):
            sums.add_to_rank(rank, 0, 0, written)

    def add_captured(self, nbytes: int) -> None:
        """Note that the function, or a change in what it captured, was sent."""
        self._sums.add_total("code and captured objects", "captured", 1, nbytes)

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
        ranks = self.ranks.copy()
        return [
            RankTotal(
                title, rank, calls, (ranks[rank].work_ns + ranks[rank].wait_ns) / 1e9, ranks[rank].wait_ns / 1e9,
                in_nbytes, out_nbytes, ranks[rank].num_slowest,
                {name: ns / 1e9 for name, ns in ranks[rank].phases_ns.copy().items()},
            )
            for rank, (calls, in_nbytes, out_nbytes) in sorted(self._sums.added_up().by_rank.items())
            if rank in ranks
        ]  # fmt: skip

    def nbytes_of(self, *kinds: str) -> int:
        """Return how many bytes of these kinds were transferred."""
        return sum(each.nbytes for each in self.totals(self.name) if each.kind in kinds)

    @property
    def staged_nbytes(self) -> int:
        """Bytes of plain arrays that the master copied into shared memory."""
        return self.nbytes_of("staged")

    @property
    def pickled_nbytes(self) -> int:
        """Bytes of objects among the arguments, and of items of maps."""
        return self.nbytes_of("pickled", "items")

    @property
    def output_nbytes(self) -> int:
        """Bytes of outputs of all ranks."""
        return self.nbytes_of("output")

    @property
    def note(self) -> str:
        """Why most calls took the slow path; empty if they did not."""
        if self.num_new <= max(_FEW, self.num_calls // 2):
            return ""
        return f"{self.num_new} of {self.num_calls} calls took the slow path. The last one: {self.why_new}"

    def verdict(self) -> str:
        """Return what costs most of the time, and what to do about it; empty if nothing stands out."""
        if self.wall_ns < _LONG_NS:
            return ""
        if self.staged_ns > _SHARE * self.wall_ns:
            largest = max((each for each in self.totals("") if each.kind == "staged"), key=lambda each: each.nbytes)
            share = largest.seconds * 1e9 / self.wall_ns
            return (
                f"{share:.0%} of its time is the copy of {largest.argument}: keep it in synk.data({largest.argument})."
            )
        work = {rank: each.work_ns for rank, each in self.ranks.copy().items()}
        if len(work) > 1 and self.function_ns > _SHARE * self.wall_ns:
            slowest = max(work, key=work.__getitem__)
            others = _median(ns for rank, ns in work.items() if rank != slowest)
            if work[slowest] > _SKEW * others:
                ratio = f"{work[slowest] / others:.1f} times longer than" if others else "for"
                where = self._slow_phase(slowest)
                return f"rank {slowest} computes {ratio} the others{where}: {self._other_waits(slowest)}"
        if self.note:
            return self.note
        is_short = self.function_ns < (1 - _SHARE) * self.wall_ns and self._per_call_ns < _SHORT_NS
        if is_short and self.wall_ns > 10 * _LONG_NS:
            return "its calls are shorter than what they cost to divide: give each call more rows, or more to do."
        return ""

    @property
    def _per_call_ns(self) -> float:
        return self.function_ns / max(self.num_calls, 1)

    def _slow_phase(self, slowest: int) -> str:
        """Say in which phase of a training step the slowest rank loses most against the others; empty otherwise."""
        others = [each.phases_ns for rank, each in self.ranks.copy().items() if rank != slowest]
        lost = {
            phase: ns - _median(each.get(phase, 0) for each in others)
            for phase, ns in self.ranks[slowest].phases_ns.copy().items()
            if phase in _IN_PHASE
        }
        return f", {_IN_PHASE[max(lost, key=lost.__getitem__)]}" if lost else ""

    def _other_waits(self, slowest: int) -> str:
        waited = sum(each.wait_ns for rank, each in self.ranks.copy().items() if rank != slowest)
        if waited > self.function_ns // 10:
            return f"they have waited for it in synk.comm for {waited / 1e9:.2f} s."
        return "its rows take longer, or its core is shared."


def _median(values: Iterable[float]) -> float:
    from statistics import median  # loads decimals and fractions, for a line that few ask for

    return median(values)
