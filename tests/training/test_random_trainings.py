"""Random programs that train random modules, change them between the steps, and are disturbed in the steps.

Each is compared with the same program in plain torch on one process, but for rounding, and with itself undisturbed on
as many workers, bit for bit. ``SYNK_TRAINING_SEED`` chooses others.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import random
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from support.harness import kill_and_wait, pids
from trainings import (
    ALL,
    BEFORE,
    BEHIND,
    OPTIMIZERS,
    Everything,
    batches,
    differences,
    disturbed_step,
    rank_states,
    state_of,
)

import synk

torch = pytest.importorskip("torch")

FIRST_SEED = int(os.environ.get("SYNK_TRAINING_SEED", "0"))
AFTER_ALL = tuple(place for place in BEHIND if place != "inside")


@dataclass
class Program:
    """What is trained, how, and what happens between and in the steps."""

    seed: int
    workers: int
    features: tuple[str, ...]
    optimizer: str
    events: list[tuple[str, Any]] = field(default_factory=list)
    faults: dict[int, tuple[str, str, int]] = field(default_factory=dict)

    @property
    def is_in_the_file(self) -> bool:
        """Whether a checkpoint has all that is trained: no numbers, and no buffers that are not persistent."""
        kinds = {kind for kind, _ in self.events}
        return not {"number", "counter"} & {*self.features} and not {"new number", "buffer in place"} & kinds

    @staticmethod
    def random(seed: int) -> Program:
        """Return the program of a seed."""
        rng = random.Random(seed)
        workers = rng.choice((1, 2, 2, 2, 3))
        features = tuple(each for each in (*ALL, "dropout") if rng.random() < (0.2 if each == "dropout" else 0.5))
        program = Program(seed, workers, features, rng.choice([*OPTIMIZERS]))
        for number in range(rng.randint(3, 7)):
            for _ in range(rng.choice((0, 0, 1, 1, 2, 3))):
                program.events.append((rng.choice([*CHANGES]), rng.random()))
            program.events.append(("step", number))
            if rng.random() < 0.4:
                program.faults[number] = program._fault(rng)
        return program

    def _fault(self, rng: random.Random) -> tuple[str, str, int]:
        rank = rng.randrange(self.workers)
        if self.workers > 1 and rng.random() < 0.25:  # these cost the start of a worker
            action = rng.choice(("kill", "kill", "kill soon"))
            return rng.choice((*BEFORE, *AFTER_ALL)), action, rank
        if rng.random() < 0.2:
            return rng.choice(BEFORE), "hang", rank
        if rng.random() < 0.3:
            return rng.choice(BEFORE), "interrupt", rank
        return rng.choice((*BEFORE, *AFTER_ALL) if self.workers > 1 else BEFORE), "raise", rank


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
        self.rep: Any = None
        self.saved: Any = None
        if rt is not None:
            self.rt = rt
            self.rep = synk.torch.replicate(*self.objects, sync_batchnorm=True, seed=program.seed, runtime=rt)
            # The check of the first step would run the fault as well, and nobody knows when that kill comes.
            has_late_kill = any(action == "kill soon" for _, action, _ in program.faults.values())
            is_checked: dict[str, Any] = {"outputs": "avg"} if program.seed % 4 or has_late_kill else {}
            self.step = self.rep.function(disturbed_step, bcast_inputs=("where", "action", "rank"), **is_checked)
            self.evaluate = self.rep.function(_evaluated, trains=False, outputs="gather")
        self.losses: list[float | None] = []

    def go(self, *, is_disturbed: bool) -> list[Any]:
        rows = iter(batches(20, (8, 6, 4, 12, 7)))
        for kind, value in self.program.events:
            if kind == "step":
                fault = self.program.faults.get(value) if is_disturbed else None
                self.seen.update([f"{fault[1]} in {fault[0]}"] if fault else [])
                self.losses.append(self._step(*next(rows), fault))
            else:
                self.seen[kind] += 1
                is_here = self.rep is not None and kind not in ("serial", "evaluate", "synk")
                with self.rep.here() if is_here else contextlib.nullcontext():
                    CHANGES[kind](self, value)
        if self.rep is None:
            return state_of(self.objects)
        states = rank_states(self.rep)
        assert all(differences(states[0], other) == [] for other in states[1:]), "ranks differ"
        self.rep.pull()
        assert differences(states[0], state_of(self.objects)) == [], "the program's objects are not those of the ranks"
        return states[0]

    def _step(self, x: Any, y: Any, fault: tuple[str, str, int] | None) -> float | None:
        if self.rep is None:
            return float(disturbed_step(*self.objects, x, y))
        victim = pids(self.rt)[fault[2]] if fault and fault[1] == "kill soon" else None
        try:
            return self._repeated_step(x, y, fault)
        finally:
            if victim is not None:
                with contextlib.suppress(ProcessLookupError):
                    kill_and_wait(victim)  # nothing that follows is to be hit

    def _repeated_step(self, x: Any, y: Any, fault: tuple[str, str, int] | None) -> float | None:
        while True:
            try:
                limit_s = 3.0 if fault and fault[1] == "hang" else None
                with warnings.catch_warnings():
                    if fault and fault[1] in ("kill", "hang"):  # which the check of the first step meets as well
                        warnings.filterwarnings("ignore", "a second run of 'disturbed_step'", RuntimeWarning)
                    return float(self.step(x, y, *(fault or ("", "", 0)), timeout=limit_s))
            except (synk.errors.SynkError, ArithmeticError, KeyboardInterrupt) as error:
                counted = error.step_counted  # type: ignore[union-attr]
                self.seen["the step counted" if counted else "the step was repeated"] += 1
                if counted:
                    assert fault is None or fault[0] not in BEFORE or fault[1] == "kill soon"
                    return None
                fault = None  # what kills "soon" may come in the repeated step


def _synchronize(run: Run, value: float) -> None:
    """Pull, push or write and load a checkpoint: nothing that changes a number."""
    if run.rep is None:
        return
    if value < 0.4:
        run.rep.pull()
    elif value < 0.7:
        with run.rep.here():
            pass
    elif run.program.is_in_the_file:
        run.rep.load_state_dict(run.rep.state_dict())


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


def _scale_weights(run: Run, value: float) -> None:
    with torch.no_grad():
        run.model.last.weight.mul_(0.5 + value)


def _add_group(run: Run, value: float) -> None:
    if len(run.optimizer.param_groups) == 1:
        run.optimizer.add_param_group({"params": [run.model.frozen.requires_grad_(True)], "lr": 0.01})


def _step_serially(run: Run, value: float) -> None:
    if "dropout" not in run.program.features:
        rows = batches(1, (9,))[0]
        run.losses.append(
            float(disturbed_step(*run.objects, *rows) if run.rep is None else run.step.serial(*rows, "", "", 0))
        )


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
    "synk": _synchronize,
    "new number": lambda run, value: setattr(run.model, "scale", 0.5 + value),
    "buffer in place": lambda run, value: run.model.counter.add_(2),
    "weights in place": _scale_weights,
    "data in place": lambda run, value: run.model.last.weight.data.mul_(0.5 + value),
    "freeze": lambda run, value: run.model.last.bias.requires_grad_(False),
    "thaw": lambda run, value: run.model.last.bias.requires_grad_(True),
    "group": _add_group,
    "serial": _step_serially,
    "evaluate": _evaluate,
}


def check(seed: int, runtime_of: Callable[[int], synk.Runtime], seen: Counter[str]) -> None:
    program = Program.random(seed)
    seen.update((f"{program.workers} workers", program.optimizer, *program.features))
    rt = runtime_of(program.workers)
    disturbed = Run(program, rt, seen)
    state = disturbed.go(is_disturbed=True)
    seen.update(programs=1, steps=sum(kind == "step" for kind, _ in program.events), faults=len(program.faults))
    if program.faults:
        clean = Run(program, rt)
        assert differences(clean.go(is_disturbed=False), state) == [], program
        pairs = [pair for pair in zip(clean.losses, disturbed.losses, strict=True) if pair[1] is not None]
        assert all(one == other for one, other in pairs), f"{program}: {clean.losses}, {disturbed.losses}"
    if "dropout" not in program.features:
        plain = Run(program, None)
        expected = plain.go(is_disturbed=False)
        assert differences(expected, state, 1e-8) == [], program
        for one, other in zip(plain.losses, disturbed.losses, strict=True):
            assert other is None or abs(one - other) <= 1e-8 * max(1.0, abs(one)), f"{program}: {one}, {other}"


@pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")
@pytest.mark.parametrize(
    "numbers",
    [
        (32, 106, 141),  # which have all features, faults and changes, and steps that count and that do not
        *(pytest.param(range(first, first + 100), marks=pytest.mark.storm) for first in range(0, 600, 100)),
    ],
    ids=lambda numbers: f"{numbers[0]}-{numbers[-1]}",
)
def test_random_trainings(subtests: Any, reused: Callable[..., Any], numbers: Sequence[int]) -> None:
    seen, runtime_of = Counter[str](), functools.cache(reused)
    for number in numbers:
        with subtests.test(seed=FIRST_SEED + number):
            check(FIRST_SEED + number, runtime_of, seen)
    assert seen["the step was repeated"] > 5 and seen["the step counted"] > 2
