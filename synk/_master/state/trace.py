"""A trace: when each call was prepared, run and put together, in the program and on each rank.

The ranks write the times of each call into their control words, which are copied here when the call has ended. The
format is that of ``chrome://tracing`` and https://ui.perfetto.dev ("Trace Event Format", Google, 2016).
"""

from __future__ import annotations

import json
import os
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from synk._wire.control import Up
from synk._wire.spans import Span

MOST_CALLS = 100_000
"""How many calls are kept: the last ones."""


class _Traced(NamedTuple):
    """One call that has ended."""

    number: int
    name: str
    lane: int
    started_ns: int
    sent_ns: int
    heard_ns: int
    ended_ns: int
    ranks: Sequence[int]
    words: list[bytes]
    nbytes: tuple[int, int]
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
        self._instants: list[tuple[str, int]] = []
        self._chunks: deque[tuple[str, int, int, int, int]] = deque(maxlen=MOST_CALLS)
        self._num_restarts = -1
        self.spans: dict[int, Sequence[Span]] = {}
        """By process: 0 is the program, 1 + r is rank r."""

    def note(
        self,
        launched: Any,
        words: Sequence[memoryview],
        heard_ns: int,
        ended_ns: int,
        nbytes: tuple[int, int],
        error: str = "",
    ) -> None:
        """Add a call that has ended."""
        ranks = launched.call.ranks
        traced = _Traced(
            launched.number, launched.function.name, launched.cached.lane.index, launched.started_ns,
            launched.sent_ns, heard_ns, ended_ns, ranks,
            [words[rank].tobytes() for rank in ranks], nbytes, error,
        )  # fmt: skip
        self._calls.append(traced)

    def follow(self, session: Any, launched: Any, result: Any, heard_ns: int, ended_ns: int) -> None:
        """Take in a call that succeeded."""
        cached = launched.cached
        self.note_restarts(session.counters["restarts"], ended_ns)
        nbytes = cached.staged_nbytes, sum(each.nbytes for each in cached.transfers if each.by_rank is not None)
        self.note(launched, cached.lane.up_words, heard_ns, ended_ns, nbytes)

    def note_restarts(self, num_restarts: int, now_ns: int) -> None:
        """Note how many workers have been replaced so far."""
        if self._num_restarts >= 0 and num_restarts > self._num_restarts:
            self._instants.append((f"{num_restarts - self._num_restarts} workers were started again", now_ns))
        self._num_restarts = num_restarts

    def note_chunk(self, name: str, rank: int, num_items: int, began_ns: int, duration_ns: int) -> None:
        """Add a chunk of a map."""
        self._chunks.append((name, rank, num_items, began_ns, duration_ns))

    # -- reports -------------------------------------------------------------------------------------------------------

    def skew(self) -> dict[str, float]:
        """Return, by function, how many times longer the slowest rank took than the average rank."""
        times: dict[str, list[float]] = defaultdict(list)
        for call in self._calls:
            took = [times_of(raw)[Up.FUNCTION_NS] for raw in call.words]
            if took and not call.error and sum(took):
                times[call.name].append(max(took) * len(took) / sum(took))
        return {name: float(np.mean(ratios)) for name, ratios in times.items()}

    def rows(self) -> list[tuple[int, str, str, float, float]]:
        """Return ``(process, lane, name, start, duration)`` of everything that took time, in seconds."""
        return [
            (event["pid"], str(event["tid"]), event["name"], event["ts"] / 1e6, event["dur"] / 1e6)
            for event in self.events()
            if event["ph"] == "X"
        ]

    def events(self) -> Iterator[dict[str, Any]]:
        """Return the events of the file. The first ones name the processes."""
        for process in range(1 + self._world_size):
            name = "program" if not process else f"rank {process - 1}"
            yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
            yield {"ph": "M", "name": "process_sort_index", "pid": process, "tid": 0, "args": {"sort_index": process}}
        for call in list(self._calls):
            yield from self._events_of(call)
        for name, rank, num_items, began, duration in list(self._chunks):
            yield self._whole(1 + rank, 0, name, began, began + duration, {"items": num_items})
        for name, now in self._instants:
            yield {"ph": "i", "s": "g", "name": name, "pid": 0, "tid": 0, "ts": self._us(now)}
        for process, spans in self.spans.items():
            for each in spans:
                if each.began_ns >= self._began_ns:
                    yield self._whole(process, f"span {each.thread}", each.name, each.began_ns, each.ended_ns, {})

    def _events_of(self, call: _Traced) -> Iterator[dict[str, Any]]:
        lane, about = call.lane, {"call": call.number}
        staged, out = call.nbytes
        sent = call.sent_ns or call.ended_ns
        yield self._whole(0, lane, f"stage {call.name}", call.started_ns, sent, {**about, "bytes": staged})
        if call.error:
            yield {"ph": "i", "s": "g", "name": call.error, "pid": 0, "tid": lane, "ts": self._us(call.ended_ns)}
            return
        yield self._whole(0, lane, f"wait {call.name}", sent, call.heard_ns, about)
        yield self._whole(0, lane, f"assemble {call.name}", call.heard_ns, call.ended_ns, {**about, "bytes": out})
        yield {
            "ph": "C", "name": "bytes", "cat": "call", "pid": 0, "ts": self._us(call.ended_ns),
            "args": {"in": staged, "out": out},
        }  # fmt: skip
        for rank, raw in zip(call.ranks, call.words):
            words = times_of(raw)
            received, began, ended, published = (int(words[k]) for k in _TIMES)
            if not call.started_ns <= received <= began <= ended <= published <= call.ended_ns:
                continue  # they belong to another call, which has followed in this lane
            process, flow = 1 + rank, f"{call.number}.{rank}"
            yield {"ph": "s", "id": flow, "name": "call", "cat": "call", "pid": 0, "tid": lane, "ts": self._us(sent)}
            yield self._whole(process, lane, "receive", received, began, about)
            yield {
                "ph": "f", "bp": "e", "id": flow, "name": "call", "cat": "call", "pid": process, "tid": lane,
                "ts": self._us(began),
            }  # fmt: skip
            waited = int(words[Up.WAIT_NS]) / 1e6
            yield self._whole(process, lane, call.name, began, ended, {**about, "waited_ms": waited})
            yield self._whole(process, lane, "publish", ended, published, about)

    def _whole(
        self, process: int, lane: Any, name: str, began: int, ended: int, about: dict[str, Any]
    ) -> dict[str, Any]:
        return {
            "ph": "X", "name": name, "pid": process, "tid": lane, "ts": self._us(began),
            "dur": max(ended - began, 0) / 1e3, "args": about,
        }  # fmt: skip

    def _us(self, now_ns: int) -> float:
        return (now_ns - self._began_ns) / 1e3


