"""Random programs that train random modules, change them between the steps, and are disturbed in the steps.

Each is compared with the same program in plain torch on one process, but for rounding, and with itself undisturbed on
as many workers, bit for bit. ``SYNK_TRAINING_SEED`` and ``SYNK_TRAINING_COUNT`` choose others.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from stateful_models import ALL, Everything, act, body_of, is_alike, rank_states, state_of
from support.harness import kill_and_wait, pids
from support.models import batches

import synk

torch = pytest.importorskip("torch")

FIRST_SEED = int(os.environ.get("SYNK_TRAINING_SEED", "0"))
BEFORE, BEHIND = ("forward", "backward", "reduction"), ("step", "scheduler", "end")
OPTIMIZERS: dict[str, Callable[..., Any]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.005, centered=True),
}


@dataclass
class Program:
    """What is trained, how, and what happens between and in the steps."""

    seed: int
    workers: int
    features: tuple[str, ...]
    optimizer: str
    events: list[tuple[str, Any]]
    faults: dict[int, tuple[str, str, int]] = field(default_factory=dict)

    @staticmethod
    def random(seed: int, *, kills: float) -> Program:
        """Return the program of a seed; ``kills`` is the share of faults that cost the start of a worker."""
        rng = random.Random(seed)
        workers = rng.choice((1, 2, 2, 2, 3)) if kills else rng.choice((1, 2, 2))
        features = tuple(each for each in (*ALL, "dropout") if rng.random() < (0.2 if each == "dropout" else 0.5))
        program = Program(seed, workers, features, rng.choice([*OPTIMIZERS]), [])
        for number in range(rng.randint(3, 7)):
            for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
                program.events.append((rng.choice([*CHANGES]), rng.random()))
            program.events.append(("step", number))
            if rng.random() < 0.4:
                program.faults[number] = program._fault(rng, kills)
        return program

    def _fault(self, rng: random.Random, kills: float) -> tuple[str, str, int]:
        rank = rng.randrange(self.workers)
        if self.workers > 1 and rng.random() < kills:
            action = rng.choice(("kill", "kill", "kill soon"))
            return rng.choice((*BEFORE, *BEHIND)), action, rank
        if rng.random() < 0.2 * bool(kills):
            return rng.choice(BEFORE), "hang", rank
        if rng.random() < 0.3:
            return rng.choice(BEFORE), "interrupt", rank
        return rng.choice((*BEFORE, *BEHIND) if self.workers > 1 else BEFORE), "raise", rank


def _evaluated(model: Any, optimizer: Any, scheduler: Any, x: Any) -> Any:
    return model.last(x).sum(1)


class Run:
    """One program, on a runtime or, without, in plain torch."""

    def __init__(self, program: Program, rt: Any, seen: Counter[str] | None = None) -> None:
        self.program, self.seen = program, Counter() if seen is None else seen
        torch.manual_seed(program.seed)
        self.model = Everything(program.features).double()
        self.optimizer = OPTIMIZERS[program.optimizer]([p for p in self.model.parameters() if p.requires_grad])
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.97)
        self.objects = self.model, self.optimizer, self.scheduler
        self.body = body_of(act)
        self.rep: Any = None
        self.table, self.saved, self.num_groups = self.model.table, None, 1
        if rt is not None:
            self.rep = synk.torch.replicate(*self.objects, sync_batchnorm=True, seed=program.seed, runtime=rt)
            self.step = self.rep.function(self.body, bcast_inputs=("where", "action", "rank"))
            self.evaluate = self.rep.function(_evaluated, trains=False, outputs="gather")
        self.losses: list[float | None] = []

    def go(self, *, is_disturbed: bool) -> dict[str, Any]:
        rows = iter(batches(20, (8, 6, 4, 12, 7)))
        for kind, value in self.program.events:
            if kind == "step":
                fault = self.program.faults.get(value) if is_disturbed else None
                self.seen.update([f"{fault[1]} in {fault[0]}"] if fault else [])
                self.losses.append(self._step(*next(rows), fault))
            else:
                self.seen[kind] += 1
                CHANGES[kind](self, value)
        if self.rep is None:
            return state_of(self.objects)
        states = rank_states(self.rep)
        assert all(is_alike(states[0], other) for other in states[1:]), "ranks differ"
        self.rep.pull()
        assert is_alike(states[0], state_of(self.objects)), "the program's objects are not those of the ranks"
        return states[0]

    def _step(self, x: Any, y: Any, fault: tuple[str, str, int] | None) -> float | None:
        if self.rep is None:
            return float(self.body(*self.objects, x, y, "", "", 0))
        victim = pids(self.rep._runtime)[fault[2]] if fault and fault[1] == "kill soon" else None
        try:
            return self._repeated_step(x, y, fault)
        finally:
            if victim is not None:
                with contextlib.suppress(ProcessLookupError):
                    kill_and_wait(victim)  # nothing that follows is to be hit

    def _repeated_step(self, x: Any, y: Any, fault: tuple[str, str, int] | None) -> float | None:
        while True:
            try:
                return float(
                    self.step(x, y, *(fault or ("", "", 0)), timeout=1.0 if fault and fault[1] == "hang" else None)
                )
            except (synk.errors.SynkError, ArithmeticError, KeyboardInterrupt) as error:
                counted = error.step_counted  # type: ignore[union-attr]
                self.seen["the step counted" if counted else "the step was repeated"] += 1
                if counted:
                    assert fault is None or fault[0] not in BEFORE or fault[1] == "kill soon"
                    return None
                fault = None  # what kills "soon" may come in the repeated step


def _synchronize(run: Run, kind: str) -> None:
    run.table = run.model.table
    if run.rep is not None:
        getattr(run.rep, kind)()


def _save(run: Run, value: float) -> None:
    groups = run.optimizer.param_groups
    run.saved = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict(), len(groups)))


def _load(run: Run, value: float) -> None:
    if run.saved is not None:
        run.model.load_state_dict(run.saved[0])
        if run.saved[2] == len(run.optimizer.param_groups):
            run.optimizer.load_state_dict(copy.deepcopy(run.saved[1]))


def _change_rate(run: Run, value: float) -> None:
    groups = run.optimizer.param_groups
    groups[int(value * len(groups))]["lr"] = 0.002 + 0.01 * value


def _replace_tensor(run: Run, value: float) -> None:
    run.table = run.model.table = torch.full((3,), value, dtype=torch.float64)


def _replace_generator(run: Run, value: float) -> None:
    run.model.rng = np.random.default_rng(int(value * 1000))


def _scale_weights(run: Run, value: float) -> None:
    with torch.no_grad():
        run.model.last.weight.mul_(0.5 + value)


def _add_group(run: Run, value: float) -> None:
    if len(run.optimizer.param_groups) == 1:
        run.optimizer.add_param_group({"params": [run.model.frozen.requires_grad_(True)], "lr": 0.01})


def _change_reference(run: Run, value: float) -> None:
    run.model.train(run.model.training)  # so that the program's objects are up to date
    run.table.mul_(0.5)


def _step_serially(run: Run, value: float) -> None:
    if "dropout" not in run.program.features:
        args = *batches(1, (9,))[0], "", "", 0
        loss = run.body(*run.objects, *args) if run.rep is None else run.step.serial(*args)
        run.losses.append(float(loss))


def _evaluate(run: Run, value: float) -> None:
    x = batches(1, (9,))[0][0]
    wide = torch.cat([x, x[:, :1]], 1)
    out = run.model.last(wide).sum(1).detach() if run.rep is None else run.evaluate(wide)
    run.losses.append(float(out.sum()))


CHANGES: dict[str, Callable[[Run, float], Any]] = {
    "learning rate": _change_rate,
    "save": _save,
    "load": _load,
    "eval": lambda run, value: run.model.eval(),
    "train": lambda run, value: run.model.train(),
    "pull": lambda run, value: _synchronize(run, "pull"),
    "push": lambda run, value: _synchronize(run, "push"),
    "new tensor": _replace_tensor,
    "new number": lambda run, value: setattr(run.model, "scale", 0.5 + value),
    "new list": lambda run, value: setattr(run.model, "notes", [{"number": 7}]),
    "new generator": _replace_generator,
    "tensor in place": lambda run, value: run.model.table.add_(value),
    "buffer in place": lambda run, value: run.model.counter.add_(2),
    "list in place": lambda run, value: run.model.notes.append({"number": -1}),
    "weights in place": _scale_weights,
    "data in place": lambda run, value: run.model.last.weight.data.mul_(0.5 + value),
    "freeze": lambda run, value: run.model.last.bias.requires_grad_(False),
    "thaw": lambda run, value: run.model.last.bias.requires_grad_(True),
    "group": _add_group,
    "reference in place": _change_reference,
    "serial": _step_serially,
    "evaluate": _evaluate,
}


def check(seed: int, runtime_of: Callable[[int], synk.Runtime], seen: Counter[str], *, kills: float) -> None:
    program = Program.random(seed, kills=kills)
    seen.update((f"{program.workers} workers", program.optimizer, *program.features))
    rt = runtime_of(program.workers)
    disturbed = Run(program, rt, seen)
    state = disturbed.go(is_disturbed=True)
    seen.update(programs=1, steps=sum(kind == "step" for kind, _ in program.events), faults=len(program.faults))
    if program.faults:
        clean = Run(program, rt)
        assert is_alike(clean.go(is_disturbed=False), state), f"{program}: the states differ"
        pairs = [pair for pair in zip(clean.losses, disturbed.losses, strict=True) if pair[1] is not None]
        assert all(one == other for one, other in pairs), f"{program}: {clean.losses}, {disturbed.losses}"
    if "dropout" not in program.features:
        plain = Run(program, None)
        expected = plain.go(is_disturbed=False)
        assert is_alike(expected, state, 1e-8), f"{program}: the states differ from those of plain torch"
        for one, other in zip(plain.losses, disturbed.losses, strict=True):
            assert other is None or abs(one - other) <= 1e-8 * max(1.0, abs(one)), f"{program}: {one}, {other}"


@pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")
def test_random_trainings(reused: Callable[..., Any]) -> None:
    """Exceptions and Ctrl-C. Deaths and time limits are of the storm: workers that import torch anew take long."""
    seen, runtime_of = Counter[str](), functools.cache(reused)
    for seed in range(FIRST_SEED + 16, FIRST_SEED + 24):  # which meet steps of both kinds
        check(seed, runtime_of, seen, kills=0.0)
    assert seen["the step was repeated"] > 8
    assert seen["the step counted"] > 2


@pytest.mark.storm
@pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")
def test_thousands_of_random_trainings(reused: Callable[..., Any], storm_count: Callable[[int], int]) -> None:
    seen, runtime_of = Counter[str](), functools.cache(reused)
    failed = {}
    for seed in range(FIRST_SEED, FIRST_SEED + int(os.environ.get("SYNK_TRAINING_COUNT", storm_count(2000)))):
        try:
            check(seed, runtime_of, seen, kills=0.25)
        except Exception as error:  # the others are to be run, too
            failed[seed] = f"{type(error).__name__}: {error}"
            print(f"seed {seed}: {failed[seed]}", flush=True)
        if seed % 50 == 49:
            print(dict(seen), flush=True)
    print(dict(seen))
    assert not failed
