"""Collectives that torch differentiates through.

Each rank has a loss of its own, and ``backward`` computes the gradient of the sum of all losses. The backward pass of a
collective is its adjoint, which is another collective: a sum for a broadcast, a scatter for a gather. It is made in
the same way (``moved``), so it can be differentiated again, any number of times.

They move rows. The axis, and blocks of different lengths, are handled by torch's own operations around them, whose
gradients torch knows. In one file because the adjoint of one is another one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
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

    Results of ``synk.comm`` become tensors: in a function that is built without a framework they are arrays.
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


def all_reduce(x: torch.Tensor, op: str = "avg") -> torch.Tensor:
    """Reduce ``x`` over all ranks. Every rank gets the result, and its gradient is summed over the ranks.

    Parameters
    ----------
    x : tensor, any shape
        It must have the same shape and dtype on all ranks.
    op : {"avg", "sum", "prod", "min", "max"}
        An average is weighted by the ranks' rows. Only ``"sum"`` and ``"avg"`` have gradients.

    Returns
    -------
    tensor
        New, with the shape of ``x``.

    Raises
    ------
    CollectiveMismatch
        If the ranks' requests differ, or a rank has left the function or its backward pass without this collective.
    TypeError
        If ``x`` is not a tensor.
    RuntimeError
        In the backward pass of an op other than an average or a sum.

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
    adjoint = gradient_of("all_reduce", op, lambda gradient: all_reduce(gradient, "sum"))
    return moved(x, lambda x: comm.all_reduce(x, op), adjoint)


def reduce(x: torch.Tensor, op: str = "avg", root: int = 0) -> torch.Tensor:
    """Reduce ``x`` over all ranks to rank ``root``, like :func:`all_reduce`. Adjoint: broadcast.

    Parameters
    ----------
    x, op
        As for :func:`all_reduce`.
    root : int

    Returns
    -------
    tensor
        New, with the shape of ``x``. On ranks other than ``root`` it is zero.
    """
    check_tensor("reduce", x)

    def move(x: torch.Tensor) -> Any:
        result = comm.reduce(x, op, root)
        return torch.zeros_like(x) if result is None else result

    return moved(x, move, gradient_of("reduce", op, lambda gradient: broadcast(gradient, root)))


def broadcast(x: torch.Tensor, root: int = 0) -> torch.Tensor:
    """Return ``x`` of rank ``root`` on every rank. Adjoint: reduce.

    Parameters
    ----------
    x : tensor, any shape
        It must have the same shape and dtype on all ranks, and require grad on all ranks or on none. The gradient of
        the root's ``x`` is the sum over all ranks; the gradient of the other ranks' ``x`` is zero.
    root : int

    Returns
    -------
    tensor
        New, with the shape of ``x``.
    """
    check_tensor("broadcast", x)
    return moved(x, lambda x: comm.broadcast(x, root), lambda gradient: reduce(gradient, "sum", root))


def gather(x: torch.Tensor, dim: int = 0, root: int = 0) -> torch.Tensor:
    """Join the tensors of all ranks along an axis, in rank order, on rank ``root``. Adjoint: scatter.

    Parameters
    ----------
    x : tensor
        It may have any length along ``dim``. Otherwise its shape, and its dtype, must be the same on all ranks.
    dim, root : int

    Returns
    -------
    tensor
        New. On ranks other than ``root`` it is empty: it has length 0 along ``dim``.

    Raises
    ------
    ValueError
        If ``x`` has no such axis, or the call has no such rank.
    """
    rows = _rows("gather", x, dim)

    def move(rows: torch.Tensor) -> Any:
        joined = comm.gather(rows, root)
        return rows.new_empty(0, *rows.shape[1:]) if joined is None else joined

    def adjoint(gradient: torch.Tensor) -> torch.Tensor:
        sizes = comm.gather(gradient.new_full((1,), len(rows), dtype=torch.int64), root)
        return scatter(gradient, 0, root, sizes=None if sizes is None else sizes.tolist())

    return moved(rows, move, adjoint).movedim(0, dim)


