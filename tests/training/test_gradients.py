"""Collectives and messages that torch differentiates, through real runtimes.

The oracle is torch itself, in one process: every rank knows what all ranks bring, and differentiates the joined
problem.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from support.harness import same_workers

import synk
import synk.torch
from synk.errors import CollectiveMismatch, ReentrancyError

EVERYWHERE = (pytest.param(1, marks=pytest.mark.storm), 2, 3, "inline")  # one worker is as one inline
Tensors = list[torch.Tensor]


def on_each(rt: Any, body: Callable[[int, int], Any]) -> list[Any]:
    """Return ``body(rank, size)`` of every rank; the last one has fewer rows than the others."""

    def run(x: torch.Tensor) -> Any:
        torch.set_num_threads(1)
        return body(synk.comm.rank, synk.comm.world_size)

    return rt.function(run, outputs=None, framework="torch", name="body")(np.zeros(2 * rt.world_size - 1))


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@dataclass(frozen=True)
class Case:
    """A collective: what rank k of n brings, what it calls, and all results from all that is brought."""

    shape: Callable[[int, int], Sequence[int]]
    call: Callable[[torch.Tensor, int, int], torch.Tensor]
    joined: Callable[[Tensors], Tensors]


def shares(xs: Tensors) -> list[float]:
    """Return the weights of an average, for the rows of ``on_each``."""
    num_rows = 2 * len(xs) - 1
    return [len(rows) / num_rows for rows in np.array_split(np.zeros(num_rows), len(xs))]


def average(xs: Tensors) -> torch.Tensor:
    return torch.stack([share * x for share, x in zip(shares(xs), xs)]).sum(0)


def only(root: int, found: torch.Tensor, xs: Tensors, other: torch.Tensor) -> Tensors:
    return [found if rank == root else other for rank in range(len(xs))]


def blocks(x: torch.Tensor, num: int, dim: int) -> Tensors:
    return list(x.chunk(num, dim))


def triangle(n: int) -> int:
    return n * (n + 1) // 2


CASES = {
    "all_reduce sum": Case(
        lambda k, n: (2, 3),
        lambda x, k, n: synk.torch.all_reduce(x, "sum"),
        lambda xs: [torch.stack(xs).sum(0)] * len(xs),
    ),
    "all_reduce avg": Case(
        lambda k, n: (2, 3), lambda x, k, n: synk.torch.all_reduce(x), lambda xs: [average(xs)] * len(xs)
    ),
    "all_reduce of a number": Case(
        lambda k, n: (), lambda x, k, n: synk.torch.all_reduce(x, "sum"), lambda xs: [torch.stack(xs).sum()] * len(xs)
    ),
    "reduce sum": Case(
        lambda k, n: (4,),
        lambda x, k, n: synk.torch.reduce(x, "sum", n - 1),
        lambda xs: only(len(xs) - 1, torch.stack(xs).sum(0), xs, torch.zeros(4)),
    ),
    "reduce avg": Case(
        lambda k, n: (4,),
        lambda x, k, n: synk.torch.reduce(x),
        lambda xs: only(0, average(xs), xs, torch.zeros(4)),
    ),
    "broadcast": Case(
        lambda k, n: (2, 2), lambda x, k, n: synk.torch.broadcast(x, n - 1), lambda xs: [xs[-1]] * len(xs)
    ),
    "gather": Case(
        lambda k, n: (2, k + 1, 2),
        lambda x, k, n: synk.torch.gather(x, 1, n // 2),
        lambda xs: only(len(xs) // 2, torch.cat(xs, 1), xs, torch.zeros(2, 0, 2)),
    ),
    "gather nothing of some": Case(
        lambda k, n: (k, 2),
        lambda x, k, n: synk.torch.gather(x),
        lambda xs: only(0, torch.cat(xs), xs, torch.zeros(0, 2)),
    ),
    "scatter": Case(
        lambda k, n: (2, 2 * n) if k == 0 else (3,),
        lambda x, k, n: synk.torch.scatter(x, -1),
        lambda xs: blocks(xs[0], len(xs), 1),
    ),
    "scatter by sizes": Case(
        lambda k, n: (triangle(n), 2),
        lambda x, k, n: synk.torch.scatter(x, 0, n - 1, sizes=[each + 1 for each in range(n)]),
        lambda xs: list(xs[-1].split([each + 1 for each in range(len(xs))])),
    ),
    "all_gather": Case(
        lambda k, n: (2, 3), lambda x, k, n: synk.torch.all_gather(x, 1), lambda xs: [torch.cat(xs, 1)] * len(xs)
    ),
    "all_gather of unequal lengths": Case(
        lambda k, n: (2, k, 2), lambda x, k, n: synk.torch.all_gather(x, -2), lambda xs: [torch.cat(xs, 1)] * len(xs)
    ),
    "reduce_scatter": Case(
        lambda k, n: (2, 3 * n),
        lambda x, k, n: synk.torch.reduce_scatter(x, dim=1),
        lambda xs: blocks(torch.stack(xs).sum(0), len(xs), 1),
    ),
    "reduce_scatter avg by sizes": Case(
        lambda k, n: (triangle(n) - n, 2),
        lambda x, k, n: synk.torch.reduce_scatter(x, "avg", sizes=list(range(n))),
        lambda xs: list(average(xs).split(list(range(len(xs))))),
    ),
    "all_to_all": Case(
        lambda k, n: (2, 2 * n),
        lambda x, k, n: synk.torch.all_to_all(x, 1, 0),
        lambda xs: [torch.cat(each) for each in zip(*(blocks(x, len(xs), 1) for x in xs))],
    ),
    "all_to_all along one axis": Case(
        lambda k, n: (3, 2 * n),
        lambda x, k, n: synk.torch.all_to_all(x, -1, 1),
        lambda xs: [torch.cat(each, 1) for each in zip(*(blocks(x, len(xs), 1) for x in xs))],
    ),
    "all_to_all of unequal lengths": Case(
        lambda k, n: (triangle(n), 2, k + 1),
        lambda x, k, n: synk.torch.all_to_all(x, 0, 2, sizes=[each + 1 for each in range(n)]),
        lambda xs: [torch.cat(each, 2) for each in zip(*(x.split([each + 1 for each in range(len(xs))]) for x in xs))],
    ),
}


def brought(case: Case, rank: int, size: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    return torch.randn(tuple(case.shape(rank, size)), generator=generator, dtype=torch.float64).requires_grad_()


def loss_of(y: torch.Tensor, rank: int) -> torch.Tensor:
    return (y**3 * torch.arange(1.0, y.numel() + 1, dtype=y.dtype).reshape(y.shape)).sum() * (rank + 1)


def derivatives(losses: torch.Tensor, xs: Tensors) -> tuple[Any, Any]:
    """Return the gradients, and those of a sum over them."""
    first = torch.autograd.grad(losses, xs, create_graph=True, materialize_grads=True)
    penalty = sum((each**2).sum() for each in first)
    assert isinstance(penalty, torch.Tensor)
    return first, torch.autograd.grad(penalty, xs, materialize_grads=True)


@pytest.mark.parametrize("where", EVERYWHERE)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(60)
def test_derivatives_are_those_of_the_joined_problem(shared_runtimes: Any, where: Any, name: str) -> None:
    """Result, gradient and the gradient of a function of the gradient."""
    case = CASES[name]

    def body(rank: int, size: int) -> bool:
        xs = [brought(case, each, size) for each in range(size)]
        ys = [y.to(torch.float64) for y in case.joined(xs)]
        expected = derivatives(sum(loss_of(y, each) for each, y in enumerate(ys)), xs)  # type: ignore[arg-type]
        x = brought(case, rank, size)
        y = case.call(x, rank, size)
        close(y.detach(), ys[rank].detach())
        first, second = derivatives(loss_of(y, rank), [x])
        close(first[0], expected[0][rank])
        close(second[0], expected[1][rank])
        return True

    assert all(on_each(shared_runtimes[where], body))


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.shape(0, 2) == case.shape(1, 2)])
@pytest.mark.sampled(3)
def test_torch_checks_the_gradients_by_differences(shared_runtimes: Any, name: str) -> None:
    """A function of what all ranks bring, which lies on rank 0 alone; the others have zeros, and keep step."""
    case = CASES[name]

    def body(rank: int, size: int) -> bool:
        def value(everything: torch.Tensor) -> torch.Tensor:
            y = case.call(synk.torch.broadcast(everything)[rank], rank, size)
            return synk.torch.reduce(loss_of(y, rank), "sum")

        everything = torch.stack([brought(case, each, size).detach() for each in range(size)]).requires_grad_()
        return torch.autograd.gradcheck(value, [everything]) and torch.autograd.gradgradcheck(value, [everything])

    assert all(on_each(shared_runtimes[2], body))


def test_a_third_derivative_of_what_only_the_root_has(shared_runtimes: Any) -> None:
    """The ranks whose share is nothing have to come to every pass."""

    def body(rank: int, size: int) -> bool:
        x = (torch.arange(3.0) if rank == 0 else torch.zeros(1)).requires_grad_()
        y = synk.torch.gather(synk.torch.scatter(x).sin() ** 2)
        value = y.sum()
        for _ in range(3):
            (value,) = torch.autograd.grad(value.sum(), [x], create_graph=True)
        expected = -4 * torch.sin(2 * torch.arange(3.0)) if rank == 0 else torch.zeros(1)
        torch.testing.assert_close(value.detach(), expected)
        return True

    assert all(on_each(shared_runtimes[3], body))


@pytest.mark.sampled(20)
@pytest.mark.parametrize("framework", [None, "torch"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.complex128, torch.int64])
def test_dtypes_and_functions_without_a_framework(shared_runtimes: Any, framework: Any, dtype: Any) -> None:
    def body(row: Any) -> bool:
        rank = synk.comm.rank
        x = torch.full((2, 2), rank + 1, dtype=dtype).requires_grad_(dtype.is_floating_point or dtype.is_complex)
        for found, expected in (
            (synk.torch.all_reduce(x.T, "sum"), torch.full((2, 2), 3)),
            (synk.torch.all_gather(x), torch.tensor([[1, 1], [1, 1], [2, 2], [2, 2]])),
            (synk.torch.all_to_all(x), torch.tensor([[1, 1], [2, 2]])),
            (synk.torch.broadcast(x, 1), torch.full((2, 2), 2)),
        ):
            assert found.dtype == dtype and torch.equal(found.detach(), expected.to(dtype))
            if x.requires_grad:
                (gradient,) = torch.autograd.grad(found.sum().abs(), [x])
                assert gradient.dtype == dtype and bool(torch.isreal(gradient).all())
        return True

    assert all(shared_runtimes[2].function(body, outputs=None, framework=framework)(np.zeros(2)))


@pytest.mark.parametrize("op", ["prod", "min", "max"])
def test_ops_without_a_gradient_say_so_in_the_backward_pass(shared_runtimes: Any, op: str) -> None:
    rt = shared_runtimes[2]
    calls = {
        "all_reduce": lambda x: synk.torch.all_reduce(x, op),
        "reduce": lambda x: synk.torch.reduce(x, op),
        "reduce_scatter": lambda x: synk.torch.reduce_scatter(x, op),
    }
    for name, call in calls.items():

        def body(rank: int, size: int, call: Any = call) -> None:
            x = torch.tensor([rank + 1.0, 3.0]).requires_grad_()
            y = call(x)
            expected = {"prod": [2.0, 9.0], "min": [1.0, 3.0], "max": [2.0, 3.0]}[op]
            assert y.tolist() in (expected, expected[rank : rank + 1], [0.0, 0.0])
            y.sum().backward()

        with same_workers(rt), pytest.raises(RuntimeError, match=f"cannot differentiate {name}: got op '{op}'"):
            on_each(rt, body)


# ----- who does not come to the backward pass


def test_an_error_in_a_backward_pass_leaves_no_rank_waiting(shared_runtimes: Any) -> None:
    rt = shared_runtimes[3]

    def body(rank: int, size: int) -> None:
        x = torch.ones(2, requires_grad=True)
        y = synk.torch.all_reduce(x, "sum") * 2

        def fail(gradient: torch.Tensor) -> None:
            raise ZeroDivisionError("of one rank")

        if rank == 1:
            y.register_hook(fail)
        y.sum().backward()

    with same_workers(rt), pytest.raises(ZeroDivisionError, match="of one rank"):
        on_each(rt, body)
    assert on_each(rt, lambda rank, size: synk.torch.all_reduce(torch.ones(()), "sum").item()) == [3.0] * 3


@pytest.mark.parametrize("what", ["requires_grad", "unused"])
def test_a_backward_pass_that_only_some_ranks_take_is_an_error(shared_runtimes: Any, what: str) -> None:
    rt = shared_runtimes[2]

    def body(rank: int, size: int) -> None:
        x = torch.ones(2, requires_grad=rank == 0 or what == "unused")
        y = synk.torch.broadcast(x)
        own = torch.ones((), requires_grad=True)
        (own + y.sum() if rank == 0 or what == "requires_grad" else own).backward()

    with same_workers(rt), pytest.raises(CollectiveMismatch, match="rank 1 left the function without joining"):
        on_each(rt, body)


def test_joining_a_dummy_brings_a_rank_to_the_backward_pass(shared_runtimes: Any) -> None:
    def body(rank: int, size: int) -> bool:
        x = torch.ones(2, requires_grad=True)
        y = synk.torch.broadcast(x)
        own = torch.ones((), requires_grad=True)
        (y.sum() if rank == 0 else synk.torch.join_dummies(own, [y])).backward()
        assert own.grad is None or own.grad.item() == 1.0
        assert x.grad is not None
        return x.grad.tolist() == [1.0 - rank] * 2

    assert all(on_each(shared_runtimes[2], body))


def test_dummies_are_tensors_of_any_kind_and_get_zeros(shared_runtimes: Any) -> None:
    def body(rank: int, size: int) -> bool:
        x, a = torch.ones(3, requires_grad=True), torch.ones(2, 2, dtype=torch.float64, requires_grad=True)
        joined = synk.torch.join_dummies(x, [a, torch.ones(5)])
        assert joined.data_ptr() == x.data_ptr()
        assert synk.torch.join_dummies(torch.ones(2), [a]).requires_grad
        first = torch.autograd.grad((joined**2).sum(), [x, a], create_graph=True)
        assert first[0].tolist() == [2.0] * 3 and torch.equal(first[1], torch.zeros_like(a))
        second = torch.autograd.grad(first[0].sum() + first[1].sum(), [x, a], materialize_grads=True)
        return second[0].tolist() == [2.0] * 3 and torch.equal(second[1], torch.zeros_like(a))

    assert on_each(shared_runtimes["inline"], body) == [True]


def test_what_has_no_meaning_is_refused(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    wrong: dict[str, Callable[[torch.Tensor], Any]] = {
        "cannot gather along axis 0: got a tensor of 0 axes": lambda x: synk.torch.gather(x.sum()),
        "cannot all_gather along axis 2: got a tensor of 2 axes": lambda x: synk.torch.all_gather(x, 2),
        "cannot gather along axis 'x'": lambda x: synk.torch.gather(x, "x"),  # type: ignore[arg-type]
        "cannot all_to_all along axis -3": lambda x: synk.torch.all_to_all(x, 0, -3),
        "cannot all_to_all: got length 3 along axis 1, expected a multiple of 2": lambda x: synk.torch.all_to_all(x, 1),
        "cannot reduce_scatter: got length 3": lambda x: synk.torch.reduce_scatter(x, dim=1),
        r"cannot reduce_scatter: got sizes=\[1, 1\] for length 3": lambda x: synk.torch.reduce_scatter(
            x, dim=1, sizes=[1, 1]
        ),
        r"cannot all_to_all: got blocks of shapes \(\d, 1\), \(\d, 1\)": lambda x: synk.torch.all_to_all(
            x[: 1 + synk.comm.rank], 1, 1, sizes=[1, 2]
        ),
        "cannot reduce: got op 'mean'": lambda x: synk.torch.all_reduce(x, "mean"),
        "cannot send a message that is differentiated: got tag=1048576": lambda x: synk.torch.send(x, 0, 1 << 20),
    }
    for text, call in wrong.items():
        with same_workers(rt), pytest.raises(ValueError, match=text):
            on_each(rt, lambda rank, size, call=call: call(torch.ones(2, 3)))  # type: ignore[misc]


def test_arrays_are_refused_and_told_how_they_become_tensors(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    for verb in COLLECTIVES + MESSAGES:
        text = r"by synk\.torch: got a value of type ndarray, expected a tensor"
        with same_workers(rt), pytest.raises(TypeError, match=text):
            rt.function(lambda x, verb=verb: with_tensor(synk.torch, verb, x), outputs=None)(np.ones(4))  # type: ignore[misc]


def test_outside_of_a_function_they_have_no_meaning() -> None:
    for verb in COLLECTIVES + MESSAGES:
        with pytest.raises(ReentrancyError, match="only inside a function"):
            with_tensor(synk.torch, verb, torch.ones(2))


COLLECTIVES = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all")
MESSAGES = ("send", "isend", "recv", "irecv")


def with_tensor(module: Any, verb: str, x: Any) -> Any:
    """Call a collective, or a message with rank 0, with a tensor."""
    if verb in ("recv", "irecv"):
        return getattr(module, verb)(0, like=x)
    return getattr(module, verb)(x, *((0,) if verb in MESSAGES else ()))


@pytest.mark.parametrize("verb", COLLECTIVES + MESSAGES)
def test_synk_comm_names_what_differentiates(shared_runtimes: Any, verb: str) -> None:
    rt = shared_runtimes[2]
    assert callable(getattr(synk.torch, verb))
    with same_workers(rt), pytest.raises(TypeError, match=rf"Use synk\.torch\.{verb}, which autograd follows"):
        on_each(rt, lambda rank, size: with_tensor(synk.comm, verb, torch.ones(2, requires_grad=True)))


# ----- messages


@dataclass(frozen=True)
class Message:
    sender: int
    receiver: int
    tag: int
    factor: float


def program(seed: int, size: int) -> list[list[Message]]:
    """Return rounds of messages, of few tags, so that many are alike."""
    draw = random.Random(seed)
    return [
        [
            Message(draw.randrange(size), draw.randrange(size), draw.randrange(2), draw.uniform(-1, 1))
            for _ in range(2 * size)
        ]
        for _ in range(3)
    ]


def joined_program(rounds: list[list[Message]], xs: Tensors) -> Tensors:
    for messages in rounds:
        received: list[Tensors] = [[x] for x in xs]
        for number, each in enumerate(messages):
            received[each.receiver].append(torch.sin(xs[each.sender] * each.factor) * (number + 1))
        xs = [torch.stack(each).sum(0).tanh() for each in received]
    return xs


def rank_program(rounds: list[list[Message]], x: torch.Tensor, rank: int, draw: random.Random) -> torch.Tensor:
    """Start and wait for everything in an order of this rank's own that the rules allow."""
    for messages in rounds:
        parts, dummies = [x], []
        mine = [(number, each) for number, each in enumerate(messages) if rank in (each.sender, each.receiver)]
        sends = [(number, each) for number, each in mine if each.sender == rank]
        receives = [(number, each) for number, each in mine if each.receiver == rank]
        handles: list[tuple[int, Any]] = []
        while sends or receives:
            if sends and (not receives or draw.random() < 0.5):
                _, each = sends.pop(0)
                handles.append((-1, synk.torch.isend(torch.sin(x * each.factor), each.receiver, each.tag)))
            else:
                number, each = receives.pop(0)
                like = torch.empty_like(x, requires_grad=True)
                handles.append((number, synk.torch.irecv(each.sender, each.tag, like=like)))
        draw.shuffle(handles)
        for number, handle in handles:
            done = synk.torch.wait(handle)
            if number < 0:
                dummies.append(done)
            else:
                parts.append(done * (number + 1))
        x = synk.torch.join_dummies(torch.stack(parts).sum(0).tanh(), dummies)
    return x


