"""Where the time and the bytes go: traces, spans of your own, and guards against wasteful transfers.

``synk.profile()`` is the table of all calls so far. This module shows more detail, and is loaded when it is first used.
:func:`span` can also be used in functions on the workers.
"""

from __future__ import annotations

import os
import pickle
import time
from contextlib import AbstractContextManager, ExitStack
from typing import TYPE_CHECKING, Any

from synk._pure.interrupts import deferred
from synk._wire.cell import refuse_inside_worker
from synk._wire.spans import pickled_spans, take_spans
from synk._wire.spans import span as span

if TYPE_CHECKING:
    from synk._master.state.profile import Profile
    from synk._master.state.trace import Tracer

__all__ = ["Trace", "live", "span", "trace", "transfer_guard"]


def transfer_guard(mode: str) -> AbstractContextManager[None]:
    """Return a context in which wasteful transfers of this thread's calls are logged, warned about, or refused.

    A transfer is wasteful if an array of 64 KB or more is copied to the workers although it had the same bytes in the
    last three calls of the function, or if another call returned the array. ``fork(transfer_guard=...)`` sets the mode
    of a runtime for all threads.

    Parameters
    ----------
    mode : {"allow", "log", "warn", "raise"}
        ``"allow"``: one line in the log, from 16 MB on. ``"log"`` and ``"warn"``: once per function and argument, in
        the logger ``synk`` or as ``synk.errors.WastefulTransfer`` at the line of the call. ``"raise"``: the call raises
        ``synk.errors.TransferRefused`` before anything is sent.

    Raises
    ------
    ValueError
        For another mode.
    NotForkedError
        If no runtime is current.

    Examples
    --------
    >>> import numpy as np, synk
    >>> with synk.fork(2), synk.profiler.transfer_guard("raise"):
    ...     total = synk.function(lambda x: x.sum(), outputs="sum")
    ...     x = np.ones((4, 10_000))
    ...     for _ in range(4):
    ...         _ = total(x)
    Traceback (most recent call last):
        ...
    synk.errors.TransferRefused: refused a transfer: x of '<lambda>', 0.32 MB, is copied at every call, ...

    Notes
    -----
    An array that changes costs the comparison of some samples. An array that does not change costs a copy, which is
    kept, and the comparison with it.
    """
    from synk._api.current import current

    session = current()._session
    session.check_here("guard transfers", "All arguments travel to the nodes in each call.")
    return session.guard.as_mode(mode)


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
    compare : bool
        Whether to count in ``synk.profile().transfers`` how often large arguments had the bytes of the call before.

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
    ...     total = synk.function(lambda x: x.sum(), outputs="sum", name="total")
    ...     with synk.profiler.trace() as t:
    ...         for _ in range(3):
    ...             _ = total(np.ones(8))
    >>> len([row for row in t.rows() if row[2] == "total"])  # three calls on two ranks
    6
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, compare: bool = False) -> None:
        self._path, self._compare = path, compare
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
                if self._compare:
                    self._stack.enter_context(session.guard.as_mode("count"))
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
        with deferred(), self._stack:  # the stack takes back the follower and the guard's mode, whatever fails here
            if session.tracer is not self._tracer:
                return
            session.tracer = None
            self._tracer.spans[0] = take_spans()

    def _take_spans_of_ranks(self) -> None:
        take = self._runtime.function(pickled_spans, outputs=None, per_rank=True, name="synk.profiler.trace")
        for rank, spans in enumerate(take()):
            self._tracer.spans[1 + rank] = pickle.loads(spans)
        self._runtime.profile.leave_out("synk.profiler.trace")


class live:
    """A context in which the table of ``synk.profile()`` is shown, and kept up to date: ``with synk.profiler.live()``.

    In a notebook the table stays in its place, and so it does in a terminal if the package ``rich`` is installed.
    Otherwise it is written to the standard error output each time. It is renewed when a call, or a chunk of a map,
    ends, and once more when the body ends. No thread is started, so nothing is renewed during one long call.

    Parameters
    ----------
    every : float
        Seconds between two tables, at least.

    Raises
    ------
    NotForkedError
        If no runtime is current.
    ValueError
        If ``every`` is negative.
    Exception
        What writing the table has raised, when the body has ended. Calls are not affected.

    Examples
    --------
    >>> import numpy as np, synk
    >>> with synk.fork(2):
    ...     total = synk.function(lambda x: x.sum(), outputs="sum", name="total")
    ...     with synk.profiler.live(every=60) as profile:  # doctest: +SKIP
    ...         for _ in range(100_000):
    ...             _ = total(np.ones(8))
    """

    def __init__(self, *, every: float = 1.0) -> None:
        if not every >= 0:
            raise ValueError(f"cannot show a live profile: got every={every!r}, expected seconds, 0 or more.")
        self._every = every
        self._error: Exception | None = None

    def __enter__(self) -> Profile:
        refuse_inside_worker("show a live profile")
        from synk._api.current import current
        from synk._api.screen import screen_for

        runtime = current()
        self._session, self._screen = runtime._session, screen_for(runtime.profile)
        self._next = time.monotonic() + self._every
        self._session.followers.append(self._follow)
        self._session.watchers.append(self._watch)
        return runtime.profile

    def __exit__(self, *exc: object) -> None:
        self._session.followers.remove(self._follow)
        self._session.watchers.remove(self._watch)
        try:
            if self._error is not None:
                raise self._error
            self._screen.show()
        finally:
            self._screen.close()

    def _follow(self, session: Any, launched: Any, result: Any, heard_ns: int, ended_ns: int) -> None:
        self._watch()

    def _watch(self) -> None:
        if self._error is None and time.monotonic() >= self._next:
            try:
                self._screen.show()
            except Exception as error:  # a closed stream must not cost a call its result
                self._error = error
            self._next = time.monotonic() + self._every
