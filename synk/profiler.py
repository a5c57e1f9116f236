"""Where the time and the bytes go: traces, and spans of your own.

``synk.profile()`` is the table of all calls so far. This module shows more detail, and is loaded when it is first used.
:func:`span` can also be used in functions on the workers.
"""

from __future__ import annotations

import os
import pickle
import sys
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from synk._pure.interrupts import deferred
from synk._pure.words import no_attribute
from synk._wire.cell import refuse_inside_worker
from synk._wire.spans import pickled_spans, take_spans
from synk._wire.spans import span as span
from synk.errors import UnsupportedError

if TYPE_CHECKING:
    from pstats import Stats

    from synk._api.function import Function
    from synk._master.state.trace import Tracer

__all__ = ["Trace", "cprofile", "span", "trace"]


def __getattr__(name: str) -> Any:
    raise no_attribute("profiler", sys.modules[__name__], name)


class Trace:
    """A recording. Made by :func:`trace`. Times are in seconds from its beginning."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a file that https://ui.perfetto.dev and ``chrome://tracing`` open."""
        from synk._master.state.trace import write_trace

        write_trace(path, self._tracer.events())

    def skew(self) -> dict[str, float]:
        """Return, by function, how many times longer the slowest rank took than the average rank; 1 is even."""
        return self._tracer.skew()

    def rows(self) -> list[tuple[int, str, str, float, float]]:
        """Return ``(process, lane, name, start, duration)`` of everything that took time. Process 0 is the program."""
        return self._tracer.rows()

    def plot(self, *, first: int = 200) -> Any:
        """Draw the first spans as bars over time, and return the matplotlib figure.

        Parameters
        ----------
        first : int
            How many spans to draw. More than a few hundred cannot be told apart.

        Raises
        ------
        ImportError
            If matplotlib is not installed.
        """
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError(
                "cannot draw a trace: got no matplotlib, expected it to be installed. pip install matplotlib."
            ) from error
        rows = sorted(self.rows(), key=lambda row: row[3])[:first]
        places = sorted({row[:2] for row in rows}, reverse=True)
        names = sorted({row[2] for row in rows})
        figure = Figure(figsize=(10, 1 + 0.4 * len(places)), layout="constrained")
        axes = figure.subplots()
        for number, name in enumerate(names):
            own = [row for row in rows if row[2] == name]
            heights = [places.index(row[:2]) for row in own]
            starts, widths = [row[3] * 1e3 for row in own], [row[4] * 1e3 for row in own]
            axes.barh(heights, widths, 0.8, starts, color=f"C{number % 10}", label=name)
        axes.set_yticks(range(len(places)), [_place_name(*place) for place in places])
        axes.set_xlabel("ms")
        axes.legend(fontsize="small", ncols=4)
        return figure


def _place_name(process: int, lane: str) -> str:
    name = "program" if not process else f"rank {process - 1}"
    return name if lane == "0" else f"{name}, {lane if lane.startswith('span') else f'lane {lane}'}"


class trace:
    """A context in which every call is recorded: ``with synk.profiler.trace("run.json") as t``.

    For each call the trace shows when its arguments were copied, how long the program waited and how long it put the
    result together. For each rank it shows when the call was received, when the function ran and when its outputs were
    in place, with arrows from one to the other. It also has failed calls, replaced workers, the chunks of maps and each
    :func:`span`. The last 100 000 calls are kept.

    Parameters
    ----------
    path : path-like, optional
        Where to save it when the body ends, also after an exception.

    Raises
    ------
    NotForkedError
        If no runtime is current.
    RuntimeError
        If another trace of this runtime is open.

    Examples
    --------
    >>> import numpy as np, synk
    >>> with synk.fork(2):
    ...     @synk.function(outputs="sum")
    ...     def total(x):
    ...         return x.sum()
    ...     with synk.profiler.trace() as t:
    ...         for _ in range(3):
    ...             _ = total(np.ones(8))
    >>> len([row for row in t.rows() if row[2] == "total"])  # three calls on two ranks
    6
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = path
        self._stack = ExitStack()

    def __enter__(self) -> Trace:
        refuse_inside_worker("trace calls")
        from synk._api.current import current
        from synk._master.state.trace import Tracer

        runtime = self._runtime = current()
        session = runtime._session
        session.check_here("trace calls", "synk.profile() shows the times of all ranks.")
        if session.tracer is not None:
            raise RuntimeError("cannot trace calls: this runtime is being traced already. End that trace first.")
        self._tracer = Tracer(runtime.world_size, time.monotonic_ns())
        try:
            with deferred():
                session.followers.append(self._tracer.follow)
                self._stack.callback(session.followers.remove, self._tracer.follow)
                session.tracer = self._tracer
            return Trace(self._tracer)
        except BaseException:  # a signal handler may raise when the section ends, and ``__exit__`` is not called then
            self._end()
            raise

    def __exit__(self, *exc: object) -> None:
        try:
            self._end()
            if not self._runtime.is_closed:
                self._take_spans_of_ranks()
        finally:
            self._end()  # a signal handler may have raised when the first attempt was about to begin
            if self._path is not None:
                Trace(self._tracer).save(self._path)

    def _end(self) -> None:
        """Trace no more calls. A second attempt does nothing."""
        session = self._runtime._session
        with deferred(), self._stack:  # the stack takes back the follower, whatever fails here
            if session.tracer is not self._tracer:
                return
            session.tracer = None
            self._tracer.spans[0] = take_spans()

    def _take_spans_of_ranks(self) -> None:
        take = self._runtime.function(pickled_spans, outputs=None, per_rank=True)
        for rank, spans in enumerate(take()):
            self._tracer.spans[1 + rank] = pickle.loads(spans)
        self._runtime.profile.leave_out(take.__name__)


def cprofile(function: Function[..., Any], /, *args: Any, timeout: float | None = None, **kwargs: Any) -> list[Stats]:
    """Call a function once under :mod:`cProfile` on every rank, and return each rank's statistics.

    Parameters
    ----------
    function : Function
    *args, **kwargs, timeout
        As for a call. The results of the function are dropped.

    Returns
    -------
    list of pstats.Stats
        One for each rank that has rows, ascending.

    Raises
    ------
    UnsupportedError
        If the function was built with variables in ``updates``, which need its results.

    Examples
    --------
    >>> import numpy as np, synk
    >>> with synk.fork(2):
    ...     f = synk.function(lambda x: np.sort(x).sum(), outputs="sum")
    ...     stats = synk.profiler.cprofile(f, np.random.rand(1000))
    >>> len(stats), any(name == "sort" for _, _, name in stats[0].stats)
    (2, True)
    """
    from synk._wire.profiled import Profiled, stats_of

    if function._callee.options["updates"]:
        raise UnsupportedError(
            f"cannot profile {function.__name__!r}: it was built with variables in updates, whose values it returns. "
            "Build it without them."
        )
    profiled = function._alike(Profiled(function._callee.fn), outputs=None, updates=function._callee.options["changes"])
    return [stats_of(raw) for raw in profiled(*args, timeout=timeout, **kwargs) if raw is not None]
