"""``rep.save`` and ``rep.load``: a run that was ended and goes on is the run that was never ended, bit for bit.

The oracle is the same training without an end, and for other numbers of workers the loop in plain torch.
"""

from __future__ import annotations

import math
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stateful_models import ALL, Everything, is_alike, rank_states, state_of
from support.harness import PACKAGE_FOLDER, kill_and_wait, pids
from support.models import batches, mlp

import synk

torch = pytest.importorskip("torch")

F = torch.nn.functional
SIZES = (8, 7, 4, 5)
DATA = batches(16, SIZES)


def step(model: Any, optimizer: Any, scheduler: Any, x: Any, y: Any) -> Any:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    return loss


def build(*features: str) -> tuple[Any, Any, Any]:
    torch.manual_seed(3)
    model = Everything(features).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def goes_on(
    runtimes: Sequence[synk.Runtime],
    make: Callable[[], tuple[Any, ...]],
    body: Callable[..., Any],
    path: Path,
    *,
    data: Sequence[Any] = DATA,
    at: int = 9,
    **options: Any,
) -> tuple[list[float], list[float], list[Any], list[Any], Any]:
    """Train with a checkpoint on the way and to the end, then once more from the checkpoint on.

    Return the losses of the second half and the states of the ranks at its end, of both runs; and the second one.
    """
    rep = synk.torch.replicate(*make(), runtime=runtimes[0], **options)
    run = rep.function(body)
    for rows in data[:at]:
        run(*rows)
    saved = rep.save(path, wait=False)
    assert saved is not None
    expected = [float(run(*rows)) for rows in data[at:]]
    states = rank_states(rep)
    saved.result()
    again = synk.torch.replicate(*make(), runtime=runtimes[1], **options)
    resumed = again.function(body)
    resumed(*data[3])  # what was there before counts no more
    again.load(path)
    losses = [float(resumed(*rows)) for rows in data[at:]]
    assert again.num_steps == rep.num_steps == len(data)
    return expected, losses, states, rank_states(again), again


# ----- the same number of workers


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_a_run_goes_on_bit_for_bit(shared_runtimes: Any, reused: Any, tmp_path: Path, workers: int) -> None:
    """With dropout, a batch norm over each worker's own rows, buffers, attributes and generators."""

    def body(*args: Any) -> Any:  # and with the generators of the workers' processes
        return step(*args) + random.random() + np.random.rand() + synk.comm.rng.random()

    runtimes = shared_runtimes[workers], reused(2) if workers == 2 else shared_runtimes[workers]
    make = lambda: build(*ALL, "dropout")  # noqa: E731
    data = batches(16, (9, 10, 7, 8))  # a batch norm wants two rows on each worker
    expected, losses, states, others, again = goes_on(runtimes, make, body, tmp_path / "run.pt", data=data, seed=5)
    assert losses == expected
    assert is_alike(states, others)
    if workers > 1:
        norms = [state["model"]["norm.running_mean"] for state in others]
        assert not torch.equal(norms[0], norms[1])  # each worker has got its own back
    assert is_alike(state_of(again._objects), others[0])  # and the program has those of rank 0


@pytest.mark.parametrize("kind", ["sgd", "rmsprop", "lbfgs", "scaler"])
def test_other_optimizers_go_on_bit_for_bit(shared_runtimes: Any, reused: Any, tmp_path: Path, kind: str) -> None:
    def make() -> tuple[Any, ...]:
        model = mlp(1, torch.nn.Dropout(0.3))
        if kind == "lbfgs":
            return model, torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")
        if kind == "scaler":
            scaler = torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=3)
            return model.float(), torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), scaler
        if kind == "sgd":
            return model, torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)
        return model, torch.optim.RMSprop(model.parameters(), lr=0.01, centered=True)

    def body(model: Any, optimizer: Any, *rest: Any) -> Any:
        *scaler, x, y = rest

        def closure() -> Any:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), y)
            loss.backward()
            return loss

        if kind == "lbfgs":
            return optimizer.step(closure)
        if not scaler:
            loss = closure()
            optimizer.step()
            return loss
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        scaler[0].scale(loss).backward()
        scaler[0].step(optimizer)
        scaler[0].update()
        return loss

    data = [(x.float(), y.float()) for x, y in DATA] if kind == "scaler" else DATA
    runtimes = shared_runtimes[2], reused(2)
    expected, losses, states, others, _ = goes_on(runtimes, make, body, tmp_path / "run.pt", data=data)
    assert losses == expected
    assert is_alike(states, others)


