"""The table of all calls that ``synk.profile()`` returns: how the ledger is shown."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from synk._master.state.ledger import RankTotal, Record, TransferTotal
from synk._pure.show import escaped, table
from synk._pure.words import Hinting

_SHOWN_NBYTES = 1 << 16
"""An argument of at least this size, in all calls together, is shown in the table."""

_NUM_SHOWN = 8


class Profile(Hinting):
    """The records of a runtime. Made by :func:`synk.profile`. It prints as a table, the most expensive function first.

    ``share`` is the part of the calls' time in which the rank that worked longest was computing. The rest is
    distribution, copies, reduction and waiting. ``wait`` is the part in which that rank waited in ``synk.comm``. ``in``
    are the bytes that the master copied per call (``Data`` and shared variables cost none), ``out`` the bytes of
    outputs of all ranks per call. Below come the largest arguments and outputs, those included that stay where they are
    (``data``, ``shared``), what each rank has done in the most expensive function, and one line that says what most of
    all time was spent on.

    Attributes
    ----------
    records : dict of str to Record
        By the name of the function. Functions with the same name are distinguished by where they were written.
    transfers : list of TransferTotal
    ranks : list of RankTotal

    Examples
    --------
    >>> import numpy as np, synk
    >>> with synk.fork(2):
    ...     @synk.function(outputs="sum")
    ...     def total(x):
    ...         return x.sum()
    ...     _ = [total(np.ones(125)) for _ in range(4)]
    ...     profile = synk.profile()
    >>> print(profile)  # doctest: +ELLIPSIS
    function     calls   total s   ms/call   share    wait   in B/call  out B/call
    total            4     ...                               0%        1000          16...
    >>> [(each.rank, each.calls) for each in profile.ranks]
    [(0, 4), (1, 4)]
    """

    def __init__(self) -> None:
        self.known: dict[Any, Record] = {}

    def record(self, fn: Any, name: str) -> Record:
        """Return the record of a function. Its first call makes one.

        A function that is defined again and again, for instance in a loop, counts as one.
        """
        code = getattr(getattr(fn, "__func__", fn), "__code__", None)
        key = name, type(fn) if code is None else code
        place = type(fn).__qualname__ if code is None else f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = Record(name, place)
        return found

    def leave_out(self, record: Record) -> None:
        """Forget the record of a function that is not the user's."""
        self.known = {key: each for key, each in self.known.items() if each is not record}

    def reset(self) -> None:
        """Forget what was counted so far."""
        for record in list(self.known.values()):
            record.reset()

    @property
    def records(self) -> dict[str, Record]:
        counted = [each for each in list(self.known.values()) if each.num_calls]
        names = [each.name for each in counted]
        found: dict[str, Record] = {}
        for each in counted:
            title = each.name if names.count(each.name) == 1 or not each.place else f"{each.name} ({each.place})"
            while title in found:
                title += "'"
            found[title] = each
        return found

    @property
    def transfers(self) -> list[TransferTotal]:
        return [total for title, record in self.records.items() for total in record.totals(title)]

    @property
    def ranks(self) -> list[RankTotal]:
        return [total for title, record in self.records.items() for total in record.rank_totals(title)]

    # -- display -------------------------------------------------------------------------------------------------------

    def _repr_html_(self) -> str:
        text = ""
        for title, (heads, rows, _) in self._tables().items():
            text += table(title, [heads, *rows], has_heads=True)
        return text + "".join(f"<p>{escaped(line)}</p>" for line in self._dominating())

    def __repr__(self) -> str:
        shown = ["\n".join(_columns(*each)) for each in self._tables().values()]
        return "\n".join(["\n\n".join(shown), *self._dominating()])

    def _tables(self) -> dict[str, tuple[list[str], list[list[str]], Sequence[int]]]:
        """Return heads, rows and widths of columns by title."""
        functions, largest, ranks = self._functions(), self._largest(), self._ranks()
        found: dict[str, Any] = {"profile": (*functions, (8, 10, 10, 8, 8, 12, 12))}
        if largest[1]:
            found["arguments"] = (*largest, (20, 10, 8, 12, 10, 11))
        if ranks[1]:
            found["ranks"] = (*ranks, (6, 8, 10, 10, 8))
        return found

    def _functions(self) -> tuple[list[str], list[list[str]]]:
        rows = []
        for title, record in sorted(self.records.items(), key=lambda item: -item[1].wall_ns):
            count, wall_ns = max(record.num_calls, 1), max(record.wall_ns, 1)
            nbytes_in = record.nbytes_of("staged", "pickled", "items")
            rows.append([
                title, str(record.num_calls), f"{wall_ns / 1e9:.3f}", f"{wall_ns / count / 1e6:.3f}",
                f"{record.function_ns / wall_ns:.0%}", f"{record.wait_ns / wall_ns:.0%}",
                str(nbytes_in // count), str(record.nbytes_of("output") // count),
            ])  # fmt: skip
        return ["function", "calls", "total s", "ms/call", "share", "wait", "in B/call", "out B/call"], rows

    def _ranks(self) -> tuple[list[str], list[list[str]]]:
        records = self.records
        dearest = max(records, key=lambda title: records[title].wall_ns, default="")
        rows = [
            [each.function, str(each.rank), str(each.calls), f"{each.function_s - each.wait_s:.3f}",
             f"{each.wait_s:.3f}", f"{each.share:.0%}"]
            for each in (records[dearest].rank_totals(dearest) if dearest else ())
        ]  # fmt: skip
        return ["function", "rank", "calls", "work s", "wait s", "share"], rows

    def _largest(self) -> tuple[list[str], list[list[str]]]:
        found = [each for each in self.transfers if each.nbytes >= _SHOWN_NBYTES or each.kind == "shared"]
        found.sort(key=lambda each: -each.nbytes)
        walls = {title: record.wall_ns for title, record in self.records.items()}
        rows = [
            [
                each.function, each.argument, each.kind, str(each.calls), f"{each.nbytes / 1e6:.2f}",
                f"{each.seconds:.3f}" if each.seconds else "",
                f"{1e9 * each.seconds / max(walls.get(each.function, 0), 1):.0%}" if each.seconds else "",
            ]
            for each in found[:_NUM_SHOWN]
        ]  # fmt: skip
        return ["function", "argument", "kind", "calls", "MB", "copy s", "share"], rows

    def _dominating(self) -> list[str]:
        """Return the line that says what most of all time was spent on, if there were calls."""
        records = self.records
        parts = [(ns, what) for title, each in records.items() for what, ns in each.parts(title).items()]
        if not parts:
            return []
        ns, what = max(parts)
        whole_ns = max(sum(each.wall_ns for each in records.values()), 1)
        return [f"{ns / whole_ns:.0%} of the time of all calls went to {what}."]


def _columns(heads: Sequence[str], rows: Iterable[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """Return lines of text, with the first column left-aligned and the others right-aligned."""
    rows = [heads, *rows]
    first = max(8, *(len(row[0]) for row in rows)) + 2
    return [f"{row[0]:<{first}}" + "".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths)) for row in rows]