@pytest.mark.parametrize("where", EVERYWHERE)
def test_gradients_of_random_programs_of_messages(
    shared_runtimes: Any, where: Any, storm_count: Callable[[int], int]
) -> None:
    """Many messages of one sender, receiver and tag, waited for in any order: each gradient finds its own."""
    count = storm_count(5)

    def body(rank: int, size: int) -> bool:
        for seed in range(count):
            rounds = program(seed, size)
            xs = [torch.linspace(0.1, 0.2 + each, 3, dtype=torch.float64).requires_grad_() for each in range(size)]
            ys = joined_program(rounds, xs)
            expected = torch.autograd.grad(sum((y**2).sum() for y in ys), xs)  # type: ignore[arg-type]
            x = xs[rank].detach().requires_grad_()
            y = rank_program(rounds, x, rank, random.Random(seed * size + rank))
            close(y.detach(), ys[rank].detach())
            (y**2).sum().backward()
            assert x.grad is not None
            close(x.grad, expected[rank])
        return True

    assert all(on_each(shared_runtimes[where], body))


def test_torch_checks_the_gradients_of_messages_by_differences(shared_runtimes: Any) -> None:
    def body(rank: int, size: int) -> bool:
        def value(everything: torch.Tensor) -> torch.Tensor:
            own = synk.torch.broadcast(everything)[rank]
            dummy = synk.torch.send(own.sin(), (rank + 1) % size)
            like = synk.torch.join_dummies(torch.empty_like(own), [dummy])
            y = own * synk.torch.recv((rank - 1) % size, like=like)
            return synk.torch.reduce(loss_of(y, rank), "sum")

        everything = torch.linspace(0, 1, 2 * size, dtype=torch.float64).reshape(size, 2).requires_grad_()
        return torch.autograd.gradcheck(value, [everything])

    assert all(on_each(shared_runtimes[3], body))


