"""D: signals, to the master and to the terminal. Ctrl-C gives the prompt back; no end of the master leaves a worker."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import itertools
import os
import pty
import signal
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import harness, saboteurs
from support.gates import hear, say, sign
from support.harness import (
    Scenario,
    assert_right,
    ctrl_c_when,
    is_nursery,
    pids,
    process_stat,
    replaced_workers,
    same_workers,
    script,
    wait_for,
    wait_until_dead,
    waits_in_synk,
)

import synk
from synk.errors import CallCancelled, ClosedError

X = np.arange(4.0)
Fork = Callable[..., Any]
Count = Callable[[int], int]


def test_D1_ctrl_c_in_a_call(rt: Any, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """It comes when the function runs and the program waits; the same workers answer, unless they do not hear it.

    The system may tell it to any thread.
    """

    def loop(begun: str) -> None:
        say(begun)
        saboteurs.loop_for_ever()

    def meet(begun: str) -> None:
        for step in range(10**9):
            synk.comm.all_reduce(np.full(1000, step), "sum")
            if step == 20 and synk.comm.rank:
                say(begun)

    def hold(begun: str) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        say(begun)
        saboteurs.loop_in_c()

    def act_on(act: Callable[[str], None], begun: str, x: np.ndarray) -> None:
        if synk.comm.rank or act.__name__ == "meet":
            act(begun)

    f = rt.function(act_on, bcast_inputs=("act", "begun"), outputs=None)
    waits: dict[str, Callable[[Callable[[str], None], str], object]] = {
        "call": lambda act, begun: f(act, begun, np.ones(4)),
        "submit": lambda act, begun: f.submit(act, begun, np.ones(4)).result(),
        "map": lambda act, begun: list(rt.map(lambda item: act(begun) if item else None, range(2))),
    }
    total = rt.function(lambda x: synk.comm.all_reduce(np.full(1000, x[0]), "sum"), outputs="first")
    cases = [*itertools.product(waits, (loop,), (True, False)), ("call", meet, True), ("call", hold, True)]
    for way, act, is_told_to_main in cases:
        begun = sign(tmp_path / f"{way} {act.__name__} {is_told_to_main}")

        def is_time(begun: str = begun) -> bool:
            hear(begun)
            return wait_for(lambda: waits_in_synk("submit", "map"))

        with subtests.test(way, act=act.__name__, is_told_to_main=is_told_to_main):
            after = replaced_workers(rt, [1]) if act is hold else same_workers(rt)
            press = ctrl_c_when(is_time, is_told_to_main=is_told_to_main)
            with after, pytest.raises(KeyboardInterrupt), press:
                waits[way](act, begun)
            assert (total(np.full(2, 3.0)) == 6.0).all(), "nothing of the old meeting is in the next"


def test_D1_ctrl_c_in_code_of_the_users_in_the_program(rt: Any, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """It is held back for a second at most where a hook does not return, or another thread has the runtime."""
    begun: list[bool] = []  # no file: Ctrl-C may come before it is closed

    def stay(*_: object) -> Any:
        begun.append(True)
        saboteurs.loop_for_ever()

    class Hooked:
        __reduce__ = stay

    def items() -> Iterator[int]:
        yield stay()

    total = rt.function(lambda x: x.sum(), outputs="sum")
    size = rt.function(lambda blob, x: x.sum(), bcast_inputs="blob", outputs="sum")
    folded = rt.function(lambda x: x.sum(), outputs=stay)
    hooked = Hooked()
    asleep, path = rt.function(lambda x: (say(path), time.sleep(60)), outputs=None), sign(tmp_path / "asleep")

    def call_and_sleep() -> None:
        with contextlib.suppress(CallCancelled):
            asleep(np.zeros(1))

    def wait_for_another_thread() -> None:
        other = threading.Thread(target=call_and_sleep)
        other.start()
        hear(path)
        begun.append(True)
        try:
            total(X)
        finally:
            rt.interrupt()
            other.join()

    cases: dict[str, Callable[[], object]] = {
        "argument": lambda: size(Hooked(), X),
        "captured": lambda: rt.function(lambda x: (hooked, x.sum())[1], outputs="sum")(X),
        "op": lambda: folded(X),
        "items": lambda: list(rt.map(lambda n: n, items())),
        "another thread": wait_for_another_thread,
    }
    for name, act in cases.items():
        with subtests.test(name):
            begun.clear()
            with (
                same_workers(rt),
                pytest.raises(KeyboardInterrupt),
                ctrl_c_when(lambda: begun and waits_in_synk()),
            ):
                act()


def test_D2_a_terminals_ctrl_c_reaches_the_master_only() -> None:
    """Workers live in sessions of their own: neither a traceback of theirs nor a new pid."""
    controller, terminal = pty.openpty()
    code = """
        from support.harness import same_workers
        os.close(os.open(os.ttyname(0), os.O_RDWR))  # becomes the controlling terminal of this session
        assert os.tcgetpgrp(0) == os.getpgrp()
        with synk.fork(2, backend="numpy") as rt:
            work = rt.function(lambda x: [time.sleep(0.01) for _ in range(10**6)], outputs=None)
            # Not one long sleep: Python begins it though a signal came between its last look and the system call.
            idle = lambda: [time.sleep(0.01) for _ in range(10**6)]
            for name, act in (("idle", idle), ("call", lambda: work(np.arange(2)))):
                with same_workers(rt):
                    try:
                        print(name, flush=True)
                        act()
                    except KeyboardInterrupt:
                        print("interrupted", flush=True)
    """
    try:
        with Scenario(code, stdin=terminal) as scenario:
            for name in ("idle", "call"):
                scenario.wait_for_line(name)
                os.write(controller, b"\x03")
            scenario.finish().check("idle\ninterrupted\ncall\ninterrupted\n")
    finally:
        os.close(controller)
        os.close(terminal)


def test_D3_ctrl_c_while_a_call_is_being_ended(
    runtime: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """A second Ctrl-C closes the runtime; one after a time limit only ends the wait: variables keep their values."""

    def press_while_it_is_ended(rt: Any, limit: float | None) -> Any:
        w, master = rt.shared(np.arange(3.0)), os.getpid()
        holds, loops, ends = (sign(tmp_path / f"{limit} {what}") for what in ("holds", "loops", "ends"))

        def stuck(row: np.ndarray) -> None:
            w.value = w.value + 1
            if row[0]:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
                say(holds)
                saboteurs.loop_in_c()
            try:
                say(loops)
                saboteurs.loop_for_ever()
            finally:
                say(ends)

        def is_being_ended() -> bool:
            hear(holds)
            hear(loops)
            if limit is None:
                os.kill(master, signal.SIGINT)
            hear(ends)
            return True

        # Rank 1 never answers: only Ctrl-C ends the wait for it.
        monkeypatch.setattr("synk._engine.workers.GRACE_S", 1000.0)
        f = rt.function(stuck, outputs=None)
        rt.distribute()
        with pytest.raises(KeyboardInterrupt), ctrl_c_when(is_being_ended):
            f(np.arange(2), timeout=limit)
        return w

    with subtests.test("second"):
        rt = runtime(2)
        press_while_it_is_ended(rt, None)
        with pytest.raises(ClosedError) as closed:
            assert_right(rt)
        assert "second Ctrl-C" in str(closed.value.__cause__)
    with subtests.test("after a limit"):
        rt = runtime(2)
        before = pids(rt)
        w = press_while_it_is_ended(rt, 2.0)
        assert (w.value == np.arange(3.0)).all()
        assert pids(rt)[1] != before[1], "who did not answer was replaced"
        assert_right(rt)


STORM = """
    import random
    from support.harness import assert_right, pids
    from synk.errors import CallCancelled

    class Mine(Exception):
        pass

    def handler(*_):
        raise Mine

    if SIGNAL != signal.SIGINT:
        signal.signal(SIGNAL, handler)
    sys.unraisablehook = lambda dropped: None  # Python drops what is raised in a finalizer
    rng = random.Random(COUNT)
    rt = synk.fork(2, backend="numpy", max_restarts=10**9)
    w = rt.shared(np.zeros(1000))

    def add(x):
        w.value = w.value + 1
        return x.sum()

    def multiply(blob, x):
        return np.full(40_000, len(blob["b"]) * x.sum())

    adding, large = rt.function(add, outputs="sum"), rt.function(multiply, bcast_inputs="blob", outputs="sum")

    def operate(pending):
        # Does one thing, and counts the assignments that were begun, and that are known to hold.
        global begun, held
        k = float(rng.randrange(1000))
        x = np.full(10, k)
        kind = rng.choice(["large", "data", "call", "submit", "submit", "result"])
        if kind == "large":
            nbytes = 1 << int(k) % 20
            assert (large({"b": b"x" * nbytes}, x) == nbytes * 10 * k).all()
        elif kind == "data":
            data = rt.data(x)
            data.set_length(20)
            data[:] = k
            assert rt.function(lambda x: k + x.sum(), outputs="sum")(data) == 22 * k
        elif kind == "call":
            begun += 1
            assert adding(x) == 10 * k
            held += 1
        elif kind == "submit":
            begun += 1
            pending.append((adding.submit(x), 10 * k))
        elif pending:
            call, right = pending[0]
            assert call.result() == right
            del pending[0]
            held += 1

    for _ in range(30):
        begun = held = 0
        operate([])
    before, num_caught = pids(rt), 0
    for _ in range(COUNT):
        known, begun, held, pending = w.value[0], 0, 0, []
        timer = threading.Timer(rng.uniform(0, 0.01), os.kill, (os.getpid(), SIGNAL))
        try:
            timer.start()
            has_come = False
            while not has_come:
                has_come = timer.finished.is_set()
                operate(pending)
        except (KeyboardInterrupt, Mine):
            num_caught += 1
        timer.join()
        for call, right in pending:
            try:
                assert call.result() == right
                held += 1
            except (CallCancelled, Mine):
                pass
        first, second = w[0], w[1]
        assert (first == first[0]).all() and (first == second).all(), (first, second)
        assert held <= first[0] - known <= begun, (held, first[0] - known, begun)
    assert SIGNAL != signal.SIGINT or pids(rt) == before
    assert num_caught > COUNT // 2
    assert_right(rt)
    rt.close()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGALRM"])
