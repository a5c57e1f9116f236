"""Collectives through which torch differentiates.

Each rank has a loss of its own, and ``backward`` brings the gradient of the sum of them all. The backward pass of a
collective is another one, its adjoint: that of a broadcast is a sum, that of a gather a scatter. It is written with the
same Functions (``_adjoints``), so it can be differentiated again, as often as one likes.

These move rows; which axis is meant, and blocks of different lengths, are left to torch's own operations around
them, whose gradients torch knows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from synk._worker.comm.comm import comm
from synk.torch._adjoints import (
    AllGather,
    AllReduce,
    AllToAll,
    Broadcast,
    Gather,
    Reduce,
    ReduceScatter,
    Scatter,
    apply,
    check_tensor,
)


def all_reduce(x: torch.Tensor, op: str = "avg") -> torch.Tensor:
    """Reduce ``x`` of all ranks; every rank gets the result, and its gradient is summed over the ranks.

    Parameters
    ----------
    x : tensor
        Of one shape and dtype on all ranks.
    op : {"avg", "sum", "prod", "min", "max"}
        Only averages, weighted by rows, and sums have gradients.

    Returns
    -------
    tensor
        New, of the shape of ``x``.

    Raises
    ------
    CollectiveMismatch
        If the ranks' requests differ, or a rank has left the function or its backward pass without this one.
    RuntimeError
        In the backward pass of another op than an average or a sum.

    Examples
    --------
    >>> import torch, synk
    >>> def slope(x):
    ...     weight = torch.ones((), dtype=x.dtype, requires_grad=True)
    ...     total = synk.torch.all_reduce((weight * x).sum(), "sum")
    ...     total.square().backward()
    ...     return weight.grad
    >>> with synk.fork(2):
    ...     slopes = synk.function(slope, outputs=None, framework="torch")(torch.tensor([1.0, 2.0]))
    >>> slopes  # two ranks, each with a loss of 3 * 3; the derivatives of their sum
    [tensor(12.), tensor(24.)]
    """
    check_tensor("all_reduce", x)
    return apply(AllReduce, x, op)


def reduce(x: torch.Tensor, op: str = "avg", root: int = 0) -> torch.Tensor:
    """Reduce ``x`` of all ranks to rank ``root``; the others get zeros. As :func:`all_reduce`; its adjoint: broadcast.

    Returns
    -------
    tensor
        New, of the shape of ``x``.
    """
    check_tensor("reduce", x)
    return apply(Reduce, x, op, root)


def broadcast(x: torch.Tensor, root: int = 0) -> torch.Tensor:
    """Return ``x`` of rank ``root``, whose gradient is the sum of all; that of the other ranks is zero.

    Parameters
    ----------
    x : tensor
        Of one shape and dtype on all ranks, and requiring grad on all or on none.
    root : int

    Returns
    -------
    tensor
        New, of the shape of ``x``.
    """
    check_tensor("broadcast", x)
    return apply(Broadcast, x, root)


def gather(x: torch.Tensor, dim: int = 0, root: int = 0) -> torch.Tensor:
    """Join the tensors of all ranks along an axis, in their order, on rank ``root``.

    Parameters
    ----------
    x : tensor
        Of any length along ``dim``, and of one shape and dtype otherwise.
    dim, root : int

    Returns
    -------
    tensor
        New. On other ranks it is empty: of length 0 along ``dim``.

    Raises
    ------
    ValueError
        If ``x`` has no such axis, or the call no such rank.
    """
    return apply(Gather, _rows("gather", x, dim), root).movedim(0, dim)


def scatter(x: torch.Tensor | None, dim: int = 0, root: int = 0, *, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """Return this rank's block, along an axis, of the tensor of rank ``root``.

    Parameters
    ----------
    x : tensor
        On the other ranks it may be of any shape, and its gradient is zero: by requiring grad or not it says whether
        there is a backward pass. None where there is none.
    dim, root : int
    sizes : sequence of int, optional
        The length for each rank of the call, on rank ``root``; equal by default.

    Returns
    -------
    tensor
        New.
    """
    if comm.rank == root:
        x = _rows("scatter", x, dim)
    elif x is not None:
        check_tensor("scatter", x)
        x = x.reshape(-1)[:0]  # nothing of it, but its place in the graph
    return apply(Scatter, x, root, sizes).movedim(0, dim)


def all_gather(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Join the tensors of all ranks along an axis, in their order, on every rank. Its adjoint: reduce_scatter.

    Parameters
    ----------
    x : tensor
        Of any length along ``dim``, and of one shape and dtype otherwise.
    dim : int

    Returns
    -------
    tensor
        New.

    Notes
    -----
    The ranks tell each other their lengths first, which takes as long as a small collective. Where they differ, all
    blocks are brought to the longest on their way.
    """
    rows = _rows("all_gather", x, dim)
    sizes = [size for (size,) in _of_all_ranks(x, [len(rows)])]
    blocks = apply(AllGather, _padded(rows, max(sizes)))
    return _joined(blocks, sizes).movedim(0, dim)


