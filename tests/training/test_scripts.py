"""What programs do beside the plain loop, against the same in plain torch: no difference may be silent."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.models import batches, mlp

import synk

torch = pytest.importorskip("torch")

F = torch.nn.functional


def plain_step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def accumulating_step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def made() -> tuple[Any, Any]:
    model = mlp()
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def serial(objects: Any, step: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *rows: step(*objects, *rows).detach()


def replicated(rt: synk.Runtime) -> Callable[..., Any]:
    return lambda objects, step: synk.torch.replicate(*objects, runtime=rt).function(step)


def same(rt: synk.Runtime, program: Callable[..., list[Any]]) -> None:
    """Run a program, which gets what makes a step of objects and a body, in plain torch and on workers."""
    for expected, found in zip(program(serial), program(replicated(rt)), strict=True):
        assert torch.allclose(torch.as_tensor(found), torch.as_tensor(expected), rtol=0, atol=1e-12)


def values(model: Any) -> list[Any]:
    return [tensor.detach().clone() for tensor in model.state_dict().values()]


# ----- gradients of the master's objects


@pytest.mark.parametrize("is_dropped", [True, False])
def test_gradients_dropped_between_two_calls_are_dropped_on_the_ranks(shared_runtimes: Any, is_dropped: bool) -> None:
    def program(on: Callable[..., Any]) -> list[Any]:
        model, optimizer = objects = made()
        step, losses = on(objects, accumulating_step), []
        for rows in batches(8):
            optimizer.zero_grad(set_to_none=is_dropped)
            losses.append(float(step(*rows)))
        return losses + values(model)

    same(shared_runtimes[2], program)


def test_gradients_of_a_backward_pass_in_the_program_count(shared_runtimes: Any) -> None:
    def program(on: Callable[..., Any]) -> list[Any]:
        model, _ = objects = made()

        def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
            loss = accumulating_step(model, optimizer, x, y)
            optimizer.zero_grad()
            return loss

        run, losses = on(objects, step), []
        for x, y in batches(8):
            losses.append(float(run(x, y)))
            model(x).mean().backward()
        return losses + values(model)

    same(shared_runtimes[2], program)


# ----- what is assigned and written


class Tempered(torch.nn.Module):
    """Has numbers and an object that are no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(1, torch.nn.Tanh(), torch.nn.Dropout(0.0))
        self.temperature = 1.0
        self.num_passes = 0
        self.factors = {"of the output": torch.ones(2)}

    def forward(self, x: Any) -> Any:
        self.num_passes += 1
        return self.inner(x) / self.temperature * self.factors["of the output"]


def test_attributes_of_a_module_reach_the_ranks_and_numbers_come_back(shared_runtimes: Any) -> None:
    def program(on: Callable[..., Any]) -> list[Any]:
        model = Tempered()
        step, losses = on((model, torch.optim.SGD(model.parameters(), lr=0.05)), plain_step), []
        for number, rows in enumerate(batches(8)):
            if number == 3:
                model.temperature = 2.0
            if number == 5:
                model.factors = {"of the output": torch.tensor([1.0, 0.5])}
            if number == 6:
                model.inner[2].p = 1.0
            losses.append(float(step(*rows)))
        return [*losses, *values(model), model.num_passes]

    same(shared_runtimes[2], program)


def test_values_written_through_data_after_a_look_reach_the_ranks(shared_runtimes: Any) -> None:
    def program(on: Callable[..., Any]) -> list[Any]:
        model, _ = objects = made()
        weight = model[0].weight
        step, losses = on(objects, plain_step), []
        for rows in batches(6):
            losses.append(float(step(*rows)))
            _ = model.training  # a look: all that was taken from the model is up to date
            weight.data.mul_(0.9)
        return losses + values(model)

    same(shared_runtimes[2], program)


# ----- hooks


def test_hooks_of_parameters_and_of_optimizers_are_on_the_ranks(shared_runtimes: Any) -> None:
    def program(on: Callable[..., Any]) -> list[Any]:
        model, optimizer = objects = made()
        model[0].weight.register_hook(lambda gradient: gradient * torch.arange(5.0))
        model[2].bias.register_hook(lambda gradient: gradient * 0.5)
        model[2].bias.requires_grad_(False)

        def halve(parameter: Any) -> None:
            parameter.grad.mul_(0.5)

        model[2].weight.register_post_accumulate_grad_hook(halve)

        def clamp(optimizer: Any, args: Any, kwargs: Any) -> None:
            with torch.no_grad():
                for parameter in optimizer.param_groups[0]["params"]:
                    parameter.clamp_(-0.3, 0.3)

        optimizer.register_step_post_hook(clamp)
        step, losses = on(objects, plain_step), []
        for number, rows in enumerate(batches(8)):
            if number == 4:
                model[2].bias.requires_grad_(True)
            losses.append(float(step(*rows)))
        return losses + values(model)

    same(shared_runtimes[2], program)


# ----- ranks that go their own ways


def by_autograd(model: Any, x: Any, y: Any) -> list[Any]:
    return list(torch.autograd.grad(F.mse_loss(model(x), y), list(model.parameters())))


def by_func(model: Any, x: Any, y: Any) -> list[Any]:
    def loss(parameters: Any) -> Any:
        return F.mse_loss(torch.func.functional_call(model, parameters, (x,)), y)

    gradients = torch.func.grad(loss)(dict(model.named_parameters()))
    return [gradient.detach() for gradient in gradients.values()]


