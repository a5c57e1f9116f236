"""Faults injected at random times into running calls, and what came of them: the numbers of ``docs/reliability.md``.

``python -m benchmarks.faults [--count N] [--only KIND ...] [--nodes] [--into PAGE]``. Each kind runs in a process of
its own, which is ended and counted as a hang if it stands still. Every answer is compared with NumPy, and so is a
variable that each call updates: one that failed must have left it as it was. With ``--nodes`` the workers belong to
two nodes, and instead of the variable each call changes a resident object: what the error says of it must be true on
all ranks.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.__main__ import fill
from benchmarks._report import table

CALL_S = 0.004
STILL_S = 60.0
ROOT = Path(__file__).resolve().parent.parent


class Injected(Exception):
    """What a function, or a signal handler of the program, raises on purpose."""


def _raise_injected(number: int, frame: Any) -> None:
    raise Injected


@dataclass
class Outcome:
    """What came of the faults of one kind; times in seconds after the fault.

    Attributes
    ----------
    num_injected, num_errors : int
        Faults, and those of them that ended a call; the others came too late for it.
    num_wrong, num_hangs, num_left : int
        Answers or values that differ from NumPy's; stand-stills; descriptors, mappings and processes after ``close``.
    error_s, usable_s : list of float
        Until the call raised, and until the next right answer.
    """

    num_injected: int = 0
    num_errors: int = 0
    num_wrong: int = 0
    num_hangs: int = 0
    num_left: int = 0
    error_s: list[float] = field(default_factory=list)
    usable_s: list[float] = field(default_factory=list)


class Trials:
    """One runtime, a function that takes ``CALL_S`` and updates a shared variable, and what both must give."""

    def __init__(self, world_size: int, seed: int) -> None:
        import synk

        self.random = random.Random(seed)
        self.rows = np.random.default_rng(seed)
        # The limit is for a worker that was stopped after its answer: the next operation finds it so.
        self.runtime = synk.Runtime(world_size, backend="numpy", max_restarts=10**9, timeout=2.0)
        self.total = total = self.runtime.shared(np.zeros(4), name="total")
        self.expected_total = np.zeros(4)

        def slow_sum(x: np.ndarray, is_bad: bool) -> np.ndarray:
            time.sleep(CALL_S)
            total.value = total.value + 1
            if is_bad and x.shape[0] and synk.comm.rank == synk.comm.world_size - 1:
                raise Injected
            return x.sum(axis=0)

        def plain_sum(x: np.ndarray) -> np.ndarray:
            time.sleep(CALL_S / 3)
            return x.sum(axis=0)

        self.function = self.runtime.function(slow_sum, outputs="sum", bcast_inputs="is_bad")
        self.plain = self.runtime.function(plain_sum, outputs="sum")
        self.pids = self.runtime.function(lambda row: os.getpid(), outputs=None)
        self.pids(np.ones(world_size), timeout=60.0)  # they have started: the runtime's limit is for calls

    def worker_pids(self) -> list[int]:
        """Return the processes of the ranks."""
        return self.pids(np.ones(self.runtime.world_size))

    def call(self, **options: Any) -> bool:
        """Make one call and return whether the answer and the shared variable are NumPy's."""
        x = self.rows.standard_normal((self.random.randrange(8, 40), 4))
        is_bad = options.pop("is_bad", False)
        answer = self.function(x, is_bad, **options)
        self.expected_total += 1
        return np.allclose(answer, x.sum(axis=0), rtol=1e-9, atol=1e-12)

    def submitted_calls(self) -> bool:
        """Have three calls in flight at once; return whether all answers are NumPy's, and raise the first error."""
        import synk

        errors: list[BaseException] = []
        is_right = True
        blocks = [self.rows.standard_normal((self.random.randrange(8, 40), 4)) for _ in range(3)]
        pending = []
        for x in blocks:
            pending.append((x, self.plain.submit(x)))
        for x, call in pending:
            try:
                is_right &= np.allclose(call.result(), x.sum(axis=0), rtol=1e-9, atol=1e-12)
            except (synk.errors.SynkError, KeyboardInterrupt) as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return bool(is_right)

    def is_total_right(self, may_have_counted: bool = False) -> bool:
        """Compare the shared variable on all ranks, once the workers answer again."""
        import synk

        while True:
            try:
                values = np.stack([self.total[rank] for rank in range(self.runtime.world_size)])
            except (
                synk.errors.WorkerDied,
                synk.errors.CallTimeout,
            ):  # the fault came after the answer, and this message met it
                continue
            break
        if may_have_counted and np.array_equal(values[0], self.expected_total + 1):
            self.expected_total += 1
        return all(np.array_equal(value, self.expected_total) for value in values)

    def note(self, error: BaseException) -> None:
        """Take in what an error says of the call. A shared variable is as it was."""