@pytest.mark.parametrize("count", [0, 1, 700_001])
def test_messages_of_any_size_and_shape(shared_runtimes: Any, count: int) -> None:
    """The gradient has the sender's shape, whatever that of the receiver."""

    def body(rank: int, size: int) -> bool:
        x = torch.full((count, 1), rank + 1.0, requires_grad=True)
        dummy = synk.torch.send(x, 1 - rank)
        y = synk.torch.recv(1 - rank, like=torch.empty(1, count, requires_grad=True))
        synk.torch.join_dummies((y * (rank + 2)).sum(), [dummy]).backward()
        assert x.grad is not None and torch.equal(y.detach(), torch.full((1, count), 2.0 - rank))
        return torch.equal(x.grad, torch.full((count, 1), 3.0 - rank))

    assert all(on_each(shared_runtimes[2], body))


def test_messages_without_gradients_leave_none_behind(shared_runtimes: Any) -> None:
    def body(rank: int, size: int) -> bool:
        with torch.no_grad():
            weight = torch.ones(2, requires_grad=True)
            synk.torch.send(weight * (rank + 1), 1 - rank, 5)
            y = synk.torch.recv(1 - rank, 5, like=weight)
        synk.torch.send(torch.tensor([rank]), 1 - rank, 5)
        z = synk.torch.recv(1 - rank, 5, like=torch.tensor([0]))
        return not y.requires_grad and y.tolist() == [2.0 - rank] * 2 and z.tolist() == [1 - rank]

    assert all(on_each(shared_runtimes[2], body))


