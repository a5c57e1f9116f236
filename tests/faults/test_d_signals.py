"""D: signals, to the master and to the terminal. Ctrl-C gives the prompt back; no end of the master leaves a worker."""

from __future__ import annotations

import itertools
import os
import pty
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import saboteurs
from support.harness import (
    Scenario,
    ctrl_c_when,
    is_nursery,
    outcomes,
    process_stat,
    replaced_workers,
    same_workers,
    script,
    wait_for,
    wait_until_dead,
    waits_in_synk,
)
from support.signs import hear, say, sign

import synk

Fork = Callable[..., Any]
Count = Callable[[int], int]


def test_D1_ctrl_c_in_a_call(reused: Fork, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """It comes when the function runs and the program waits; the same workers answer, unless they do not hear it.

    The system may tell it to any thread.
    """
    rt = reused(2)

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


def test_D2_a_terminals_ctrl_c_reaches_the_master_only() -> None:
    """Workers live in sessions of their own: neither a traceback of theirs nor a new pid."""
    controller, terminal = pty.openpty()
    code = """
        from support.harness import assert_right, pids
        os.close(os.open(os.ttyname(0), os.O_RDWR))  # becomes the controlling terminal of this session
        assert os.tcgetpgrp(0) == os.getpgrp()
        with synk.fork(2, backend="numpy") as rt:
            before = pids(rt)
            try:
                print("ready", flush=True)
                time.sleep(20)
            except KeyboardInterrupt:
                print("interrupted")
            assert pids(rt) == before
            def work(x):
                for _ in range(2000):
                    time.sleep(0.01)
            rt.function(work, outputs=None)
            try:
                print("again", flush=True)
                rt.function(work, outputs=None)(np.arange(2))
            except KeyboardInterrupt:
                print("interrupted again")
            assert pids(rt) == before
            assert_right(rt)
    """
    try:
        with Scenario(code, stdin=terminal) as scenario:
            scenario.wait_for_line("ready")
            os.write(controller, b"\x03")
            scenario.wait_for_line("again")
            os.write(controller, b"\x03")
            scenario.finish().check("ready\ninterrupted\nagain\ninterrupted again\n")
    finally:
        os.close(controller)
        os.close(terminal)


PRESSED = """
    import warnings
    from support import saboteurs
    from support.harness import assert_right, pids
    from support.signs import hear, say, sign
    from synk.errors import CallTimeout, ClosedError

    warnings.simplefilter("ignore", RuntimeWarning)

    def case(name, way, is_limited):
        with synk.Runtime(2, backend="numpy") as rt:
            use(rt, name, way, is_limited)

    def use(rt, name, way, is_limited):
        w = rt.shared(np.arange(3.0))
        before = pids(rt)
        rt._session.workers.recovery.grace_s = 1000.0  # rank 1 never answers: only Ctrl-C ends the wait for it
        holds, loops, ends = (sign(f"{__file__}.{name}.{what}") for what in ("holds", "loops", "ends"))

        def stuck(row):
            w.value = w.value + 1
            try:
                if row[0]:
                    signal.signal(signal.SIGINT, signal.SIG_IGN)
                    say(holds)
                    saboteurs.loop_in_c()
                say(loops)
                saboteurs.loop_for_ever()
            except BaseException:
                say(ends)
                raise

        def press():
            hear(holds)
            hear(loops)
            if not is_limited:
                os.kill(os.getpid(), signal.SIGINT)
            hear(ends)  # the call is being ended
            os.kill(os.getpid(), signal.SIGINT)

        f = rt.function(stuck, outputs=None)
        rt.distribute()
        presses = threading.Thread(target=press)
        presses.start()
        call = None
        try:
            try:
                limit = 4.0 if is_limited else None
                if way == "submit":
                    call = f.submit(np.arange(2), timeout=limit)
                    call.result()
                f(np.arange(2), timeout=limit)
            finally:
                presses.join()
            raise AssertionError("the signal was swallowed")
        except KeyboardInterrupt:
            pass
        if not is_limited:
            try:
                assert_right(rt)
            except ClosedError as error:
                assert "second Ctrl-C" in str(error.__cause__), error.__cause__
            assert rt.is_closed
            return
        if call is not None:
            try:
                call.result()
            except CallTimeout:
                pass
        assert (w.value == np.arange(3.0)).all(), w.value
        assert pids(rt)[1] != before[1], "who did not answer was replaced"
        assert_right(rt)
"""


def test_D3_ctrl_c_while_a_call_is_being_ended(subtests: pytest.Subtests) -> None:
    """A second Ctrl-C closes the runtime; one after a time limit only ends the wait: variables keep their values."""
    cases = [("second", "call", False), ("limit", "call", True), ("submitted", "submit", True)]
    for case, outcome in outcomes(PRESSED, cases).items():
        with subtests.test(str(case)):
            assert outcome == ""


STORM = """
    import random, gc
    from support.harness import assert_right, census, pids, settled_census
    from synk.errors import CallCancelled

    SIGNAL, COUNT = {signal}, {count}

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

    double = rt.function(lambda x: 2 * x, outputs="gather")
    large = rt.function(lambda x: np.full(40_000, x.sum()), outputs="sum")
    blob = rt.function(lambda blob, x: len(blob["b"]) * len(x), bcast_inputs="blob", outputs="sum")
    adding = rt.function(add, outputs="sum")

    def operate(pending):
        # Does one thing, and counts the assignments that were begun, and that are known to hold.
        global begun, held
        k = float(rng.randrange(1000))
        x = np.full(10, k)
        kind = rng.choice(["double", "large", "blob", "data", "assign", "submit", "submit", "done", "result", "new"])
        if kind == "double":
            assert (double(x) == 2 * x).all()
        elif kind == "large":
            assert (large(x) == 10 * k).all()
        elif kind == "blob":
            assert blob({{"b": b"x" * (1 << int(k) % 20)}}, x) == 10 * (1 << int(k) % 20)
        elif kind == "data":
            data = rt.data(x)
            data.set_length(20)
            data[:] = k
            assert double(data).sum() == 40 * k
        elif kind == "assign":
            begun += 1
            assert adding(x) == 10 * k
            held += 1
        elif kind == "submit":
            f = rng.choice([large, adding])
            begun += f is adding
            pending.append((f, f.submit(x), 10 * k))
        elif kind == "new":
            assert rt.function(lambda x: k + x.sum() / len(x), outputs="avg")(x) == 2 * k
        elif pending and kind == "done":
            pending[0][1].done()
        elif pending:
            f, call, right = pending[0]
            assert np.all(call.result() == right)
            del pending[0]
            held += f is adding

    for _ in range(30):
        begun = held = 0
        operate([])
    assert_right(rt)
    before, num_caught = pids(rt), 0
    for number in range(COUNT):
        known, begun, held, pending = w.value[0], 0, 0, []
        timer = threading.Timer(rng.uniform(0, 0.01), os.kill, (os.getpid(), SIGNAL))
        try:
            timer.start()
            while True:
                has_come = timer.finished.is_set()
                operate(pending)
                if has_come:
                    break
        except (KeyboardInterrupt, Mine):
            num_caught += 1
        timer.join()
        for f, call, right in pending:
            try:
                assert np.all(call.result() == right)
                held += f is adding
            except CallCancelled:
                pass
        first, second = rt.get_value(w, 0), rt.get_value(w, 1)
        assert (first == first[0]).all() and (first == second).all(), (first, second)
        assert held <= first[0] - known <= begun, (held, first[0] - known, begun)
        assert (double(np.arange(4.0)) == 2 * np.arange(4.0)).all()
        if number == COUNT // 2:
            pending = timer = call = None
            gc.collect()
            base = census()
    assert SIGNAL != signal.SIGINT or pids(rt) == before
    assert num_caught > COUNT // 2
    assert_right(rt)
    pending = timer = call = None
    left = settled_census(base).leftovers(base)
    assert len(left) < 40, left  # buffers of results that are used again
    rt.close()
"""


@pytest.mark.parametrize("name", ["SIGINT", "SIGALRM"])
def test_D1_D4_D11_storm_of_interrupts(name: str, storm_count: Count) -> None:
    """Ctrl-C, or a handler that raises, at any moment of any call, between the bytes of messages too.

    It comes out as itself. What is answered is right, now and afterwards; assignments hold on all ranks or on none, and
    each that was told to hold does. After Ctrl-C the same workers answer.
    """
    count = storm_count(100 if name == "SIGINT" else 40)
    script(STORM.format(signal=int(getattr(signal, name)), count=count), timeout=60 + count).check("", stderr=None)


MASTER_ENDS = {
    "return": ("", 0, ""),
    "exception": ("raise ValueError('mine')", 1, "ValueError: mine\n"),
    "os._exit": ("os._exit(4)", 4, ""),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
    "return, calls in flight": ("pending = [endless.submit(data) for _ in range(3)]", 0, ""),
    "return, another thread in a call": ("threading.Thread(target=endless, args=[data], daemon=True).start()", 0, ""),
}


@pytest.mark.parametrize("end", MASTER_ENDS)
def test_D6_E9_the_master_ends_without_close_and_its_workers_with_it(end: str) -> None:
    """What the workers have started ends, too."""
    code, status, last_line = MASTER_ENDS[end]
    result = script(
        f"""
        from support import saboteurs
        rt = synk.fork(2, backend="numpy")
        data = rt.data(np.ones((1000, 1000)))
        endless = rt.function(lambda x: saboteurs.loop_for_ever(), outputs=None)
        spawn = rt.function(lambda x: saboteurs.start_sleeper(), outputs=None)
        print(len(spawn(data)), flush=True)
        {code}
        """,
        flags=("-X", "dev", "-W", "error"),
    ).check("2\n", returncode=status, stderr=None)
    assert result.stderr.endswith(last_line) if last_line else result.stderr == ""


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
def test_D1_ctrl_c_under_asyncio_run() -> None:
    """It ends a call, though asyncio's handler would only cancel the task, which the blocked loop does not notice.

    What a coroutine does as it ends is not interrupted once more, and the loop has its handler back.
    """
    script("""
        import asyncio
        from support.harness import assert_right, pids
        master = os.getpid()

        def press(x):
            if x[0]:
                os.kill(master, signal.SIGINT)
            while True:
                time.sleep(0.01)

        async def call(act):
            handler = signal.getsignal(signal.SIGINT)
            try:
                await act()
            finally:
                assert signal.getsignal(signal.SIGINT) is handler

        async def press_in_a_call():
            pressing(np.arange(2.0))

        async def press_and_call():
            signal.raise_signal(signal.SIGINT)
            try:
                await asyncio.sleep(20)
            finally:
                print((double(np.arange(3.0)) == 2 * np.arange(3.0)).all(), flush=True)

        with synk.fork(2, backend="numpy") as rt:
            pressing = rt.function(press, outputs="sum")
            double = rt.function(lambda x: 2 * x, outputs="gather")
            before = pids(rt)
            for act in (press_in_a_call, press_and_call):
                try:
                    asyncio.run(call(act))
                except KeyboardInterrupt:
                    print("interrupted", flush=True)
                assert pids(rt) == before
            assert_right(rt)
    """).check("interrupted\nTrue\ninterrupted\n")