class NodeTrials(Trials):
    """Trials over two nodes, with a resident object that counts."""

    def __init__(self, world_size: int, seed: int) -> None:
        import synk

        self.random = random.Random(seed)
        self.rows = np.random.default_rng(seed)
        counts = (1, world_size - 1)
        self.runtime = synk.Runtime(counts, cluster="here", nodes=2, max_restarts=10**9, timeout=8.0)
        self.held = held = self.runtime.resident([0])
        self.expected = 0
        self.is_unknown = False

        def slow_sum(x: np.ndarray, is_bad: bool) -> np.ndarray:
            held.value[0] += 1
            time.sleep(CALL_S)
            if is_bad and synk.comm.rank == synk.comm.world_size - 1:
                raise Injected
            return x.sum(axis=0)

        def plain_sum(x: np.ndarray) -> np.ndarray:
            time.sleep(CALL_S / 3)
            return x.sum(axis=0)

        self.function = self.runtime.function(slow_sum, outputs="sum", bcast_inputs="is_bad", updates=[held])
        self.plain = self.runtime.function(plain_sum, outputs="sum")
        self.pids = self.runtime.function(lambda row: os.getpid(), outputs=None)

    def agent_pids(self) -> list[int]:
        return [worker.process.pid for worker in self.runtime._session.by_rank]

    def call(self, **options: Any) -> bool:
        x = self.rows.standard_normal((self.random.randrange(8, 40), 4))
        answer = self.function(x, options.pop("is_bad", False), **options)
        self.expected += 1
        return np.allclose(answer, x.sum(axis=0), rtol=1e-9, atol=1e-12)

    def note(self, error: BaseException) -> None:
        counted = getattr(error, "step_counted", None)
        self.expected += counted is True
        self.is_unknown = (
            counted is not True
        )  # part of what the call was to change, or nothing, but the same everywhere

    def is_total_right(self, may_have_counted: bool = False) -> bool:
        import synk

        while True:
            try:
                values = {self.held.get(rank)[0] for rank in range(self.runtime.world_size)}
            except (synk.errors.WorkerDied, synk.errors.CallTimeout) as error:
                if "is lost" in str(error):  # with all workers
                    self.held.set([self.expected])
                continue
            break
        allowed = {self.expected, self.expected + (self.is_unknown or may_have_counted)}
        self.is_unknown = False
        if len(values) == 1 and values <= allowed:
            (self.expected,) = values
            return True
        return False


def kill_one(trials: Trials) -> Callable[[], None]:
    """A worker is killed."""
    victim = trials.random.choice(trials.worker_pids())
    return lambda: os.kill(victim, signal.SIGKILL)


def kill_all(trials: Trials) -> Callable[[], None]:
    """All workers are killed."""
    victims = trials.worker_pids()

    def fault() -> None:
        for victim in victims:
            os.kill(victim, signal.SIGKILL)

    return fault


def segfault(trials: Trials) -> Callable[[], None]:
    """A worker gets SIGSEGV."""
    victim = trials.random.choice(trials.worker_pids())
    return lambda: os.kill(victim, signal.SIGSEGV)


def interrupt(trials: Trials) -> Callable[[], None]:
    """Ctrl-C in the program."""
    return lambda: os.kill(os.getpid(), signal.SIGINT)


def freeze(trials: Trials) -> Callable[[], None]:
    """A worker is stopped (SIGSTOP) in a call limited to 50 ms."""
    victim = trials.random.choice(trials.worker_pids())
    return lambda: os.kill(victim, signal.SIGSTOP)


def raise_in_handler(trials: Trials) -> Callable[[], None]:
    """A signal handler of the program raises."""
    signal.signal(signal.SIGUSR1, _raise_injected)
    return lambda: os.kill(os.getpid(), signal.SIGUSR1)


def raise_in_handler_submitted(trials: Trials) -> Callable[[], None]:
    """A signal handler raises, three submitted calls in flight."""
    return raise_in_handler(trials)


def freeze_and_interrupt(trials: Trials) -> Callable[[], None]:
    """Ctrl-C while a call that timed out waits for a stopped worker."""
    victim = trials.random.choice(trials.worker_pids())

    def fault() -> None:
        os.kill(victim, signal.SIGSTOP)
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGINT)

    return fault


def kill_submitted(trials: Trials) -> Callable[[], None]:
    """A worker is killed, three submitted calls in flight."""
    return kill_one(trials)


