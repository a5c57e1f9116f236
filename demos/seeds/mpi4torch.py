"""Seed 003: the names of mpi4torch, https://github.com/helmholtz-analytics/mpi4torch, inside functions on workers.

A program for mpi4torch runs as it is with this file on its path: ``003_regression.py`` is its example. The differences:

- The ranks are those that run the call, and the communicator has a meaning only inside a function.
- The in-place operations write the values into their argument, but return another tensor, which has the gradient.
- ``Recv`` and ``Irecv`` return the received tensor, and do not write into the tensor that gives the shape.
- Messages can be differentiated once. Tags are below 2**20.
- TorchScript knows only ``Allreduce``.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from typing import Any, NoReturn, TypeAlias

import torch

from synk import comm
from synk import torch as t

MPI_MAX, MPI_MIN, MPI_SUM, MPI_PROD, MPI_LAND, MPI_BAND, MPI_LOR, MPI_BOR, MPI_LXOR, MPI_BXOR = range(1, 11)
MPI_MINLOC, MPI_MAXLOC = 11, 12

_OPS = {MPI_MAX: "max", MPI_MIN: "min", MPI_SUM: "sum", MPI_PROD: "prod"}
_FOLDS = {
    MPI_LAND: torch.logical_and,
    MPI_BAND: torch.bitwise_and,
    MPI_LOR: torch.logical_or,
    MPI_BOR: torch.bitwise_or,
    MPI_LXOR: torch.logical_xor,
    MPI_BXOR: torch.bitwise_xor,
}


WaitHandle: TypeAlias = Any
"""What ``Isend`` and ``Irecv`` return."""


class _Join(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *dummies: torch.Tensor) -> torch.Tensor:
        ctx.kinds = [(each.shape, each.dtype, each.device) for each in dummies]  # not the tensors, which may be large
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, *(torch.zeros(shape, dtype=dtype, device=device) for shape, dtype, device in ctx.kinds)


def JoinDummies(x: torch.Tensor, dummies: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return ``x`` so that torch sees it depend on other tensors as well. Their gradients through it are zero."""
    joined: torch.Tensor = _Join.apply(x, *dummies)
    return joined


def JoinDummiesHandle(handle: Any, dummies: Sequence[torch.Tensor]) -> Any:
    """Return another handle of the same message, to use in place of the first."""
    return dataclasses.replace(handle, dummy=JoinDummies(handle.dummy, dummies))


def _allreduce(tensor: torch.Tensor, op: int, is_alone: bool) -> torch.Tensor:
    """Reduce a tensor over all ranks, or over this one alone, by an MPI operation. Only MPI_SUM has a gradient."""
    if op not in _OPS and op not in _FOLDS:
        raise ValueError(
            f"cannot reduce a tensor by MPI operation {op!r}: got none that tensors have (MPI_MINLOC and MPI_MAXLOC "
            "are for pairs), expected MPI_SUM, PROD, MIN, MAX, LAND, LOR, LXOR, BAND, BOR or BXOR of this module."
        )
    if is_alone:
        return tensor.clone()
    if op in _OPS:
        return t.all_reduce(tensor, _OPS[op])
    folded: torch.Tensor = _Fold.apply(tensor, op)
    return folded


