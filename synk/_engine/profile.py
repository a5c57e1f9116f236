"""What ``synk.profile()`` returns: the table of all calls, and which change of the program would save what. Traces.

The advice follows from the bytes, messages and seconds that the ledger holds. A trace says when each call was prepared,
run and put together, in the program and on each rank. Its format is that of ``chrome://tracing`` and
https://ui.perfetto.dev ("Trace Event Format", Google, 2016).
"""

from __future__ import annotations

import json
import math
import os
import time
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from synk._engine.ledger import RankTotal, Record, TransferTotal
from synk._pure.ranges import round_up
from synk._pure.words import Hinting, Text
from synk._wire.apart import WithOneMore
from synk._wire.spans import Span

_NUM_LINES = 5
_LEAST_CALLS = 10
_LEAST_NBYTES = 1 << 20
_CHUNK_NS = 20_000_000
"""How long a chunk of items should take."""

_FACTOR = 10
"""How many times the rows in a call."""

_KEPT = {
    "staged": "pass {!r} as {} if it stays the same",
    "pickled": "keep {!r} in synk.resident if it stays the same",
}

Change = tuple[float, str]
"""The seconds that a change saves, and the line about it."""


def advice(records: dict[str, Record], keeper: str) -> Text:
    """Return at most five lines, the change that saves most first."""
    changes = [change for title, record in records.items() for change in _of_function(title, record, keeper)]
    changes += _fewer_workers([each for each in records.values() if not each.num_chunks])
    lines = [line for _, line in sorted(changes, reverse=True)[:_NUM_LINES]]
    return Text("\n".join(lines) or "No change stands out in what was measured.")


def _of_function(title: str, record: Record, keeper: str) -> Iterator[Change]:
    """Yield the changes of the calls, or the maps, of one function."""
    calls, chunks, way_s = record.num_calls, record.num_chunks, record.way_ns / 1e9
    if chunks:
        work_s = sum(each.function_s for each in record.rank_totals(title))
        size = max(int(_CHUNK_NS * calls / max(1e9 * work_s, 1)), 1)
        saved = chunks - math.ceil(calls / size)
        if saved >= chunks / 2 and chunks >= _LEAST_CALLS:
            cure = f"leave batch_size= out, or pass batch_size={size}"
            yield _change(title, cure, f"{2 * saved} of {2 * chunks} messages", way_s * saved / chunks)
        return
    for each in record.totals(title):
        nbytes = each.nbytes * (each.calls - 1) // max(each.calls, 1)
        if each.kind in _KEPT and each.calls >= _LEAST_CALLS and nbytes >= _LEAST_NBYTES:
            cure = _KEPT[each.kind].format(each.argument, keeper)
            yield _change(title, cure, f"{nbytes / 1e6:.1f} MB", each.seconds)
    if calls >= _LEAST_CALLS and way_s > record.function_ns / 1e9:
        messages, share = 2 * sum(each.calls for each in record.rank_totals(title)), 1 - 1 / _FACTOR
        cure = f"give each call {_FACTOR} times the rows, or use repeat"
        yield _change(title, cure, f"{messages * share:.0f} of {messages} messages", way_s * share)


def _fewer_workers(records: list[Record]) -> Iterator[Change]:
    """Yield the advice to fork fewer workers, if messages to them cost more than they save.

    With ``n`` workers all work takes ``work / n``, and the messages take ``n * way``.
    """
    totals = [each for record in records for each in record.rank_totals("")]
    messages, num_ranks = 2 * sum(each.calls for each in totals), len({each.rank for each in totals})
    work_s = sum(each.function_s - each.wait_s for each in totals)
    way_s = sum(record.way_ns for record in records) / 1e9 / max(num_ranks, 1)
    best = max(round(math.sqrt(work_s / max(way_s, 1e-9))), 1)
    seconds = (num_ranks - best) * way_s - work_s / best + work_s / max(num_ranks, 1)
    if best <= num_ranks / 2 and messages >= 2 * _LEAST_CALLS and seconds > 0:
        saved = f"{messages * (num_ranks - best) // num_ranks} of {messages} messages"
        yield _change("all functions", f"fork({best})", saved, seconds)


def _change(title: str, cure: str, saved: str, seconds: float) -> Change:
    return seconds, f"{title}: {cure}: saves {saved}" + (f", about {seconds:.2g} s." if seconds else ".")


_SHOWN_NBYTES = 1 << 16
"""An argument of at least this size, in all calls together, is shown in the table."""

_NUM_SHOWN = 8

_FEW_CALLS = 10
"""With fewer calls than this, the start of the workers may be most of the time."""


