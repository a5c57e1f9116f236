"""The program's own objects beside those of the ranks: what the program changes, what comes back, and their lives."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from trainings import F, assert_steps_keep_nothing, batches, differences, mlp, plain_step, rank_states, state_of

import synk

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")


def made(*layers: Any) -> tuple[Any, Any]:
    model = mlp(1, *layers)
    return model, torch.optim.Adam(model.parameters(), lr=0.01)


def trained(rt: synk.Runtime, count: int = 3) -> tuple[Any, Any, Any, Any]:
    model, optimizer = made()
    rep = synk.torch.replicate(model, optimizer, runtime=rt)
    step = rep.function(plain_step, outputs="avg")
    for x, y in batches(count):
        step(x, y)
    return rep, step, model, optimizer


def saved_and_loaded(value: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


# ----- what the program changes between two steps


class Gain:
    gain = 1.0

    def __call__(self, module: Any, inputs: Any, output: Any) -> Any:
        return output * self.gain


class Tempered(torch.nn.Module):
    """Has numbers, tensors and objects that are no parameters, and a hook that is an object."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(1, torch.nn.Tanh(), torch.nn.LayerNorm(8), torch.nn.Dropout(0.0))
        self.temperature, self.num_passes, self.gain = 1.0, 0, Gain()
        self.table, self.options = torch.ones(2), {"shift": [0.0]}
        self.inner[0].register_forward_hook(self.gain)

    def forward(self, x: Any) -> Any:
        self.num_passes += 1
        return self.inner(x) / self.temperature * self.table + self.options["shift"][0]


def load_weights(model: Any, optimizer: Any) -> None:
    model.load_state_dict({name: tensor.flip(0) for name, tensor in model.state_dict().items()})


CHANGES: dict[str, Callable[[Any, Any], Any]] = {
    "the rate": lambda model, optimizer: optimizer.param_groups[0].update(lr=0.1),
    "weights by data": lambda model, optimizer: model.inner[0].weight.data.clamp_(-0.2, 0.2),
    "loaded weights": load_weights,
    "frozen": lambda model, optimizer: model.inner[0].requires_grad_(False),
    "eval": lambda model, optimizer: model.eval(),
    "a number": lambda model, optimizer: setattr(model, "temperature", 2.0),
    "a tensor in place": lambda model, optimizer: model.table.mul_(0.5),
    "a list in place": lambda model, optimizer: model.options["shift"].__setitem__(0, 1.0),
    "another layer": lambda model, optimizer: model.inner.append(torch.nn.Tanh()),
    "a hook's object": lambda model, optimizer: setattr(model.gain, "gain", 3.0),
    "a gradient's hook": lambda model, optimizer: model.inner[0].weight.register_hook(lambda gradient: gradient * 0),
}


def test_what_the_program_changes_holds_on_all_ranks(subtests: Any, shared_runtimes: Any) -> None:
    for number, (name, change) in enumerate(CHANGES.items()):
        plain, objects = ((model, torch.optim.Adam(model.parameters(), lr=0.01)) for model in (Tempered(), Tempered()))
        rep = synk.torch.replicate(*objects, runtime=shared_runtimes[(1, 2)[bool(number % 4)]])
        run = rep.function(plain_step, outputs="avg")
        with subtests.test(change=name):
            for count, (x, y) in enumerate(batches(7, (8, 7))):
                if count in (2, 4):
                    change(*plain)
                    rep.pull()
                    change(*objects)
                    rep.push()
                expected = float(plain_step(*plain, x, y).detach())
                assert abs(float(run(x, y)) - expected) < 1e-12
            states = rank_states(rep)
            assert all(differences(states[0], other) == [] for other in states[1:])
            rep.pull()
            assert differences(states[0], state_of(objects)) == []
            assert differences(state_of(plain), states[0], 1e-11) == []
            assert objects[0].num_passes == plain[0].num_passes


def test_both_sides_changed_is_an_error_and_push_or_pull_says_which_counts(shared_runtimes: Any) -> None:
    rep, step, model, _ = trained(shared_runtimes[2], 0)
    x, y = batches(1)[0]
    weight = model[0].weight  # taken before the ranks take steps
    step(x, y)
    torch.nn.init.zeros_(weight)
    with pytest.raises(ValueError, match=r"cannot bring Sequential up to date: it was changed in the master, .*pull"):
        step(x, y)
    rep.push()
    expected = F.mse_loss(copy.deepcopy(model)(x), y)
    assert abs(float(step(x, y)) - float(expected.detach())) < 1e-12
    rep.pull()
    torch.nn.init.constant_(weight, 0.25)
    step(x, y)
    assert differences(*rank_states(rep)) == []