def scatter(x: torch.Tensor | None, dim: int = 0, root: int = 0, *, sizes: Sequence[int] | None = None) -> torch.Tensor:
    """Return this rank's block, along an axis, of the tensor of rank ``root``. Adjoint: gather.

    Parameters
    ----------
    x : tensor or None
        On rank ``root``, the tensor to divide. The other ranks pass a tensor of any shape, whose gradient is zero, if
        there will be a backward pass (it must require grad if the root's does), and else None.
    dim, root : int
    sizes : sequence of int, optional
        The length of each rank's block along ``dim``, given on rank ``root``. By default all are equal.

    Returns
    -------
    tensor
        New, with this rank's length along ``dim``.
    """
    if comm.rank == root:
        x = _rows("scatter", x, dim)
    elif x is not None:
        check_tensor("scatter", x)
        x = x.reshape(-1)[:0]  # none of its elements, but its place in the graph
    shape = () if x is None else x.shape
    return moved(
        x,
        lambda x: comm.scatter(x, root, sizes=sizes),
        lambda gradient: gather(gradient, 0, root).reshape(shape),
    ).movedim(0, dim)


def all_gather(x: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Join the tensors of all ranks along an axis, in rank order, on every rank. Adjoint: reduce_scatter.

    Parameters
    ----------
    x : tensor
        It may have any length along ``dim``. Otherwise its shape, and its dtype, must be the same on all ranks.
    dim : int

    Returns
    -------
    tensor
        New. Its length along ``dim`` is the sum of the ranks' lengths.

    Notes
    -----
    The ranks first exchange their lengths, which takes as long as a small collective. If the lengths differ, all blocks
    travel with the length of the longest.
    """
    rows = _rows("all_gather", x, dim)
    sizes = [size for (size,) in _of_all_ranks(x, [len(rows)])]
    return _joined(_gathered(_padded(rows, max(sizes))), sizes).movedim(0, dim)


def reduce_scatter(
    x: torch.Tensor, op: str = "sum", dim: int = 0, *, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Reduce ``x`` over all ranks, and return this rank's block along an axis. Adjoint: all_gather.

    Parameters
    ----------
    x : tensor
        It must have the same shape and dtype on all ranks.
    op : {"sum", "avg", "prod", "min", "max"}
        An average is weighted by the ranks' rows. Only ``"sum"`` and ``"avg"`` have gradients.
    dim : int
    sizes : sequence of int, optional
        The length of each rank's block along ``dim``, the same list on all ranks. By default all lengths are equal.

    Returns
    -------
    tensor
        New, with this rank's length along ``dim``.

    Raises
    ------
    ValueError
        If ``x`` has no such axis, or ``sizes`` (or equal blocks) do not add up to its length.
    """
    rows = _rows("reduce_scatter", x, dim)
    lengths = _checked_sizes("reduce_scatter", len(rows), dim, sizes)
    return _scattered(_stacked(rows, lengths), op)[: lengths[comm.rank]].movedim(0, dim)


def all_to_all(
    x: torch.Tensor, split_dim: int = 0, cat_dim: int = 0, *, sizes: Sequence[int] | None = None
) -> torch.Tensor:
    """Divide ``x`` along one axis among the ranks, and join the blocks from all ranks along another axis (or the same).

    It works like a transposition: a rank that had all columns of some rows has all rows of some columns afterwards. Its
    adjoint is all_to_all with the axes exchanged.

    Parameters
    ----------
    x : tensor
        Its number of axes and its dtype must be the same on all ranks.
    split_dim, cat_dim : int
    sizes : sequence of int, optional
        The length along ``split_dim`` of the block for each rank of the call. By default all are equal. Ranks may give
        different lists.

    Returns
    -------
    tensor
        New. Along ``cat_dim`` its length is the sum of the lengths of the blocks that came from all ranks.

    Raises
    ------
    ValueError
        If ``x`` has no such axis, ``sizes`` (or equal blocks) do not add up to its length, or the blocks for a rank
        differ in more than their lengths along ``cat_dim``.
    """
    _check_dim("all_to_all", x, cat_dim)
    rows = _rows("all_to_all", x, split_dim)
    lengths = _checked_sizes("all_to_all", len(rows), split_dim, sizes)
    shapes = _incoming_shapes(x, split_dim % x.ndim, cat_dim % x.ndim, lengths)
    row_size = math.prod(rows.shape[1:])
    counts = [math.prod(shape) for shape in shapes]
    received = _exchanged(rows.reshape(-1), [length * row_size for length in lengths], counts)
    blocks = [part.view(shape).movedim(0, split_dim) for part, shape in zip(received.split(counts), shapes)]
    return torch.cat(blocks, cat_dim)


def check_tensor(verb: str, x: Any) -> None:
    """Raise TypeError unless ``x`` is a tensor. A function that is built without a framework gets arrays."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"cannot {verb} by synk.torch: got a value of type {type(x).__name__}, expected a tensor. Build the "
            "function with framework='torch', or pass torch.as_tensor(value)."
        )


def gradient_of(verb: str, op: str, total: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the adjoint of a reduction; ``total`` is that of a sum. An average has this rank's share of it.

    If the op has no gradient the adjoint raises RuntimeError. All ranks gave the same op, so none waits for another.
    """
    share = 1.0
    if op == "avg":
        share = comm.rows / comm.total_rows if comm.total_rows else 1 / comm.world_size

    def adjoint(gradient: torch.Tensor) -> torch.Tensor:
        if op not in ("sum", "avg"):
            raise RuntimeError(
                f"cannot differentiate {verb}: got op {op!r}, expected 'sum' or 'avg'. Pass it tensor.detach(), and no "
                "gradient comes back."
            )
        return total(gradient) if op == "sum" else total(gradient) * share

    return adjoint


def _gathered(block: torch.Tensor) -> torch.Tensor:
    """Return the blocks of all ranks, which have one shape, stacked."""
    return moved(block, comm.all_gather, lambda gradient: _scattered(gradient, "sum"))


def _scattered(stack: torch.Tensor, op: str) -> torch.Tensor:
    """Return the block of this rank, reduced over all ranks, of a stack with one for each."""
    return moved(stack, lambda stack: comm.reduce_scatter(stack, op)[0], gradient_of("reduce_scatter", op, _gathered))


def _exchanged(numbers: torch.Tensor, outgoing: list[int], incoming: list[int]) -> torch.Tensor:
    """Return flat elements from each rank, ``incoming`` counts, for flat elements to each, ``outgoing`` counts."""
    return moved(
        numbers,
        lambda numbers: comm.all_to_all(numbers, sizes=outgoing),
        lambda gradient: _exchanged(gradient, incoming, outgoing),
    )


def _check_dim(verb: str, x: Any, dim: int) -> None:
    check_tensor(verb, x)
    if not isinstance(dim, (int, np.integer)) or not -x.ndim <= dim < x.ndim:
        raise ValueError(f"cannot {verb} along axis {dim!r}: got a tensor of {x.ndim} axes, expected one that has it.")


def _rows(verb: str, x: Any, dim: int) -> torch.Tensor:
    """Return a view of a tensor with the given axis in front."""
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
    """Return the numbers of all ranks. They travel on the device of ``x``."""
    gathered: list[list[int]] = comm.all_gather(torch.tensor(numbers, device=x.device)).tolist()
    return gathered


def _padded(rows: torch.Tensor, length: int) -> torch.Tensor:
    if len(rows) == length:
        return rows
    return torch.cat([rows, rows.new_zeros(length - len(rows), *rows.shape[1:])])


def _stacked(rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Return blocks of rows, padded to the longest and stacked. The result is a view if all lengths are equal."""
    if len({*sizes}) == 1:
        return rows.unflatten(0, (len(sizes), sizes[0]))
    return torch.stack([_padded(block, max(sizes)) for block in rows.split(sizes)])


def _joined(stack: torch.Tensor, sizes: list[int]) -> torch.Tensor:
    """Undo ``_stacked``."""
    if len({*sizes}) == 1:
        return stack.flatten(0, 1)
    return torch.cat([block[:size] for block, size in zip(stack, sizes)])


def _incoming_shapes(x: torch.Tensor, split_dim: int, cat_dim: int, lengths: list[int]) -> list[list[int]]:
    """Return the shapes of the blocks that come from each rank, with ``split_dim`` in front.

    Raises
    ------
    ValueError
        If the blocks cannot be joined along ``cat_dim``.
    """
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
