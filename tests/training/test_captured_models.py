"""What a function captures of torch: an optimizer is refused, a module may be read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import synk
from synk._wire.cell import cell
from synk._worker.held.residents import Reading

torch = pytest.importorskip("torch")


def test_a_closure_over_an_optimizer_is_refused_when_it_is_built(shared_runtimes: Any) -> None:
    model = torch.nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    for build in (shared_runtimes[2].function, synk.function, synk.wrap):
        for fn in (step, lambda x: scheduler.get_last_lr()[0]):
            with pytest.raises(TypeError, match=r"refers to a torch optimizer \(SGD\)") as caught:
                build(fn, framework="torch")
            assert "synk.torch.replicate(model, optimizer)" in str(caught.value)
            assert "synk.resident" in str(caught.value)


def test_a_global_that_becomes_an_optimizer_is_refused_at_the_next_call(shared_runtimes: Any) -> None:
    space: dict[str, Any] = {"tool": 3.0}
    exec("def f(x): return x.sum() * (tool if isinstance(tool, float) else 0)", space)
    f = shared_runtimes[2].function(space["f"], outputs="sum")
    assert f(np.ones(4)) == 12.0
    space["tool"] = torch.optim.SGD(torch.nn.Linear(2, 1).parameters(), lr=0.1)
    with pytest.raises(TypeError, match="refers to a torch optimizer"):
        f(np.ones(4))
    space["tool"] = 2.0
    assert f(np.ones(4)) == 8.0


@pytest.mark.parametrize("kind", [1, 2, "inline"])
def test_a_module_that_is_only_read_is_allowed_and_follows_the_masters(shared_runtimes: Any, kind: Any) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).double().eval()
    predict = shared_runtimes[kind].function(lambda x: model(x), framework="torch", outputs="gather")
    x = torch.randn(6, 3, dtype=torch.float64)
    for _ in range(3):
        with torch.no_grad():
            assert torch.allclose(predict(x).detach(), model(x), rtol=0, atol=1e-12)
            model[0].weight.mul_(0.5)  # is sent


CHANGES = {
    "parameter": lambda model: model[0].weight.detach().mul_(2.0),
    "replaced data": lambda model: setattr(model[0].bias, "data", torch.zeros(4)),
    "batch norm": lambda model: model.train()(torch.ones(4, 3)),
    "in place": lambda model: torch.nn.init.zeros_(model[2].bias),
}


@pytest.mark.parametrize("change", CHANGES)
def test_the_first_call_that_changes_a_captured_module_ends_with_an_error(shared_runtimes: Any, change: str) -> None:
    rt = shared_runtimes[2]
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 2)).eval()
    act, other = CHANGES[change], rt.function(lambda x: x.sum(), outputs="sum")

    def step(x: Any, is_changing: bool) -> Any:
        if is_changing:
            act(model)
        return x.sum()

    f = rt.function(step, bcast_inputs="is_changing", outputs="sum", framework="torch")
    assert float(f(torch.ones(4), False)) == 4.0
    for is_changing in (True, False):  # the copies differ from now on
        with pytest.raises(TypeError, match="of a torch module that it captured") as caught:
            f(torch.ones(4), is_changing)
        assert "synk.torch.replicate" in str(caught.value)
        assert "synk.resident" in str(caught.value)
    assert other(np.ones(4)) == 4.0
    again = rt.function(step, bcast_inputs="is_changing", outputs="sum", framework="torch")
    assert float(again(torch.ones(4), False)) == 4.0


@pytest.mark.parametrize("kind", [2, "inline"])
def test_what_other_functions_and_failed_calls_change_is_not_blamed_on_a_reader(
    shared_runtimes: Any, kind: Any
) -> None:
    rt = shared_runtimes[kind]
    model = torch.nn.Linear(3, 1)
    counter = rt.resident([0])

    def read(x: Any, fails: bool) -> Any:
        if fails:
            torch.nn.init.zeros_(model.weight)
            raise RuntimeError("no")
        return x.sum()

    def train(counter: Any) -> None:
        counter[0] += 1
        torch.nn.init.ones_(model.weight)

    f = rt.function(read, bcast_inputs="fails", outputs="sum", framework="torch")
    g = rt.function(train, bcast_inputs="counter", outputs=None, changes=[counter])
    for _ in range(3):
        assert float(f(torch.ones(4), False)) == float(f(torch.ones(4), False)) == 4.0
        g(counter)
        assert float(f(torch.ones(4), False)) == 4.0
        with pytest.raises(RuntimeError):
            f(torch.ones(4), True)


def test_gradients_of_a_captured_module_may_be_taken(shared_runtimes: Any) -> None:
    model = torch.nn.Linear(3, 1).double()

    def gradient(x: Any) -> Any:
        model.zero_grad()
        model(x).mean().backward()
        return model.weight.grad.clone()

    x = torch.randn(5, 3, dtype=torch.float64)
    found = shared_runtimes[2].function(gradient, framework="torch")(x)
    model(x).mean().backward()
    assert torch.allclose(found, model.weight.grad, rtol=0, atol=1e-14)


def test_what_others_change_is_not_blamed_on_a_reader_however_many_messages_came_between(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.Linear(3, 1)
    read = Reading(lambda: 1, [model], "read")
    for num_messages in (
        1,
        1 + 2**16 + 1,
    ):  # in messages they have 16 bits, and these two look like neighbours
        monkeypatch.setattr(cell, "worker", SimpleNamespace(sequence=num_messages & 0xFFFF, num_messages=num_messages))
        assert read() == 1
        torch.nn.init.zeros_(model.weight)
