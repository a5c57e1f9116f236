"""``comm``: collectives inside a function, between the ranks that run it.

A function refers to ``synk.comm`` as to any module; it means something only on a worker, during a call. In one file
because all of it is one object.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from synk._pure.ops import REDUCE_OPS
from synk._wire.cell import cell
from synk._wire.control import Down
from synk._worker.comm.collectives import Collectives
from synk._worker.comm.requests import Request
from synk.communicators._schedule import Steps
from synk.errors import ReentrancyError


def _worker() -> Any:
    if cell.worker is None:
        raise ReentrancyError(
            "synk.comm has a meaning only inside a function, on a worker. In the master use the collectives over "
            "Shared "
            "variables, as synk.all_reduce."
        )
    if cell.worker.check is not None:
        raise cell.worker.check.refused()
    return cell.worker


def _collectives() -> Collectives:
    collectives: Collectives = _worker().collectives()
    return collectives


def _run(steps: Steps) -> Any:
    return _collectives().host.run(steps)


def _start(steps: Steps) -> Request:
    collectives = _collectives()
    host = collectives.host
    operation = host.start(steps)
    return Request(
        host,
        lambda: host.test(operation) and collectives.is_there(operation.value),
        lambda: collectives.joined(host.finish(operation)),
    )


def _called() -> Any:
    """Return the worker, which is in a call."""
    worker = _worker()
    worker.check_called()
    return worker


class Comm:
    """The communication of one rank during one call; the only instance is ``synk.comm``.

    Arrays are of the backend's own library (NumPy on CPU workers); results are new arrays. All ranks that run the
    function must call the same collectives in the same order. Messages (``send``, ``recv`` and their like) are between
    two ranks. One thread at a time may use it, whichever it is.

    Ranks are counted within the call: ranks without rows do not take part in it, and one alone runs a serial call.
    ``rank``, ``peer`` and ``root`` are from 0 to ``world_size - 1``, so the same function works on any number of rows.

    Nothing here is differentiated: a torch tensor that requires grad is refused with a TypeError, because the result
    would be a constant to autograd. :mod:`synk.torch` has the same collectives and messages for autograd.

    Attributes
    ----------
    rank : int
        This worker's place among those of the call; in an item of ``map``, in the runtime.
    world_size : int
        How many ranks run this call; in an item of ``map``, how many the runtime has. In the program,
        ``synk.current().world_size`` is that of the runtime.
    ranks : tuple of int
        The numbers in the runtime of those that run this call; ``ranks[rank]`` is this worker's own, which errors name.
    rows, total_rows : int
        Rows of this rank, and of all ranks, in this call.
    device : str
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
        return str(_worker().device)

    @property
    def rng(self) -> np.random.Generator:
        """This rank's own generator of random numbers, which goes on from call to call.

        That of the runtime's rank k is seeded by ``numpy.random.SeedSequence(seed).spawn(n)[k]``, with the ``seed`` of
        :func:`synk.fork` and its n workers. So ranks draw independently of one another, and a program draws the same
        numbers again on as many workers. A worker in the place of one that died goes on with numbers of its own.

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
        worker = _called()
        return int(worker.lane.down[worker.rank, Down.ROWS])

    @property
    def total_rows(self) -> int:
        return sum(_called().lane.rows().values())

    def all_reduce(self, array: Any, op: str = "avg", *, weight: float | None = None, out: Any = None) -> Any:
        """Reduce ``array`` of all ranks; every rank gets the result.

        Parameters
        ----------
        array : array
            Of the same shape and dtype on all ranks.
        op : {"avg", "sum", "prod", "min", "max"}
        weight : float, optional
            This rank's share in an average; the shares of all ranks sum to 1. Its share of the rows where not given.
        out : array, optional
            Where the result goes: contiguous, of the shape and dtype of ``array``, and perhaps ``array`` itself.

        Returns
        -------
        array
            ``out`` where given, else new, of the same shape and dtype.

        Raises
        ------
        CollectiveMismatch
            If the ranks' requests differ, or one has left the function.
        TypeError, ValueError
            For an op that the dtype does not have, and for a torch tensor that requires grad.
        """
        return _run(self._all_reduce(array, op, weight, out))

    def iall_reduce(self, array: Any, op: str = "avg", *, weight: float | None = None, out: Any = None) -> Request:
        """Start an ``all_reduce`` and return at once; ``wait()`` of the request returns the result.

        Non-blocking collectives are started in the same order on all ranks, and may be mixed with those that wait and
        with messages. The array must stay as it is until the result is there. On CPU workers nothing goes on by
        itself: it does in ``wait`` and ``test`` of any request, and while any other call of ``synk.comm`` waits.
        Between GPUs, by NCCL, what has ``out=`` goes on beside the function, on a stream of its own.

        Returns
        -------
        Request
        """
        return _start(self._all_reduce(array, op, weight, out, is_started=True))

    def _all_reduce(self, array: Any, op: str, weight: float | None, out: Any, is_started: bool = False) -> Steps:
        self._check_op(op)
        _check_constant(array, "all_reduce")
        return _collectives().all_reduce(array, op, self._weight(op, weight), out, is_started)

    def reduce(self, array: Any, op: str = "avg", root: int = 0, *, weight: float | None = None) -> Any:
        """Reduce ``array`` of all ranks to rank ``root``; others get None."""
        self._check_op(op)
        _check_constant(array, "reduce")
        return _run(_collectives().reduce(array, op, root, self._weight(op, weight)))

    def broadcast(self, array: Any, root: int = 0) -> Any:
        """Return ``array`` of rank ``root``; the others' arrays say its shape and dtype."""
        _check_constant(array, "broadcast")
        return _run(_collectives().broadcast(array, root))

    def ibroadcast(self, array: Any, root: int = 0) -> Request:
        """Start a ``broadcast``, as :meth:`iall_reduce` an ``all_reduce``."""
        _check_constant(array, "broadcast")
        return _start(_collectives().broadcast(array, root))

    def all_gather(self, array: Any, axis: int | None = None) -> Any:
        """Return the arrays of all ranks, on every rank.

        Parameters
        ----------
        array : array
            Of one shape and dtype on all ranks; along ``axis`` of any length.
        axis : int, optional
            Join the arrays along it, in the order of the ranks. By default they are stacked.

        Returns
        -------
        array
            Shape ``(len(ranks), *shape)``, or that of the arrays joined.
        """
        _check_constant(array, "all_gather")
        if axis is not None:
            return _collectives().messages.all_gather(array, axis)
        return _run(_collectives().all_gather(array))

    def iall_gather(self, array: Any) -> Request:
        """Start an ``all_gather``, as :meth:`iall_reduce` an ``all_reduce``."""
        _check_constant(array, "all_gather")
        return _start(_collectives().all_gather(array))

    def reduce_scatter(self, array: Any, op: str = "sum", *, weight: float | None = None) -> Any:
        """Reduce ``array``, shape ``(len(ranks) * n, *rest)``, and return the rank's own block of n rows."""
        return _run(self._reduce_scatter(array, op, weight))

    def ireduce_scatter(self, array: Any, op: str = "sum", *, weight: float | None = None) -> Request:
        """Start a ``reduce_scatter``, as :meth:`iall_reduce` an ``all_reduce``."""
        return _start(self._reduce_scatter(array, op, weight))

    def _reduce_scatter(self, array: Any, op: str, weight: float | None) -> Steps:
        self._check_op(op)
        _check_constant(array, "reduce_scatter")
        return _collectives().reduce_scatter(array, op, self._weight(op, weight))

    def send(self, array: Any, peer: int, tag: int = 0) -> None:
        """Send ``array`` to rank ``peer``, which may be this one; when this returns it may be changed.

        A small message is sent at once; a larger one waits until the receiver takes it in, which it does whenever it
        waits for a message itself. A message that is never received is an error at the end of the call.

        Parameters
        ----------
        array : array
        peer : int
        tag : int
            From 0 on. Messages with one sender, receiver and tag are received in the order in which they were sent.
        """
        worker = cell.worker
        if worker is not None and (path := worker.peers.short_path) is not None and path.send_now(array, peer, tag):
            return
        _check_constant(array, "send")
        _collectives().messages.send(array, peer, tag)

    def isend(self, array: Any, peer: int, tag: int = 0) -> Request:
        """Send ``array`` to rank ``peer`` without waiting for it.

        When this returns the array may be changed. ``wait()`` of the request returns None at once.
        """
        _check_constant(array, "isend")
        return _collectives().messages.isend(array, peer, tag)

    def recv(self, peer: int, tag: int = 0, *, like: Any = None, out: Any = None) -> Any:
        """Return what rank ``peer`` sent: the oldest message of this tag that was not received.

        Parameters
        ----------
        peer, tag : int
        like : array, optional
            Of the dtype and number of elements of the message; the result has its shape. By default the result has the
            message's own shape and dtype.
        out : array, optional
            Where the message goes: contiguous, of its dtype and number of elements.

        Returns
        -------
        array
            ``out`` where given, else new.

        Raises
        ------
        TypeError, ValueError
            If ``peer`` is no rank of the call, as an array is none that is to be filled: pass it as ``out=``.
        CollectiveMismatch
            If the message differs from ``like`` or ``out``, or cannot come.

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
        if out is None and worker is not None and (path := worker.peers.short_path) is not None:
            array = path.recv_now(peer, tag, like)
            if array is not None:
                return array
        _check_constant(like, "recv")
        return _collectives().messages.recv(peer, tag, like, out)

    def irecv(self, peer: int, tag: int = 0, *, like: Any = None, out: Any = None) -> Request:
        """Ask for a message, and return at once; ``wait()`` of the request returns what :meth:`recv` does.

        The k-th that asks for a sender and tag gets the k-th message, whatever the order in which they are waited for.
        """
        _check_constant(like, "irecv")
        return _collectives().messages.irecv(peer, tag, like, out)

    def gather(self, array: Any, root: int = 0, *, sizes: Sequence[int] | None = None) -> Any:
        """Join the rows of all ranks, in their order, on rank ``root``; others get None.

        Parameters
        ----------
        array : array, shape (rows, *rest)
            With as many rows as the rank has.
        root : int
        sizes : sequence of int, optional
            How many rows each rank is expected to bring; more or less is an error.
        """
        _check_constant(array, "gather")
        return _collectives().messages.gather(array, root, sizes)

    def scatter(self, array: Any, root: int = 0, *, sizes: Sequence[int] | None = None) -> Any:
        """Return this rank's block of the rows of rank ``root``.

        Parameters
        ----------
        array : array, shape (rows, *rest)
            On rank ``root``; on the others it does not matter, and may be None.
        root : int
        sizes : sequence of int, optional
            The number of rows for each rank of the call, on rank ``root``; blocks of equal length by default.
        """
        _check_constant(array, "scatter")
        return _collectives().messages.scatter(array, root, sizes)

    def all_to_all(self, array: Any, *, sizes: Sequence[int] | None = None) -> Any:
        """Send a block of rows to each rank, and return the blocks that came from each, joined in their order.

        Parameters
        ----------
        array : array, shape (rows, *rest)
        sizes : sequence of int, optional
            The number of rows for each rank of the call; blocks of equal length by default. May differ between ranks.
        """
        _check_constant(array, "all_to_all")
        return _collectives().messages.all_to_all(array, sizes)

    def barrier(self) -> None:
        """Return when all ranks of the call have called it."""
        _run(_collectives().barrier())

    def ibarrier(self) -> Request:
        """Start a ``barrier``: the request is done when all ranks have started it."""
        return _start(_collectives().barrier())

    def wait_all(self, requests: Iterable[Request]) -> list[Any]:
        """Wait for all requests, and return their results in the same order."""
        return [request.wait() for request in requests]

    def shielded(self) -> contextlib.AbstractContextManager[None]:
        """Return a context in which no interrupt of the call (Ctrl-C, a timeout, a worker that died) is heard.

        For a short step that must not be left half done, as that of an optimizer; what it holds back is raised at its
        end. A worker that does not answer an interrupt for two seconds is killed, so no collective may be in it.
        """
        context: contextlib.AbstractContextManager[None] = _worker().uninterrupted()
        return context

    @staticmethod
    def _check_op(op: str) -> None:
        if op not in REDUCE_OPS:
            raise ValueError(f"cannot reduce: got op {op!r}, expected one of {', '.join(map(repr, REDUCE_OPS))}.")

    def _weight(self, op: str, weight: float | None) -> float | None:
        if op != "avg" or weight is not None:
            return weight
        return self.rows / self.total_rows if self.total_rows else None

    def __repr__(self) -> str:
        return "<synk.comm>"

    def __reduce__(self) -> Any:
        return _the_comm, ()


def _check_constant(array: Any, verb: str) -> None:
    """Refuse a tensor through which autograd would follow a value: it cannot follow it to the other ranks."""
    if type(array) is np.ndarray:
        return
    torch = sys.modules.get("torch")  # where it was never imported there is no tensor
    if torch is not None and isinstance(array, torch.Tensor) and array.requires_grad:
        raise TypeError(
            f"cannot {verb} a torch tensor: got one that requires grad, expected one without, because synk.comm never "
            f"differentiates and its result would be a constant to autograd. Use synk.torch.{verb}, which autograd "
            "follows, or pass tensor.detach()."
        )


def _the_comm() -> Comm:
    return comm


comm = Comm()
