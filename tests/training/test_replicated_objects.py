"""The program's own objects beside those of the ranks: pull, push and here, what is told, and their lives."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from trainings import (
    F,
    assert_steps_keep_nothing,
    batches,
    differences,
    mlp,
    plain_step,
    rank_states,
    state_of,
    step_and_schedule,
)

import synk

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")


class Gain:
    gain = 1.0

    def __call__(self, module: Any, inputs: Any, output: Any) -> Any:
        return output * self.gain


class Config(dict[str, int]):
    def __getattr__(self, name: str) -> Any:
        return None  # whatever pickle and copy ask for


class Tempered(torch.nn.Module):
    """Has numbers, a buffer that no checkpoint holds, lists, a hook that is an object, and a traced layer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp(1, torch.fx.symbolic_trace(torch.nn.Tanh()), torch.nn.LayerNorm(8), torch.nn.Dropout(0.0))
        self.temperature, self.num_passes, self.gain = 1.0, 0, Gain()
        self.register_buffer("table", torch.ones(2), persistent=False)
        self.options: Any = {"shift": [0.0]}
        self.hidden, self.last, self.config = (torch.zeros(2), torch.ones(2)), None, Config(width=8)
        self.inner[0].register_forward_hook(self.gain)

    def forward(self, x: Any) -> Any:
        self.num_passes += 1
        self.last = x * 2 if torch.is_inference_mode_enabled() else None
        return self.inner(x) / self.temperature * self.table + self.options["shift"][0] + self.hidden[0]


def made() -> tuple[Any, ...]:
    model = Tempered()
    optimizer = torch.optim.Adam(model.parameters(), lr=torch.tensor(0.01, dtype=torch.float64))
    return model, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.9**epoch)


def replicated(rt: synk.Runtime, count: int = 0) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return what ``replicate`` returns, a step, and the program's objects, after so many steps."""
    objects = made()
    rep = synk.torch.replicate(*objects, runtime=rt)
    step = rep.function(step_and_schedule, outputs="avg")
    for x, y in batches(count):
        step(x, y)
    return rep, step, objects


# ----- what the program changes between two steps


def load_weights(model: Any, *others: Any) -> None:
    model.load_state_dict({name: tensor.flip(0) for name, tensor in model.state_dict().items()})


def load_optimizer(model: Any, optimizer: Any, scheduler: Any) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for slots in state["state"].values():
        slots["exp_avg"] *= 0.5
    optimizer.load_state_dict(state)


def add_layer(model: Any, optimizer: Any, scheduler: Any) -> None:
    model.inner.append(torch.nn.Linear(2, 2).to(model.inner[0].weight.dtype))
    for parameter in model.inner[-1].parameters():
        torch.nn.init.ones_(parameter)
    optimizer.param_groups[0]["params"] += model.inner[-1].parameters()


def change_dtype(model: Any, optimizer: Any, scheduler: Any) -> None:
    model.float()  # which writes by .data
    optimizer.state.clear()


def evaluate(model: Any, *others: Any) -> None:
    model.eval()
    model(batches(1)[0][0])
    with torch.inference_mode():
        model(batches(1)[0][0])
    model.train()


TOLD: dict[str, Callable[..., Any]] = {
    "a rate": lambda model, optimizer, scheduler: optimizer.param_groups[0].update(lr=0.1),
    "a scheduler": lambda model, optimizer, scheduler: scheduler.step(),
    "loaded weights": load_weights,
    "loaded moments": load_optimizer,
    "forgotten moments": lambda model, optimizer, scheduler: optimizer.state.clear(),
    "a weight": lambda model, optimizer, scheduler: torch.nn.init.ones_(model.inner[0].weight),
    "frozen": lambda model, optimizer, scheduler: model.inner[0].requires_grad_(False),
    "eval": lambda model, optimizer, scheduler: model.eval(),
    "a number": lambda model, optimizer, scheduler: setattr(model, "temperature", 2.0),
    "another list": lambda model, optimizer, scheduler: setattr(model, "options", {"shift": [0.5]}),
    "a tuple of tensors": lambda model, *others: setattr(model, "hidden", (torch.ones(2), torch.ones(2))),
    "a buffer": lambda model, optimizer, scheduler: model.table.mul_(0.5),
    "another layer": lambda model, optimizer, scheduler: model.inner.append(torch.nn.Tanh()),
    "another layer, in a group": add_layer,
    "a rate that is a tensor": lambda model, optimizer, scheduler: optimizer.param_groups[0]["lr"].fill_(0.02),
    "what no state has": lambda model, optimizer, scheduler: setattr(scheduler, "lr_lambdas", [lambda _: 0.5]),
}
"""What a program may change, and is told of if it does not send it."""