def interrupt_submitted(trials: Trials) -> Callable[[], None]:
    """Ctrl-C in the program, three submitted calls in flight."""
    return interrupt(trials)


def kill_agent(trials: Trials) -> Callable[[], None]:
    """The agent of a node is killed."""
    assert isinstance(trials, NodeTrials)
    victim = trials.random.choice(trials.agent_pids())
    return lambda: os.kill(victim, signal.SIGKILL)


def freeze_agent(trials: Trials) -> Callable[[], None]:
    """The agent of a node is stopped (SIGSTOP) in a call limited to 50 ms."""
    assert isinstance(trials, NodeTrials)
    victim = trials.random.choice(trials.agent_pids())
    return lambda: os.kill(victim, signal.SIGSTOP)


def raise_in_function(trials: Trials) -> None:
    """The function raises on one rank."""


KINDS: dict[str, Callable[[Trials], Callable[[], None] | None]] = {
    "kill-one": kill_one,
    "kill-all": kill_all,
    "segfault": segfault,
    "interrupt": interrupt,
    "handler": raise_in_handler,
    "freeze": freeze,
    "freeze-interrupt": freeze_and_interrupt,
    "exception": raise_in_function,
    "kill-submitted": kill_submitted,
    "interrupt-submitted": interrupt_submitted,
    "handler-submitted": raise_in_handler_submitted,
}
OF_NODES: dict[str, Callable[[Trials], Callable[[], None] | None]] = {
    "kill-one": kill_one,
    "kill-all": kill_all,
    "kill-agent": kill_agent,
    "interrupt": interrupt,
    "freeze": freeze,
    "freeze-agent": freeze_agent,
    "exception": raise_in_function,
    "kill-submitted": kill_submitted,
    "interrupt-submitted": interrupt_submitted,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "freeze": {"timeout": 0.05},
    "freeze-agent": {"timeout": 0.05},
    "freeze-interrupt": {"timeout": 0.05},
    "exception": {"is_bad": True},
}
SHARES = {
    "freeze": 0.1,
    "freeze-agent": 0.1,
    "freeze-interrupt": 0.1,
}  # of the count: each waits for its time limit, and for the grace after it


def inject(trials: Trials, kind: str, outcome: Outcome) -> None:
    """Inject one fault into a call, and call until an answer comes again."""
    import synk

    fault = (OF_NODES if isinstance(trials, NodeTrials) else KINDS)[kind](trials)
    fired = [time.monotonic()]

    def fire() -> None:
        fired[0] = time.monotonic()
        if fault:
            fault()

    timer = threading.Timer(trials.random.uniform(0, 2 * CALL_S), fire)
    errors = synk.errors
    failures = (errors.WorkerDied, errors.CallTimeout, errors.CallCancelled, KeyboardInterrupt, Injected)
    outcome.num_injected += 1
    is_calling = False
    try:
        if fault:
            timer.start()
        is_calling = True
        is_right = trials.submitted_calls() if "submitted" in kind else trials.call(**OPTIONS.get(kind, {}))
        outcome.num_wrong += not is_right
        is_calling = False
        while timer.is_alive():  # an interrupt comes in here
            time.sleep(0.001)
    except failures as error:
        if is_calling:
            trials.note(error)
            outcome.num_errors += 1
            outcome.error_s.append(time.monotonic() - fired[0])
    while timer.is_alive():
        time.sleep(0.001)
    # Ctrl-C can come when the call has just ended: then it counts, and only its result was lost.
    outcome.num_wrong += not trials.is_total_right(may_have_counted=kind in ("interrupt", "handler"))
    while True:
        try:
            is_right = trials.call()
        except (
            synk.errors.WorkerDied,
            synk.errors.CallTimeout,
        ):  # the fault came after the answer, and this call met it
            continue
        break
    outcome.usable_s.append(time.monotonic() - fired[0])
    outcome.num_wrong += not is_right
    outcome.num_wrong += not trials.is_total_right()


def holdings() -> int:
    """Return how many descriptors, mapped segments and children this process has."""
    gc.collect()
    segments = Path("/proc/self/maps").read_text().count("memfd:synk")
    children = [pid for task in os.listdir("/proc/self/task") for pid in _children(task)]
    return len(os.listdir("/proc/self/fd")) + segments + len(children)


def _children(task: str) -> list[str]:
    return Path(f"/proc/self/task/{task}/children").read_text().split()


