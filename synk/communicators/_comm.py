"""``synk.comm``: collectives and messages inside a function, between the ranks that run it.

A function refers to ``synk.comm`` as to any module. It works only on a worker, during a call. In one file because all
of it is one object.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from synk._pure.words import Hinting
from synk._wire.cell import cell
from synk.communicators._collectives import Collectives, Request
from synk.communicators._meetings import LONGER
from synk.communicators._shm_collectives import NOTHING
from synk.errors import ReentrancyError


def _worker() -> Any:
    if cell.worker is None:
        raise ReentrancyError(
            "synk.comm can only be used inside a function that runs on a worker. In the program use the collectives "
            "over Shared variables, such as synk.all_reduce."
        )
    return cell.worker


def _collectives() -> Collectives:
    worker = cell.worker
    if worker is None or (current := worker.peers.current) is None:
        current = _worker().collectives()  # joins the call's group, or raises if the function may not communicate
    cell.worker.num_collectives += 1
    collectives: Collectives = current
    return collectives


def _run(
    kind: str, array: Any, out: Any, async_op: bool, *, op: Any = "", weight: float | None = None, root: Any = -1,
    sizes: Sequence[int] | None = None, axis: int = 0,
) -> Any:  # fmt: skip
    """Take a collective, without steps where that can be, and return its result; or start it, and return a request."""
    collectives = _collectives()
    if not (async_op or axis or sizes is not None or collectives.at_once is None):
        result = collectives.at_once(kind, array, out, op, weight, root)
        if result is not LONGER:
            return result
    _check_constant(array, kind.split()[0])
    steps = collectives.steps(
        kind, array, out, op=op, weight=weight, root=root, sizes=sizes, axis=axis, is_started=async_op
    )
    host = collectives.host
    if not async_op:
        return host.run(steps)
    operation = host.start(steps)
    return Request(
        host,
        lambda: host.test(operation) and collectives.is_there(operation.value),
        lambda: collectives.joined(host.finish(operation)),
    )


def _called() -> Any:
    """Return the worker. Raise if it is not in a call that all ranks run together."""
    worker = _worker()
    worker.check_called()
    return worker


class Comm(Hinting):
    """The communication of one rank during one call. The only instance is ``synk.comm``.

    Arrays are of the backend's own library (NumPy on CPU workers). Results are new arrays, or go to ``out=``: a
    contiguous array of the result's shape and dtype. All ranks that run the function must call the same collectives in
    the same order. Messages (``send``, ``recv`` and their non-blocking forms) are between two ranks. Any thread may use
    it, but only one at a time.

    With ``async_op=True`` a collective returns a :class:`Request` at once, whose ``wait()`` returns the result. Such
    collectives may be mixed with those that wait and with messages; their arrays must not change until the result is
    there. On CPU workers they make no progress by themselves, only in ``wait`` and ``test`` of any request, and while
    any other call of ``synk.comm`` waits. With NCCL, an ``all_reduce`` with ``out=`` runs beside the function, on a
    separate stream.

    Ranks are counted within the call: a rank without rows does not take part, and a serial call has one rank. ``rank``,
    ``peer`` and ``root`` are from 0 to ``world_size - 1``, so the same function works on any number of rows.

    Nothing here is differentiated: a torch tensor that requires grad is refused with a TypeError, because the result
    would be a constant to autograd. :mod:`synk.torch` has the same collectives and messages for autograd.

    Attributes
    ----------
    rank : int
        This worker's position among the ranks of the call. In an item of ``map``, its position in the runtime.
    world_size : int
        How many ranks run this call. In an item of ``map``, how many the runtime has. Outside functions use
        ``synk.current().world_size``, which is the runtime's.
    ranks : tuple of int
        The runtime's numbers of the ranks that run this call. ``ranks[rank]`` is this worker's own, which errors name.
    rows, total_rows : int
        Rows of this rank, and of all ranks, in this call; in a slice of a training step, ``rows`` are those of the
        slice.
    device : str
        The worker's device, such as ``"cuda:0"`` or ``"cpu:0"``.
    """

    @property
    def rank(self) -> int:
        worker = _worker()
        ranks: tuple[int, ...] = worker.ranks
        return ranks.index(worker.rank)

    @property
    def world_size(self) -> int:
        return len(_worker().ranks)

    @property
    def device(self) -> str:
        return str(_worker().backend.device)

    @property
    def rng(self) -> np.random.Generator:
        """This rank's own generator of random numbers, which goes on from call to call.

        Rank k of the runtime has a generator seeded by ``numpy.random.SeedSequence(seed).spawn(n)[k]``, with the
        ``seed`` of :func:`synk.fork` and its n workers. So ranks draw independently of one another, and calls draw the
        same numbers again in a program that has as many workers. The replacement of a worker that died draws other
        numbers. An item of a map has a generator of its own, seeded by ``SeedSequence(seed, spawn_key=(m, n))`` for the
        item with number n of the runtime's map with number m: it draws the same numbers with any number of workers.
        The tasks of an executor, and the calls of one ``joblib.Parallel``, are numbered as the items of a map.

        Examples
        --------
        >>> import numpy as np, synk
        >>> with synk.fork(2, seed=7):
        ...     draw = synk.function(lambda x: synk.comm.rng.random(len(x)), outputs="gather")
        ...     drawn = draw(np.zeros(4))
        >>> streams = [np.random.default_rng(each) for each in np.random.SeedSequence(7).spawn(2)]
        >>> bool((drawn == np.concatenate([each.random(2) for each in streams])).all())
        True
        """
        generator: np.random.Generator = _worker().rng
        return generator

    @property
    def ranks(self) -> tuple[int, ...]:
        ranks: tuple[int, ...] = _called().ranks
        return ranks

    @property
    def rows(self) -> int:
        num_rows: int = _called().num_rows
        return num_rows

    @property
    def total_rows(self) -> int:
        num_rows: int = _called().total_rows
        return num_rows

    def all_reduce(
        self, array: Any, op: str = "avg", *, weight: float | None = None, out: Any = None, async_op: bool = False
    ) -> Any:
        """Reduce ``array`` of all ranks. Every rank gets the result.

        Parameters
        ----------
        array : array
            It must have the same shape and dtype on all ranks.
        op : {"avg", "sum", "prod", "min", "max"}
        weight : float from 0 to 1, optional
            This rank's share in an average, of the sum of all shares. Default: its number of rows.
        out : array, optional
            Where the result goes: contiguous, with the shape and dtype of ``array``. It may be ``array`` itself.
        async_op : bool
            Return a request at once.

        Returns
        -------
        array or Request
            ``out`` if given, else a new array of the same shape and dtype.

        Raises
        ------
        CollectiveMismatch
            If the ranks' requests differ (kind, op, dtype, number of elements), or a rank has left the function.
        TypeError, ValueError
            For an op that the dtype does not have, and for a torch tensor that requires grad.
        """
        return self._reduced("all_reduce", array, op, -1, weight, out, async_op)

    def reduce(
        self,
        array: Any,
        op: str = "avg",
        root: int = 0,
        *,
        weight: float | None = None,
        out: Any = None,
        async_op: bool = False,
    ) -> Any:
        """Reduce ``array`` of all ranks to rank ``root``. The others get None, and their ``out`` is not touched."""
        return self._reduced("reduce", array, op, root, weight, out, async_op)

    def _reduced(
        self, kind: str, array: Any, op: str, root: int, weight: float | None, out: Any, async_op: bool
    ) -> Any:
        share = self._share() if weight is None and op == "avg" else weight
        return _run(kind, array, out, async_op, op=op, weight=share, root=root)

    def _share(self) -> float | None:
        collectives = _collectives()
        if collectives.share is None and self.total_rows:
            collectives.share = self.rows / self.total_rows
        return collectives.share

    def broadcast(self, array: Any, root: int = 0, *, out: Any = None, async_op: bool = False) -> Any:
        """Return ``array`` of rank ``root``. The arrays of the others must have its shape and dtype.

        With ``out=array`` the others' arrays are filled, and nothing is copied on ``root``.
        """
        return _run("broadcast", array, out, async_op, root=root)

    def all_gather(self, array: Any, axis: int | None = None, *, out: Any = None, async_op: bool = False) -> Any:
        """Return the arrays of all ranks, on every rank.

        Parameters
        ----------
        array : array
            It must have the same shape and dtype on all ranks. Only its length along ``axis`` may differ.
        axis : int, optional
            Join the arrays along this axis, in rank order. By default they are stacked.
        out : array, optional
            Where the result goes: contiguous, of the result's shape and dtype.
        async_op : bool
            Return a request at once.

        Returns
        -------
        array or Request
            The arrays stacked, with shape ``(len(ranks), *shape)``, or joined along ``axis``.
        """
        if axis is None:
            return _run("all_gather", array, out, async_op)
        return _run("all_gather along an axis", array, out, async_op, axis=axis)

    def reduce_scatter(
        self, array: Any, op: str = "sum", *, weight: float | None = None, out: Any = None, async_op: bool = False
    ) -> Any:
        """Reduce ``array``, shape ``(len(ranks) * n, *rest)``, and return this rank's block of n rows."""
        return self._reduced("reduce_scatter", array, op, -1, weight, out, async_op)

    def send(self, array: Any, peer: int, tag: int = 0) -> None:
        """Send ``array`` to rank ``peer``, which may be this one. The array may be changed once this returns.

        A small message is sent at once. A larger one waits until the receiver takes it in, which it does whenever it
        waits in ``synk.comm``. A message that is never received is an error at the end of the call.

        Parameters
        ----------
        array : array
        peer : int
        tag : int
            0 or more. Messages with the same sender, receiver and tag arrive in the order in which they were sent.
        """
        worker = cell.worker
        if worker is not None and (path := worker.peers.short_path) is not None and path.send_now(array, peer, tag):
            return
        _check_constant(array, "send")
        _collectives().send(array, peer, tag)

    def isend(self, array: Any, peer: int, tag: int = 0) -> Request:
        """Send ``array`` to rank ``peer`` without waiting for it.

        The array may be changed once this returns. ``wait()`` of the request returns None at once.
        """
        _check_constant(array, "isend")
        return _collectives().isend(array, peer, tag)

    def recv(self, peer: int, tag: int = 0, *, like: Any = None, out: Any = None) -> Any:
        """Return the oldest message of this tag from rank ``peer`` that was not received yet.

        Parameters
        ----------
        peer, tag : int
        like : array, optional
            An array with the dtype and number of elements of the message. The result gets its shape. By default the
            result has the message's own shape and dtype.
        out : array, optional
            Where the message goes: contiguous, with the message's dtype and number of elements.

        Returns
        -------
        array
            ``out`` if given, else a new array.

        Raises
        ------
        TypeError, ValueError
            If ``peer`` is not a rank of the call. An array to be filled goes to ``out=``.
        CollectiveMismatch
            If the message does not fit ``like`` or ``out``, or cannot come.

        Examples
        --------
        >>> import numpy as np, synk
        >>> def shift(x):
        ...     synk.comm.isend(x, (synk.comm.rank + 1) % synk.comm.world_size)
        ...     return synk.comm.recv((synk.comm.rank - 1) % synk.comm.world_size)
        >>> with synk.fork(2, backend="numpy"):
        ...     shifted = synk.function(shift, outputs="gather")
        ...     shifted(np.arange(4.0)), shifted(np.arange(1.0)), shifted.serial(np.arange(4.0))
        (array([2., 3., 0., 1.]), array([0.]), array([0., 1., 2., 3.]))
        """
        worker = cell.worker
        if worker is not None and (path := worker.peers.short_path) is not None:
            array = path.recv_now(peer, tag, like, out)
            if array is not None:
                return array
        _check_constant(like, "recv")
        return _collectives().recv(peer, tag, like, out)

    def irecv(self, peer: int, tag: int = 0, *, like: Any = None, out: Any = None) -> Request:
        """Ask for a message and return at once. ``wait()`` of the request returns what :meth:`recv` would.

        The k-th request for a sender and tag gets the k-th message, no matter in which order you wait for them.
        """
        _check_constant(like, "irecv")
        return _collectives().irecv(peer, tag, like, out)

    def gather(
        self, array: Any, root: int = 0, *, sizes: Sequence[int] | None = None, out: Any = None, async_op: bool = False
    ) -> Any:
        """Join the rows of all ranks, in rank order, on rank ``root``. The others get None.

        Parameters
        ----------
        array : array, shape (rows, *rest)
            This rank's rows, any number of them.
        root : int
        sizes : sequence of int, optional
            How many rows each rank is expected to bring. Another number is an error.
        out : array, optional
            Where the result goes on rank ``root``: contiguous, of the result's shape and dtype. Not touched elsewhere.
        """
        return _run("gather", array, out, async_op, root=root, sizes=sizes)

    def scatter(
        self, array: Any, root: int = 0, *, sizes: Sequence[int] | None = None, out: Any = None, async_op: bool = False
    ) -> Any:
        """Return this rank's block of the rows of rank ``root``.

        Parameters
        ----------
        array : array, shape (rows, *rest)
            The rows of rank ``root``. Ignored on the others, where it may be None.
        root : int
        sizes : sequence of int, optional
            The number of rows for each rank of the call, given on rank ``root``. Default: blocks of equal length.
        out : array, optional
            Where this rank's block goes: contiguous, of the block's shape and dtype.
        """
        return _run("scatter", array, out, async_op, root=root, sizes=sizes)

    def all_to_all(
        self, array: Any, *, sizes: Sequence[int] | None = None, out: Any = None, async_op: bool = False
    ) -> Any:
        """Send a block of rows to each rank, and return the blocks that came, joined in rank order.

        Parameters
        ----------
        array : array, shape (rows, *rest)
        sizes : sequence of int, optional
            The number of rows for each rank of the call. Ranks may give different sizes. Default: blocks of equal
            length.
        out : array, optional
            Where the result goes: contiguous, of the result's shape and dtype.
        """
        return _run("all_to_all", array, out, async_op, sizes=sizes)

    def barrier(self, *, async_op: bool = False) -> Request | None:
        """Return when all ranks of the call have called it."""
        request: Request | None = _run("barrier", NOTHING, None, async_op)
        return request

    def wait_all(self, requests: Iterable[Request]) -> list[Any]:
        """Wait for all requests, and return their results in the same order."""
        return [request.wait() for request in requests]

    def shielded(self) -> contextlib.AbstractContextManager[None]:
        """Return a context that holds back interrupts of the call (Ctrl-C, a timeout, the death of a worker).

        It is meant for a short step that must not be left half done, such as an optimizer's. An interrupt that comes
        meanwhile is raised at the end of the context. A worker that does not answer an interrupt for two seconds is
        killed, so there must be no collective in the context.
        """
        context: contextlib.AbstractContextManager[None] = _worker().uninterrupted()
        return context

    def __repr__(self) -> str:
        return "<synk.comm>"

    def __reduce__(self) -> Any:
        return _the_comm, ()


def _check_constant(array: Any, verb: str) -> None:
    """Refuse a tensor that autograd tracks, because autograd cannot track it to the other ranks."""
    if type(array) is np.ndarray:
        return
    torch = sys.modules.get("torch")  # if torch was never imported, there are no tensors
    if torch is not None and isinstance(array, torch.Tensor) and array.requires_grad:
        raise TypeError(
            f"cannot {verb} a torch tensor: got one that requires grad, expected one without, because synk.comm never "
            f"differentiates and its result would be a constant to autograd. Use synk.torch.{verb}, which autograd "
            "follows, or pass tensor.detach()."
        )


def _the_comm() -> Comm:
    return comm


comm = Comm()