NOTHING: dict[str, Callable[..., Any]] = {
    "nothing": lambda model, optimizer, scheduler: None,
    "an evaluation": evaluate,
    "a number of a layer": lambda model, optimizer, scheduler: setattr(model.inner[3], "p", 0.0),
}
"""What changes nothing but a counter."""

SILENT: dict[str, Callable[..., Any]] = {
    "weights by data": lambda model, optimizer, scheduler: model.inner[0].weight.data.clamp_(-0.2, 0.2),
    "a list in place": lambda model, optimizer, scheduler: model.options["shift"].__setitem__(0, 1.0),
    "gradients": lambda model, optimizer, scheduler: optimizer.zero_grad(),
    "a hook's object": lambda model, optimizer, scheduler: setattr(model.gain, "gain", 3.0),
    "another dtype": change_dtype,
}
"""What it is not told of. All of it is sent."""


def test_what_the_program_changes_is_told_or_sent(subtests: Any, shared_runtimes: Any) -> None:
    for number, (name, change) in enumerate((TOLD | NOTHING | SILENT).items()):
        plain, atol = made(), 1e-4 if change is change_dtype else 1e-11
        rep, step, objects = replicated(shared_runtimes[(1, 2)[bool(number % 4)]])
        with subtests.test(change=name):
            for count, (x, y) in enumerate(batches(4, (8, 7))):
                if count in (1, 3):
                    change(*plain)
                    with rep.here():
                        change(*objects)
                        if count == 1 and name in TOLD:
                            with pytest.raises(ValueError, match=r"the program has changed .*rep\.push\(\)"):
                                step(x, y)
                expected = float(step_and_schedule(*plain, x, y).detach())
                assert abs(float(step(x, y)) - expected) < atol / 10
            states = rank_states(rep)
            assert all(differences(states[0], other) == [] for other in states[1:])
            rep.pull()
            assert differences(states[0], state_of(objects)) == []
            assert differences(state_of(plain), states[0], atol) == []
            assert objects[0].num_passes == plain[0].num_passes


def test_a_copy_that_is_behind_is_not_used(subtests: Any, shared_runtimes: Any) -> None:
    rep, step, (model, optimizer, scheduler) = replicated(shared_runtimes[2], 3)
    x, y = batches(1)[0]
    weight = model.inner[0].weight
    uses: dict[str, Callable[[], Any]] = {
        "forward": lambda: model(x),
        "forward of a layer": lambda: model.inner(x),
        "state_dict": model.state_dict,
        "state_dict of a layer": model.inner.state_dict,
        "step": optimizer.step,
        "the optimizer's state_dict": optimizer.state_dict,
        "a copy": lambda: copy.deepcopy(model),
        "a pickle": lambda: pickle.dumps(model),
        "a captured model": lambda: shared_runtimes[2].function(lambda x: model(x), outputs=None, framework="torch")(x),
        "a captured weight": lambda: shared_runtimes[2].function(lambda x: weight.tolist(), outputs=None)(x),
        "push": rep.push,
    }
    for name, use in uses.items():
        with subtests.test(use=name), pytest.raises(Exception, match=r"rep\.pull\(\)"):
            use()
    scheduler.step()
    with pytest.raises(ValueError, match=r"'last_epoch' of LambdaLR.*rep\.pull\(\).*rep\.push\(\)"):
        step(x, y)
    assert "the program's copy is 3 steps old" in repr(rep)
    with pytest.warns(RuntimeWarning, match=r"pull\(\) has undone .* 'last_epoch' of LambdaLR"):
        rep.pull()
    assert scheduler.last_epoch == rep.num_steps == 3 and "is up to date" in repr(rep)
    with pytest.raises(TypeError, match="missing a required argument: 'y'"):  # which reaches no worker
        step(x)
    for name, use in uses.items():
        if name != "step":
            use()
    step(x, y)


