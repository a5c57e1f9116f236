"""The names of mpi4torch, in functions on workers: values by torch on all ranks' inputs, gradients by their definition.

Every body computes by itself what it expects; ranks have different values, so that no mistake cancels.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import mpi4torch
import numpy as np
import pytest
import torch
from mpi4torch import COMM_WORLD, JoinDummies, JoinDummiesHandle
from support.harness import same_workers

import synk

KINDS = (2, 3)


def on_each(rt: Any, body: Callable[[Any, int, int], Any]) -> list[Any]:
    """Return ``body(COMM_WORLD, rank, size)`` of every rank."""

    def run(x: np.ndarray) -> Any:
        return body(COMM_WORLD, COMM_WORLD.rank, COMM_WORLD.size)

    return rt.function(run, outputs=None)(np.zeros(rt.world_size))


def values(rank: int, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


class Linear(NamedTuple):
    """An operation that is linear in the inputs of all ranks.

    ``shape(rank, size)`` is that of a rank's input, ``call(comm, x, rank)`` what the rank does with it, and
    ``value(inputs, rank)`` what it then has; where that is None nobody may use it.
    """

    shape: Callable[[int, int], tuple[int, ...]]
    call: Callable[[Any, Any, int], Any]
    value: Callable[[list[torch.Tensor], int], torch.Tensor | None]


def first(rank: int) -> int:
    """Return where the rows of a rank begin of which each has one more than the one before."""
    return rank * (rank + 1) // 2


def on_root(root: Callable[[int], int], value: Callable[..., Any]) -> Callable[..., Any]:
    return lambda inputs, rank: value(inputs) if rank == root(len(inputs)) else None


def message(kind: str) -> Linear:
    """Return an exchange around a ring, of 1 MB: more than a ring between two ranks holds."""

    def call(comm: Any, x: Any, rank: int) -> Any:
        place, after, before = torch.empty_like(x), (rank + 1) % comm.size, (rank - 1) % comm.size
        if kind == "Isend Irecv":
            sending = comm.Isend(x, after, 0)
            receiving = comm.Irecv(JoinDummies(place, [sending.dummy]), before, 0)
            sent = comm.Wait(JoinDummiesHandle(sending, [receiving.dummy]))
            return comm.Wait(JoinDummiesHandle(receiving, [sent]))
        if kind == "Isend Recv":
            sending = comm.Isend(x, after, 0)
            y = comm.Recv(JoinDummies(place, [sending.dummy]), before, 0)
            return JoinDummies(y, [comm.Wait(JoinDummiesHandle(sending, [y]))])
        if kind == "Irecv Send":
            receiving = comm.Irecv(JoinDummies(place, [x]), before, 0)
            return comm.Wait(JoinDummiesHandle(receiving, [comm.Send(x, after, 0)]))
        return comm.Recv(JoinDummies(place, [comm.Send(x, after, 0)]), before, 0)

    return Linear(lambda rank, size: (1 << 17,), call, lambda inputs, rank: inputs[rank - 1])


LINEAR: dict[str, Linear] = {
    "Allreduce": Linear(
        lambda rank, size: (4,),
        lambda comm, x, rank: comm.Allreduce(x, mpi4torch.MPI_SUM),
        lambda inputs, rank: sum(inputs),  # type: ignore[arg-type, return-value]
    ),
    "Reduce_": Linear(
        lambda rank, size: (5,),
        lambda comm, x, rank: comm.Reduce_(x, mpi4torch.MPI_SUM, comm.size - 1),
        on_root(lambda size: size - 1, sum),
    ),
    "Bcast_": Linear(
        lambda rank, size: (5,),
        lambda comm, x, rank: comm.Bcast_(x, comm.size // 2),
        lambda inputs, rank: inputs[len(inputs) // 2],
    ),
    "Gather": Linear(
        lambda rank, size: (2, rank + 1, 3),
        lambda comm, x, rank: comm.Gather(x, 1, 0),
        on_root(lambda size: 0, lambda inputs: torch.cat(inputs, 1)),
    ),
    "Allgather": Linear(
        lambda rank, size: (2, rank + 1),
        lambda comm, x, rank: comm.Allgather(x, 1),
        lambda inputs, rank: torch.cat(inputs, 1),
    ),
    "Scatter": Linear(  # who is not the root may bring a tensor of any shape
        lambda rank, size: (4,) if rank else (2, first(size)),
        lambda comm, x, rank: comm.Scatter(x, 1, rank + 1, 0),
        lambda inputs, rank: inputs[0][:, first(rank) : first(rank + 1)],
    ),
    "Alltoall": Linear(
        lambda rank, size: (2, size - rank, first(size)),
        lambda comm, x, rank: comm.Alltoall(x, 1, -1, rank + 1),
        lambda inputs, rank: torch.cat(inputs, 1)[:, :, first(rank) : first(rank + 1)],
    ),
    **{kind: message(kind) for kind in ("Isend Irecv", "Isend Recv", "Irecv Send", "Send Recv")},
}


def test_values_and_gradients_of_linear_operations(subtests: pytest.Subtests, shared_runtimes: Any) -> None:
    """Over all ranks the products of outputs and their gradients add up to those of inputs and theirs."""

    def body(op: Linear, comm: Any, rank: int, size: int) -> None:
        inputs = [values(each, op.shape(each, size)) for each in range(size)]
        x, unused = inputs[rank].clone().requires_grad_(), torch.ones(2, requires_grad=True)
        y = op.call(comm, x, rank)
        expected = op.value(inputs, rank)
        weights = values(size + rank, tuple(y.shape))
        (JoinDummies(y, [unused]) * weights).sum().backward()
        assert x.grad is not None
        assert unused.grad is not None and not unused.grad.any()
        if expected is not None:
            torch.testing.assert_close(y.detach(), expected)
        ours = 0.0 if expected is None else float((expected * weights).sum())
        difference = torch.tensor([ours - float((inputs[rank] * x.grad).sum())])
        assert abs(float(comm.Allreduce(difference, mpi4torch.MPI_SUM))) < 1e-6 * x.numel()

    for name, op in LINEAR.items():
        for kind in KINDS:
            with subtests.test(name=name, kind=kind):
                on_each(shared_runtimes[kind], lambda *args, op=op: body(op, *args))


FOLDS: dict[str, Callable[..., Any]] = {
    "MPI_MAX": np.maximum, "MPI_MIN": np.minimum, "MPI_PROD": np.multiply, "MPI_LAND": np.logical_and,
    "MPI_LOR": np.logical_or, "MPI_LXOR": np.logical_xor, "MPI_BAND": np.bitwise_and, "MPI_BOR": np.bitwise_or,
    "MPI_BXOR": np.bitwise_xor,
}  # fmt: skip


def test_other_operations_have_values_and_no_gradients(subtests: pytest.Subtests, shared_runtimes: Any) -> None:
    def body(name: str, comm: Any, rank: int, size: int) -> None:
        all_values = [np.array([0, 3, 5, each, 2 * each + 1]) for each in range(size)]
        expected = all_values[0]
        for each in all_values[1:]:
            expected = FOLDS[name](expected, each)
        x, op = torch.from_numpy(all_values[rank]), getattr(mpi4torch, name)
        assert comm.Allreduce(x, op).tolist() == expected.astype(int).tolist()
        reduced = comm.Reduce_(x.clone(), op, size - 1)
        assert rank < size - 1 or reduced.tolist() == expected.astype(int).tolist()
        if "_B" not in name:  # those are of ints, which have no gradients
            with pytest.raises(RuntimeError, match="cannot differentiate"):
                comm.Allreduce(x.double().requires_grad_(), op).sum().backward()

    for name in FOLDS:
        with subtests.test(name=name):
            on_each(shared_runtimes[3], lambda *args, name=name: body(name, *args))
    for op in (mpi4torch.MPI_MINLOC, mpi4torch.MPI_MAXLOC, 99):
        with (
            subtests.test(op=op),
            same_workers(shared_runtimes[3]),
            pytest.raises(ValueError, match=f"cannot reduce a tensor by MPI operation {op}"),
        ):
            on_each(shared_runtimes[3], lambda comm, rank, size, op=op: comm.Allreduce(torch.ones(2), op))


def test_what_was_overwritten_cannot_be_differentiated(subtests: pytest.Subtests, shared_runtimes: Any) -> None:
    """Of a leaf torch lets nobody say so; any other tensor tells in the backward pass, on every rank."""

    def body(name: str, comm: Any, rank: int, size: int) -> None:
        x = values(rank, (5,)).requires_grad_() * 1.0
        y = comm.Bcast_(x, 0) if name == "Bcast_" else comm.Reduce_(x, mpi4torch.MPI_SUM, 0)
        with pytest.raises(RuntimeError, match="that Bcast_ or Reduce_ has written into"):
            (x + y).sum().backward()

    for name in ("Bcast_", "Reduce_"):
        for kind in KINDS:
            with subtests.test(name=name, kind=kind):
                on_each(shared_runtimes[kind], lambda *args, name=name: body(name, *args))


def test_in_torchscript(shared_runtimes: Any) -> None:
    def body(comm: Any, rank: int, size: int) -> None:
        def total(x: torch.Tensor, comm: mpi4torch.MPI_Communicator, op: int) -> torch.Tensor:
            return comm.Allreduce(x * 2, op)

        total.__annotations__ = {"x": torch.Tensor, "comm": mpi4torch.MPI_Communicator, "op": int}
        total.__annotations__["return"] = torch.Tensor
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of torch.jit.script
            scripted = torch.jit.script(total)
        x = values(rank, (4,)).requires_grad_()
        y = scripted(x, comm, mpi4torch.MPI_SUM)
        torch.testing.assert_close(y.detach(), 2 * sum(values(each, (4,)) for each in range(size)))
        y.sum().backward()
        assert x.grad is not None and x.grad.tolist() == [2.0 * size] * 4
        alone = mpi4torch.comm_from_mpi4py(SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1))
        assert torch.equal(scripted(x, alone, mpi4torch.MPI_SUM), 2 * x)

    on_each(shared_runtimes[3], body)


def test_communicators_of_mpi4py(shared_runtimes: Any) -> None:
    """One of MPI is what has its methods: one process alone, as MPI sees a worker, or as many as the call has."""

    def of_mpi(rank: int, size: int) -> Any:
        return SimpleNamespace(Get_rank=lambda: rank, Get_size=lambda: size)

    def body(comm: Any, rank: int, size: int) -> None:
        assert mpi4torch.comm_from_mpi4py(of_mpi(rank, size)).size == size
        alone = mpi4torch.comm_from_mpi4py(of_mpi(0, 1))
        assert (alone.rank, alone.size) == (0, 1)
        with pytest.raises(ValueError, match=f"got rank 0 of 7, expected this rank alone, or rank {rank} of {size}"):
            mpi4torch.comm_from_mpi4py(of_mpi(0, 7))
        with pytest.raises(ValueError, match="cannot communicate with rank 1: got a communicator of 1"):
            alone.Send(torch.ones(1), 1, 0)
        x = values(rank, (3,)).requires_grad_()
        for y in (
            alone.Allreduce(x, mpi4torch.MPI_SUM), alone.Gather(x, 0, 0), alone.Allgather(x, 0), alone.Bcast_(x, 0),
            alone.Scatter(x, 0, 3, 0), alone.Alltoall(x, 0, 0, 3), alone.Reduce_(x, mpi4torch.MPI_LAND, 0),
            alone.Recv(JoinDummies(torch.empty_like(x), [alone.Send(x, 0, 1)]), 0, 1),
        ):  # fmt: skip
            assert torch.equal(y, x) and y is not x
            assert torch.equal(torch.autograd.grad(y.sum(), [x])[0], torch.ones_like(x))

    on_each(shared_runtimes[2], body)


def test_it_has_all_names_of_mpi4torch() -> None:
    operations = ("MAX", "MIN", "SUM", "PROD", "LAND", "BAND", "LOR", "BOR", "LXOR", "BXOR", "MINLOC", "MAXLOC")
    others = ("WaitHandle", "JoinDummies", "JoinDummiesHandle", "MPI_Communicator", "COMM_WORLD", "comm_from_mpi4py")
    names = {*(f"MPI_{each}" for each in operations), *others, "deactivate_cuda_aware_mpi_support"}
    assert set(mpi4torch.__all__) == names
    assert mpi4torch.deactivate_cuda_aware_mpi_support() is None  # type: ignore[func-returns-value]
    with pytest.raises(synk.errors.ReentrancyError, match="only be used inside a function"):
        _ = COMM_WORLD.rank
