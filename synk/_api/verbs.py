"""The module-level verbs, which call the verbs of the current runtime.

In one file because each is its documentation and one line of code.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import numpy as np
import numpy.typing as npt

from synk._api.current import current
from synk._engine.data import Data
from synk._engine.profile import Profile
from synk._engine.resident import Resident
from synk._engine.shared import Shared
from synk._pure.files import Path
from synk._pure.texts import Text
from synk._pure.tracebacks import verb
from synk._version import __version__
from synk._wire.cell import cell
from synk.backends import BACKENDS, backend_module

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from synk._api.options import MapOptions

R = TypeVar("R")
T = TypeVar("T")


@verb
def data(
    value: Any = None,
    *,
    dtype: npt.DTypeLike | None = None,
    shape: Sequence[int] | int | None = None,
    ndim: int | None = None,
    force_cast: bool = False,
    oversize: float = 1.0,
    name: str | None = None,
) -> Data:
    """Make an array in shared memory; see :class:`synk.Data`.

    Parameters
    ----------
    value : array-like, shape (rows, *rest), optional
        The contents, which are copied. By default zeros.
    dtype, shape, ndim
        The dtype, shape and number of axes. Without a value, ``dtype`` and one of the others are needed.
    force_cast : bool
        Whether to allow a cast of ``value`` to ``dtype`` that can lose information.
    oversize : float
        The memory to take, as a factor of 1.0 to 2.0 of the array's size, so that the array can grow in place.
    name : str, optional
        The name in errors.

    Returns
    -------
    Data

    Raises
    ------
    TypeError
        For objects, masked arrays, ragged lists, and casts that lose information.
    SharedMemoryError
        If there is not enough memory.
    NotForkedError, ClosedError
        If there is no open runtime.

    Examples
    --------
    >>> import synk
    >>> with synk.fork(2):
    ...     x = synk.data([[1.0, 2.0], [3.0, 4.0]])
    ...     x[0] = 5.0
    ...     x.data.sum()
    np.float64(17.0)
    """
    return current().data(
        value,
        dtype=dtype,
        shape=shape,
        ndim=ndim,
        force_cast=force_cast,
        oversize=oversize,
        name=name,
    )


@verb
def shared(value: Any, *, sharded: bool = False, name: str | None = None) -> Shared:
    """Make a variable that lives on the workers; see :class:`synk.Shared`.

    Parameters
    ----------
    value : array-like, or a nesting (tuple, list, dict) of them
        The first value. It is copied to every rank or, if ``sharded``, divided among the ranks by rows.
    sharded : bool
        Whether each rank gets a shard of the rows instead of a replica.
    name : str, optional
        The name in errors.

    Returns
    -------
    Shared

    Raises
    ------
    TypeError
        For values that are not numbers, text or records.
    SharedMemoryError
        If there is not enough memory.

    Examples
    --------
    >>> import numpy as np, synk
    >>> with synk.fork(2):
    ...     w = synk.shared(np.zeros(3))
    ...     @synk.function(outputs="sum")
    ...     def step(x):
    ...         w.value = w.value + 1
    ...         return x.sum()
    ...     step(np.ones(4))
    ...     w.value
    np.float64(4.0)
    array([1., 1., 1.])
    """
    return current().shared(value, sharded=sharded, name=name)


@verb
def resident(
    obj: Any,
    *,
    name: str | None = None,
    dump: Callable[[Any], Any] | None = None,
    load: Callable[[Any, Any], None] | None = None,
) -> Resident:
    """Give every rank a Python object that it keeps between calls; see :class:`synk.Resident`.

    A function closes over it and uses its ``.value``, or gets the rank's object as a broadcast argument.

    Parameters
    ----------
    obj : object
        The object, copied to every rank by one pickle, so that several objects in a tuple still share their parts.
    name : str, optional
        The name in errors. By default the name of the object's class.
    dump, load : callable, optional
        How a rank takes over another rank's state: ``load(object, dump(object_of_another_rank))`` changes ``object`` in
        place. Both are sent to the workers. By default ``state_dict`` and ``load_state_dict``, if the object, or each
        object in a tuple or list, has them; else a pickle of the whole object.

    Returns
    -------
    Resident

    Raises
    ------
    SerializationError
        If the object cannot be pickled, or cannot be loaded on the workers.
    NotForkedError, ClosedError
        If there is no open runtime.

    Examples
    --------
    >>> import numpy as np, synk
    >>> with synk.fork(2):
    ...     seen = synk.resident({"rows": 0})
    ...     @synk.function(outputs="sum", updates=[seen])
    ...     def count(x):
    ...         seen.value["rows"] += synk.comm.total_rows
    ...         return len(x)
    ...     count(np.zeros(10)), count(np.zeros(7))
    ...     seen.get()
    (10, 7)
    {'rows': 17}
    """
    return current().resident(obj, name=name, dump=dump, load=load)


@overload
def map(
    fn: Callable[[T], R],
    items: Iterable[T],
    /,
    **options: Unpack[MapOptions],
) -> Iterator[R]: ...


@overload
def map(
    fn: Callable[..., R],
    first: Iterable[Any],
    second: Iterable[Any],
    /,
    *others: Iterable[Any],
    **options: Unpack[MapOptions],
) -> Iterator[R]: ...


@verb
def map(
    fn: Callable[..., R],
    *iterables: Iterable[Any],
    batch_size: int | None = None,
    ordered: bool = True,
    progress: bool = False,
    on_error: Literal["raise", "return"] = "raise",
    item_timeout: float | None = None,
    max_tasks_per_worker: int | None = None,
    max_worker_memory: int | None = None,
    journal: Path | None = None,
    key: Callable[[Any], Any] | None = None,
    version: str | int | None = None,
) -> Iterator[R]:
    """Return an iterator over the results of ``fn`` for each item. Workers get new items as they become free.

    Use it for work that comes in items: files, parameter sets, starting points. For rows of arrays use
    :func:`synk.function`. ``from synk import *`` leaves it out, because it would hide the built-in ``map``.

    Parameters
    ----------
    fn : callable
        A plain function of one item, or of one item from each iterable. It runs for each item on one worker alone:
        ``synk.comm`` has no meaning there, and shared variables (replicated ones) can be read but not assigned.
    *iterables : iterable
        The items, objects that can be pickled. They are taken as workers need them, so an iterable may be endless. The
        shortest iterable ends the map, as in the built-in ``map``.
    batch_size : int, optional
        The number of items to send to a worker at a time. By default one at first, then as many as take about 20 ms.
    ordered : bool
        Whether results come in the order of the items. Otherwise they come as soon as they are there.
    progress : bool
        Whether to show a progress bar, by tqdm (``pip install "synkhronos[progress]"``), with a summary at the end.
    on_error : {"raise", "return"}
        What an item that fails does: it ends the map, or gives a :class:`synk.ItemError` in its place and the others go
        on. An item fails if ``fn`` raises, if it kills its worker, or if its time is over; it is not tried again. With
        ``"return"`` deaths do not count for ``max_restarts``, but as many deaths in a row end the map.
    item_timeout : float, optional
        Seconds that one item may take. Its worker is interrupted then, and replaced if that does not help.
    max_tasks_per_worker : int, optional
        A worker is replaced after so many items. The others go on meanwhile.
    max_worker_memory : int, optional
        A worker is replaced, between items, when its memory, shared memory not counted, exceeds so many bytes.
    journal : path-like, optional
        A file to which each result is written as soon as it is there. A later map of the same function over the same
        items reads those results from the file and computes the rest; items that failed are tried again. A program
        that is killed at any moment loses only the items that were running. Results are pickled, at most 1 GB each:
        open only your own files.
    key : callable, optional
        A function of an item (the tuple of arguments, for several iterables) that returns a name for it. The journal
        compares the names of items whose pickles differ from run to run.
    version : str or int, optional
        The journal compares it instead of the function and what that captures. Change it when you change the function.

    Returns
    -------
    iterator
        The results. The work begins when you ask for the first. At most about four chunks of items for each worker are
        ahead of you, so memory is bounded. Dropping the iterator ends the items in flight.

    Raises
    ------
    TypeError, ValueError, SerializationError
        For a function or an option that does not fit, at once. For a journal of another function, which says what has
        changed, and for a function that cannot be compared between two runs of the program.
    Exception
        From the iterator, after the results of the items before it: the exception of ``fn``, with a note that names the
        item and a ``RemoteError`` as its cause; the exception of the iterable; ``SerializationError`` for an item that
        cannot be pickled; ``WorkerDied`` and ``CallTimeout`` (the runtime's ``timeout``, for each chunk of items). The
        exception ends the map.

    Notes
    -----
    You may make other calls between two results: they wait for the items that are running. Arrays of 1 MB and more in
    an item arrive read-only. An array that is in many items is sent to the workers once, as long as its contents stay
    the same. A function is sent once for as long as its map, or its module, holds it. Each chunk of items is computed
    with what the function captures as it is when the chunk is sent. So what you change between two results counts from
    the next chunk on, and not for the chunks that are ahead of you. If results depend on it, pass it with the items, or
    take all results before you change it. With ``num_workers=0`` there are no workers to replace, and ``item_timeout``
    is refused.

    A journal compares code (without comments and positions in the file), names, constants, defaults and captured
    values, also of your functions that the function calls. Installed packages count by their names, files that the
    function reads not at all.

    Examples
    --------
    >>> import synk
    >>> with synk.fork(2):
    ...     list(synk.map(lambda n: n * n, range(5)))
    [0, 1, 4, 9, 16]
    """
    return current().map(
        fn,
        *iterables,
        batch_size=batch_size,
        ordered=ordered,
        progress=progress,
        on_error=on_error,
        item_timeout=item_timeout,
        max_tasks_per_worker=max_tasks_per_worker,
        max_worker_memory=max_worker_memory,
        journal=journal,
        key=key,
        version=version,
    )


@verb
def profile() -> Profile:
    """Return time and bytes of all calls of the current runtime so far, by function. It prints as a table.

    Examples
    --------
    >>> import numpy as np, synk
    >>> with synk.fork(2):
    ...     @synk.function(outputs="sum")
    ...     def total(x):
    ...         return x.sum()
    ...     _ = total(np.ones(1000))
    ...     synk.profile().records["total"].nbytes_of("staged")
    8000
    """
    return current().profile


@verb
def info() -> str:
    """Return a description of synk, this machine, and the current runtime."""
    lines = [
        f"synk {__version__}, Python {platform.python_version()}, numpy {np.__version__}, {platform.platform()}",
        *(line for name in BACKENDS for line in backend_module(name).report()),
    ]
    if cell.runtime is not None:
        lines.append(current().info())
    else:
        lines.append("runtime: none (synk.fork() starts one)")
    return Text("\n".join(lines))


@verb
def distribute() -> None:
    """Send all functions that the workers of the current runtime do not have yet, together.

    This is optional: the first call of a function does it. A program that builds many functions saves round trips, and
    functions that are pickled together share their common objects.

    Raises
    ------
    SerializationError
        If a function cannot be pickled, or cannot be loaded on the workers. Then no rank has it.
    """
    current().distribute()