def test_in_the_middle_of_an_accumulation(shared_runtimes: Any, reused: Any, tmp_path: Path) -> None:
    """Gradients that no_sync() has kept back are each worker's own."""

    def make() -> tuple[Any, ...]:
        model = mlp()
        return model, torch.optim.SGD(model.parameters(), lr=0.05)

    def train(runtime: synk.Runtime, path: Path, *, is_first: bool) -> list[Any]:
        rep = synk.torch.replicate(*make(), runtime=runtime)

        @rep.function(bcast_inputs="is_last")
        def body(model: Any, optimizer: Any, x: Any, y: Any, is_last: bool) -> Any:
            loss = F.mse_loss(model(x), y)
            if not is_last:
                with rep.no_sync():
                    loss.backward()
                return loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        data = batches(6, (7,))
        for number, rows in enumerate(data):
            if number == 4:  # one of this group of three was kept back
                rep.save(path) if is_first else rep.load(path)
            if number >= 4 or is_first:
                body(*rows, number % 3 == 2)
        return rank_states(rep)

    path = tmp_path / "run.pt"
    first = train(shared_runtimes[2], path, is_first=True)
    assert is_alike(first, train(reused(2), path, is_first=False))
    with pytest.raises(ValueError, match="have ended with a worker"):  # on other workers they are nobody's
        train(shared_runtimes[3], path, is_first=False)


# ----- another number of workers


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 3), (3, 2)])
def test_another_number_of_workers_is_exact_without_random_numbers(
    shared_runtimes: Any, tmp_path: Path, before: int, after: int
) -> None:
    make = lambda: build("spectral", "counter", "tensor", "number", "list", "shared", "frozen")  # noqa: E731
    runtimes = shared_runtimes[before], shared_runtimes[after]
    _, losses, _, states, again = goes_on(runtimes, make, step, tmp_path / "run.pt")
    plain = make()
    expected = [float(step(*plain, *rows).detach()) for rows in DATA]
    assert max(abs(a - b) for a, b in zip(losses, expected[9:])) <= 1e-12
    assert is_alike(state_of(again._objects), state_of(plain), atol=1e-12)
    assert all(is_alike(states[0], other) for other in states[1:])


# ----- files


def test_a_file_holds_plain_values_and_loads_without_running_code(shared_runtimes: Any, tmp_path: Path) -> None:
    rep = synk.torch.replicate(*build(*ALL, "dropout"), runtime=shared_runtimes[2], seed=7)
    rep.function(step)(*DATA[0])
    rep.save(tmp_path / "run.pt")
    assert os.listdir(tmp_path) == ["run.pt"]
    held = torch.load(tmp_path / "run.pt", weights_only=True)
    assert (held["format"], held["seed"], held["num_steps"], len(held["ranks"])) == (1, 7, 1, 2)
    assert [each["class"] for each in held["objects"]] == ["Everything", "AdamW", "StepLR"]
    own = rep._objects[0].state_dict()
    tensors = held["objects"][0]["state"]["tensors"]  # of a shared weight one
    assert own.keys() - tensors.keys() == {"other.weight"}
    assert all(torch.equal(tensors[name], own[name]) for name in own.keys() & tensors.keys())


class Trap:
    def __reduce__(self) -> Any:
        return os.mkdir, ("trap",)


