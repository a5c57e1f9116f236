"""The module-level verbs that only pass on to the current runtime."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from synk._api.current import current
from synk._master.objects.data import Data
from synk._master.objects.resident import Resident
from synk._master.objects.shared import Shared
from synk._master.state.profile import Profile
from synk._pure.cores import num_cores
from synk._pure.show import Text
from synk._version import __version__
from synk._wire.cell import cell
from synk.cuda._cupy import has_cupy
from synk.cuda._report import gpu_lines

R = TypeVar("R")


def data(
    value: Any = None,
    *,
    dtype: npt.DTypeLike | None = None,
    shape: Sequence[int] | int | None = None,
    ndim: int | None = None,
    minibatch: bool = False,
    force_cast: bool = False,
    oversize: float = 1.0,
    name: str | None = None,
) -> Data:
    """Make an array in shared memory; see :class:`synk.Data`.

    Parameters
    ----------
    value : array-like, shape (rows, *rest), optional
        Copied in. Without it the contents are zeros.
    dtype, shape, ndim
        Of the array; needed where there is no value (dtype, and one of the others).
    minibatch : bool
        The object will hold only the rows of the current batch, in its order: row j belongs to the j-th row that
        ``batch`` picks of the other inputs.
    force_cast : bool
        Allow a cast of ``value`` to ``dtype`` that can lose information.
    oversize : float
        Memory to take, as a factor of 1.0 to 2.0, so that it can grow in place.
    name : str, optional
        For errors.

    Returns
    -------
    Data

    Raises
    ------
    TypeError
        For objects, masked arrays, ragged lists, and casts that lose information.
    SharedMemoryError
        If the memory does not suffice.
    NotForkedError, ClosedError

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
        minibatch=minibatch,
        force_cast=force_cast,
        oversize=oversize,
        name=name,
    )


