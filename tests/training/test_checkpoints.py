"""``rep.save`` and ``rep.load``: a run that was ended and goes on is the run that was never ended, bit for bit.

The oracle is the same training without an end, and for other numbers of workers the loop in plain torch.
"""

from __future__ import annotations

import copy
import os
import pickle
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import PACKAGE_FOLDER, kill_and_wait, pids
from trainings import (
    ALL,
    Everything,
    F,
    batches,
    closure_step,
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
DATA = batches(7, (9, 8, 7, 10))  # a batch norm wants two rows on each worker


def step_with_draws(*args: Any) -> Any:
    """Draws from the generators of the worker's process, too."""
    return step_and_schedule(*args) + random.random() + np.random.rand() + synk.comm.rng.random()


def scaled_step(model: Any, optimizer: Any, scaler: Any, x: Any, y: Any) -> Any:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x.float()), y.float())
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    return loss


def build(*features: str) -> tuple[Any, Any, Any]:
    torch.manual_seed(3)
    model = Everything(features).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)


def build_and_use(*features: str) -> tuple[Any, Any, Any]:
    """The model keeps a tensor with its graph (the spectral norm), as after an evaluation in the program."""
    model, *others = build(*features)
    model(DATA[0][0])
    return model, *others


def with_lbfgs() -> tuple[Any, ...]:
    model = mlp(1, torch.nn.Dropout(0.3))
    return model, torch.optim.LBFGS(model.parameters(), 0.5, max_iter=4, line_search_fn="strong_wolfe")


def with_scaler() -> tuple[Any, ...]:
    model = mlp(1, torch.nn.Dropout(0.3)).float()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    return model, optimizer, torch.amp.GradScaler("cpu", init_scale=2.0**4, growth_interval=3)


def goes_on(
    runtimes: Sequence[synk.Runtime], make: Callable[[], tuple[Any, ...]], body: Callable[..., Any], path: Path
) -> tuple[list[float], list[float], list[Any], list[Any]]:
    """Train with a checkpoint on the way and to the end, then once more from the checkpoint on.

    Return the losses of the second half and the states of the ranks at its end, of both runs.
    """
    rep = synk.torch.replicate(*make(), runtime=runtimes[0], seed=5, sync_batchnorm=True)
    run = rep.function(body, outputs="avg")
    for rows in DATA[:4]:
        run(*rows)
    saved = rep.save(path, wait=False)
    assert saved is not None
    expected = [float(run(*rows)) for rows in DATA[4:]]
    states = rank_states(rep)
    saved.result()
    again = synk.torch.replicate(*(objects := make()), runtime=runtimes[1], sync_batchnorm=True)
    resumed = again.function(body, outputs="avg")
    resumed(*DATA[3])  # what was there before counts no more, as the seed: the file has one
    again.load(path)
    losses = [float(resumed(*rows)) for rows in DATA[4:]]
    assert again.num_steps == rep.num_steps == len(DATA)
    others = rank_states(again)
    again.pull()
    assert differences(others[0], state_of(objects)) == []  # the program has those of rank 0
    return expected, losses, states, others


def test_a_run_goes_on_bit_for_bit(subtests: Any, shared_runtimes: Any, reused: Any, tmp_path: Path) -> None:
    """With dropout, a batch norm of all rows, buffers, generators of the processes; on other workers."""
    makes: dict[str, tuple[Callable[[], tuple[Any, ...]], Any]] = {
        "everything": (
            lambda: build_and_use("spectral", "batch norm", "shared", "frozen", "conv", "dropout"), step_with_draws
        ),
        "lbfgs": (with_lbfgs, closure_step),
        "scaler": (with_scaler, scaled_step),
    }  # fmt: skip
    for name, (make, body) in makes.items():
        for workers in (1, 3, 2) if name == "everything" else (2,):
            with subtests.test(objects=name, workers=workers):
                runtimes = shared_runtimes[workers], reused(2) if workers == 2 else shared_runtimes[workers]
                expected, losses, states, others = goes_on(runtimes, make, body, tmp_path / "run.pt")
                assert losses == expected and differences(states, others) == []


def test_another_number_of_workers_is_exact_without_random_numbers(
    subtests: Any, shared_runtimes: Any, tmp_path: Path
) -> None:
    make = lambda: build("spectral", "shared", "frozen")  # noqa: E731
    plain = make()
    serial = [float(step_and_schedule(*plain, *rows).detach()) for rows in DATA][4:]
    for before, after in [(1, 2), (3, 2)]:
        with subtests.test(before=before, after=after):
            runtimes = shared_runtimes[before], shared_runtimes[after]
            _, losses, _, states = goes_on(runtimes, make, step_and_schedule, tmp_path / "run.pt")
            assert differences(serial, losses, 1e-12) == []
            assert differences(state_of(plain), states[0], 1e-12) == []
            assert all(differences(states[0], other) == [] for other in states[1:])


