"""A trace: when each call was prepared, run and put together, in the program and on each rank.

The format is that of ``chrome://tracing`` and https://ui.perfetto.dev ("Trace Event Format", Google, 2016).
"""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Sequence
from typing import Any, BinaryIO

from synk._wire.spans import Span

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
        """Add a call that has ended."""
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
            if each.began_ns >= self._began_ns
        ]


def _named(what: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": process, "tid": thread, "args": {"name": name}}