@pytest.mark.parametrize("gradients", [by_autograd, by_func])
def test_gradients_that_no_backward_pass_has_summed_are_told(shared_runtimes: Any, gradients: Any) -> None:
    def program(on: Callable[..., Any], average: Callable[..., Any]) -> list[Any]:
        model, _ = objects = made()

        def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
            for parameter, gradient in zip(model.parameters(), gradients(model, x, y)):
                parameter.grad = average(gradient)
            optimizer.step()
            return F.mse_loss(model(x), y)

        run = on(objects, step)
        return [float(run(*rows)) for rows in batches(8)] + values(model)

    rt = shared_runtimes[2]
    with pytest.raises(synk.errors.OpMismatch, match="differs from that on one worker, in its gradients"):
        program(replicated(rt), lambda gradient: gradient)
    same(rt, lambda on: program(on, _unchanged if on is serial else _averaged))


def _unchanged(gradient: Any) -> Any:
    return gradient


def _averaged(gradient: Any) -> Any:
    return synk.comm.all_reduce(gradient, "avg")


def test_a_loss_that_is_a_sum_over_rows(shared_runtimes: Any) -> None:
    def program(on: Callable[..., Any]) -> list[Any]:
        is_serial = on is serial
        model = mlp()
        objects = model, torch.optim.SGD(model.parameters(), lr=0.005)

        def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y, reduction="sum")
            loss = loss if is_serial else synk.torch.total(loss)
            loss.backward()
            optimizer.step()
            return loss

        run = on(objects, step)
        return [float(run(*rows)) for rows in batches(10)] + values(model)

    same(shared_runtimes[2], program)


# ----- modes of the program


def test_autocast_around_a_call_is_refused(shared_runtimes: Any) -> None:
    objects = made()
    step = synk.torch.replicate(*objects, runtime=shared_runtimes[2]).function(plain_step)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ValueError, match=r"inside of torch\.autocast"):
        step(*batches(1)[0])
    step(*batches(1)[0])


def test_tensors_that_the_body_makes_have_the_programs_default_dtype(shared_runtimes: Any) -> None:
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        return torch.tensor(1 / 3) * plain_step(model, optimizer, x, y)

    torch.set_default_dtype(torch.float64)
    try:
        same(shared_runtimes[2], lambda on: [on(made(), step)(*batches(1)[0])])
    finally:
        torch.set_default_dtype(torch.float32)


# ----- models of other kinds


class Graph(torch.nn.Module):
    """Multiplies by a sparse matrix, which is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = torch.nn.Linear(5, 2).double()
        with torch.sparse.check_sparse_tensor_invariants():
            self.register_buffer("adjacency", torch.eye(5).double().to_sparse())

    def forward(self, x: Any) -> Any:
        return self.inner((self.adjacency @ x.T).T)


def test_sparse_buffers_are_replicated_and_sparse_gradients_refused(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def program(on: Callable[..., Any]) -> list[Any]:
        model = Graph()
        step = on((model, torch.optim.SGD(model.parameters(), lr=0.05)), plain_step)
        return [float(step(*rows)) for rows in batches(5)] + [model.state_dict()["adjacency"].to_dense()]

    same(rt, program)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(9, 4, sparse=True, mode="sum"), torch.nn.Linear(4, 2)).double()
    step = replicated(rt)((model, torch.optim.SGD(model.parameters(), lr=0.05)), plain_step)
    with pytest.raises(TypeError, match="got a sparse one, expected dense ones"):
        step(torch.randint(9, (6, 3)), torch.zeros(6, 2, dtype=torch.float64))
    same(rt, program)  # the runtime is whole


# ----- memory


def _resident_nbytes(key: str) -> int:
    """Return a number of this process's status: VmRSS now, or VmHWM, its peak since ``_forget_peak``."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith(key))


def _forget_peak() -> None:
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def large() -> tuple[Any, Any]:
    """Return a model of 75 MB and its optimizer; so large are its parts that what is freed goes back to the system."""
    model = torch.nn.Sequential(*(torch.nn.Linear(3072, 3072, bias=False) for _ in range(2)))
    return model, torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)


def test_a_rank_needs_one_buffer_of_gradients_more_than_a_process_of_its_own(shared_runtimes: Any) -> None:
    """The peaks of steps, above what the process held before there was a model."""
    rt = shared_runtimes[2]

    def alone(x: Any) -> Any:
        before = _resident_nbytes("VmRSS")
        model, optimizer = large()
        _forget_peak()
        for _ in range(2):
            plain_step(model, optimizer, x, x)
        return np.float64(_resident_nbytes("VmHWM") - before)

    def start(x: Any) -> Any:
        gc.collect()
        return np.float64(_resident_nbytes("VmRSS"))

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        _forget_peak()
        plain_step(model, optimizer, x, x)
        return np.float64(_resident_nbytes("VmHWM"))

    x = torch.ones(4, 3072)
    needed = [rt.function(alone, framework="torch", outputs="max")(x) for _ in range(2)][1]  # first torch makes its own
    before = rt.function(start, framework="torch", outputs=None)(x)  # what other tests have left on each rank
    model, optimizer = large()
    nbytes = sum(parameter.nbytes for parameter in model.parameters())
    run = synk.torch.replicate(model, optimizer, runtime=rt).function(step, outputs=None)
    peaks = [run(x) for _ in range(3)][-1]
    slots = 2 * 8 << 20  # in which the ranks exchange parts of the sums
    more = max(peak - held for peak, held in zip(peaks, before, strict=True))
    assert more <= needed + nbytes + slots + (16 << 20)  # the allocator's own