# ----- files


def test_a_file_holds_plain_values_and_loads_without_running_code(shared_runtimes: Any, tmp_path: Path) -> None:
    model, optimizer, scheduler = build(*ALL, "dropout")
    rep = synk.torch.replicate(model, optimizer, scheduler, runtime=shared_runtimes[2], seed=7)
    rep.function(step_and_schedule)(*DATA[0])
    rep.save(tmp_path / "run.pt")
    assert os.listdir(tmp_path) == ["run.pt"]
    held = torch.load(tmp_path / "run.pt", weights_only=True)
    assert (held["format"], held["seed"], held["num_steps"], len(held["ranks"])) == (2, 7, 1, 2)
    assert held["classes"] == ["Everything", "AdamW", "StepLR"]
    rep.pull()
    assert differences(dict(held["objects"][0]), dict(model.state_dict())) == []
    plain = build(*ALL, "dropout")
    for obj, state in zip(plain, held["objects"]):  # of a program without synk
        obj.load_state_dict(state)
    assert plain[2].last_epoch == 1
    scheduler.T_max = np.float64(3.0)  # schedulers hold what the program gives them
    rep.push()
    with pytest.raises(TypeError, match=r"cannot save Everything, AdamW, StepLR: a state_dict holds what torch\.load"):
        rep.save(tmp_path / "run.pt")
    assert os.listdir(tmp_path) == ["run.pt"]


class Trap:
    def __reduce__(self) -> Any:
        return os.mkdir, ("trap",)


