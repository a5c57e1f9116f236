"""Steps of ``replicate`` that run out of memory are taken in slices; against the same loop in plain torch."""

from __future__ import annotations

import copy
import logging
import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.models import batches, mlp

import synk

torch = pytest.importorskip("torch")

F = torch.nn.functional
ROOM_NBYTES = 60_000_000
WIDTH = 1000
NUM_ROWS = 6_401


def limit_memory() -> None:
    """Let this process have little more memory than it has now."""
    with open("/proc/self/statm", encoding="ascii") as file:
        nbytes = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (nbytes + ROOM_NBYTES, resource.RLIM_INFINITY))


def lift_limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)


def wide() -> tuple[Any, Any]:
    """A small model whose activations take 16 KB for each row."""
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(5, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, 2)).double()
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def step(model: Any, optimizer: Any, x: Any, y: Any) -> tuple[Any, Any]:
    """Return the loss, and the norm of the gradients of all rows, by which they are clipped."""
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    return loss, norm


def parameters_of(*objects: Any) -> np.ndarray:
    return torch.cat([each.detach().reshape(-1) for each in objects[0].parameters()]).numpy()


def test_a_step_that_does_not_fit_equals_the_serial_one(runtime: Callable[..., Any], caplog: Any) -> None:
    rt = runtime(2)
    objects = wide()
    serial = copy.deepcopy(objects[0])
    optimizer = torch.optim.Adam(serial.parameters(), lr=0.01)
    rep = synk.torch.replicate(*objects, runtime=rt)
    generator = torch.Generator().manual_seed(5)
    small, large = (torch.randn(count, 5, generator=generator, dtype=torch.float64) for count in (6, NUM_ROWS))
    data = [(x, torch.stack([x.sum(1), x[:, 0] * x[:, 1]], 1)) for x in (small, large, small, large)]
    expected = [[float(each.detach()) for each in step(serial, optimizer, *rows)] for rows in data]
    plain = rep.function(step, name="plain")
    f = rep.function(step, on_oom="slices", name="in slices")
    found = [[float(each) for each in f(*data[0])]]
    rt.function(limit_memory, outputs=None, per_rank=True)()
    with pytest.raises(MemoryError) as caught:
        plain(*data[1])
    assert caught.value.step_counted is False  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING, "synk"):
        found += [[float(each) for each in f(*rows)] for rows in data[1:]]
    assert [each.getMessage().partition(" (")[0] for each in caplog.records] == [
        "'in slices' ran out of memory on a rank"
    ]
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    rt.function(lift_limit, outputs=None, per_rank=True)()  # the allocator may have left nothing below it
    np.testing.assert_allclose(parameters_of(*objects), parameters_of(serial), rtol=0, atol=1e-9)
    copies = [parameters_of(*rep._resident.get(rank).objects) for rank in range(2)]
    assert (copies[0] == copies[1]).all() and rep.num_steps == 4


def two_optimizers(one: Any, other: Any, first: Any, second: Any, x: Any, y: Any) -> Any:
    """Two backward passes, the second with what the first step has changed."""
    first.zero_grad()
    second.zero_grad()
    loss = F.mse_loss(one(x), y)
    loss.backward()
    first.step()
    later = F.mse_loss(other(x) + one(x).detach(), y)
    later.backward()
    second.step()
    return loss + later