def test_messages_are_differentiated_once(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def body(rank: int, size: int, twice: bool) -> float:
        x = torch.full((), 2.0, requires_grad=True)
        if rank == 0:
            loss = synk.torch.send(x**2, 1)
        else:
            like = synk.torch.join_dummies(torch.empty(()), [x])  # grad goes to what is asked for, and this is
            loss = x * synk.torch.recv(0, like=like) ** 2
        (gradient,) = torch.autograd.grad(loss, [x], create_graph=True)
        if twice:
            torch.autograd.grad(gradient, [x])
        return gradient.item()

    assert on_each(rt, lambda rank, size: body(rank, size, False)) == [64.0, 16.0]
    with same_workers(rt), pytest.raises(RuntimeError, match=r"cannot differentiate a message of synk\.torch twice"):
        on_each(rt, lambda rank, size: body(rank, size, True))


def test_a_gradient_that_the_receiver_does_not_send_is_an_error(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def body(rank: int, size: int) -> None:
        x = torch.ones(2, requires_grad=True)
        if rank == 0:
            synk.torch.send(x, 1, 3).backward()
        else:
            synk.torch.recv(0, 3, like=torch.empty(2))

    with same_workers(rt), pytest.raises(CollectiveMismatch, match=r"cannot finish recv.*tag 1048579.*rank 1 left"):
        on_each(rt, body)


# ----- inside of replicate


def energies(model: Any, x: torch.Tensor, everything: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Return for each row how alike it is to all rows."""
    codes = model(x)
    return torch.tanh(codes @ everything(codes).T).mean(1)


def step(model: Any, optimizer: Any, x: torch.Tensor, everything: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Train by the energies, and by their derivatives with respect to the rows."""
    x = x.clone().requires_grad_()
    energy = energies(model, x, everything)
    (slopes,) = torch.autograd.grad(energy.mean(), [x], create_graph=True)
    loss = energy.mean() + ((len(x) * slopes) ** 2).sum(1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def model_and_optimizer() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.5)


@pytest.mark.parametrize("num_workers", [2, 3])
def test_steps_of_replicate_are_exact_whatever_the_rows(shared_runtimes: Any, num_workers: int) -> None:
    """Each rank's loss is of its rows and all others, and has derivatives in it: 8, 7, and 4 rows."""
    rows = torch.randn(8, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    model, optimizer = model_and_optimizer()
    expected = [step(model, optimizer, rows[:n], lambda codes: codes) for n in (8, 7, 4)]
    parallel, other = model_and_optimizer()
    rep = synk.torch.replicate(parallel, other, runtime=shared_runtimes[num_workers])
    run = rep.function(lambda model, optimizer, x: step(model, optimizer, x, synk.torch.all_gather))
    found = [run(rows[:n]) for n in (8, 7, 4)]
    for a, b in zip([*found, *parallel.parameters()], [*expected, *model.parameters()]):
        close(a.detach(), b.detach())


def test_messages_in_a_step_of_replicate(shared_runtimes: Any) -> None:
    """The mean of all rows' values, by a ring of messages; five rows, so that ranks count differently."""
    rows = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def train(model: Any, optimizer: Any, x: torch.Tensor, mean: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        optimizer.zero_grad()
        codes = model(x)
        loss = ((codes - mean(codes)) ** 3).sum(1).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    def by_messages(codes: torch.Tensor) -> torch.Tensor:
        comm, total = synk.comm, codes.sum(0)
        passing = total
        dummies = []
        for _ in range(len(comm.ranks) - 1):
            dummies.append(synk.torch.send(passing, (comm.rank + 1) % comm.world_size))
            like = torch.empty_like(total, requires_grad=True)
            passing = synk.torch.recv((comm.rank - 1) % comm.world_size, like=like)
            total = total + passing
        return synk.torch.join_dummies(total / comm.total_rows, dummies)

    model, optimizer = model_and_optimizer()
    expected = train(model, optimizer, rows, lambda codes: codes.mean(0))
    parallel, other = model_and_optimizer()
    rep = synk.torch.replicate(parallel, other, runtime=shared_runtimes[3])
    found = rep.function(lambda model, optimizer, x: train(model, optimizer, x, by_messages))(rows)
    for a, b in zip([found, *parallel.parameters()], [expected, *model.parameters()]):
        close(a.detach(), b.detach())