def write_trace(path: str | os.PathLike[str], events: Iterable[dict[str, Any]]) -> None:
    """Write events to a file in one step: a reader finds all of it, or what was there before."""
    path = os.fspath(path)
    temporary = f"{path}.{os.getpid()}"
    with open(temporary, "w", encoding="utf-8") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for position, event in enumerate(_with_threads(events)):
            file.write((",\n" if position else "") + json.dumps(event))
        file.write("\n]}\n")
    os.replace(temporary, path)


def _with_threads(events: Iterable[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield events with numbers for threads of a process, as viewers want them, and the names of lanes and threads."""
    numbers: dict[str, int] = {}
    named: set[tuple[int, int]] = set()
    for event in events:
        tid = event.get("tid", 0)
        name = tid if isinstance(tid, str) else f"lane {tid}"
        number = numbers.setdefault(tid, 100 + len(numbers)) if isinstance(tid, str) else tid
        place = event["pid"], number
        if event["ph"] == "X" and place not in named:
            named.add(place)
            yield {"ph": "M", "name": "thread_name", "pid": place[0], "tid": number, "args": {"name": name}}
        yield {**event, "tid": number} if "tid" in event else event


_TIMES = (Up.RECEIVED_NS, Up.BEGAN_NS, Up.ENDED_NS, Up.PUBLISHED_NS)


def times_of(raw: bytes) -> np.ndarray:
    """Return the control words of a rank from their copy."""
    return np.frombuffer(raw, np.int64)
