"""Reductions by MPI's operations, and the one torch operator that TorchScript can call for them."""

from __future__ import annotations

import functools
from typing import Any

import torch

from synk import comm
from synk.torch import all_reduce
from synk.torch._adjoints import as_tensor, check_has_gradient

MPI_MAX, MPI_MIN, MPI_SUM, MPI_PROD, MPI_LAND, MPI_BAND, MPI_LOR, MPI_BOR, MPI_LXOR, MPI_BXOR = range(1, 11)
MPI_MINLOC, MPI_MAXLOC = 11, 12

OPS = {MPI_MAX: "max", MPI_MIN: "min", MPI_SUM: "sum", MPI_PROD: "prod"}
_FOLDS = {
    MPI_LAND: torch.logical_and,
    MPI_BAND: torch.bitwise_and,
    MPI_LOR: torch.logical_or,
    MPI_BOR: torch.bitwise_or,
    MPI_LXOR: torch.logical_xor,
    MPI_BXOR: torch.bitwise_xor,
}


def allreduce(tensor: torch.Tensor, op: int, is_alone: bool) -> torch.Tensor:
    """Reduce a tensor of all ranks, or of this one alone, by an MPI operation. Only MPI_SUM has a gradient."""
    if op not in OPS and op not in _FOLDS:
        raise ValueError(
            f"cannot reduce a tensor by MPI operation {op!r}: got none that tensors have (MPI_MINLOC and MPI_MAXLOC "
            "are for pairs), expected MPI_SUM, PROD, MIN, MAX, LAND, LOR, LXOR, BAND, BOR or BXOR of this module."
        )
    if is_alone:
        return tensor.clone()
    if op in OPS:
        return all_reduce(tensor, OPS[op])
    folded: torch.Tensor = _Fold.apply(tensor, op)
    return folded


class _Fold(torch.autograd.Function):
    """Combines the values of all ranks here, for operations that no communicator has."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: int) -> torch.Tensor:
        values = as_tensor(comm.all_gather(tensor.detach()))
        return functools.reduce(_FOLDS[op], values[1:], values[0]).to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        check_has_gradient("a reduction", "a logical one")


@torch.library.custom_op("synk::mpi4torch_allreduce", mutates_args=())
def _scripted(tensor: torch.Tensor, op: int, is_alone: bool) -> torch.Tensor:
    return allreduce(tensor, op, is_alone)


def _remember(ctx: Any, inputs: tuple[torch.Tensor, int, bool], output: torch.Tensor) -> None:
    _, ctx.op, ctx.is_alone = inputs


def _backward(ctx: Any, gradient: torch.Tensor) -> Any:
    check_has_gradient("Allreduce", OPS.get(ctx.op, "a logical one"))
    return allreduce(gradient, MPI_SUM, ctx.is_alone), None, None


_scripted.register_autograd(_backward, setup_context=_remember)
