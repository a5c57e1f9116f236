"""The current runtime: the verbs that make, find and end it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from synk._api.notebook import notebook_cell
from synk._api.runtime import Runtime
from synk._master.processes.output import report
from synk._master.session import current_session
from synk._pure.interrupts import deferred
from synk._wire.cell import cell, refuse_inside_worker
from synk.errors import SynkError


def current() -> Runtime:
    """Return the runtime that ``synk.fork()`` made.

    Raises
    ------
    NotForkedError
        If there is none.
    ClosedError
        If it was closed.
    """
    current_session()
    runtime: Runtime = cell.runtime
    return runtime


def fork(
    num_workers: int | None = None,
    *,
    backend: str = "auto",
    devices: Sequence[Any] | None = None,
    inline: bool = False,
    timeout: float | None = None,
    max_restarts: int = 3,
    on_restart: Callable[[], Any] | None = None,
    seed: int | None = None,
) -> Runtime:
    """Start one worker process per device and make their runtime the current one.

    Returns at once: the workers come up while the program goes on, and the first verb that needs them waits.

    In a notebook, a cell that calls it at its top level can be run again: with the same arguments the runtime that it
    made before is closed, and another one started.

    Parameters
    ----------
    num_workers : int or None
        None: one per visible GPU, else one per usable CPU core.
    backend : str
        ``"auto"`` (cupy where a GPU is visible and CuPy is installed, else numpy), ``"numpy"`` or ``"cupy"``.
    devices : sequence or None
        Which GPUs, by index or UUID; one may appear more than once.
    inline : bool
        Run the one rank in this process, on the same path, for a debugger. Time limits have no effect then.
    timeout : float or None
        Default for all calls, in seconds; None: no limit. Counts from the call on, the start of the workers included.
    max_restarts : int
        How many dead workers are started again within 60 s before the runtime closes. 0: none; a death closes it.
    on_restart : callable, optional
        ``on_restart()`` is run by each worker that is started in the place of another, before its first call, to load
        what functions keep on a worker. What it captures is what the functions capture: the same objects.
    seed : int, optional
        Of ``synk.comm.rng``, the generator of random numbers that each rank has. None: another one each time.

    Returns
    -------
    Runtime

    Raises
    ------
    SynkError
        If a runtime made by ``fork`` is still running, and it is not the same cell of a notebook that asks again.
    StartupError
        If a worker process cannot be started.
    ValueError, TypeError
        For arguments that make no sense.

    Examples
    --------
    >>> import synk
    >>> runtime = synk.fork(2)
    >>> runtime.world_size
    2
    >>> synk.close()
    """
    refuse_inside_worker("fork")
    if cell.runtime is not None and cell.runtime.is_closed:  # by a fault: what it still holds is let go of
        cell.runtime.close()
    wanted = (num_workers, backend, str(devices), inline, timeout, max_restarts, on_restart, seed)
    place = notebook_cell(sys._getframe(1))
    if cell.runtime is not None and cell.session.is_own_process:
        if place is None or not place.is_run_again(cell.forked_at) or wanted != cell.forked_with:
            raise SynkError(
                f"cannot fork: {cell.runtime!r} is already running. Call synk.close() first, or make a second one with "
                "synk.Runtime(...)."
            )
        _close_to_begin_anew()
    try:
        with deferred():  # a runtime that nobody can name could not be closed
            runtime = Runtime(
                num_workers,
                backend=backend,
                devices=devices,
                inline=inline,
                timeout=timeout,
                max_restarts=max_restarts,
                on_restart=on_restart,
                seed=seed,
            )
            cell.runtime, cell.session, cell.last_session = runtime, runtime._session, runtime._session
            cell.forked_at, cell.forked_with = place, wanted
    except BaseException:  # Ctrl-C, or what another signal handler raises, comes when it has started
        close()
        raise
    return cell.runtime


def _close_to_begin_anew() -> None:
    names = [repr(variable.name) for variable in cell.session.variables.living()]
    close()
    if names:
        report(
            "fork: the cell was run again. Its workers are new, and shared variables (%s) are gone.", ", ".join(names)
        )


def close() -> None:
    """Close the current runtime, if there is one; its data, functions and variables raise ``ClosedError`` then."""
    refuse_inside_worker("close")
    if cell.runtime is not None:
        cell.runtime.close()