def test_a_body_with_tensors_of_the_program_is_refused(subtests: Any, shared_runtimes: Any) -> None:
    """Where it is built, or where it is called after a change."""
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rep = synk.torch.replicate(model, optimizer, runtime=shared_runtimes[2])
    held: Any = [each.detach().clone() for each in model.parameters()]

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        return plain_step(model, optimizer, x, y) + 0 * len(held)

    run, rows = rep.function(step, outputs="avg"), batches(1)[0]
    run(*rows)
    for held in ([*model.parameters()], {"w": model[2].bias.detach()}, optimizer.param_groups):
        for use in (lambda: run(*rows), lambda: rep.function(step)):
            with (
                subtests.test(held=type(held)),
                pytest.raises(ValueError, match=r"captures '[02]\.\w+' of the program"),
            ):
                use()
    held = [1.0]
    run(*rows)


def test_an_evaluation_changes_nothing(shared_runtimes: Any) -> None:
    """No statistics of a batch norm; a write into a parameter is told."""
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2)), torch.randn(8, 4)
    rep = synk.torch.replicate(model, runtime=shared_runtimes[2])
    bodies = (lambda model, x: model.eval()(x), lambda model, x: model(x), lambda model, x: model[0].weight.zero_())
    evaluate, train, write = (rep.function(body, trains=False, outputs="first") for body in bodies)
    expected = evaluate(x)
    train(x)
    assert torch.equal(evaluate(x), expected)
    with pytest.raises(ValueError, match=r"has written into the parameter '0\.weight'.*rep\.push\(\)"):
        write(x)
    rep.push()
    assert torch.equal(evaluate(x), expected)
    of_none = rep.function(lambda model, x: synk.torch.mean(0 * x.sum(), 0), trains=False, outputs="avg")
    assert torch.isnan(of_none(x))