def reduce_scatter(
    x: torch.Tensor, op: str = "sum", dim: int = 0, *, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Reduce ``x`` of all ranks, and return this rank's block along an axis. Its adjoint: all_gather.

    Parameters
    ----------
    x : tensor
        Of one shape and dtype on all ranks.
    op : {"sum", "avg", "prod", "min", "max"}
        Only sums, and averages weighted by rows, have gradients.
    dim : int
    sizes : sequence of int, optional
        The length for each rank of the call, the same on all ranks; equal by default.

    Returns
    -------
    tensor
        New.
    """
    rows = _rows("reduce_scatter", x, dim)
    lengths = _checked_sizes("reduce_scatter", len(rows), dim, sizes)
    return apply(ReduceScatter, _stacked(rows, lengths), op)[: lengths[comm.rank]].movedim(0, dim)


def all_to_all(
    x: torch.Tensor, split_dim: int = 0, cat_dim: int = 0, *, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Divide ``x`` along one axis among the ranks, and join what comes from each along another (or the same).

    As a transposition does: who has all columns of some rows before has all rows of some columns afterwards. Its
    adjoint is all_to_all with the axes exchanged.

    Parameters
    ----------
    x : tensor
        Of one number of axes and one dtype on all ranks.
    split_dim, cat_dim : int
    sizes : sequence of int, optional
        The length along ``split_dim`` for each rank of the call; equal by default. May differ between ranks.

    Returns
    -------
    tensor
        New.

    Raises
    ------
    ValueError
        If the blocks for a rank differ in more than their lengths along ``cat_dim``.
    """
    _check_dim("all_to_all", x, cat_dim)
    rows = _rows("all_to_all", x, split_dim)
    lengths = _checked_sizes("all_to_all", len(rows), split_dim, sizes)
    shapes = _incoming_shapes(x, split_dim % x.ndim, cat_dim % x.ndim, lengths)
    row_size = math.prod(rows.shape[1:])
    counts = [math.prod(shape) for shape in shapes]
    received = apply(AllToAll, rows.reshape(-1), [length * row_size for length in lengths], counts)
    blocks = [part.view(shape).movedim(0, split_dim) for part, shape in zip(received.split(counts), shapes)]
    return torch.cat(blocks, cat_dim)


def _check_dim(verb: str, x: Any, dim: int) -> None:
    check_tensor(verb, x)
    if not isinstance(dim, (int, np.integer)) or not -x.ndim <= dim < x.ndim:
        raise ValueError(f"cannot {verb} along axis {dim!r}: got a tensor of {x.ndim} axes, expected one that has it.")


def _rows(verb: str, x: Any, dim: int) -> torch.Tensor:
    """Return a tensor with an axis in front."""
    _check_dim(verb, x, dim)
    rows: torch.Tensor = x.movedim(dim, 0)
    return rows


def _checked_sizes(verb: str, length: int, dim: int, sizes: Sequence[int] | None) -> list[int]:
    num_ranks = comm.world_size
    if sizes is None:
        if length % num_ranks:
            raise ValueError(
                f"cannot {verb}: got length {length} along axis {dim}, expected a multiple of {num_ranks} (the ranks "
                "of the call). Pass sizes= for blocks of different lengths."
            )
        return [length // num_ranks] * num_ranks
    found = [int(size) for size in sizes]
    if len(found) != num_ranks or min(found) < 0 or sum(found) != length:
        raise ValueError(
            f"cannot {verb}: got sizes={found} for length {length} along axis {dim}, expected one for each of the "
            f"{num_ranks} ranks of the call, and as much in all."
        )
    return found


def _of_all_ranks(x: torch.Tensor, numbers: Sequence[int]) -> list[list[int]]:
    """Return numbers of all ranks; they travel on the device of ``x``."""
    gathered: list[list[int]] = comm.all_gather(torch.tensor(numbers, device=x.device)).tolist()
    return gathered


def _padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    if len(rows) == length:
        return rows
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])


def _stacked(rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Return blocks of rows, brought to the longest, stacked; a view where they are of one length."""
    if len({*sizes}) == 1:
        return rows.unflatten(0, (len(sizes), sizes[0]))
    return torch.stack([_padded(block, max(sizes)) for block in rows.split(sizes)])


def _joined(stack: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Return what was stacked, joined again."""
    if len({*sizes}) == 1:
        return stack.flatten(0, 1)
    return torch.cat([block[:size] for block, size in zip(stack, sizes)])


def _incoming_shapes(x: torch.Tensor, split_dim: int, cat_dim: int, lengths: list[int]) -> list[list[int]]:
    """Return the shapes of the blocks that come from each rank, ``split_dim`` in front."""
    found = []
    for row in _of_all_ranks(x, [*x.shape, *lengths]):
        shape = row[: x.ndim]
        shape[split_dim] = row[x.ndim + comm.rank]
        found.append(shape)
    if len({tuple(shape[:cat_dim] + shape[cat_dim + 1 :]) for shape in found}) > 1:
        raise ValueError(
            f"cannot all_to_all: got blocks of shapes {', '.join(str(tuple(shape)) for shape in found)} for rank "
            f"{comm.ranks[comm.rank]}, expected them to differ in length along axis {cat_dim} only."
        )
    return [[shape.pop(split_dim), *shape] for shape in found]