def of_tokens(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    """A mean over a number of things that differs from row to row."""
    optimizer.zero_grad()
    mask = x[:, :2] > 0
    loss = synk.torch.mean((((model(x) - y) * mask) ** 2).sum(), mask.sum() + len(x))
    loss.backward()
    optimizer.step()
    return loss


def of_tokens_serial(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    optimizer.zero_grad()
    mask = x[:, :2] > 0
    loss = (((model(x) - y) * mask) ** 2).sum() / (mask.sum() + len(x))
    loss.backward()
    optimizer.step()
    return loss


def of_sums(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    optimizer.zero_grad()
    loss = synk.torch.total(((model(x) - y) ** 2).sum())
    loss.backward()
    optimizer.step()
    return loss


def of_sums_serial(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    optimizer.zero_grad()
    loss = ((model(x) - y) ** 2).sum()
    loss.backward()
    optimizer.step()
    return loss


def with_closure(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    return optimizer.step(closure)


def accumulating(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    """Gradients of several calls add up, and a scheduler's work is done in the body."""
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.param_groups[0]["lr"] *= 0.9
    return F.mse_loss(model(x), y)  # with the new parameters


def some_rows(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    """A layer that only some rows use, so that some slices have no gradient of it."""
    optimizer.zero_grad(set_to_none=True)
    out = model[0](x)
    if bool((x[:, 0] > 1.0).any()):
        out = out + (x[:, :1] > 1.0) * model[2](torch.tanh(out))[:, :1]
    loss = (out**2).mean() + (y**2).mean()
    loss.backward()
    optimizer.step()
    return loss


def adam(model: Any) -> Any:
    return torch.optim.Adam(model.parameters(), lr=0.01)


def with_one(model: Any) -> tuple[Any, ...]:
    return model, adam(model)


CASES: dict[str, tuple[Callable[[], tuple[Any, ...]], Any, Any]] = {
    "clipped": (lambda: with_one(mlp()), lambda *a: step(*a)[0], None),
    "two optimizers": (
        lambda: (lambda one, other: (one, other, adam(one), adam(other)))(mlp(1), mlp(2)), two_optimizers, None,
    ),
    "means over tokens": (lambda: with_one(mlp()), of_tokens, of_tokens_serial),
    "sums": (lambda: with_one(mlp()), of_sums, of_sums_serial),
    "a closure": (
        lambda: (lambda model: (model, torch.optim.LBFGS(model.parameters(), max_iter=3)))(mlp()), with_closure, None,
    ),
    "accumulated": (lambda: with_one(mlp()), accumulating, None),
    "used by some rows": (lambda: with_one(mlp()), some_rows, None),
}  # fmt: skip


@pytest.mark.sampled(20)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("world_size", [1, 3])
def test_steps_in_slices_equal_the_serial_loop(reused: Callable[..., Any], name: str, world_size: int) -> None:
    """In as many slices as were asked for: 3, of rows that do not divide evenly, or of one row."""
    build, body, plain = CASES[name]
    serial, objects = build(), build()
    data = batches(4, (11, 8, 3))
    expected = [float((plain or body)(*serial, *rows).detach()) for rows in data]
    rep = synk.torch.replicate(*objects, runtime=reused(world_size))
    f = rep.function(body, on_oom="slices", name=name)
    found = [float(f(*rows, num_slices=1 if number == 2 else 3)) for number, rows in enumerate(data)]
    np.testing.assert_allclose(found, expected, rtol=1e-9)
    for mine, others in zip(objects, serial, strict=True):
        if isinstance(mine, torch.nn.Module):
            np.testing.assert_allclose(parameters_of(mine), parameters_of(others), rtol=0, atol=1e-9)
    assert rep.num_steps == len(data)


def uneven(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    loss = F.mse_loss(model(x), y)
    for _ in range(1 + int(bool((x[:, 0] == 7.0).any()))):
        loss.backward(retain_graph=True)
    return loss


def talking(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    return F.mse_loss(model(x), y) + float(synk.comm.all_reduce(1.0))


def keeping(model: Any, optimizer: Any, x: Any, y: Any, rep: Any) -> Any:
    with rep.no_sync():
        loss = F.mse_loss(model(x), y)
        loss.backward()
    return loss


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (uneven, "more backward passes on some rows than on others"),
        (talking, "cannot communicate in 'talking'"),
        (keeping, "it ends with gradients that no_sync\\(\\) keeps back"),
    ],
)
def test_what_slices_cannot_do_is_refused_and_put_back(reused: Callable[..., Any], body: Any, message: str) -> None:
    objects = with_one(mlp())
    rep = synk.torch.replicate(*objects, runtime=reused(2))
    run = body if body is not keeping else lambda model, optimizer, x, y: keeping(model, optimizer, x, y, rep)
    f = rep.function(run, on_oom="slices", name=body.__name__)
    before = parameters_of(*objects).copy()
    (x, y), *_ = batches(1)
    x = x.clone()
    x[-1, 0] = 7.0
    with pytest.raises(ValueError, match=message):
        f(x, y, num_slices=2)
    assert (parameters_of(*objects) == before).all() and rep.num_steps == 0
    assert float(rep.function(of_sums)(x, y)) > 0  # the next step works


def test_batch_norms_over_all_ranks_are_refused(reused: Callable[..., Any]) -> None:
    rep = synk.torch.replicate(*with_one(mlp()), runtime=reused(2), sync_batchnorm=True)
    with pytest.raises(ValueError, match="got on_oom='slices' and replicate"):
        rep.function(step, on_oom="slices")