class _Fold(torch.autograd.Function):
    """Combines the values of all ranks on each rank, for operations that communicators lack."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, op: int) -> torch.Tensor:
        values = torch.as_tensor(comm.all_gather(tensor.detach()))
        return functools.reduce(_FOLDS[op], values[1:], values[0]).to(tensor.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        _refuse_gradient("a logical one")


def _refuse_gradient(op: str) -> NoReturn:
    """Raise RuntimeError. All ranks gave the same op, so all of them raise, and none of them waits for another one."""
    raise RuntimeError(f"cannot differentiate Allreduce: got op {op!r}, expected MPI_SUM. Pass it tensor.detach().")


@torch.library.custom_op("synk::mpi4torch_allreduce", mutates_args=())
def _scripted(tensor: torch.Tensor, op: int, is_alone: bool) -> torch.Tensor:
    return _allreduce(tensor, op, is_alone)


def _remember(ctx: Any, inputs: tuple[torch.Tensor, int, bool], output: torch.Tensor) -> None:
    _, ctx.op, ctx.is_alone = inputs


def _backward(ctx: Any, gradient: torch.Tensor) -> Any:
    if ctx.op != MPI_SUM:
        _refuse_gradient(_OPS.get(ctx.op, "a logical one"))
    return _allreduce(gradient, MPI_SUM, ctx.is_alone), None, None


_scripted.register_autograd(_backward, setup_context=_remember)


class _Communicator:
    """The methods that TorchScript does not compile: it compiles a class's own methods, and knows little Python."""

    __jit_unused_properties__ = ("rank", "size")
    _is_alone: bool

    @property
    def rank(self) -> int:
        """This rank's position among the ranks of the call."""
        return 0 if self._is_alone else comm.rank

    @property
    def size(self) -> int:
        """The number of ranks."""
        return 1 if self._is_alone else comm.world_size

    def Bcast_(self, tensor: torch.Tensor, root: int) -> torch.Tensor:
        """Copy the values of ``root`` into all ranks' tensors and return them: see :func:`synk.torch.broadcast`."""
        source = self._rank_of(root)
        result = tensor.clone() if self._is_alone else t.broadcast(tensor, source)
        _overwrite(tensor, result)
        return result

    def Reduce_(self, tensor: torch.Tensor, op: int, root: int) -> torch.Tensor:
        """Reduce into the tensor of ``root`` and return it. On other ranks the result has no meaning."""
        target = self._rank_of(root)
        is_plain = op in _OPS and not self._is_alone
        result = t.reduce(tensor, _OPS[op], target) if is_plain else _allreduce(tensor, op, self._is_alone)
        _overwrite(tensor, result)
        return result

    def Gather(self, tensor: torch.Tensor, gatheraxis: int, root: int) -> torch.Tensor:
        """Join tensors along an axis on ``root``: see :func:`synk.torch.gather`."""
        target = self._rank_of(root)
        return tensor.clone() if self._is_alone else t.gather(tensor, gatheraxis, target)

    def Allgather(self, tensor: torch.Tensor, gatheraxis: int) -> torch.Tensor:
        """Join tensors along an axis on all ranks: see :func:`synk.torch.all_gather`."""
        return tensor.clone() if self._is_alone else t.all_gather(tensor, gatheraxis)

    def Scatter(self, tensor: torch.Tensor, scatteraxis: int, numelem: int, root: int) -> torch.Tensor:
        """Return ``numelem`` elements of ``root``'s tensor along an axis: see :func:`synk.torch.scatter`."""
        source = self._rank_of(root)
        if self._is_alone:
            return tensor.clone()
        sizes = comm.gather(torch.tensor([numelem], device=tensor.device), source)
        return t.scatter(tensor, scatteraxis, source, sizes=None if sizes is None else sizes.tolist())

    def Alltoall(self, tensor: torch.Tensor, gatheraxis: int, scatteraxis: int, numelem: int) -> torch.Tensor:
        """Return the result of ``Gather`` and then ``Scatter``: see :func:`synk.torch.all_to_all`."""
        if self._is_alone:
            return tensor.clone()
        own = torch.tensor([tensor.shape[gatheraxis], numelem], device=tensor.device)
        lengths, sizes = zip(*comm.all_gather(own).tolist())
        if gatheraxis % tensor.ndim == scatteraxis % tensor.ndim:
            start, stop = _bounds(lengths)[self.rank]
            sizes = tuple(max(0, min(stop, end) - max(start, begin)) for begin, end in _bounds(sizes))
        return t.all_to_all(tensor, scatteraxis, gatheraxis, sizes=sizes)

    def Isend(self, tensor: torch.Tensor, dest: int, tag: int) -> Any:
        """Start a send: see :func:`synk.torch.isend`."""
        return t.isend(tensor, self._rank_of(dest), tag)

    def Irecv(self, tensor: torch.Tensor, source: int, tag: int) -> Any:
        """Start a receive: see :func:`synk.torch.irecv`."""
        return t.irecv(self._rank_of(source), tag, like=tensor)

    def Wait(self, waithandle: Any) -> torch.Tensor:
        """Return the received tensor or, for a send, a tensor for ``JoinDummies``."""
        return waithandle.wait()

    def Send(self, tensor: torch.Tensor, dest: int, tag: int) -> torch.Tensor:
        """Send, and return a tensor for ``JoinDummies``: see :func:`synk.torch.send`."""
        return t.send(tensor, self._rank_of(dest), tag)

    def Recv(self, tensor: torch.Tensor, source: int, tag: int) -> torch.Tensor:
        """Return the received tensor: see :func:`synk.torch.recv`."""
        return t.recv(self._rank_of(source), tag, like=tensor)

    def _rank_of(self, place: int) -> int:
        if not 0 <= place < self.size:
            raise ValueError(f"cannot communicate with rank {place}: got a communicator of {self.size}.")
        return comm.rank if self._is_alone else place