def test_D1_D4_D11_storm_of_interrupts(name: str, storm_count: Count) -> None:
    """Ctrl-C, or a handler that raises, at any moment of any call, between the bytes of messages too.

    It comes out as itself. What is answered is right, now and afterwards; assignments hold on all ranks or on none, and
    each that was told to hold does. After Ctrl-C the same workers answer.
    """
    count = storm_count(100 if name == "SIGINT" else 40)
    code = f"SIGNAL, COUNT = {int(getattr(signal, name))}, {count}\n{textwrap.dedent(STORM)}"
    script(code, timeout=60 + count).check("", stderr=None)


def test_D4_a_handler_raises_while_something_is_pickled(
    reused: Fork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """It comes out as itself, nobody is blamed, and the next time what was to be sent arrives."""
    pandas = pytest.importorskip("pandas")
    (tmp_path / "struck_module.py").write_text("held = None\ndef name(): return type(held).__name__\n")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("struck_module")

    class Mine(Exception):
        pass

    class Struck:
        def __reduce__(self) -> Any:
            if strikes and strikes.pop():
                signal.raise_signal(signal.SIGUSR1)
            return Struck, ()

    def handler(*_: object) -> None:
        raise Mine

    @dataclasses.dataclass
    class Batch:
        rows: Any
        count: int = dataclasses.field(init=False)

        def __post_init__(self) -> None:
            self.count = len(self.rows)
            Struck().__reduce__()

    rt, strikes, held = reused(2), list[bool](), dict[str, Any]()
    batch = Batch(X)
    by_name = rt.function(lambda x: module.name(), outputs="first")
    in_dict = rt.function(lambda x: type(held.get("k")).__name__, outputs="first")
    of_table = rt.function(lambda table: type(table.k.iloc[0]).__name__, outputs="first")
    of_batch = rt.function(lambda rows: "Struck", outputs="first")
    passed = rt.function(lambda blob, x: type(blob).__name__, bcast_inputs="blob", outputs="first")

    def captures(struck: Struck) -> str:
        return str(rt.function(lambda x: type(struck).__name__, outputs="first")(X))

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        for way in (
            lambda: captures(Struck()),
            lambda: (held.update(k=held.get("k") or Struck()), in_dict(X))[1],
            lambda: (setattr(module, "held", module.held or Struck()), by_name(X))[1],
            lambda: passed(Struck(), X),
            lambda: (rt.resident(Struck()), "Struck")[1],
            lambda: of_batch(batch),
            lambda: of_table(pandas.DataFrame({"k": [Struck()] * 4})),
            lambda: next(iter(rt.map(lambda struck: type(struck).__name__, [Struck()]))),
        ):
            assert (in_dict(X), by_name(X)) == tuple(type(each).__name__ for each in (held.get("k"), module.held))
            strikes[:] = [True]
            with subtests.test(way=way):
                with pytest.raises(Mine):
                    way()
                assert not strikes and way() == "Struck"
    finally:
        signal.signal(signal.SIGUSR1, before)
        sys.modules.pop("struck_module")
    assert_right(rt)


MASTER_ENDS = {
    "return": ("", 0, ""),
    "exception": ("raise ValueError('mine')", 1, "ValueError: mine\n"),
    "os._exit": ("os._exit(4)", 4, ""),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    "return, calls in flight": ("pending = [endless.submit(data) for _ in range(3)]", 0, ""),
    "return, another thread in a call": ("threading.Thread(target=endless, args=[data], daemon=True).start()", 0, ""),
}


def test_D6_E9_the_master_ends_without_close_and_its_workers_with_it(tmp_path: Path) -> None:
    """What the workers have started ends, too. Each end is that of a fork of one program, which has begun nothing."""
    script(
        f"""
        from support import nursery_process, saboteurs

        for end, (code, status, last_line) in {MASTER_ENDS!r}.items():
            if (child := os.fork()) == 0:
                break
            found = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            with open({str(tmp_path / "said")!r}) as file:
                said = file.read()
            assert found == status and (said.endswith(last_line) if last_line else said == ""), (end, found, said)
        else:
            sys.exit()
        with open({str(tmp_path / "said")!r}, "w") as file:
            os.dup2(file.fileno(), 2)
        if {harness.forks_workers}:
            nursery_process.raise_own_workers()
        rt = synk.fork(2, backend="numpy")
        data = rt.data(np.ones((1000, 1000)))
        endless = rt.function(lambda x: saboteurs.loop_for_ever(), outputs=None)
        spawn = rt.function(lambda x: saboteurs.start_sleeper(), outputs=None)
        print(len(spawn(data)), flush=True)
        exec(code)
        """,
        flags=("-Werror",),
    ).check("2\n" * len(MASTER_ENDS))


MASTER_KILLED = {
    "idle": "",
    "in a call that holds the interpreter": "rt.function(stuck, outputs=None)(np.arange(2))",
    "in a collective": "rt.function(lambda row: busy(row) if row[0] else synk.comm.barrier())(np.arange(2))",
    "in the start": "start_again()",
    # As the C library of an extension would: it holds the write ends of all pipes of the master.
    "with a child that no hook has seen": "import ctypes; child = ctypes.PyDLL(None).fork(); child or sleep()",
}


@pytest.mark.parametrize("phase", MASTER_KILLED)
def test_D7_sigkill_of_the_master(phase: str) -> None:
    """Workers and their children are gone, whatever they were doing, and whoever else has the master's descriptors."""
    with Scenario(f"""
        import warnings
        from support import saboteurs
        from support.harness import armed
        warnings.simplefilter("ignore", DeprecationWarning)  # fork in a process with threads, Python 3.12
        rt, child = synk.fork(2, backend="numpy"), 0
        rt.function(lambda x: x.sum(), outputs="sum")(np.arange(2.0))

        def start_again():
            synk.close()
            with armed(("start.import", 0, 1, "sleep"), ("start.import", 1, 1, "sleep")):
                synk.fork(2, backend="numpy").distribute()

        def busy(row):
            print("sleeper", saboteurs.start_sleeper(), flush=True)
            saboteurs.loop_for_ever()

        def stuck(row):
            print("sleeper", saboteurs.start_sleeper(), flush=True)
            saboteurs.loop_in_c()

        def sleep():
            while True:
                time.sleep(60)

        if "child" not in {phase!r}:
            print("ready", 0, flush=True)
        {MASTER_KILLED[phase]}
        print("ready", child, flush=True)
        sleep()
    """) as scenario:
        child = int(scenario.wait_for_line("ready").split()[1])
        if phase.startswith("in a c"):
            scenario.wait_for_line("[rank 1] sleeper")
        scenario.send_signal(signal.SIGKILL)
        others = [pid for pid in scenario.processes() if pid != child and not is_nursery(pid)]
        assert [pid for pid in others if not wait_until_dead(pid)] == []
        if child:
            assert not wait_until_dead(child, 0.0)
            os.kill(child, signal.SIGKILL)
        scenario.finish().check(None, returncode=-signal.SIGKILL)


def test_D8_stop_and_continue() -> None:
    with Scenario("""
        from support.harness import assert_right, pids
        with synk.fork(2, backend="numpy") as rt:
            before = pids(rt)
            print("ready", flush=True)
            def work(x):
                time.sleep(1.0)
                return x.sum()
            assert rt.function(work, outputs="sum")(np.arange(4.0)) == 6.0
            assert_right(rt)
            assert pids(rt) == before
        print("done")
    """) as scenario:
        scenario.wait_for_line("ready")
        for _ in range(3):
            scenario.send_signal(signal.SIGSTOP)
            assert wait_for(lambda: process_stat(scenario.pid)[1] == "T")
            scenario.send_signal(signal.SIGCONT)
            assert wait_for(lambda: process_stat(scenario.pid)[1] != "T")
        scenario.finish().check("ready\ndone\n")


@pytest.mark.own_start
def test_D10_workers_start_with_default_handlers_and_an_empty_mask() -> None:
    script("""
        from support.harness import assert_right
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT})
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with synk.fork(2, backend="numpy") as rt:
            states = rt.function(lambda x: {
                "blocked" if signal.pthread_sigmask(signal.SIG_BLOCK, ()) else "open",
                "default" if signal.getsignal(signal.SIGHUP) == signal.SIG_DFL else "changed",
                "deaf" if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None) else "hears",
            }, outputs=None)(np.arange(2))
            print(states == [{"open", "default", "hears"}] * 2)
            try:
                rt.function(lambda x: [time.sleep(0.01) for _ in range(10**6)])(np.arange(2), timeout=0.3)
            except synk.errors.CallTimeout:
                print("timeout")
            assert_right(rt)
    """).check("True\ntimeout\n")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Ctrl-C does not cancel the task before Python 3.11")
def test_D1_ctrl_c_under_asyncio_run(rt: Any) -> None:
    """It ends a call, though asyncio's handler would only cancel the task, which the blocked loop does not notice.

    What a coroutine does as it ends is not interrupted once more, and the loop has its handler back.
    """
    master, results = os.getpid(), []

    def press(x: np.ndarray) -> None:
        if x[0]:
            os.kill(master, signal.SIGINT)
        saboteurs.loop_for_ever()

    pressing, total = rt.function(press, outputs="sum"), rt.function(lambda x: x.sum(), outputs="sum")

    async def call(act: Callable[[], Any]) -> None:
        handler = signal.getsignal(signal.SIGINT)
        try:
            await act()
        finally:
            assert signal.getsignal(signal.SIGINT) is handler

    async def press_in_a_call() -> None:
        pressing(np.arange(2.0))

    async def press_and_call() -> None:
        signal.raise_signal(signal.SIGINT)
        try:
            await asyncio.sleep(20)
        finally:
            results.append(total(X))

    for act in (press_in_a_call, press_and_call):
        with same_workers(rt), pytest.raises(KeyboardInterrupt):
            asyncio.run(call(act))
    assert results == [6.0]