def test_what_is_no_checkpoint_is_refused_and_runs_nothing(
    shared_runtimes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    rep = synk.torch.replicate(*build("dropout"), runtime=shared_runtimes[2])
    run = rep.function(step)
    run(*DATA[0])
    rep.save("good.pt")
    before = rank_states(rep)
    torch.save({"format": 1, "trap": Trap()}, "trap.pt")
    Path("pickle.pt").write_bytes(pickle.dumps(Trap()))
    Path("empty.pt").write_bytes(b"")
    whole = Path("good.pt").read_bytes()
    Path("cut.pt").write_bytes(whole[: len(whole) // 2])
    flipped = bytearray(whole)
    flipped[whole.index(rep._objects[0].last.weight.detach().numpy().tobytes()[:16])] ^= 1
    Path("flipped.pt").write_bytes(bytes(flipped))
    for name in ("trap.pt", "pickle.pt", "empty.pt", "cut.pt", "flipped.pt"):
        with pytest.raises(ValueError, match=f"cannot load '{name}': got one .*, expected a file that save"):
            rep.load(name)
    torch.save(rep._objects[0].state_dict(), "model.pt")
    torch.save({**rep.state_dict(), "format": 2}, "newer.pt")
    with pytest.raises(ValueError, match="got something else, expected format 1"):
        rep.load("model.pt")
    with pytest.raises(ValueError, match="got format 2, expected format 1"):
        rep.load("newer.pt")
    with pytest.raises(FileNotFoundError):
        rep.load("none.pt")
    assert not Path("trap").exists()
    assert is_alike(before, rank_states(rep))
    assert rep.num_steps == 1


def test_the_state_of_other_objects_is_refused_and_changes_nothing(shared_runtimes: Any) -> None:
    rep = synk.torch.replicate(*build(), runtime=shared_runtimes[2])
    state = rep.state_dict()

    def refused(*objects: Any) -> str:
        other = synk.torch.replicate(*objects, runtime=shared_runtimes[2])
        before = rank_states(other)
        with pytest.raises(ValueError, match="cannot load the state of") as caught:
            other.load_state_dict(state)
        assert is_alike(before, rank_states(other))
        return str(caught.value)

    model, optimizer, _ = build()
    assert "got 3 objects, expected 2 replicated objects" in refused(model, optimizer)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    later = torch.optim.lr_scheduler.StepLR(sgd, 3)
    assert "SGD: got a AdamW, expected a SGD" in refused(model, sgd, later)
    model.last = torch.nn.Linear(6, 3).double()
    optimizer = torch.optim.AdamW(model.parameters())
    text = refused(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3))
    assert "Everything.last.weight: got torch.float64 of shape (2, 6), expected torch.float64 of shape (3, 6)" in text
    model = build()[0]
    model.extra = torch.nn.Linear(1, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    assert "got no tensor 'extra.weight', expected the same names" in refused(model, optimizer, scheduler)
    floats = build()[0].float()
    optimizer = torch.optim.AdamW(floats.parameters())
    assert "expected torch.float32" in refused(floats, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3))


def test_state_dicts_are_copies_and_go_where_the_user_wants(shared_runtimes: Any) -> None:
    rep = synk.torch.replicate(*build("dropout"), runtime=shared_runtimes[2])
    run = rep.function(step)
    run(*DATA[0])
    state = rep.state_dict()
    kept = pickle.loads(pickle.dumps(state))
    expected = [float(run(*rows)) for rows in DATA[1:6]]
    assert is_alike(state["objects"], kept["objects"])  # later steps do not reach it
    for _ in range(2):  # nor what is trained from it
        rep.load_state_dict(state)
        assert [float(run(*rows)) for rows in DATA[1:6]] == expected
    assert is_alike(state["objects"], kept["objects"])


def test_what_the_program_has_changed_is_in_the_file(shared_runtimes: Any, tmp_path: Path) -> None:
    model, optimizer, scheduler = build()
    rep = synk.torch.replicate(model, optimizer, scheduler, runtime=shared_runtimes[2])
    run = rep.function(step)
    run(*DATA[0])
    optimizer.param_groups[0]["lr"] = 0.125
    model.scale = 2.0
    rep.save(tmp_path / "run.pt")
    optimizer.param_groups[0]["lr"] = 0.5
    model.scale = 4.0
    run(*DATA[1])
    model.scale = 8.0  # a change that the load throws away
    rep.load(tmp_path / "run.pt")
    assert (optimizer.param_groups[0]["lr"], model.scale, rep.num_steps) == (0.125, 2.0, 1)
    assert all(state["model"]["scale"] == 2.0 for state in rank_states(rep))
    assert float(run(*DATA[1])) > 0


class Config:
    def __init__(self, width: int) -> None:
        self.width = width
        self.names = ["a"]


class Odd(torch.nn.Module):
    """Attributes of many kinds, of which the last one is no data."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(5, 2).double()
        self.config = Config(3)
        self.array = np.arange(3.0)
        self.half = np.float16(0.5)
        self.dtype, self.shape = torch.bfloat16, torch.Size([2, 3])
        self.nested = {"synk": 1, (1, "b"): [None, {2.5}, b"x", 1j, math.inf]}
        self.parts = [self.linear, self.linear.weight]
        self.torch_rng, self.rng = torch.Generator().manual_seed(1), random.Random(2)
        self.activation = torch.tanh
        self.range = range(3)

    def forward(self, x: Any) -> Any:
        self.config.width += 1
        self.config.names.append("b")
        self.array = self.array * 2 + 1
        return self.activation(self.linear(x)) + torch.rand(1, generator=self.torch_rng) + self.rng.random()


def test_attributes_of_many_kinds_and_what_is_no_data(shared_runtimes: Any, reused: Any, tmp_path: Path) -> None:
    def make() -> tuple[Any, ...]:
        torch.manual_seed(1)
        model = Odd()
        return model, torch.optim.SGD(model.parameters(), lr=0.1), {"epoch": 0}

    def body(model: Any, optimizer: Any, counts: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        counts["epoch"] += 1
        return loss

    objects = make()
    rep = synk.torch.replicate(*objects, runtime=shared_runtimes[2])
    run = rep.function(body)
    run(*DATA[0])
    with pytest.warns(UserWarning, match=r"Odd\['attributes'\]\[0\]\['range'\]: neither data nor code") as caught:
        rep.save(tmp_path / "run.pt")
    assert [each.filename for each in caught if "neither data" in str(each.message)] == [__file__]
    expected = [float(run(*rows)) for rows in DATA[1:5]]
    model, optimizer, counts = make()
    config, first = model.config, model.config.names
    again = synk.torch.replicate(model, optimizer, counts, runtime=reused(2))
    again.load(tmp_path / "run.pt")
    assert model.config is config and config.names is first  # the program's own objects have the new contents
    assert (config.width, first, counts["epoch"]) == (4, ["a", "b"], 1)
    assert (model.half, model.half.dtype, model.dtype, model.shape) == (0.5, np.float16, torch.bfloat16, (2, 3))
    assert model.nested == Odd().nested
    assert model.parts[0] is model.linear and model.parts[1] is model.linear.weight
    resumed = again.function(body)
    assert [float(resumed(*rows)) for rows in DATA[1:5]] == expected
    assert np.array_equal(model.array, objects[0].array)


def test_generators_of_the_program_go_on(shared_runtimes: Any) -> None:
    rep = synk.torch.replicate(*build(), runtime=shared_runtimes[2])
    state = rep.state_dict()
    expected = torch.rand(3).tolist(), np.random.rand(), random.random(), torch.randperm(9).tolist()
    rep.load_state_dict(state)
    assert (torch.rand(3).tolist(), np.random.rand(), random.random(), torch.randperm(9).tolist()) == expected


# ----- faults

OTHER_RANKS = [(0, 0), (1, 0), (1, 1)]


def test_a_load_brings_back_what_was_lost_with_all_workers(runtime: Callable[..., Any], tmp_path: Path) -> None:
    rt = runtime(1)  # of its own: on another one the objects of other tests would be lost, too
    rep = synk.torch.replicate(*build("dropout"), runtime=rt)
    run = rep.function(step)
    run(*DATA[0])
    rep.save(tmp_path / "run.pt")
    expected = [float(run(*rows)) for rows in DATA[1:4]]
    kill_and_wait(*pids(rt))
    with pytest.warns(RuntimeWarning), pytest.raises(synk.errors.WorkerDied, match="is lost"):
        run(*DATA[4])
    rep.load(tmp_path / "run.pt")
    assert [float(run(*rows)) for rows in DATA[1:4]] == expected
    rt.close()
    with pytest.raises(synk.errors.ClosedError):
        rep.save(tmp_path / "late.pt")
    assert os.listdir(tmp_path) == ["run.pt"]


@pytest.mark.parametrize(
    ("before_save", "before_load"), [(0, 1), *(pytest.param(*ranks, marks=pytest.mark.storm) for ranks in OTHER_RANKS)]
)
def test_a_worker_that_was_killed_before_a_save_or_a_load(
    reused: Callable[..., Any], tmp_path: Path, before_save: int, before_load: int
) -> None:
    rt = reused(2)
    rep = synk.torch.replicate(*build("dropout"), runtime=rt)
    run = rep.function(step)
    run(*DATA[0])
    kill_and_wait(pids(rt)[before_save])
    with pytest.warns(RuntimeWarning):
        rep.save(tmp_path / "run.pt")
    expected = [float(run(*rows)) for rows in DATA[1:4]]
    kill_and_wait(pids(rt)[before_load])
    with pytest.warns(RuntimeWarning):
        rep.load(tmp_path / "run.pt")
    assert [float(run(*rows)) for rows in DATA[1:4]] == expected


PROGRAM = '''
"""Trains, from its checkpoint where there is one, and prints the loss of each step."""
import os, sys
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
import synk
from support.models import batches
from test_checkpoints import replicated

path, count = sys.argv[1], int(sys.argv[2])
with synk.fork({workers}, backend="numpy") as runtime:
    rep, step = replicated(runtime)
    if os.path.exists(path):
        rep.load(path)
    data = batches(count)
    while rep.num_steps < count:
        number = rep.num_steps
        print(number, float(step(*data[number])).hex(), flush=True)
        rep.save(path, wait=number % 2 == 0)
'''


def replicated(runtime: synk.Runtime) -> tuple[Any, Any]:
    """Return a network with dropout, and a step of its training."""
    model = mlp(1, torch.nn.Dropout(0.3))
    rep = synk.torch.replicate(model, torch.optim.Adam(model.parameters(), lr=0.01), runtime=runtime)

    @rep.function
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    return rep, step


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("workers", "num_kills"),
    [(1, 1), *(pytest.param(workers, 10, marks=pytest.mark.storm) for workers in (1, 2))],
)
def test_a_program_killed_at_random_goes_on_bit_for_bit(
    shared_runtimes: Any, tmp_path: Path, storm_count: Callable[[int], int], workers: int, num_kills: int
) -> None:
    """After the last kill in this process; after those before it in a program like the one that was killed."""
    here = Path(__file__).resolve().parent
    source = PROGRAM.format(paths=[str(PACKAGE_FOLDER), str(here), str(here.parent)], workers=workers)
    count = 40
    _, step = replicated(shared_runtimes[workers])
    expected = {number: float(step(*rows)).hex() for number, rows in enumerate(batches(count))}

    def started() -> Any:
        command = [sys.executable, "-c", source, str(tmp_path / "run.pt"), str(count)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def losses(text: str) -> dict[int, str]:
        lines = [line.split() for line in text.splitlines(keepends=True) if line.endswith("\n")]
        return {int(number): loss for number, loss in lines}

    found: dict[int, str] = {}
    chance = random.Random(os.urandom(8))
    for _ in range(storm_count(num_kills)):
        program = started()
        line = program.stdout.readline()  # it is up
        time.sleep(chance.random() * 0.15)
        program.send_signal(signal.SIGKILL)
        text, errors = program.communicate()
        assert errors == ""
        for number, loss in losses(line + text).items():
            assert expected[number] == loss, number
            found[number] = loss
    rep, step = replicated(shared_runtimes[workers])
    if os.path.exists(tmp_path / "run.pt"):
        rep.load(tmp_path / "run.pt")
    found |= {number: float(step(*rows)).hex() for number, rows in enumerate(batches(count)) if number >= rep.num_steps}
    assert found == expected
    rep.save(tmp_path / "run.pt")
    assert os.listdir(tmp_path) == ["run.pt"]