def test_what_is_no_checkpoint_is_refused_and_runs_nothing(
    shared_runtimes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model, optimizer, scheduler = build("dropout")
    rep = synk.torch.replicate(model, optimizer, scheduler, runtime=shared_runtimes[2])
    rep.function(step_and_schedule)(*DATA[0])
    rep.save("good.pt")
    rep.pull()
    before = rank_states(rep)
    torch.save({"format": 1, "trap": Trap()}, "trap.pt")
    Path("pickle.pt").write_bytes(pickle.dumps(Trap()))
    whole = Path("good.pt").read_bytes()
    Path("cut.pt").write_bytes(whole[: len(whole) // 2])
    flipped = bytearray(whole)
    flipped[whole.index(model.last.weight.detach().numpy().tobytes()[:16])] ^= 1
    Path("flipped.pt").write_bytes(bytes(flipped))
    for name in ("trap.pt", "pickle.pt", "cut.pt", "flipped.pt"):
        with pytest.raises(ValueError, match=f"cannot load '{name}': got one .*, expected a file that save"):
            rep.load(name)
    torch.save({**rep.state_dict(), "format": 3}, "newer.pt")
    with pytest.raises(ValueError, match="got format 3, expected format 2"):
        rep.load("newer.pt")
    assert not Path("trap").exists()
    assert differences(before, rank_states(rep)) == [] and rep.num_steps == 1


def test_the_state_of_other_objects_is_refused_and_changes_nothing(subtests: Any, shared_runtimes: Any) -> None:
    trained = synk.torch.replicate(*build(), runtime=shared_runtimes[2])
    trained.function(step_and_schedule)(*DATA[0])
    state = trained.state_dict()
    model, optimizer, scheduler = build()
    wider = build()[0]
    wider.last = torch.nn.Linear(6, 3).double()
    of_wider = torch.optim.AdamW(wider.parameters(), 0.1)
    cases = {
        "got one of Everything, AdamW, StepLR, expected one of Everything, AdamW": (model, optimizer),
        "got one of Everything, AdamW, StepLR, expected one of Everything, SGD, StepLR": (
            model, torch.optim.SGD(model.parameters(), 0.1), scheduler
        ),
        "size mismatch for last.weight": (wider, of_wider, scheduler),
    }  # fmt: skip
    for text, others in cases.items():
        with subtests.test(text=text):
            other = synk.torch.replicate(*others, runtime=shared_runtimes[2])
            before = rank_states(other)
            with pytest.raises(ValueError, match=f"(?s)cannot load (the|a) state of.*{text}"):
                other.load_state_dict(state)
            assert differences(before, rank_states(other)) == []


def test_state_dicts_are_copies_and_hold_what_the_program_has_sent(shared_runtimes: Any) -> None:
    """Also the generators of the program, which go on."""
    model, optimizer, scheduler = build("dropout")
    rep = synk.torch.replicate(model, optimizer, scheduler, runtime=shared_runtimes[2])
    run = rep.function(step_and_schedule)
    run(*DATA[0])
    with rep.here():
        optimizer.param_groups[0]["lr"] = 0.125
        with pytest.raises(ValueError, match=r"the program has changed 'lr' of group 0 of AdamW.*rep\.push\(\)"):
            rep.state_dict()
    state = rep.state_dict()
    drawn, kept = (torch.rand(3).tolist(), np.random.rand(), random.random()), pickle.loads(pickle.dumps(state))
    expected = [float(run(*rows)) for rows in DATA[1:6]]
    for _ in range(2):  # neither later steps nor what is trained from it reach it
        rep.load_state_dict(state)
        assert (torch.rand(3).tolist(), np.random.rand(), random.random()) == drawn
        assert (optimizer.param_groups[0]["lr"], rep.num_steps) == (0.125, state["num_steps"])
        assert [float(run(*rows)) for rows in DATA[1:6]] == expected
    assert differences(state["objects"], kept["objects"]) == []


# ----- faults


def test_a_load_brings_back_what_was_lost_with_all_workers(runtime: Callable[..., Any], tmp_path: Path) -> None:
    rt = runtime(1)  # of its own: on another one the objects of other tests would be lost, too
    objects = build("dropout")
    rep = synk.torch.replicate(*objects, runtime=rt)
    run = rep.function(step_and_schedule)
    run(*DATA[0])
    rep.pull()
    kept = copy.deepcopy(objects[0].state_dict())
    rep.save(tmp_path / "run.pt")
    expected = [float(run(*rows)) for rows in DATA[1:4]]
    kill_and_wait(*pids(rt))
    with pytest.raises(synk.errors.WorkerDied, match="is lost"):
        run(*DATA[4])
    rep.push()  # the program's own brings back what it was at the last pull
    held = rank_states(rep)[0][0]
    assert differences(dict(kept), {name: held[name] for name in kept}) == []
    rep.load(tmp_path / "run.pt")
    assert [float(run(*rows)) for rows in DATA[1:4]] == expected
    rt.close()
    with pytest.raises(synk.errors.ClosedError):
        rep.save(tmp_path / "late.pt")
    assert os.listdir(tmp_path) == ["run.pt"]


PROGRAM = '''
"""Trains, from its checkpoint where there is one, and prints the loss of each step."""
import os, sys
sys.path[:0] = {paths!r}
import torch
torch.set_num_threads(1)
import synk
from trainings import batches
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
    return rep, rep.function(plain_step)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("workers", "num_kills"),
    [(1, 1), pytest.param(2, 20, marks=pytest.mark.storm)],
)
def test_a_program_killed_at_random_goes_on_bit_for_bit(
    shared_runtimes: Any, tmp_path: Path, storm_count: Callable[[int], int], workers: int, num_kills: int
) -> None:
    """After the last kill in this process; after those before it in a program like the one that was killed."""
    here, count = Path(__file__).resolve().parent, 40
    source = PROGRAM.format(paths=[str(PACKAGE_FOLDER), str(here), str(here.parent)], workers=workers)
    _, step = replicated(shared_runtimes[workers])
    expected = {number: float(step(*rows)).hex() for number, rows in enumerate(batches(count))}
    found: dict[int, str] = {}
    chance = random.Random(os.urandom(8))
    for _ in range(storm_count(num_kills)):
        program = subprocess.Popen(
            [sys.executable, "-c", source, str(tmp_path / "run.pt"), str(count)],
            env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
        assert program.stdout is not None
        lines = [program.stdout.readline() for _ in range(chance.randrange(1, 20))]  # then it is in the midst of a step
        program.send_signal(signal.SIGKILL)
        text, errors = program.communicate()
        assert errors == ""
        for line in (*lines, *text.splitlines(keepends=True)):
            number, _, loss = line.partition(" ")
            if line.endswith("\n"):
                found[int(number)] = loss.strip()
    assert {number: expected[number] for number in found} == found
    rep, step = replicated(shared_runtimes[workers])
    if os.path.exists(tmp_path / "run.pt"):
        rep.load(tmp_path / "run.pt")
    found |= {number: float(step(*rows)).hex() for number, rows in enumerate(batches(count)) if number >= rep.num_steps}
    assert found == expected
    rep.save(tmp_path / "run.pt")
    assert os.listdir(tmp_path) == ["run.pt"]
