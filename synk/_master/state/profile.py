"""The table of all calls that ``synk.profile()`` returns: how the ledger is shown."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import Any

from synk._master.state.ledger import RankTotal, Record, TransferTotal
from synk._pure.show import escaped, table
from synk._wire.apart import Quiet

_SHOWN_NBYTES = 1 << 16
"""A transfer of at least this size, in all calls together, is shown in the table."""

_NUM_SHOWN = 8


class Profile:
    """The records of a runtime. Made by :func:`synk.profile`. It prints as a table, the most expensive function first.

    ``share`` is the part of the calls' time in which the rank that worked longest was computing. The rest is
    distribution, copies, reduction and waiting. ``wait`` is the part in which that rank waited in ``synk.comm``. ``in``
    are the bytes that the master copied per call (``Data`` and shared variables cost none), ``out`` the bytes of
    outputs of all ranks per call. Below the table come the phases of training steps by rank, the largest transfers, and
    a line for each function with something to point out.

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
    >>> [(each.rank, each.in_nbytes) for each in profile.ranks]
    [(0, 2016), (1, 1984)]
    """

    def __init__(self) -> None:
        self.known: dict[Any, Record] = {}

    def record(self, fn: Any, name: str) -> Record:
        """Return the record of a function. Its first call makes one.

        A function that is defined again and again, for instance in a loop, counts as one.
        """
        if isinstance(fn, Quiet):
            return Record(name, "")  # a run of synk's own
        code = getattr(getattr(fn, "__func__", fn), "__code__", None)
        key = name, type(fn) if code is None else code
        place = type(fn).__qualname__ if code is None else f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = Record(name, place)
        return found

    def leave_out(self, name: str) -> None:
        """Forget a function that is not the user's."""
        self.known = {key: each for key, each in self.known.items() if each.name != name}

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

    def to_dict(self) -> dict[str, Any]:
        """Return everything as plain numbers and texts, for JSON."""
        return {
            "functions": [
                {
                    "function": title,
                    "calls": record.num_calls,
                    "wall_s": record.wall_ns / 1e9,
                    "function_s": record.function_ns / 1e9,
                    "wait_s": record.wait_ns / 1e9,
                    "staged_s": record.staged_ns / 1e9,
                    "verdict": record.verdict(),
                }
                for title, record in self.records.items()
            ],
            "transfers": [each._asdict() for each in self.transfers],
            "ranks": [each._asdict() for each in self.ranks],
        }

    # -- display -------------------------------------------------------------------------------------------------------

    def _repr_html_(self) -> str:
        heads, rows = self._functions()
        text = table("profile", [heads, *rows], has_heads=True)
        for title, (heads, rows) in {"training steps": self._phases(), "largest transfers": self._largest()}.items():
            if rows:
                text += table(title, [heads, *rows], has_heads=True)
        return text + "".join(f"<p>{escaped(line)}</p>" for line in self._verdicts())

    def __repr__(self) -> str:
        heads, rows = self._functions()
        lines = _columns(heads, rows, (8, 10, 10, 8, 8, 12, 12))
        for (heads, rows), widths in ((self._phases(), (6, *[13] * 6)), (self._largest(), (20, 10, 8, 12, 10, 11))):
            if rows:
                lines += ["", *_columns(heads, rows, widths)]
        return "\n".join([*lines, *self._verdicts()])

    def _functions(self) -> tuple[list[str], list[list[str]]]:
        rows = []
        for title, record in sorted(self.records.items(), key=lambda item: -item[1].wall_ns):
            count, wall_ns = max(record.num_calls, 1), max(record.wall_ns, 1)
            nbytes_in = record.nbytes_of("staged", "pickled", "items")
            rows.append([
                title, str(record.num_calls), f"{wall_ns / 1e9:.3f}", f"{wall_ns / count / 1e6:.3f}",
                f"{record.function_ns / wall_ns:.0%}", f"{record.wait_ns / wall_ns:.0%}",
                str(nbytes_in // count), str(record.output_nbytes // count),
            ])  # fmt: skip
        return ["function", "calls", "total s", "ms/call", "share", "wait", "in B/call", "out B/call"], rows

    def _phases(self) -> tuple[list[str], list[list[str]]]:
        found = [each for each in self.ranks if each.phases]
        names = ("forward", "backward", "reduce", "optimizer", "copy")
        rows = [
            [each.function, str(each.rank), *(f"{each.phases[name]:.3f}" for name in names), f"{each.wait_s:.3f}"]
            for each in found
        ]
        return ["training step", "rank", *(f"{name} s" for name in names), "wait s"], rows

    def _largest(self) -> tuple[list[str], list[list[str]]]:
        found = [each for each in self.transfers if each.nbytes >= _SHOWN_NBYTES and each.direction != "none"]
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

    def _verdicts(self) -> list[str]:
        told = {title: record.verdict() or record.note for title, record in self.records.items()}
        return [f"{title}: {verdict}" for title, verdict in told.items() if verdict]


def _columns(heads: Sequence[str], rows: Iterable[Sequence[str]], widths: Sequence[int]) -> list[str]:
    """Return lines of text, with the first column left-aligned and the others right-aligned."""
    rows = [heads, *rows]
    first = max(8, *(len(row[0]) for row in rows)) + 2
    return [f"{row[0]:<{first}}" + "".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths)) for row in rows]
