"""The collectives of ``synk.comm`` as torch Functions: the backward pass of each is another collective.

The gradient is that of the sum of all ranks' losses. Results of ``synk.comm`` become tensors by ``torch.as_tensor``:
in a function that is built without a framework they are arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from synk._worker.comm.comm import comm


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


def apply(function: Any, x: torch.Tensor | None, *args: Any) -> torch.Tensor:
    """Apply a Function that moves values between the ranks.

    In a step of ``replicate`` a rank's loss is the mean over its rows, and its gradients are multiplied by its share of
    the rows when they are reduced. A gradient that comes from another rank must carry that rank's weight instead. So it
    is multiplied by its sender's number of rows on the way out and divided by the receiver's on the way in.
    """
    weight = losses.weight
    result: torch.Tensor
    if weight is None or x is None:
        result = function.apply(x, *args)
    else:
        result = _Weighted.apply(function.apply(_Weighted.apply(x, 1 / weight), *args), weight)
    return result


class _Weighted(torch.autograd.Function):
    """A tensor whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient * ctx.weight, None


class AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: str) -> torch.Tensor:
        ctx.op, ctx.share = op, _share(op)
        return torch.as_tensor(comm.all_reduce(x.detach(), op, weight=ctx.share))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        check_has_gradient("all_reduce", ctx.op)
        return _shared(apply(AllReduce, gradient, "sum"), ctx.share), None


class Reduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, op: str, root: int) -> torch.Tensor:
        ctx.op, ctx.share, ctx.root = op, _share(op), root
        reduced = comm.reduce(x.detach(), op, root, weight=ctx.share)
        return torch.zeros_like(x) if reduced is None else torch.as_tensor(reduced)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        check_has_gradient("reduce", ctx.op)
        return _shared(apply(Broadcast, gradient, ctx.root), ctx.share), None, None


class Broadcast(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, root: int) -> torch.Tensor:
        ctx.root = root
        return torch.as_tensor(comm.broadcast(x.detach(), root))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return apply(Reduce, gradient, "sum", ctx.root), None


class Gather(torch.autograd.Function):
    """The rows of all ranks -> on the root all of them, on other ranks no rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, root: int) -> torch.Tensor:
        ctx.root, ctx.length = root, len(rows)
        joined = comm.gather(rows.detach(), root)
        return rows.new_empty(0, *rows.shape[1:]) if joined is None else torch.as_tensor(joined)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        sizes = comm.gather(gradient.new_full((1,), ctx.length, dtype=torch.int64), ctx.root)
        return apply(Scatter, gradient, ctx.root, None if sizes is None else sizes.tolist()), None


class Scatter(torch.autograd.Function):
    """The root's rows (other ranks pass none) -> each rank's own rows."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor | None, root: int, sizes: Sequence[int] | None) -> torch.Tensor:
        ctx.root, ctx.shape = root, None if rows is None else rows.shape
        return torch.as_tensor(comm.scatter(None if rows is None else rows.detach(), root, sizes=sizes))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return apply(Gather, gradient, ctx.root).reshape(ctx.shape), None, None


class AllGather(torch.autograd.Function):
    """A block of one shape from each rank -> on every rank all blocks, stacked."""

    @staticmethod
    def forward(ctx: Any, block: torch.Tensor) -> torch.Tensor:
        return torch.as_tensor(comm.all_gather(block.detach()))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return apply(ReduceScatter, gradient, "sum")


class ReduceScatter(torch.autograd.Function):
    """A stack with a block for each rank -> the block of this rank, reduced over all ranks."""

    @staticmethod
    def forward(ctx: Any, stack: torch.Tensor, op: str) -> torch.Tensor:
        ctx.op, ctx.share = op, _share(op)
        return torch.as_tensor(comm.reduce_scatter(stack.detach(), op, weight=ctx.share))[0]

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        check_has_gradient("reduce_scatter", ctx.op)
        return _shared(apply(AllGather, gradient), ctx.share), None


class AllToAll(torch.autograd.Function):
    """Flat elements for each rank, ``outgoing`` counts -> flat elements from each rank, ``incoming`` counts."""

    @staticmethod
    def forward(ctx: Any, numbers: torch.Tensor, outgoing: list[int], incoming: list[int]) -> torch.Tensor:
        ctx.outgoing, ctx.incoming = outgoing, incoming
        return torch.as_tensor(comm.all_to_all(numbers.detach(), sizes=outgoing))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return apply(AllToAll, gradient, ctx.incoming, ctx.outgoing), None, None


def check_tensor(verb: str, x: Any) -> None:
    """Raise TypeError unless ``x`` is a tensor. A function that is built without a framework gets arrays."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"cannot {verb} by synk.torch: got a value of type {type(x).__name__}, expected a tensor. Build the "
            "function with framework='torch', or pass torch.as_tensor(value)."
        )


def check_has_gradient(verb: str, op: str) -> None:
    """Raise RuntimeError if an op has no gradient.

    All ranks gave the same op, so all of them raise, and none of them waits for another one.
    """
    if op not in ("sum", "avg"):
        raise RuntimeError(
            f"cannot differentiate {verb}: got op {op!r}, expected 'sum' or 'avg'. Pass it tensor.detach(), and no "
            "gradient comes back."
        )


def _share(op: str) -> float | None:
    """Return this rank's weight in an average, as ``synk.comm`` uses it; None for other ops."""
    if op != "avg":
        return None
    return comm.rows / comm.total_rows if comm.total_rows else 1 / comm.world_size


def _shared(total: torch.Tensor, share: float | None) -> torch.Tensor:
    """Return the gradient of one rank's value from the gradient of the sum or of the average."""
    return total if share is None else total * share
