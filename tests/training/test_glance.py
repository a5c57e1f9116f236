"""Whether a module or an optimizer was changed: a glance must see whatever a fingerprint does. Starts no process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")


class Gain:
    gain = 1.0

    def __call__(self, module: Any, inputs: Any, output: Any) -> Any:
        return output * self.gain


def made() -> tuple[Any, Any]:
    """Return a model and an optimizer with state and a tensor among its numbers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.1))
    model[2].register_forward_hook(Gain())
    model(torch.randn(4, 2)).sum().backward()
    optimizer.step()
    return model, optimizer


def moved(tensor: Any) -> None:
    tensor.data = tensor.data.clone()


def shared(model: Any) -> None:
    model[2].bias = model[0].bias


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "a value": lambda model, _: torch.nn.init.zeros_(model[0].weight),
    "a buffer": lambda model, _: model[1].running_mean.add_(1),
    "a step": lambda _, optimizer: optimizer.step(),
    "memory": lambda model, _: moved(model[0].weight),
    "dtype": lambda model, _: model.double(),
    "a flag": lambda model, _: model[1].eval(),
    "all flags": lambda model, _: model.eval(),
    "frozen": lambda model, _: model[0].weight.requires_grad_(False),
    "another parameter": lambda model, _: setattr(model[0], "weight", torch.nn.Parameter(torch.ones(3, 2))),
    "no parameter": lambda model, _: setattr(model[0], "bias", None),
    "a parameter that is another's": lambda model, _: shared(model),
    "another layer": lambda model, _: model.append(torch.nn.ReLU()),
    "a layer less": lambda model, _: model.pop(2),
    "a new buffer": lambda model, _: model.register_buffer("extra", torch.ones(1)),
    "another table": lambda model, _: model[0].__dict__.update(_parameters=copy.deepcopy(model[0]._parameters)),
    "load": lambda model, _: model.load_state_dict(model.state_dict()),
    "a number": lambda _, optimizer: optimizer.param_groups[0].update(eps=1e-3),
    "a learning rate": lambda _, optimizer: optimizer.param_groups[0]["lr"].mul_(0.5),
    "a new number": lambda _, optimizer: optimizer.param_groups[0].update(mine=1),
    "a group": lambda model, optimizer: optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]}),
    "a parameter less": lambda _, optimizer: optimizer.param_groups[0]["params"].pop(),
    "no state": lambda _, optimizer: optimizer.state.clear(),
    "state": lambda model, optimizer: optimizer.state[model[0].weight]["exp_avg"].add_(1),
    "load the optimizer": lambda _, optimizer: optimizer.load_state_dict(optimizer.state_dict()),
    "an attribute": lambda model, _: setattr(model[1], "momentum", 0.5),
    "a new attribute": lambda model, _: setattr(model[0], "mine", 1),
    "no gradients": lambda _, optimizer: optimizer.zero_grad(),
    "gradients of zero": lambda _, optimizer: optimizer.zero_grad(set_to_none=False),
    "another gradient": lambda model, _: setattr(model[0].weight, "grad", torch.ones(3, 2)),
    "a hook": lambda model, _: model[0].register_forward_hook(Gain()),
    "a hook less": lambda model, _: model[2]._forward_hooks.clear(),
    "a hook's object": lambda model, _: setattr(next(iter(model[2]._forward_hooks.values())), "gain", 2.0),
    "a parameter's hook": lambda model, _: model[0].weight.register_hook(torch.zeros_like),
    "nothing": lambda model, optimizer: None,
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_glance_sees_what_a_fingerprint_sees(what: str) -> None:
    from synk.torch._state import Glance, fingerprint

    objects = made()
    glances = [Glance.of(obj) for obj in objects]
    before = [fingerprint(obj) for obj in objects]
    assert all(glance.is_same() for glance in glances)
    CHANGES[what](*objects)
    is_same = [fingerprint(obj, was) == was for obj, was in zip(objects, before)]
    assert [glance.is_same() for glance in glances] == is_same
    assert all(is_same) == (what == "nothing")


@pytest.mark.parametrize("what", ["a value", "a buffer", "a gradient", "state", "an attribute", "a nested attribute"])
def test_a_fingerprint_sees_what_leaves_no_trace(what: str) -> None:
    from synk.torch._state import fingerprint

    model, optimizer = made()
    model.table, model.tables = torch.ones(2), {"conjugate": [torch.ones(2, dtype=torch.complex64).conj()]}
    tensor = {
        "a value": model[0].weight,
        "a buffer": model[1].running_mean,
        "a gradient": model[0].weight.grad,
        "state": optimizer.state[model[0].weight]["exp_avg"],
        "an attribute": model.table,
        "a nested attribute": model.tables["conjugate"][0],
    }[what]
    before = [fingerprint(obj) for obj in (model, optimizer)]
    assert [fingerprint(obj) for obj in (model, optimizer)] == before
    tensor.data.add_(1)
    assert [fingerprint(obj) for obj in (model, optimizer)] != before