# ----- what comes back


def test_whoever_looks_finds_it_up_to_date(shared_runtimes: Any) -> None:
    """The live mirror; ``pull()`` does the same for a program that asks."""
    plain = made()
    for x, y in batches(3):
        plain_step(*plain, x, y)
    for look in (lambda model: model.state_dict(), lambda model: saved_and_loaded(model).state_dict()):
        model = trained(shared_runtimes[2])[2]
        assert differences(dict(look(plain[0])), dict(look(model)), 1e-12) == []


def test_a_state_dict_goes_into_a_plain_model_and_back(shared_runtimes: Any) -> None:
    rep, step, model, optimizer = trained(shared_runtimes[2], 5)
    rep.pull()
    kept = saved_and_loaded({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    plain = made()
    plain[0].load_state_dict(kept["model"])
    plain[1].load_state_dict(copy.deepcopy(kept["optimizer"]))  # it would step in these very tensors
    data = batches(10)[5:]
    expected = [float(plain_step(*plain, x, y).detach()) for x, y in data]
    assert differences(expected, [float(step(x, y)) for x, y in data], 1e-12) == []
    rep.pull()
    model.load_state_dict(kept["model"])
    optimizer.load_state_dict(kept["optimizer"])
    rep.push()
    assert differences(expected, [float(step(x, y)) for x, y in data], 1e-12) == []


# ----- lives


def test_objects_replicated_once_more_go_on(shared_runtimes: Any) -> None:
    """A cell of a notebook that is run again; a function of the first ones would train what no object follows."""
    plain, objects, data = made(), made(), batches(6)
    expected = [float(plain_step(*plain, *rows).detach()) for rows in data]
    losses: list[float] = []
    before: Any = None
    for start in (0, 2, 4):
        rep = synk.torch.replicate(*objects, runtime=shared_runtimes[2])
        run = rep.function(plain_step)
        if start:
            with pytest.raises(ValueError, match="got objects that were replicated once more"):
                before(*data[0])
        losses += [float(run(*rows)) for rows in data[start : start + 2]]
        before = run
    assert differences(expected, losses, 1e-12) == []
    rep.pull()
    assert differences(state_of(plain), state_of(objects), 1e-12) == []


def test_after_the_runtime_objects_are_ordinary_and_what_is_lost_is_told(runtime: Callable[..., Any]) -> None:
    rt = runtime(2)
    _, step, model, optimizer = trained(rt, 4)
    plain = made()
    for x, y in batches(4):
        plain_step(*plain, x, y)
    rt.close()
    assert type(model) is torch.nn.Sequential
    assert differences(state_of(plain), state_of((model, optimizer)), 1e-12) == []
    plain_step(model, optimizer, *batches(1)[0])
    with pytest.raises(synk.errors.ClosedError):
        step(*batches(1)[0])


def test_many_steps_take_no_more_memory(shared_runtimes: Any) -> None:
    _, step, _, _ = trained(shared_runtimes[2])
    rows = batches(1)[0]
    assert_steps_keep_nothing(shared_runtimes[2], lambda: step(*rows))


def test_what_is_dropped_is_freed_on_the_ranks(shared_runtimes: Any) -> None:
    """So is the copy on which one rank checks the first step. Hooks of gradients would keep both for ever."""

    def count(x: Any) -> int:
        gc.collect()
        found = [each for each in gc.get_objects() if type(each) is torch.nn.Parameter and each.shape == (7, 41)]
        return len(found)

    num_parameters = shared_runtimes[2].function(count, outputs=None)
    model = torch.nn.Linear(41, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rep = synk.torch.replicate(model, optimizer, runtime=shared_runtimes[2])
    step = rep.function(plain_step)
    for _ in range(3):
        step(torch.ones(8, 41), torch.ones(8, 7))
    assert num_parameters(np.zeros(2)) == [1, 1]
    del step, rep, model, optimizer
    gc.collect()
    assert num_parameters(np.zeros(2)) == [0, 0]
