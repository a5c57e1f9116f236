"""Which change of a program would save what: the advice of a profile, from the bytes, messages and seconds it holds."""

from __future__ import annotations

import math
from collections.abc import Iterator

from synk._engine.ledger import Record
from synk._pure.texts import Text

_NUM_LINES = 5
_LEAST_CALLS = 10
_LEAST_NBYTES = 1 << 20
_CHUNK_NS = 20_000_000
"""How long a chunk of items should take."""

_FACTOR = 10
"""How many times the rows in a call."""

_KEPT = {
    "staged": "pass {!r} as synk.data if it stays the same",
    "pickled": "keep {!r} in synk.resident if it stays the same",
}

Change = tuple[float, str]
"""The seconds that a change saves, and the line about it."""


def advice(records: dict[str, Record]) -> Text:
    """Return at most five lines, the change that saves most first."""
    changes = [change for title, record in records.items() for change in _of_function(title, record)]
    changes += _fewer_workers([each for each in records.values() if not each.num_chunks])
    lines = [line for _, line in sorted(changes, reverse=True)[:_NUM_LINES]]
    return Text("\n".join(lines) or "No change stands out in what was measured.")


def _of_function(title: str, record: Record) -> Iterator[Change]:
    """Yield the changes of the calls, or the maps, of one function."""
    calls, chunks, way_s = record.num_calls, record.num_chunks, record.way_ns / 1e9
    if chunks:
        size = max(_CHUNK_NS * calls // max(record.function_ns, 1), 1)
        saved = chunks - math.ceil(calls / size)
        if saved >= chunks / 2 and chunks >= _LEAST_CALLS:
            cure = f"leave batch_size= out, or pass batch_size={size}"
            yield _change(title, cure, f"{2 * saved} of {2 * chunks} messages", way_s * saved / chunks)
        return
    for each in record.totals(title):
        nbytes = each.nbytes * (each.calls - 1) // max(each.calls, 1)
        if each.kind in _KEPT and each.calls >= _LEAST_CALLS and nbytes >= _LEAST_NBYTES:
            yield _change(title, _KEPT[each.kind].format(each.argument), f"{nbytes / 1e6:.1f} MB", each.seconds)
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
    if best <= num_ranks / 2 and messages >= 2 * _LEAST_CALLS:
        saved = f"{messages * (num_ranks - best) // num_ranks} of {messages} messages"
        seconds = (num_ranks - best) * way_s - work_s / best + work_s / num_ranks
        yield _change("all functions", f"fork({best})", saved, seconds)


def _change(title: str, cure: str, saved: str, seconds: float) -> Change:
    return seconds, f"{title}: {cure}: saves {saved}" + (f", about {seconds:.2g} s." if seconds else ".")
