"""The names of mpi4torch, in functions on workers: what its own tests ask, and what they do not.

Every body computes by itself what it expects; ranks have different values, so that no mistake cancels.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.harness import same_workers

import synk
from synk.extensions import mpi4torch
from synk.extensions.mpi4torch import COMM_WORLD, JoinDummies, JoinDummiesHandle

EVERYWHERE = (pytest.param(1, marks=pytest.mark.storm), 2, 3, "inline")  # one worker is as one inline


def on_each(rt: Any, body: Callable[[Any, int, int], Any]) -> list[Any]:
    """Return ``body(COMM_WORLD, rank, size)`` of every rank."""

    def run(x: np.ndarray) -> Any:
        return body(COMM_WORLD, COMM_WORLD.rank, COMM_WORLD.size)

    return rt.function(run, outputs=None, name="body")(np.zeros(rt.world_size))


@pytest.fixture(params=EVERYWHERE)
def everywhere(request: Any, shared_runtimes: Any) -> Callable[..., None]:
    """Return what runs a body on the ranks of a runtime, each kind in turn; it has to return True."""
    return lambda body: np.testing.assert_equal(set(on_each(shared_runtimes[request.param], body)), {True})


def values(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def leaf(rank: int, *shape: int) -> torch.Tensor:
    return values(rank, *shape).requires_grad_()


def gradient(y: torch.Tensor, x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    (y * factor).sum().backward()
    assert x.grad is not None
    return x.grad


# ----- reductions


def test_allreduce_adds_and_so_does_its_gradient(everywhere: Any) -> None:
    def body(comm: Any, rank: int, size: int) -> bool:
        x = leaf(rank, 4)
        y = comm.Allreduce(x, mpi4torch.MPI_SUM)
        torch.testing.assert_close(y.detach(), sum(values(each, 4) for each in range(size)))
        return torch.equal(gradient(y, x, rank + 1.0), torch.full((4,), size * (size + 1) / 2, dtype=x.dtype))

    everywhere(body)


def test_allreduce_in_torchscript(everywhere: Any) -> None:
    def body(comm: Any, rank: int, size: int) -> bool:
        def total(x: torch.Tensor, comm: mpi4torch.MPI_Communicator, op: int) -> torch.Tensor:
            return comm.Allreduce(x * 2, op)

        total.__annotations__ = {
            "x": torch.Tensor,
            "comm": mpi4torch.MPI_Communicator,
            "op": int,
            "return": torch.Tensor,
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # torch's, of torch.jit.script
            scripted = torch.jit.script(total)
        x = leaf(rank, 4)
        y = scripted(x, comm, mpi4torch.MPI_SUM)
        torch.testing.assert_close(y.detach(), 2 * sum(values(each, 4) for each in range(size)))
        assert torch.equal(gradient(y, x), torch.full((4,), 2.0 * size, dtype=x.dtype))
        alone = mpi4torch.comm_from_mpi4py(SimpleNamespace(Get_rank=lambda: 0, Get_size=lambda: 1))
        assert torch.equal(scripted(x, alone, mpi4torch.MPI_SUM), 2 * x)
        with pytest.raises(RuntimeError, match="cannot differentiate Allreduce: got op 'max'"):
            scripted(x, comm, mpi4torch.MPI_MAX).sum().backward()
        return True

    everywhere(body)


FOLDS: dict[str, Callable[..., Any]] = {
    "MPI_MAX": np.maximum, "MPI_MIN": np.minimum, "MPI_PROD": np.multiply, "MPI_LAND": np.logical_and,
    "MPI_LOR": np.logical_or, "MPI_LXOR": np.logical_xor, "MPI_BAND": np.bitwise_and, "MPI_BOR": np.bitwise_or,
    "MPI_BXOR": np.bitwise_xor,
}  # fmt: skip


@pytest.mark.parametrize("name", FOLDS)
def test_other_operations_have_values_and_no_gradients(shared_runtimes: Any, name: str) -> None:
    fold = FOLDS[name]

    def body(comm: Any, rank: int, size: int) -> bool:
        all_values = [np.array([0, 3, 5, each, 2 * each + 1]) for each in range(size)]
        expected = all_values[0]
        for each in all_values[1:]:
            expected = fold(expected, each)
        x = torch.from_numpy(all_values[rank])
        op = getattr(mpi4torch, name)
        assert comm.Allreduce(x, op).tolist() == expected.astype(int).tolist()
        reduced = comm.Reduce_(x.clone(), op, size - 1)
        assert rank < size - 1 or reduced.tolist() == expected.astype(int).tolist()
        if "_B" in name:  # of ints, which have no gradients
            return True
        x = x.double().requires_grad_()
        with pytest.raises(RuntimeError, match="cannot differentiate"):
            comm.Allreduce(x, op).sum().backward()
        return True

    assert all(on_each(shared_runtimes[3], body))


def test_operations_on_pairs_are_refused(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    for op in (mpi4torch.MPI_MINLOC, mpi4torch.MPI_MAXLOC, 99):
        with same_workers(rt), pytest.raises(ValueError, match=f"cannot reduce a tensor by MPI operation {op}"):
            on_each(rt, lambda comm, rank, size, op=op: comm.Allreduce(torch.ones(2), op))


def test_reduce_sends_its_gradient_to_all(everywhere: Any) -> None:
    def body(comm: Any, rank: int, size: int) -> bool:
        x, root = leaf(rank, 5), size - 1
        y = comm.Reduce_(x, mpi4torch.MPI_SUM, root)
        total = sum(values(each, 5) for each in range(size))
        if rank == root:
            torch.testing.assert_close(y.detach(), total)
            torch.testing.assert_close(x.detach(), total)  # in place
        return torch.equal(gradient(y, x, rank + 1.0), torch.full((5,), float(size), dtype=x.dtype))

    everywhere(body)


@pytest.mark.parametrize("name", ["Reduce_", "Bcast_"])
def test_what_was_overwritten_cannot_be_differentiated(everywhere: Any, name: str) -> None:
    """Of a leaf torch lets nobody say so; any other tensor tells in the backward pass, on every rank."""

    def body(comm: Any, rank: int, size: int) -> bool:
        x = leaf(rank, 5) * 1.0
        y = comm.Bcast_(x, 0) if name == "Bcast_" else comm.Reduce_(x, mpi4torch.MPI_SUM, 0)
        with pytest.raises(RuntimeError, match="that Bcast_ or Reduce_ has written into"):
            (x + y).sum().backward()
        return True

    everywhere(body)


def test_bcast_brings_the_gradients_to_its_root(everywhere: Any) -> None:
    def body(comm: Any, rank: int, size: int) -> bool:
        x, root = leaf(rank, 5), size // 2
        y = comm.Bcast_(x, root)
        assert torch.equal(y.detach(), values(root, 5)) and torch.equal(x.detach(), values(root, 5))
        expected = size * (size + 1) / 2 if rank == root else 0.0
        return torch.equal(gradient(y, x, rank + 1.0), torch.full((5,), expected, dtype=x.dtype))

    everywhere(body)


# ----- blocks along an axis


def test_gather_joins_along_an_axis(everywhere: Any) -> None:
    def body(comm: Any, rank: int, size: int) -> bool:
        x = leaf(rank, 2, rank + 1, 3)
        y = comm.Gather(x, 1, 0)
        if rank == 0:
            assert torch.equal(y.detach(), torch.cat([values(each, 2, each + 1, 3) for each in range(size)], 1))
        return True

    everywhere(body)


def test_gather_scatters_its_gradient(everywhere: Any) -> None:
    def body(comm: Any, rank: int, size: int) -> bool:
        x = leaf(rank, 2, rank + 1, 3)
        y = comm.Gather(x, 1, 0)
        places = torch.arange(y.shape[1], dtype=y.dtype)[None, :, None]
        (y * places).sum().backward()
        start = rank * (rank + 1) // 2
        expected = torch.arange(start, start + rank + 1, dtype=y.dtype)[None, :, None].expand(2, -1, 3)
        return x.grad is not None and torch.equal(x.grad, expected)

    everywhere(body)


def test_allgather_joins_on_every_rank(everywhere: Any) -> None:
    def body(comm: Any, rank: int, size: int) -> bool:
        y = comm.Allgather(values(rank, 2, rank + 1), 1)
        return torch.equal(y, torch.cat([values(each, 2, each + 1) for each in range(size)], 1))

    everywhere(body)


def test_allgather_adds_up_its_gradients(everywhere: Any) -> None:
    def body(comm: Any, rank: int, size: int) -> bool:
        x = leaf(rank, 2, 3)
        found = gradient(comm.Allgather(x, 0), x, rank + 1.0)
        return torch.equal(found, torch.full((2, 3), size * (size + 1) / 2, dtype=x.dtype))

    everywhere(body)


def test_scatter_gives_each_rank_what_it_asks_for(everywhere: Any) -> None:
    """Who is not the root may bring a tensor of any shape."""

    def body(comm: Any, rank: int, size: int) -> bool:
        length = size * (size + 1) // 2
        x = values(0, 2, length) if rank == 0 else torch.zeros(1, dtype=torch.float64)
        start = rank * (rank + 1) // 2
        return torch.equal(comm.Scatter(x, 1, rank + 1, 0), values(0, 2, length)[:, start : start + rank + 1])

    everywhere(body)


def test_scatter_and_gather_undo_each_other(everywhere: Any) -> None:
    def body(comm: Any, rank: int, size: int) -> bool:
        x = values(0, 2, size, 3) if rank == 0 else values(rank, 4)
        y = comm.Gather(comm.Scatter(x, 1, 1, 0), 1, 0)
        return rank > 0 or torch.equal(y, x)

    everywhere(body)


def test_scatter_gathers_its_gradient(everywhere: Any) -> None:
    def body(comm: Any, rank: int, size: int) -> bool:
        x = leaf(rank, 2, size, 3) if rank == 0 else leaf(rank, 4)
        found = gradient(comm.Scatter(x, 1, 1, 0), x, rank + 1.0)
        expected = torch.arange(1.0, size + 1, dtype=x.dtype)[None, :, None].expand(2, -1, 3)
        return torch.equal(found, expected) if rank == 0 else torch.equal(found, torch.zeros_like(x))

    everywhere(body)


def test_alltoall_is_gather_and_scatter(everywhere: Any) -> None:
    def body(comm: Any, rank: int, size: int) -> bool:
        x = values(rank, 2, 1, size, 2)
        return torch.equal(comm.Alltoall(x, 1, 2, 1), comm.Scatter(comm.Gather(x, 1, 0), 2, 1, 0))

    everywhere(body)


def test_alltoall_of_different_lengths_is_gather_and_scatter(everywhere: Any) -> None:
    def body(comm: Any, rank: int, size: int) -> bool:
        x = values(rank, 2, size - rank, size * (size + 1) // 2)
        found = comm.Alltoall(x, 1, -1, rank + 1)
        return torch.equal(found, comm.Scatter(comm.Gather(x, 1, 0), 2, rank + 1, 0))

    everywhere(body)


def test_alltoall_along_one_axis_divides_anew(everywhere: Any) -> None:
    """As if all were joined and divided into other parts, the gradient too."""

    def body(comm: Any, rank: int, size: int) -> bool:
        length = size * (size + 1) // 2
        start = rank * (rank + 1) // 2
        x = torch.arange(start, start + rank + 1, dtype=torch.float64).expand(2, -1).clone().requires_grad_()
        y = comm.Alltoall(x, 1, -1, size - rank)
        begin = sum(size - each for each in range(rank))
        assert y[1].tolist() == list(range(length))[begin : begin + size - rank]
        y.square().sum().backward()
        return x.grad is not None and torch.equal(x.grad, 2 * x.detach())

    everywhere(body)


def test_alltoall_undoes_itself(everywhere: Any) -> None:
    def body(comm: Any, rank: int, size: int) -> bool:
        x = values(rank, 2, 3, 2 * size)
        return torch.equal(comm.Alltoall(comm.Alltoall(x, 1, 2, 2), 2, 1, 3), x)

    everywhere(body)


def test_alltoall_sends_its_gradients_back(everywhere: Any) -> None:
    def body(comm: Any, rank: int, size: int) -> bool:
        x = leaf(rank, 2, 1, size)
        found = gradient(comm.Alltoall(x, 1, 2, 1), x, rank + 1.0)
        return torch.equal(found, torch.arange(1.0, size + 1, dtype=x.dtype).expand(2, 1, -1))

    everywhere(body)


# ----- messages and dummies


def test_dummies_are_part_of_the_graph(everywhere: Any) -> None:
    def body(comm: Any, rank: int, size: int) -> bool:
        x, a, b = leaf(rank, 4), leaf(rank, 2), leaf(rank, 3)
        y = JoinDummies(comm.Allreduce(x, mpi4torch.MPI_SUM), [a, b])
        assert torch.equal(gradient(y, x), torch.full((4,), float(size), dtype=x.dtype))
        return all(each.grad is not None and not each.grad.any() for each in (a, b))

    everywhere(body)


def ring(comm: Any) -> tuple[int, int]:
    """Return the rank after this one, and the one before it."""
    return (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size


@pytest.mark.sampled(20)
@pytest.mark.parametrize("kind", ["Isend Irecv", "Isend Recv", "Irecv Send", "Send Recv"])
def test_gradients_of_messages_go_back_around_the_ring(everywhere: Any, kind: str) -> None:
    """1 MB, which is more than a ring between two ranks holds."""

    def body(comm: Any, rank: int, size: int) -> bool:
        x = leaf(rank, 1 << 17)
        after, before = ring(comm)
        place = torch.empty_like(x)
        if kind == "Isend Irecv":
            sending = comm.Isend(x, after, 0)
            receiving = comm.Irecv(JoinDummies(place, [sending.dummy]), before, 0)
            sent = comm.Wait(JoinDummiesHandle(sending, [receiving.dummy]))
            y = comm.Wait(JoinDummiesHandle(receiving, [sent]))
        elif kind == "Isend Recv":
            sending = comm.Isend(x, after, 0)
            y = comm.Recv(JoinDummies(place, [sending.dummy]), before, 0)
            y = JoinDummies(y, [comm.Wait(JoinDummiesHandle(sending, [y]))])
        elif kind == "Irecv Send":
            receiving = comm.Irecv(JoinDummies(place, [x]), before, 0)
            y = comm.Wait(JoinDummiesHandle(receiving, [comm.Send(x, after, 0)]))
        else:
            y = comm.Recv(JoinDummies(place, [comm.Send(x, after, 0)]), before, 0)
        assert torch.equal(y.detach(), values(before, 1 << 17))
        return torch.equal(gradient(y, x, rank + 1.0), torch.full_like(x, after + 1.0))

    everywhere(body)


# ----- the module


def test_communicators_of_mpi4py(shared_runtimes: Any) -> None:
    """One of MPI is what has its methods: one process alone, as MPI sees a worker, or as many as the call has."""

    def of_mpi(rank: int, size: int) -> Any:
        return SimpleNamespace(Get_rank=lambda: rank, Get_size=lambda: size)

    def body(comm: Any, rank: int, size: int) -> bool:
        assert mpi4torch.comm_from_mpi4py(of_mpi(rank, size)).size == size
        alone = mpi4torch.comm_from_mpi4py(of_mpi(0, 1))
        assert (alone.rank, alone.size) == (0, 1)
        with pytest.raises(ValueError, match=f"got rank 0 of 7, expected this rank alone, or rank {rank} of {size}"):
            mpi4torch.comm_from_mpi4py(of_mpi(0, 7))
        with pytest.raises(ValueError, match="cannot communicate with rank 1: got a communicator of 1"):
            alone.Send(torch.ones(1), 1, 0)
        x = leaf(rank, 3)
        for y in (
            alone.Allreduce(x, mpi4torch.MPI_SUM), alone.Gather(x, 0, 0), alone.Allgather(x, 0), alone.Bcast_(x, 0),
            alone.Scatter(x, 0, 3, 0), alone.Alltoall(x, 0, 0, 3), alone.Reduce_(x, mpi4torch.MPI_LAND, 0),
        ):  # fmt: skip
            assert torch.equal(y, x) and y is not x
            assert torch.equal(torch.autograd.grad(y.sum(), [x])[0], torch.ones_like(x))
        dummy = alone.Send(x, 0, 1)
        y = alone.Recv(JoinDummies(torch.empty_like(x), [dummy]), 0, 1)
        return torch.equal(gradient(y, x, 2.0), torch.full_like(x, 2.0))

    assert all(on_each(shared_runtimes[2], body))


def test_ranks_are_those_of_the_call(shared_runtimes: Any) -> None:
    """One row: one rank; places are counted among those that take part."""
    rt = shared_runtimes[3]
    f = rt.function(lambda x: (COMM_WORLD.rank, COMM_WORLD.size), outputs=None)
    assert f(np.zeros(1)) == [(0, 1), None, None]
    assert f(np.zeros(3)) == [(0, 3), (1, 3), (2, 3)]


def test_the_name_of_mpi4torch_can_be_given_to_it(shared_runtimes: Any) -> None:
    """For modules of others. A linear regression as its examples have: loss and parameters are those of one rank."""

    def fit(comm: Any, rank: int, size: int) -> bool:
        sys.modules["mpi4torch"] = mpi4torch
        try:
            import mpi4torch as other  # type: ignore[import-not-found]
        finally:
            del sys.modules["mpi4torch"]
        x = torch.linspace(0, 2, 101, dtype=torch.float64)
        y = 0.1 + x - 2 * x**2
        rows = torch.arange(len(x)).tensor_split(size)[rank]

        def fitted(loss_of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            parameters = torch.arange(3, dtype=torch.float64).requires_grad_()
            optimizer = torch.optim.LBFGS([parameters], max_iter=10)

            def closure() -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(parameters)
                loss.backward()
                return loss

            optimizer.step(closure)
            return parameters.detach()

        def residual(p: torch.Tensor, rows: Any) -> torch.Tensor:
            return ((p[2] * x[rows] + p[1]) * x[rows] + p[0] - y[rows]).square().sum()

        def over_ranks(p: torch.Tensor) -> torch.Tensor:
            p = other.COMM_WORLD.Allreduce(p, other.MPI_SUM) / size
            return other.COMM_WORLD.Allreduce(residual(p, rows), other.MPI_SUM)

        torch.testing.assert_close(fitted(over_ranks), fitted(lambda p: residual(p, slice(None))), rtol=1e-9, atol=1e-9)
        return True

    assert all(on_each(shared_runtimes[3], fit))


def test_it_has_all_names_of_mpi4torch() -> None:
    operations = ("MAX", "MIN", "SUM", "PROD", "LAND", "BAND", "LOR", "BOR", "LXOR", "BXOR", "MINLOC", "MAXLOC")
    others = ("WaitHandle", "JoinDummies", "JoinDummiesHandle", "MPI_Communicator", "COMM_WORLD", "comm_from_mpi4py")
    names = {*(f"MPI_{each}" for each in operations), *others, "deactivate_cuda_aware_mpi_support"}
    assert set(mpi4torch.__all__) == names
    assert mpi4torch.deactivate_cuda_aware_mpi_support() is None  # type: ignore[func-returns-value]
    with pytest.raises(synk.errors.ReentrancyError, match="only inside a function"):
        _ = COMM_WORLD.rank
