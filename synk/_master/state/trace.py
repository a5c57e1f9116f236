"""A trace: when each call was prepared, run and put together, in the program and on each rank.

The ranks write the times of each call into their control words, which are copied here when the call has ended. The
format is that of ``chrome://tracing`` and https://ui.perfetto.dev ("Trace Event Format", Google, 2016).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from synk._wire.control import Up
from synk._wire.spans import Span

MOST_CALLS = 100_000
"""How many calls are kept: the last ones."""

_TIMES = (Up.RECEIVED_NS, Up.BEGAN_NS, Up.ENDED_NS, Up.PUBLISHED_NS)


class _Traced(NamedTuple):
    """One call that has ended."""

    number: int
    name: str
    lane: str
    started_ns: int
    sent_ns: int
    heard_ns: int
    ended_ns: int
    words: dict[int, bytes]
    nbytes: int
    error: str


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
        self._calls: deque[_Traced] = deque(maxlen=MOST_CALLS)
        self._chunks: deque[tuple[str, int, int, int, int]] = deque(maxlen=MOST_CALLS)
        self.spans: dict[int, Sequence[Span]] = {}
        """By process: 0 is the program, 1 + r is rank r."""

    def note(self, launched: Any, heard_ns: int, ended_ns: int, error: str = "") -> None:
        """Add a call that has ended."""
        cached, words = launched.cached, launched.cached.lane.up_words
        traced = _Traced(
            launched.number, launched.function.name, f"lane {cached.lane.index}", launched.started_ns,
            launched.sent_ns or ended_ns, heard_ns, ended_ns,
            {rank: words[rank].tobytes() for rank in launched.call.ranks}, cached.staged_nbytes, error,
        )  # fmt: skip
        self._calls.append(traced)

    def note_chunk(self, name: str, rank: int, num_items: int, began_ns: int, ended_ns: int) -> None:
        """Add a chunk of a map."""
        self._chunks.append((name, rank, num_items, began_ns, ended_ns))

    def write(self, file: BinaryIO) -> None:
        """Write the file."""
        file.write(json.dumps({"displayTimeUnit": "ms", "traceEvents": self._events()}).encode())

    def _events(self) -> list[dict[str, Any]]:
        events: list[dict[str, Any]] = []
        threads: dict[tuple[int, str], int] = {}

        def add(process: int, thread: str, name: str, began: int, ended: int, **about: Any) -> None:
            number = threads.setdefault((process, thread), len(threads))
            events.append({
                "ph": "X", "name": name, "pid": process, "tid": number, "ts": (began - self._began_ns) / 1e3,
                "dur": max(ended - began, 0) / 1e3, "args": about,
            })  # fmt: skip

        for call in list(self._calls):
            name, lane, number = call.name, call.lane, call.number
            add(0, lane, f"stage {name}", call.started_ns, call.sent_ns, call=number, bytes=call.nbytes)
            if call.error:
                add(0, lane, call.error, call.sent_ns, call.ended_ns, call=number)
                continue
            add(0, lane, f"wait {name}", call.sent_ns, call.heard_ns, call=number)
            add(0, lane, f"assemble {name}", call.heard_ns, call.ended_ns, call=number)
            for rank, raw in call.words.items():
                words = np.frombuffer(raw, np.int64)
                received, began, ended, published = (int(words[k]) for k in _TIMES)
                if not call.started_ns <= received <= began <= ended <= published <= call.ended_ns:
                    continue  # they belong to another call, which has followed in this lane
                add(1 + rank, lane, "receive", received, began, call=number)
                add(1 + rank, lane, name, began, ended, call=number, waited_ms=int(words[Up.WAIT_NS]) / 1e6)
                add(1 + rank, lane, "publish", ended, published, call=number)
        for name, rank, num_items, began, ended in list(self._chunks):
            add(1 + rank, "lane 0", name, began, ended, items=num_items)
        for process, spans in self.spans.items():
            for each in spans:
                if each.began_ns >= self._began_ns:
                    add(process, f"span {each.thread}", each.name, each.began_ns, each.ended_ns)
        for process in range(1 + self._world_size):
            events.append(_named("process_name", process, 0, f"rank {process - 1}" if process else "program"))
        for (process, thread), number in threads.items():
            events.append(_named("thread_name", process, number, thread))
        return events


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
