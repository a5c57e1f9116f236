"""The current runtime, and the verbs that make, find and close it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any, NamedTuple, ParamSpec, TypeVar

from synk._api.runtime import Runtime
from synk._processes.output import report
from synk._pure.interrupts import deferred, waiting
from synk._pure.tracebacks import verb
from synk._wire.cell import cell, current_session, refuse_inside_worker
from synk.errors import SynkError

P = ParamSpec("P")
R = TypeVar("R")


@verb
def current() -> Runtime:
    """Return the runtime that ``synk.fork()`` made.

    Raises
    ------
    NotForkedError
        If there is no runtime.
    ClosedError
        If it was closed.
    """
    current_session()
    runtime: Runtime = cell.runtime
    return runtime


def _like(made: Callable[P, R]) -> Callable[[Callable[..., R]], Callable[P, R]]:
    """Give a verb the parameters of the class of which it makes an object, for errors, ``help`` and type checkers."""

    def likened(verb: Callable[..., R]) -> Callable[P, R]:
        verb.__signature__ = inspect.signature(made).replace(return_annotation=made)  # type: ignore[attr-defined]
        return verb

    return likened


@verb
@_like(Runtime)
def fork(num_workers: int | Sequence[int] | None = None, **options: Any) -> Runtime:
    """Start one worker process for each device and make their runtime the current one.

    ``fork`` returns at once: the workers start while the program goes on, and the first verb that needs them waits.

    In a notebook, a cell that calls ``fork`` at its top level can be run again. If the arguments are the same, the
    runtime that the cell made before is closed and a new one is started.

    Parameters
    ----------
    num_workers : int or None
        The number of workers. By default one for each visible GPU or, without GPUs, one for each usable CPU core.
        With 0 the program itself is the one rank, on the same path, for a debugger: a function that is called is still
        a pickled copy, and ``timeout`` is refused everywhere.
    backend : str
        The array library of the workers: ``"auto"`` (cupy if a GPU is visible and CuPy is installed, else numpy),
        ``"numpy"``, ``"cupy"`` or ``"dpnp"`` (OpenCL and SYCL). Functions on each may get tensors or JAX arrays.
    devices : sequence or None
        The devices to use: GPUs by index or UUID with CuPy, by name with dpnp (``"cpu"``, ``"gpu:0"``). One
        may appear more than once.
    timeout : float or None
        Default time limit of all calls, in seconds; None means no limit. The time starts with the call and includes the
        start of the workers.
    max_restarts : int
        How many dead workers are replaced within 60 s before the runtime closes. With 0 the first death closes it.
    on_restart : callable, optional
        Each replacement worker runs ``on_restart()`` before its first call, to load objects that functions keep on a
        worker. It captures the same objects as the functions do.
    seed : int, optional
        Seed of ``synk.comm.rng``, each rank's random number generator, and of the workers' hashes unless
        ``PYTHONHASHSEED`` is set. By default a new seed each time.
    cluster : None, "here", "auto" or str
        Where the workers run. None is this machine, without nodes. ``"auto"`` or an address such as
        ``"10.0.0.1:6379"`` means the machines of a running Ray cluster, which needs token authentication or TLS.
        ``"here"`` makes nodes that are child processes of this program, to try on one machine what will run on many.
        Features that do not work over nodes yet raise ``UnsupportedError``. See the page on many machines.
    nodes : int or tuple (int, int), optional
        How many nodes to use, with ``cluster``. By default all machines that have CPUs to give. ``(2, 4)`` means as
        many as there are now, but at least 2 and at most 4. Other machines are spares for those that fail. The ranks
        stay the same: without a spare, the node of a failed machine moves to the machine of another node, as long as
        the cluster has 2. ``num_workers`` is then for each node: a number, or a sequence with one for each node. By
        default it is the number of the node's CPUs, and with ``"here"`` a part of the cores.
    check : bool
        Whether the first call of each function is verified first, as by :meth:`synk.Function.verify`. A difference is a
        warning, with the report as its text. For a first look at a program: it costs up to five runs.

    Returns
    -------
    Runtime

    Raises
    ------
    SynkError
        If a runtime made by ``fork`` is still open, unless the same notebook cell made it.
    StartupError
        If a worker process cannot be started.
    UnsupportedError
        If there is no such device, or an option does not work with ``cluster``.
    ValueError, TypeError
        For arguments that are out of range or do not fit together.

    Examples
    --------
    >>> import synk
    >>> runtime = synk.fork(2)
    >>> runtime.world_size
    2
    >>> synk.close()
    """
    refuse_inside_worker("fork")
    if cell.runtime is not None and cell.runtime.is_closed:  # a fault closed it, and its memory is not released yet
        cell.runtime.close()
    wanted = num_workers, {**options, "devices": str(options.get("devices"))}
    place = notebook_cell(sys._getframe(3))
    if cell.runtime is not None and cell.session.is_own_process:
        if place is None or not place.is_run_again(cell.forked_at) or wanted != cell.forked_with:
            raise SynkError(
                f"cannot fork: {cell.runtime!r} is already running. Call synk.close() first, or make a second one with "
                "synk.Runtime(...)."
            )
        _close_to_begin_anew()
    try:
        # Ctrl-C waits until the cell holds the runtime: before, nobody could close it.
        with deferred():
            runtime = Runtime(num_workers, **options)
            cell.runtime, cell.session, cell.last_session = runtime, runtime._session, runtime._session
            cell.forked_at, cell.forked_with = place, wanted
        waiting(int)  # a Ctrl-C that was held back comes here: the runtime exists by then, and is closed again
    except BaseException:
        close()
        raise
    return cell.runtime


def _close_to_begin_anew() -> None:
    names = [repr(variable.name) for variable in cell.session.variables]
    close()
    if names:
        report(
            "fork: the cell was run again. Its workers are new, and shared variables (%s) are gone.", ", ".join(names)
        )


@verb
def close() -> None:
    """Close the current runtime, if there is one. Its data and variables then raise ``ClosedError``.

    Functions of the module run on the next runtime.
    """
    refuse_inside_worker("close")
    if cell.runtime is not None:
        cell.runtime.close()


class NotebookCell(NamedTuple):
    """A cell, and one run of it.

    Attributes
    ----------
    name : str
        The notebook's own id of the cell, else the file name that stands for its text.
    run : int
        The number of the run, which counts all runs of the notebook.
    """

    name: str
    run: int

    def is_run_again(self, before: NotebookCell | None) -> bool:
        """Whether this is a later run of the same cell."""
        return before is not None and self.name == before.name and self.run != before.run


def notebook_cell(frame: FrameType) -> NotebookCell | None:
    """Return the cell if ``frame`` is at its top level, else None."""
    shell = frame.f_globals.get("get_ipython")
    if frame.f_code.co_name != "<module>" or not callable(shell) or frame.f_globals.get("__name__") != "__main__":
        return None
    shell = shell()
    run = getattr(shell, "execution_count", None)
    if not isinstance(run, int):
        return None
    parent = getattr(shell, "get_parent", None)  # the message that brought the cell, in a kernel
    message = parent() if callable(parent) else None
    name = message.get("metadata", {}).get("cellId") if isinstance(message, dict) else None
    return NotebookCell(str(name or frame.f_code.co_filename), run)