class Profile(Hinting):
    """The records of a runtime. Made by :func:`synk.profile`. It prints as a table, the most expensive function first.

    ``share`` is the part of the calls' time in which the rank that worked longest was computing. The rest is
    distribution, copies, reduction and waiting. ``wait`` is the part in which that rank waited in ``synk.comm``. ``in``
    are the bytes that the program copied per call (``Data`` and shared variables cost none), ``out`` the bytes of
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

    def __init__(self, keeper: str = "synk.data") -> None:
        self.keeper = keeper  # what arrays are to be that stay the same
        self.known: dict[Any, Record] = {}

    def record(self, fn: Any, name: str) -> Record:
        """Return the record of a function. Its first call makes one.

        A function that is defined again and again, for instance in a loop, counts as one.
        """
        code = getattr(getattr(fn, "__func__", fn), "__code__", None)
        key = name, type(fn) if code is None else code
        own = fn.title if isinstance(fn, WithOneMore) else type(fn).__qualname__
        place = own if code is None else f"{os.path.basename(code.co_filename)}:{code.co_firstlineno}"
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

    def advice(self) -> Text:
        """Return at most five lines, each with a change of the program and what it would save, as far as measured.

        Examples
        --------
        >>> import numpy as np, synk
        >>> with synk.fork(2):
        ...     table = np.ones((1000, 100))
        ...     def norm(table, x):
        ...         return table.mean() * x.sum()
        ...     norm = synk.function(norm, bcast_inputs="table", outputs="sum")
        ...     for _ in range(10):
        ...         _ = norm(table, np.ones(100))
        ...     advice = synk.profile().advice()
        >>> print(advice)  # doctest: +ELLIPSIS
        norm: ...: saves ...
        """
        return advice(self.records, self.keeper)

    # -- display ------------------------------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return "\n".join(["\n\n".join(map(_aligned, self._tables())), *self._dominating()])

    def _tables(self) -> list[list[list[str]]]:
        """Return tables, as rows; the first one of each has the heads."""
        records = self.records
        dearest = sorted(records, key=lambda title: -records[title].wall_ns)
        found = [[_HEADS, *(_function_row(title, records[title]) for title in dearest)]]
        largest = [each for each in self.transfers if each.nbytes >= _SHOWN_NBYTES or each.kind == "shared"]
        largest.sort(key=lambda each: -each.nbytes)
        if largest:
            shown = [_transfer_row(each, records[each.function]) for each in largest[:_NUM_SHOWN]]
            found.append([_ARGUMENT_HEADS, *shown])
        if ranks := [total for title in dearest[:1] for total in records[title].rank_totals(title)]:
            found.append([_RANK_HEADS, *map(_rank_row, ranks)])
        return found

    def _dominating(self) -> list[str]:
        """Return the line that says what most of all time was spent on, if there were calls."""
        records = self.records
        parts = [part for title, record in records.items() for part in _parts_of_time(title, record, self.keeper)]
        if not parts:
            return []
        most_ns, what = max(parts)
        whole_ns = max(sum(each.wall_ns for each in records.values()), 1)
        return [f"{most_ns / whole_ns:.0%} of the time of all calls went to {what}."]


def _parts_of_time(title: str, record: Record, keeper: str) -> Iterator[tuple[float, str]]:
    """Yield what the time of a function's calls went to: nanoseconds, and a text."""
    if ranks := record.rank_totals(title):
        busiest = max(ranks, key=lambda each: each.share)
        yield record.function_ns, f"the work of {title!r}, most of it on rank {busiest.rank}"
    yield record.wait_ns, f"waits of {title!r} in synk.comm"
    if staged := [each for each in record.totals(title) if each.kind == "staged"]:
        largest = max(staged, key=lambda each: each.nbytes)
        yield 1e9 * largest.seconds, f"the copy of {largest.argument} for {title!r}: keep it in {keeper}"
    is_early = record.num_calls < _FEW_CALLS
    cure = "give each call more to do" if not is_early else "it includes the workers' start, so look after more calls"
    yield record.way_ns, f"the way of {title!r} to the workers and back: {cure}"


_HEADS = ["function", "calls", "total s", "ms/call", "share", "wait", "in B/call", "out B/call"]
_ARGUMENT_HEADS = ["function", "argument", "kind", "calls", "MB", "copy s", "share"]
_RANK_HEADS = ["function", "rank", "calls", "work s", "wait s", "share"]