def run_kind(kind: str, count: int, world_size: int, seed: int, *, over_nodes: bool) -> None:
    """Inject ``count`` faults of one kind and print the outcome; each line is one sign of life."""
    warnings.simplefilter("ignore", RuntimeWarning)  # a worker that died between two calls was started again
    make = NodeTrials if over_nodes else Trials
    make(world_size, seed).runtime.close()  # whatever is imported and opened once
    before = holdings()
    trials = make(world_size, seed)
    outcome = Outcome()
    for _ in range(count):
        inject(trials, kind, outcome)
        print(".", flush=True)
    trials.runtime.close()
    del trials
    outcome.num_left = max(holdings() - before, 0)
    print(json.dumps(asdict(outcome)), flush=True)


def supervise(kind: str, options: argparse.Namespace) -> Outcome:
    """Run a kind in a process of its own; one that gives no sign of life is ended and counted as a hang."""
    count = max(1, round(options.count * SHARES.get(kind, 1.0)))
    arguments = ["--kind", kind, "--count", str(count), "--workers", str(options.workers), "--seed", str(options.seed)]
    arguments += ["--nodes"] if options.nodes else []
    command = [sys.executable, "-X", "faulthandler", "-m", "benchmarks.faults", *arguments]
    with tempfile.TemporaryFile("w+") as crashes:  # each SIGSEGV leaves a stack there: shown only if something is wrong
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=crashes, text=True)
        assert process.stdout is not None
        last = ""
        watchdog = _watch(process)
        for line in process.stdout:
            watchdog.cancel()
            watchdog = _watch(process)
            last = line
        watchdog.cancel()
        if process.wait() == 0:
            return Outcome(**json.loads(last))
        crashes.seek(0)
        sys.stderr.write(crashes.read())
    if process.returncode == -signal.SIGABRT:
        return Outcome(num_injected=count, num_hangs=1)
    raise RuntimeError(f"the trials of {kind!r} ended with exit status {process.returncode}")


def _watch(process: subprocess.Popen[str]) -> threading.Timer:
    timer = threading.Timer(STILL_S, process.send_signal, (signal.SIGABRT,))
    timer.daemon = True
    timer.start()
    return timer


def report(outcomes: dict[str, Outcome], options: argparse.Namespace) -> str:
    """Return the table of the page."""
    header = (
        "fault", "injected", "ended the call", "hangs", "wrong", "left behind",
        "to the error: median, worst ms", "to the next right answer: median, worst ms",
    )  # fmt: skip
    rows = []
    for kind, outcome in outcomes.items():
        counts = (outcome.num_injected, outcome.num_errors, outcome.num_hangs, outcome.num_wrong, outcome.num_left)
        name = ((KINDS | OF_NODES)[kind].__doc__ or kind).partition(".")[0]
        rows.append([name, *map(str, counts), _times(outcome.error_s), _times(outcome.usable_s)])
    import synk

    where = "workers on two nodes," if options.nodes else "workers"
    about = (
        f"{options.workers} {where} on {len(os.sched_getaffinity(0))} cores, Python {sys.version.split()[0]}, NumPy "
        f"{np.__version__}, synk {synk.__version__}, seed {options.seed}, {time.strftime('%Y-%m-%d')}; a call takes "
        f"{CALL_S * 1e3:g} ms, a fault comes at a random time of twice that."
    )
    return f"{about}\n\n{table(header, rows)}"


def _times(seconds: list[float]) -> str:
    return f"{statistics.median(seconds) * 1e3:.1f}, {max(seconds) * 1e3:.0f}" if seconds else ""


def main() -> None:
    """Run all kinds and print the table, or write it into a page."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("--count", type=int, default=300, help="faults of each kind")
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    known = KINDS | OF_NODES
    parser.add_argument("--only", nargs="+", choices=known, metavar="KIND", help=" ".join(known))
    parser.add_argument("--nodes", action="store_true", help="two nodes, and a resident object")
    parser.add_argument("--into", type=Path, metavar="PAGE", help="write the table between the marks of a page")
    parser.add_argument("--kind", choices=known, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if options.kind:
        run_kind(options.kind, options.count, options.workers, options.seed, over_nodes=options.nodes)
        return
    outcomes = {}
    for kind in options.only or (OF_NODES if options.nodes else KINDS):
        print(f"{time.strftime('%H:%M:%S')} {kind}", file=sys.stderr, flush=True)
        outcomes[kind] = supervise(kind, options)
    text = report(outcomes, options)
    if options.into:
        fill(options.into, text)
    else:
        print(text)
    if any(outcome.num_hangs or outcome.num_wrong or outcome.num_left for outcome in outcomes.values()):
        sys.exit("something hung, was wrong or was left behind: see the table")


if __name__ == "__main__":
    main()