def shared(value: Any, *, sharded: bool = False, name: str | None = None) -> Shared:
    """Make a variable that lives on the workers; see :class:`synk.Shared`.

    Parameters
    ----------
    value : array-like, or a nesting (tuple, list, dict) of them
        Copied to every rank; or, ``sharded``, its rows are scattered over the ranks.
    sharded : bool
        One shard of the rows per rank instead of a replica.
    name : str, optional
        For errors.

    Returns
    -------
    Shared

    Raises
    ------
    TypeError
        For values that are no numbers, text or records.
    SharedMemoryError
        If the memory does not suffice.

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


def resident(
    obj: Any,
    *,
    name: str | None = None,
    dump: Callable[[Any], Any] | None = None,
    load: Callable[[Any, Any], None] | None = None,
) -> Resident:
    """Give every rank a Python object of its own that it keeps between calls; see :class:`synk.Resident`.

    Functions close over it and use its ``.value``, or get the rank's object as a broadcast argument.

    Parameters
    ----------
    obj : object
        Copied to every rank by one pickle, so that several objects in a tuple keep what they share.
    name : str, optional
        For errors; that of its class where not given.
    dump, load : callable, optional
        How another rank gets its state: ``load(object, dump(object_of_another_rank))`` changes ``object`` in place;
        both are sent to the workers. By default ``state_dict`` and ``load_state_dict``, where the object, or each in a
        tuple or list, has them; else a pickle of the whole object.

    Returns
    -------
    Resident

    Raises
    ------
    SerializationError
        If the object cannot be pickled, or cannot be loaded on the workers.
    NotForkedError, ClosedError

    Examples
    --------
    >>> import numpy as np, synk
    >>> with synk.fork(2):
    ...     seen = synk.resident({"rows": 0})
    ...     @synk.function(outputs="sum", changes=[seen])
    ...     def count(x):
    ...         seen.value["rows"] += synk.comm.total_rows
    ...         return len(x)
    ...     count(np.zeros(10)), count(np.zeros(7))
    ...     seen.get()
    (np.int64(10), np.int64(7))
    {'rows': 17}
    """
    return current().resident(obj, name=name, dump=dump, load=load)


def map(
    fn: Callable[..., R],
    *iterables: Iterable[Any],
    batch_size: int | None = None,
    ordered: bool = True,
    progress: bool = False,
) -> Iterator[R]:
    """Return an iterator over what ``fn`` returns for each of the items; the workers get more as they become free.

    For work that comes in pieces of its own: files, parameter sets, starting points. Work on the rows of arrays is
    :func:`synk.function`'s. It is not among the names of ``from synk import *``, which would hide the built-in.

    Parameters
    ----------
    fn : callable
        A plain function of one item, or of one from each iterable. It runs for each item on one worker, by itself:
        ``synk.comm`` has no meaning there, and shared variables can be read (replicated ones) but not assigned.
    *iterables : iterable
        Objects that can be pickled. Items are taken as workers need them, so they may be endless. Of several iterables
        the shortest ends the map, as of the built-in one.
    batch_size : int, optional
        How many items a worker is sent at a time. By default a few at first, then as many as take it some 20 to 200 ms.
    ordered : bool
        False: results come as they are there, not in the order of the items.
    progress : bool
        Show a bar, by tqdm (``pip install "synkhronos[progress]"``).

    Returns
    -------
    iterator
        Of the results. Work begins with the first that is asked for. At most about four chunks of items per worker
        are ahead of what was taken, so memory is bounded. To drop the iterator ends what is in flight.

    Raises
    ------
    TypeError, ValueError, SerializationError
        For a function or an option that does not fit, at once.
    Exception
        From the iterator, after the results of the items before it: what ``fn`` raised, with a note that names the item
        and a ``RemoteError`` as its cause; what the iterable raised; ``SerializationError`` for an item that cannot be
        pickled; ``WorkerDied`` and ``CallTimeout`` (the runtime's ``timeout``, for each batch of items). It has ended
        then.

    Notes
    -----
    Other calls may be made between two results: they wait for the items that workers are at. Arrays of 1 MB and more
    in an item arrive read-only; one that is in many items crosses to the workers once, as long as it holds the same. A
    function is sent once, and what it captures as it was when the map began. The runtime remembers the last 8
    functions.

    Examples
    --------
    >>> import synk
    >>> with synk.fork(2):
    ...     list(synk.map(lambda n: n * n, range(5)))
    [0, 1, 4, 9, 16]
    """
    return current().map(fn, *iterables, batch_size=batch_size, ordered=ordered, progress=progress)


def broadcast(variables: Any, values: Any = None) -> None:
    """Copy rank 0's value of each variable, or ``values``, to all ranks.

    Parameters
    ----------
    variables : Shared or sequence of Shared
    values : value or sequence of values, optional
        One for each variable.
    """
    current().broadcast(variables, values)


def scatter(variables: Any, values: Any, batch: Any = None) -> None:
    """Split the rows of ``values`` over the ranks, as calls split their inputs.

    Parameters
    ----------
    variables : Shared or sequence of Shared
    values : array-like of shape (rows, *rest), Data, or a sequence of them
    batch : int, slice, sequence of int or bool mask, optional
        Which rows of ``values``.
    """
    current().scatter(variables, values, batch)


def gather(variables: Any, nd_up: int = 1) -> Any:
    """Return the values of all ranks as new arrays.

    Parameters
    ----------
    variables : Shared or sequence of Shared
    nd_up : {0, 1}
        1: stacked, shape ``(world_size, *shape)``, for values of one shape. 0: concatenated along axis 0; shards may
        differ in length.
    """
    return current().gather(variables, nd_up)


def all_gather(variables: Any) -> None:
    """Make every rank's value the concatenation of the values of all ranks along axis 0."""
    current().all_gather(variables)


def reduce(variables: Any, op: str = "avg", in_place: bool = True) -> Any:
    """Reduce the values of all ranks, all alike in weight.

    Parameters
    ----------
    variables : Shared or sequence of Shared
        Of one shape on all ranks.
    op : {"avg", "sum", "prod", "min", "max"}
    in_place : bool
        True: the result becomes rank 0's value. False: it is returned and no variable changes.
    """
    return current().reduce(variables, op, in_place)


def all_reduce(variables: Any, op: str = "avg") -> None:
    """Reduce the values of all ranks (all alike in weight) and make the result the value of every rank."""
    current().all_reduce(variables, op)


def set_value(variables: Any, values: Any, rank: int | None = None, batch: Any = None) -> None:
    """Set the value of one rank, or of all ranks where ``rank`` is None.

    Parameters
    ----------
    variables : Shared or sequence of Shared
    values : value or sequence of values
        One for each variable.
    rank : int, optional
    batch : int, slice, sequence of int or bool mask, optional
        Which rows of ``values``.
    """
    current().set_value(variables, values, rank, batch)


def get_value(variables: Any, rank: int = 0) -> Any:
    """Return a copy of the value of one rank; of a sequence of variables, a list of them."""
    return current().get_value(variables, rank)


def get_lengths(variables: Any) -> Any:
    """Return the number of rows on each rank: a list per variable."""
    return current().get_lengths(variables)


def get_shapes(variables: Any) -> Any:
    """Return the shape on each rank: a list per variable."""
    return current().get_shapes(variables)


def profile() -> Profile:
    """Return time and bytes of all calls of the current runtime so far, by function; prints as a table.

    Examples
    --------
    >>> import numpy as np, synk
    >>> with synk.fork(2):
    ...     total = synk.function(lambda x: x.sum(), outputs="sum", name="total")
    ...     _ = total(np.ones(1000))
    ...     synk.profile().records["total"].staged_nbytes
    8000
    """
    return current().profile


def info() -> str:
    """Return a description of synk, this machine, and the current runtime."""
    lines = [
        f"synk {__version__}, Python {platform.python_version()}, numpy {np.__version__}, {platform.platform()}",
        f"CPU: {num_cores()} of {os.cpu_count()} cores usable",
        *gpu_lines(has_cupy=has_cupy()),
    ]
    if cell.runtime is not None:
        lines.append(current().info())
    else:
        lines.append("runtime: none (synk.fork() starts one)")
    return Text("\n".join(lines))


def distribute() -> None:
    """Send all functions that are not yet on the workers of the current runtime, in one go.

    Optional: the first call of a function does it. A program that builds many functions saves round trips, and
    functions that are pickled together keep what they share in common.

    Raises
    ------
    SerializationError
        If one cannot be pickled, or cannot be loaded on the workers; it is then on no rank.
    """
    current().distribute()