def test_pull_and_push_change_nothing(shared_runtimes: Any) -> None:
    """Not even gradients that calls have added up, and what is each worker's own, beside what the program changes."""
    changes: dict[int, Callable[[Any, Any], Any]] = {
        1: lambda model, optimizer: model.eval(),
        3: lambda model, optimizer: setattr(model, "gain", 0.5),
        5: lambda model, optimizer: optimizer.param_groups[0].update(lr=0.02),
        7: lambda model, optimizer: torch.nn.init.zeros_(model.inner[0].weight),
    }

    class Own(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.gain = mlp(), 1.0
            self.rng, self.notes, self.hidden = np.random.default_rng(3), [1.0], None

        def forward(self, x: Any) -> Any:
            self.notes.append(float(self.rng.random()) + sum(self.notes[-3:]))
            self.hidden = x.detach() if self.hidden is None else self.hidden + x.detach()
            return self.inner(x) * self.notes[-1] * self.gain + self.hidden.mean(1, keepdim=True)

    def accumulate(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        loss = F.mse_loss(model(x), y)
        loss.backward()
        if len(model.notes) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def built() -> tuple[Any, Any]:
        model = Own()
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    plain, objects = built(), built()
    rep = synk.torch.replicate(*objects, runtime=shared_runtimes[2])
    step = rep.function(accumulate, outputs="avg")
    for number, (x, y) in enumerate(batches(10, (8,))):
        assert differences(float(accumulate(*plain, x, y).detach()), float(step(x, y)), 1e-12) == []
        with rep.here():
            assert objects[0].hidden is None and objects[0].notes == [1.0]
            for each in (plain, objects) if number in changes else ():
                changes[number](*each)
    assert rep.num_steps == 10
    assert all(differences(state_of(plain), state, 1e-10) == [] for state in rank_states(rep))
    rep.pull()
    plain[0].hidden = objects[0].hidden = None
    plain[0].notes, plain[0].rng, objects[0].notes = [2.0], np.random.default_rng(3), [2.0]
    rep.push()  # the program has changed one of them, so all begin again
    x, y = batches(1, (6,))[0]
    assert abs(float(step(x, y)) - float(accumulate(*plain, x, y).detach())) < 1e-12


def test_an_exception_in_here_sends_nothing(shared_runtimes: Any) -> None:
    rep, step, objects = replicated(shared_runtimes[2], 1)
    with pytest.raises(ZeroDivisionError), rep.here():
        load_weights(*objects)
        raise ZeroDivisionError
    with pytest.raises(ValueError, match=r"the program has changed 'weight' of Tempered\.inner\..*rep\.push\(\)"):
        step(*batches(1)[0])
    rep.push()
    step(*batches(1)[0])


# ----- lives


def test_objects_replicated_once_more_go_on(shared_runtimes: Any) -> None:
    """A cell of a notebook that is run again. Another one that has some of them, and is out of date, is not used."""
    plain, objects, data = made(), made(), batches(6)
    expected = [float(step_and_schedule(*plain, *rows).detach()) for rows in data]
    losses: list[float] = []
    others: list[Any] = []
    for start in (0, 2, 4):
        rep = synk.torch.replicate(*objects, runtime=shared_runtimes[2])
        run = rep.function(step_and_schedule)
        losses += [float(run(*rows)) for rows in data[start : start + 2]]
        for other in others:
            with pytest.raises(ValueError, match=r"Pass all objects to one.* call pull\(\) on the other one"):
                other(data[0][0])
        with pytest.raises(synk.errors.SerializationError, match=r"elsewhere call rep\.pull\(\) first"):
            synk.torch.replicate(*objects, runtime=shared_runtimes[2])
        rep.pull()
        again = synk.torch.replicate(objects[0], runtime=shared_runtimes[2])
        others = [again.function(lambda model, x: model(x), trains=False, outputs="gather")]
    assert differences(expected, losses, 1e-12) == []
    assert differences(state_of(plain), state_of(objects), 1e-12) == []


def test_closing_pulls_and_what_is_lost_is_told(runtime: Callable[..., Any]) -> None:
    rt, plain = runtime(2), made()
    _, step, objects = replicated(rt, 4)
    for x, y in batches(4):
        step_and_schedule(*plain, x, y)
    rt.close()
    assert differences(state_of(plain), state_of(objects), 1e-12) == []
    step_and_schedule(*objects, *batches(1)[0])
    with pytest.raises((synk.errors.ClosedError, ValueError)):
        step(*batches(1)[0])


def test_many_steps_take_no_more_memory(shared_runtimes: Any) -> None:
    _, step, _ = replicated(shared_runtimes[2], 3)
    rows = batches(1, (3000,))[0]
    assert_steps_keep_nothing(shared_runtimes[2], lambda: step(*rows))


def test_what_is_dropped_is_freed_on_the_ranks(runtime: Callable[..., Any]) -> None:
    """Also a worker's first one. So is the copy on which one rank checks the first step. Hooks of gradients would keep
    both for ever.
    """

    def count(x: Any) -> int:
        gc.collect()
        found = [each for each in gc.get_objects() if type(each) is torch.nn.Parameter and each.shape == (7, 41)]
        return len(found)

    rt = runtime(2)
    num_parameters = rt.function(count, outputs=None)
    model = torch.nn.Linear(41, 7)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    rep = synk.torch.replicate(model, optimizer, runtime=rt)
    step = rep.function(plain_step)
    for _ in range(3):
        step(torch.ones(8, 41), torch.ones(8, 7))
    assert num_parameters(np.zeros(2)) == [1, 1]
    del step, rep, model, optimizer
    gc.collect()
    assert num_parameters(np.zeros(2)) == [0, 0]
