"""The collectives of ``synk.comm`` with their adjoints: the backward pass of each is another collective.

The gradient is that of the sum of all ranks' losses. Results of ``synk.comm`` become tensors by ``torch.as_tensor``:
in a function that is built without a framework they are arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from synk.communicators._comm import comm


class Losses:
    """The weight with which a rank's loss enters the sum of all losses.

    Attributes
    ----------
    weight : float or None
        The number of this rank's rows while a step of ``replicate`` runs; None otherwise, when all losses weigh the
        same. One value for all threads, because autograd has its own threads on devices.
    """

    weight: float | None = None


losses = Losses()


def moved(x: torch.Tensor | None, move: Callable[[Any], Any], adjoint: Callable[[Any], Any]) -> torch.Tensor:
    """Return ``move(x)``, which takes values to other ranks. ``adjoint`` brings the gradient back, by ``moved`` again.

    In a step of ``replicate`` a rank's loss is the mean over its rows, and its gradients are multiplied by its share of
    the rows when they are reduced. A gradient that comes from another rank must carry that rank's weight instead. So it
    is multiplied by its sender's number of rows on the way out and divided by the receiver's on the way in.
    """
    result: torch.Tensor = _Moved.apply(x, move, adjoint)
    return result


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor | None, move: Any, adjoint: Any) -> torch.Tensor:
        ctx.adjoint, ctx.weight = adjoint, losses.weight
        return torch.as_tensor(move(None if x is None else x.detach()))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.weight is None:
            return ctx.adjoint(gradient), None, None
        return ctx.adjoint(gradient * ctx.weight) / ctx.weight, None, None


def all_reduced(x: torch.Tensor, op: str) -> torch.Tensor:
    share = _share(op)
    return moved(
        x,
        lambda x: comm.all_reduce(x, op, weight=share),
        lambda gradient: _shared("all_reduce", op, share, lambda: all_reduced(gradient, "sum")),
    )


def reduced(x: torch.Tensor, op: str, root: int) -> torch.Tensor:
    """Return zeros on ranks other than ``root``."""
    share = _share(op)

    def move(x: torch.Tensor) -> Any:
        result = comm.reduce(x, op, root, weight=share)
        return torch.zeros_like(x) if result is None else result

    return moved(x, move, lambda gradient: _shared("reduce", op, share, lambda: broadcasted(gradient, root)))


def broadcasted(x: torch.Tensor, root: int) -> torch.Tensor:
    return moved(x, lambda x: comm.broadcast(x, root), lambda gradient: reduced(gradient, "sum", root))


def gathered(rows: torch.Tensor, root: int) -> torch.Tensor:
    """Return the rows of all ranks on ``root``, and no rows on other ranks."""
    length = len(rows)

    def move(rows: torch.Tensor) -> Any:
        joined = comm.gather(rows, root)
        return rows.new_empty(0, *rows.shape[1:]) if joined is None else joined

    def adjoint(gradient: torch.Tensor) -> torch.Tensor:
        sizes = comm.gather(gradient.new_full((1,), length, dtype=torch.int64), root)
        return scattered(gradient, root, None if sizes is None else sizes.tolist())

    return moved(rows, move, adjoint)


def scattered(rows: torch.Tensor | None, root: int, sizes: Sequence[int] | None) -> torch.Tensor:
    """Return each rank's own rows of those of ``root``. Other ranks pass none."""
    shape = () if rows is None else rows.shape
    return moved(
        rows,
        lambda rows: comm.scatter(rows, root, sizes=sizes),
        lambda gradient: gathered(gradient, root).reshape(shape),
    )


def all_gathered(block: torch.Tensor) -> torch.Tensor:
    """Return the blocks of all ranks, which have one shape, stacked."""
    return moved(block, comm.all_gather, lambda gradient: reduce_scattered(gradient, "sum"))


def reduce_scattered(stack: torch.Tensor, op: str) -> torch.Tensor:
    """Return the block of this rank, reduced over all ranks, of a stack with one for each."""
    share = _share(op)
    return moved(
        stack,
        lambda stack: comm.reduce_scatter(stack, op, weight=share)[0],
        lambda gradient: _shared("reduce_scatter", op, share, lambda: all_gathered(gradient)),
    )


def exchanged(numbers: torch.Tensor, outgoing: list[int], incoming: list[int]) -> torch.Tensor:
    """Return flat elements from each rank, ``incoming`` counts, for flat elements to each, ``outgoing`` counts."""
    return moved(
        numbers,
        lambda numbers: comm.all_to_all(numbers, sizes=outgoing),
        lambda gradient: exchanged(gradient, incoming, outgoing),
    )


def check_tensor(verb: str, x: Any) -> None:
    """Raise TypeError unless ``x`` is a tensor. A function that is built without a framework gets arrays."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"cannot {verb} by synk.torch: got a value of type {type(x).__name__}, expected a tensor. Build the "
            "function with framework='torch', or pass torch.as_tensor(value)."
        )


def _share(op: str) -> float | None:
    """Return this rank's weight in an average, as ``synk.comm`` uses it; None for other ops."""
    if op != "avg":
        return None
    return comm.rows / comm.total_rows if comm.total_rows else 1 / comm.world_size


def _shared(verb: str, op: str, share: float | None, total: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return the gradient of one rank's value from the gradient of the sum or of the average.

    Raises
    ------
    RuntimeError
        If the op has no gradient. All ranks gave the same op, so all of them raise, and none waits for another one.
    """
    if op not in ("sum", "avg"):
        raise RuntimeError(
            f"cannot differentiate {verb}: got op {op!r}, expected 'sum' or 'avg'. Pass it tensor.detach(), and no "
            "gradient comes back."
        )
    return total() if share is None else total() * share