class MPI_Communicator(_Communicator):
    """The ranks of the call, or one rank alone."""

    def __init__(self, is_alone: bool = False) -> None:
        self._is_alone = is_alone

    def Allreduce(self, tensor: torch.Tensor, op: int) -> torch.Tensor:
        """Reduce by an MPI operation: see :func:`synk.torch.all_reduce`. Only ``MPI_SUM`` has a gradient."""
        if torch.jit.is_scripting():
            return torch.ops.synk.mpi4torch_allreduce(tensor, op, self._is_alone)
        else:  # noqa: RET505 - without it TorchScript compiles the rest too
            return _allreduce(tensor, op, self._is_alone)


COMM_WORLD = MPI_Communicator()


def comm_from_mpi4py(comm_of_mpi: Any) -> MPI_Communicator:
    """Return the communicator with the ranks of an mpi4py communicator.

    MPI does not know synk's workers. It sees each of them alone, so its ``COMM_WORLD`` becomes a communicator of one.
    For all ranks of a call use ``COMM_WORLD`` of this module.

    Raises
    ------
    ValueError
        If its ranks are neither this one alone nor those of the call.
    """
    place, size = comm_of_mpi.Get_rank(), comm_of_mpi.Get_size()
    if size == 1:
        return MPI_Communicator(is_alone=True)
    if (place, size) == (COMM_WORLD.rank, COMM_WORLD.size):
        return COMM_WORLD
    raise ValueError(
        f"cannot convert a communicator of mpi4py: got rank {place} of {size}, expected this rank alone, or rank "
        f"{COMM_WORLD.rank} of {COMM_WORLD.size} as in the call. Use COMM_WORLD of this module."
    )


def deactivate_cuda_aware_mpi_support() -> None:
    """Do nothing: there is no MPI."""


def _bounds(lengths: Any) -> list[tuple[int, int]]:
    return list(itertools.pairwise(itertools.accumulate(lengths, initial=0)))


def _overwrite(tensor: torch.Tensor, result: torch.Tensor) -> None:
    """Write the result into the argument. Differentiating through the argument afterwards raises an error."""
    if tensor.requires_grad and not tensor.is_leaf:
        _Overwritten.apply(tensor, result)
    else:
        with torch.no_grad():
            tensor.copy_(result)


class _Overwritten(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, result: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(tensor)
        return tensor.copy_(result)

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise RuntimeError(
            "cannot differentiate through a tensor that Bcast_ or Reduce_ has written into: got it, expected the "
            "tensor that they have returned."
        )


__all__ = [
    "COMM_WORLD",
    "MPI_BAND",
    "MPI_BOR",
    "MPI_BXOR",
    "MPI_LAND",
    "MPI_LOR",
    "MPI_LXOR",
    "MPI_MAX",
    "MPI_MAXLOC",
    "MPI_MIN",
    "MPI_MINLOC",
    "MPI_PROD",
    "MPI_SUM",
    "JoinDummies",
    "JoinDummiesHandle",
    "MPI_Communicator",
    "WaitHandle",
    "comm_from_mpi4py",
    "deactivate_cuda_aware_mpi_support",
]
