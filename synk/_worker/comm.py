"""``comm``: collectives inside a function, between the ranks that run it.

A function refers to ``synk.comm`` as to any module; it means something only on a worker, during a call.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import numpy as np

from synk._pure.ops import REDUCE_OPS
from synk._wire.cell import cell
from synk._wire.control import Down
from synk.errors import ReentrancyError


def _worker() -> Any:
    if cell.worker is None:
        raise ReentrancyError(
            "synk.comm has a meaning only inside a function, on a worker. In the master use the collectives over "
            "Shared "
            "variables, as synk.all_reduce."
        )
    return cell.worker


class Comm:
    """The communication of one rank during one call; the only instance is ``synk.comm``.

    Arrays are of the backend's own library (NumPy on CPU workers); results are new arrays. All ranks that run the
    function must make the same calls in the same order; ranks without rows in a call do not take part.

    Nothing here is differentiated: a torch tensor that requires grad is refused with a TypeError, because the result
    would be a constant to autograd. Pass ``tensor.detach()``.

    Attributes
    ----------
    rank : int
        This worker's place in the runtime.
    world_size : int
        How many workers the runtime has.
    ranks : tuple of int
        Those that run this call.
    rows, total_rows : int
        Rows of this rank, and of all ranks, in this call.
    device : str
    """

    @property
    def rank(self) -> int:
        return int(_worker().rank)

    @property
    def world_size(self) -> int:
        return int(_worker().world_size)

    @property
    def device(self) -> str:
        return str(_worker().device)

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(np.flatnonzero(_worker().lane.down[:, Down.PARTICIPATES]).tolist())

    @property
    def rows(self) -> int:
        worker = _worker()
        return int(worker.lane.down[worker.rank, Down.ROWS])

    @property
    def total_rows(self) -> int:
        down = _worker().lane.down
        return int((down[:, Down.ROWS] * down[:, Down.PARTICIPATES]).sum())

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
        self._check_op(op)
        _check_constant(array, "all_reduce")
        return _worker().collectives().all_reduce(array, op, self._weight(op, weight), out)

    def reduce(self, array: Any, op: str = "avg", root: int = 0, *, weight: float | None = None) -> Any:
        """Reduce ``array`` of all ranks to rank ``root``; others get None."""
        self._check_op(op)
        _check_constant(array, "reduce")
        return _worker().collectives().reduce(array, op, root, self._weight(op, weight))

    def broadcast(self, array: Any, root: int = 0) -> Any:
        """Return ``array`` of rank ``root``; the others' arrays say its shape and dtype."""
        _check_constant(array, "broadcast")
        return _worker().collectives().broadcast(array, root)

    def all_gather(self, array: Any) -> Any:
        """Return the arrays of all ranks (of one shape), stacked: shape ``(len(ranks), *shape)``."""
        _check_constant(array, "all_gather")
        return _worker().collectives().all_gather(array)

    def reduce_scatter(self, array: Any, op: str = "sum", *, weight: float | None = None) -> Any:
        """Reduce ``array``, shape ``(len(ranks) * n, *rest)``, and return the rank's own block of n rows."""
        self._check_op(op)
        _check_constant(array, "reduce_scatter")
        return _worker().collectives().reduce_scatter(array, op, self._weight(op, weight))

    def send(self, array: Any, peer: int, tag: int = 0) -> None:
        """Send ``array`` to rank ``peer``."""
        _check_constant(array, "send")
        _worker().collectives().send(array, peer, tag)

    def recv(self, like: Any, peer: int, tag: int = 0) -> Any:
        """Return a new array of the shape and dtype of ``like`` with what rank ``peer`` sent."""
        _check_constant(like, "recv")
        return _worker().collectives().recv(like, peer, tag)

    def barrier(self) -> None:
        """Return when all ranks of the call have called it."""
        _worker().collectives().barrier()

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
    torch = sys.modules.get("torch")  # where it was never imported there is no tensor
    if torch is not None and isinstance(array, torch.Tensor) and array.requires_grad:
        raise TypeError(
            f"cannot {verb} a torch tensor: got one that requires grad, expected one without, because synk.comm never "
            "differentiates and its result would be a constant to autograd. Pass tensor.detach()."
        )


def _the_comm() -> Comm:
    return comm


comm = Comm()
