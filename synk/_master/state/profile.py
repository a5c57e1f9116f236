"""Where the time and the bytes of calls go, function by function."""

from __future__ import annotations

import html
from dataclasses import dataclass

from synk._pure.show import table

_FEW = 4
"""So many calls of a function are new in any case, one or two in each lane."""


@dataclass
class Record:
    """What the calls of one function have cost so far.

    Attributes
    ----------
    num_calls : int
    wall_ns : int
        From the user's call to its result.
    function_ns : int
        In the user's function, on the slowest rank of each call.
    staged_nbytes, pickled_nbytes : int
        Plain arrays and objects copied into shared memory by the master.
    output_nbytes : int
        Outputs published by all ranks.
    num_new : int
        Calls that were bound anew, because they did not fit the one before: this costs the master ten times as much.
    why_new : str
        Why those like the last of these are new each time, too; empty where nothing is in the way.
    """

    num_calls: int = 0
    wall_ns: int = 0
    function_ns: int = 0
    staged_nbytes: int = 0
    pickled_nbytes: int = 0
    output_nbytes: int = 0
    num_new: int = 0
    why_new: str = ""

    @property
    def note(self) -> str:
        """Why most of the calls were bound anew; an empty text where they were not."""
        if self.num_new <= max(_FEW, self.num_calls // 2):
            return ""
        why = self.why_new or "what was passed, or what the workers had to be told, was different each time"
        return f"{self.num_new} of {self.num_calls} calls were bound anew: {why}"


class Profile:
    """The records of a runtime by function name; prints as a table, the most expensive function first.

    ``share`` is the part of a call that is spent in the user's function; what remains is distribution, transfer,
    reduction and waiting. ``in`` are the bytes that the master copied per call (``Data`` and shared variables cost
    none), ``out`` the bytes of outputs of all ranks per call. A line below the table says why most calls of a function
    were bound anew, if they were: no message would be needed for calls that are like the one before.

    Examples
    --------
    >>> profile = Profile()
    >>> profile.records["loss"] = Record(2, 4_000_000, 3_000_000, 2000, 0, 16)
    >>> print(profile)
    function     calls   total s   ms/call   share   in B/call  out B/call
    loss             2     0.004     2.000     75%        1000           8
    """

    def __init__(self) -> None:
        self.records: dict[str, Record] = {}

    def record(self, name: str) -> Record:
        """Return the record of function ``name``, a new one at its first call."""
        found = self.records.get(name)
        if found is None:
            found = self.records[name] = Record()
        return found

    def _repr_html_(self) -> str:
        heads = ("function", "calls", "total s", "ms/call", "share", "in B/call", "out B/call")
        rows = [[part.strip() for part in line.rsplit(None, 6)] for line in self._lines()[1:]]
        notes = "".join(f"<p>{html.escape(note)}</p>" for note in self._notes())
        return table("profile", [heads, *rows], has_heads=True) + notes

    def __repr__(self) -> str:
        return "\n".join([*self._lines(), *self._notes()])

    def _notes(self) -> list[str]:
        return [f"{name}: {record.note}" for name, record in self.records.items() if record.note]

    def _lines(self) -> list[str]:
        width = max([8, *(len(name) for name in self.records)]) + 2
        titles = f"{'calls':>8}{'total s':>10}{'ms/call':>10}{'share':>8}{'in B/call':>12}{'out B/call':>12}"
        lines = [f"{'function':<{width}}{titles}"]
        for name, record in sorted(self.records.items(), key=lambda item: -item[1].wall_ns):
            count = max(record.num_calls, 1)
            nbytes_in = record.staged_nbytes + record.pickled_nbytes
            lines.append(
                f"{name:<{width}}{record.num_calls:>8}{record.wall_ns / 1e9:>10.3f}"
                f"{record.wall_ns / count / 1e6:>10.3f}{record.function_ns / max(record.wall_ns, 1):>8.0%}"
                f"{nbytes_in // count:>12}{record.output_nbytes // count:>12}"
            )
        return lines