def _function_row(title: str, record: Record) -> list[str]:
    count, wall_ns = max(record.num_calls, 1), max(record.wall_ns, 1)
    return [
        title, str(record.num_calls), f"{wall_ns / 1e9:.3f}", f"{wall_ns / count / 1e6:.3f}",
        f"{record.function_ns / wall_ns:.0%}", f"{record.wait_ns / wall_ns:.0%}",
        str(record.nbytes_of("staged", "pickled", "items") // count), str(record.nbytes_of("output") // count),
    ]  # fmt: skip


def _transfer_row(each: TransferTotal, record: Record) -> list[str]:
    seconds, share = each.seconds, 1e9 * each.seconds / max(record.wall_ns, 1)
    times = [f"{seconds:.3f}", f"{share:.0%}"] if seconds else ["", ""]
    return [each.function, each.argument, each.kind, str(each.calls), f"{each.nbytes / 1e6:.2f}", *times]


def _rank_row(each: RankTotal) -> list[str]:
    times = [f"{each.function_s - each.wait_s:.3f}", f"{each.wait_s:.3f}", f"{each.share:.0%}"]
    return [each.function, str(each.rank), str(each.calls), *times]


def _aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return lines of text, with the first column left-aligned and the others right-aligned."""
    first, *others = [max(map(len, column)) for column in zip(*rows)]
    widths = [max(round_up(width + 2, 2), 8) for width in others]
    return "\n".join(
        f"{row[0]:<{max(first, 8) + 2}}" + "".join(f"{cell:>{width}}" for cell, width in zip(row[1:], widths))
        for row in rows
    )


MOST_EVENTS = 1_000_000
"""How many events are kept: the last ones."""


class Tracer:
    """Records what happens from its creation on.

    Parameters
    ----------
    world_size : int
    began_ns : int
        Times in the file count from it.
    """

    def __init__(self, world_size: int, began_ns: int) -> None:
        self._world_size, self._began_ns = world_size, began_ns
        self._events: deque[tuple[int, str, str, int, int, dict[str, Any]]] = deque(maxlen=MOST_EVENTS)
        self._ends: dict[int, int] = {}
        self.spans: dict[int, Sequence[Span]] = {}
        """By process: 0 is the program, 1 + r is rank r."""

    def note(self, call: Any) -> None:
        """Add a call that has ended, unless it was submitted before the trace."""
        if call.started_ns < self._began_ns:
            return
        now = time.monotonic_ns()
        started = max(call.started_ns, self._ends.get(call.lane.index, 0))  # it may have waited for its lane
        self._ends[call.lane.index] = now
        name, number = call.callee.name, call.number
        lane = f"lane {call.lane.index}"
        sent = call.sent_ns or now
        self._add(0, lane, f"stage {name}", started, sent, call=number, bytes=call.nbytes)
        if call.error is not None:
            self._add(0, lane, type(call.error).__name__, sent, now, call=number)
            return
        self._add(0, lane, f"wait {name}", sent, call.heard_ns, call=number)
        self._add(0, lane, f"assemble {name}", call.heard_ns, now, call=number)
        for rank, (_, _, (received, began, ended, published, waited)) in call.replies.items():
            self._add(1 + rank, lane, "receive", received, began, call=number)
            self._add(1 + rank, lane, name, began, ended, call=number, waited_ms=waited / 1e6)
            self._add(1 + rank, lane, "publish", ended, published, call=number)

    def note_chunk(self, name: str, rank: int, num_items: int, began_ns: int, ended_ns: int) -> None:
        """Add a chunk of a map."""
        self._add(1 + rank, "lane 0", name, began_ns, ended_ns, items=num_items)

    def _add(self, process: int, thread: str, name: str, began_ns: int, ended_ns: int, **about: Any) -> None:
        self._events.append((process, thread, name, began_ns, ended_ns, about))

    def write(self, file: BinaryIO) -> None:
        """Write the file."""
        threads: dict[tuple[int, str], int] = {}
        events = [
            {
                "ph": "X", "name": name, "pid": process, "tid": threads.setdefault((process, thread), len(threads)),
                "ts": (began - self._began_ns) / 1e3, "dur": max(ended - began, 0) / 1e3, "args": about,
            }
            for process, thread, name, began, ended, about in [*self._events, *self._own_spans()]
            if began >= self._began_ns
        ]  # fmt: skip
        for process in range(1 + self._world_size):
            events.append(_named("process_name", process, 0, f"rank {process - 1}" if process else "program"))
        events += [_named("thread_name", process, number, thread) for (process, thread), number in threads.items()]
        file.write(json.dumps({"displayTimeUnit": "ms", "traceEvents": events}).encode())

    def _own_spans(self) -> list[tuple[int, str, str, int, int, dict[str, Any]]]:
        return [
            (process, f"span {each.thread}", each.name, each.began_ns, each.ended_ns, {})
            for process, spans in self.spans.items()
            for each in spans
        ]


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
