"""Where the time and the bytes go: traces, and spans of your own.

``synk.profile()`` is the table of all calls so far. This module shows more detail, and is loaded when it is first used.
:func:`span` can also be used in functions on the workers.
"""

from __future__ import annotations

import contextlib
import pickle
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from synk._pure.files import Path, check, save
from synk._pure.words import no_attribute
from synk._wire.cell import refuse_inside_worker
from synk._wire.spans import pickled_spans, take_spans
from synk._wire.spans import span as span
from synk.errors import UnsupportedError

if TYPE_CHECKING:
    from pstats import Stats

    from synk._api.function import Function

__all__ = ["cprofile", "span", "trace"]


def __dir__() -> list[str]:
    return __all__


def __getattr__(name: str) -> Any:
    raise no_attribute("profiler", sys.modules[__name__], name)


@contextlib.contextmanager
def trace(path: Path) -> Iterator[None]:
    """Record every call in the body, and write what was recorded to a file: ``with synk.profiler.trace("run.json")``.

    https://ui.perfetto.dev and ``chrome://tracing`` open it. For each call it shows when its arguments were copied, how
    long the program waited and how long it put the result together; for each rank, when it received the call, ran the
    function and had its outputs in place. It also has failed calls, the chunks of maps and each :func:`span`. The last
    100 000 calls are kept.

    Parameters
    ----------
    path : path-like
        It is written when the body ends, also after an exception, as a whole or not at all. Calls that are in flight at
        the end are waited for; what began before the body is left out.

    Raises
    ------
    NotForkedError
        If no runtime is current.
    RuntimeError
        If another trace of this runtime is open.
    OSError, ValueError
        If no file can be written there. This is noticed before the body begins.

    Examples
    --------
    >>> import json, pathlib, tempfile, numpy as np, synk
    >>> path = pathlib.Path(tempfile.mkdtemp(), "run.json")
    >>> with synk.fork(2):
    ...     @synk.function(outputs="sum")
    ...     def total(x):
    ...         return x.sum()
    ...     with synk.profiler.trace(path):
    ...         for _ in range(3):
    ...             _ = total(np.ones(8))
    >>> events = json.loads(path.read_text())["traceEvents"]
    >>> len([event for event in events if event["name"] == "total"])  # three calls on two ranks
    6
    """
    refuse_inside_worker("trace calls")
    from synk._api.current import current
    from synk._engine.profile import Tracer

    runtime = current()
    session = runtime._session
    session.check_here("trace calls", "synk.profile() shows the times of all ranks.")
    if session.tracer is not None:
        raise RuntimeError("cannot trace calls: this runtime is being traced already. End that trace first.")
    check(path)
    tracer = session.tracer = Tracer(runtime.world_size, time.monotonic_ns())
    try:
        yield
    finally:
        try:
            if not runtime.is_closed:
                session.run("end a trace", list)  # calls in flight belong to it
        finally:
            session.tracer = None
        tracer.spans[0] = take_spans()
        try:
            if not runtime.is_closed:
                take = runtime.function(pickled_spans, outputs=None, per_rank=True)
                tracer.spans.update(enumerate(map(pickle.loads, take()), start=1))
                runtime.profile.leave_out(take._callee.record)
        finally:
            save(path, lambda: tracer, Tracer.write, wait=True)


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
    from synk._wire.replayed import Profiled, stats_of

    if function._callee.options["updates"]:
        raise UnsupportedError(
            f"cannot profile {function.__name__!r}: it was built with variables in updates, whose values it returns. "
            "Build it without them."
        )
    profiled = function._alike(Profiled(function._callee.fn), outputs=None, updates=function._callee.options["changes"])
    return [stats_of(raw) for raw in profiled(*args, timeout=timeout, **kwargs) if raw is not None]
