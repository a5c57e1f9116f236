"""D: signals, to the master and to the terminal. Ctrl-C gives the prompt back; no end of the master leaves a worker."""

from __future__ import annotations

import os
import pty
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from support.harness import Scenario, children, process_stat, script, wait_for

Count = Callable[[int], int]

INTERRUPT = """
    import ctypes, random
    from support.harness import assert_right, pids, wait_for

    def interrupt_after(seconds):
        timer = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        return timer

    def interrupted(seconds, call, *args):
        '''Make a call that lasts for ever, but for a signal at ``seconds``, which is always consumed here.'''
        timer = interrupt_after(seconds)
        try:
            timer.start()
            call(*args)
            raise AssertionError("the signal was swallowed")
        except KeyboardInterrupt:
            pass
        timer.join()
"""


def test_D1_ctrl_c_in_a_loop_of_python(storm_count: Count) -> None:
    """The same workers answer, each time, whenever the signal falls."""
    script(
        INTERRUPT
        + f"""
    rng = random.Random(1)
    with synk.fork(2, backend="numpy") as rt:
        def work(x):
            while True:
                time.sleep(0.01)
        slow = rt.function(work, outputs="sum")
        before = pids(rt)
        for _ in range({storm_count(8)}):
            interrupted(rng.uniform(0.01, 0.05), slow, np.ones(4))
            assert_right(rt)
        assert pids(rt) == before
    """,
        timeout=60,
    ).check("")


def test_D1_ctrl_c_in_a_short_call(storm_count: Count) -> None:
    """The signal falls on every step of the call path; the answer is the answer of this call or nothing."""
    script(
        INTERRUPT
        + f"""
    rng = random.Random(2)
    with synk.fork(2, backend="numpy") as rt:
        double = rt.function(lambda x: 2 * x, outputs="gather")
        x = np.arange(100.0)
        double(x)
        for number in range({storm_count(20)}):
            timer = interrupt_after(rng.uniform(0.001, 0.005))
            try:
                timer.start()
                for step in range(10**9):
                    result = double(x + step)
                    assert (result == 2 * (x + step)).all(), (number, step)
            except KeyboardInterrupt:
                pass
            timer.join()
            assert (double(x) == 2 * x).all()
        assert_right(rt)
    """,
        timeout=60,
    ).check("")


def test_D1_ctrl_c_in_code_that_ignores_it() -> None:
    """Workers that hold the interpreter are killed after the grace period, and replaced."""
    script(
        INTERRUPT
        + """
    from support import saboteurs
    with synk.fork(2, backend="numpy") as rt:
        before = pids(rt)
        stuck = rt.function(lambda row: saboteurs.loop_in_c() if row[0] else None, outputs=None)
        interrupted(0.2, stuck, np.arange(2))
        assert_right(rt)
        after = pids(rt)
        assert after[0] == before[0] and after[1] != before[1]
    """
    ).check("")


def test_D1_ctrl_c_in_a_collective(storm_count: Count) -> None:
    """Ranks that wait for one another leave together; nothing of the old meeting is in the next."""
    script(
        INTERRUPT
        + f"""
    rng = random.Random(3)
    with synk.fork(2, backend="numpy") as rt:
        def meet(x):
            while True:
                synk.comm.all_reduce(np.full(1000, x[0]), "sum")
        endless = rt.function(meet)
        total = rt.function(lambda x: synk.comm.all_reduce(np.full(1000, x[0]), "sum"), outputs="first")
        before = pids(rt)
        for number in range({storm_count(10)}):
            interrupted(rng.uniform(0.01, 0.05), endless, np.ones(2))
            assert (total(np.full(2, float(number))) == 2.0 * number).all()
        assert pids(rt) == before
        assert_right(rt)
    """,
        timeout=60,
    ).check("")


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


def test_D3_second_ctrl_c_while_the_first_is_handled() -> None:
    script(
        INTERRUPT
        + """
    from support import saboteurs
    from synk._master.workers.recovery import Recovery
    rt = synk.fork(2, backend="numpy")
    path = __file__ + ".stuck"
    stuck = rt.function(lambda row: (open(path, "w").close(), saboteurs.loop_in_c()), outputs=None)
    rt.distribute()
    rt._session.workers.recovery.grace_s = 1000.0  # the workers never answer: only the second signal ends the wait
    end_calls = Recovery.end_calls

    def interrupted_again(*args):
        interrupt_after(0.05).start()
        end_calls(*args)

    Recovery.end_calls = interrupted_again
    first = lambda: wait_for(lambda: os.path.exists(path)) and os.kill(os.getpid(), signal.SIGINT)
    threading.Thread(target=first, daemon=True).start()
    try:
        stuck(np.arange(2))
    except KeyboardInterrupt:
        print("interrupted")
    try:
        assert_right(rt)
    except synk.errors.ClosedError as error:
        print("closed", "Ctrl-C" in str(error.__cause__))
    """
    ).check("interrupted\nclosed True\n")


@pytest.mark.parametrize("seconds", [0.8, pytest.param(10.0, marks=pytest.mark.storm)])
def test_D4_storm_of_interrupts(seconds: float) -> None:
    """An interrupt every few milliseconds, between the bytes of messages too; then every call is right."""
    result = script(
        f"""
        from support.harness import assert_right
        rt = synk.fork(2, backend="numpy")
        blob = rt.function(lambda blob, x: len(blob["b"]) + x.sum(), bcast_inputs="blob", outputs="avg")
        double = rt.function(lambda x: 2 * x, outputs="gather")
        assert_right(rt)
        x = np.arange(50.0)
        end = time.monotonic() + {seconds}
        wrong = []
        rng = np.random.default_rng(4)

        def calls():
            step = int(rng.integers(1 << 20))
            if not (double(x + step) == 2 * (x + step)).all():
                wrong.append(step)
            blob({{"b": b"x" * (1 << (step % 20))}}, x)
            double(rt.data(x))

        is_armed, is_sent = threading.Event(), threading.Event()

        def storm():
            # One at a time: a second Ctrl-C while the first is handled closes the runtime, by contract.
            while time.monotonic() < end:
                is_armed.wait()
                is_armed.clear()
                time.sleep(rng.uniform(0, 0.003))
                os.kill(os.getpid(), signal.SIGINT)
                is_sent.set()

        thread = threading.Thread(target=storm, daemon=True)
        started = False
        while thread.is_alive() or not started:
            try:
                if not started:
                    started = True
                    thread.start()
                is_sent.clear()
                is_armed.set()
                while thread.is_alive():
                    has_come = is_sent.is_set()
                    calls()
                    if has_come:
                        break  # Python drops an interrupt that falls into a finalizer
            except KeyboardInterrupt:
                continue
        assert not wrong, wrong
        for step in range(100):
            assert (double(x + step) == 2 * (x + step)).all()
            length = blob({{"b": b"x" * step}}, x)
            np.testing.assert_allclose(length, step + x.sum() / 2)
        assert_right(rt)
        rt.close()
        """,
        timeout=seconds + 40,
    ).check(stderr=None)
    assert "Error" not in result.stderr, result.stderr


@pytest.mark.parametrize("where", ["fork", "data", "close"])
def test_D5_ctrl_c_inside_the_life_cycle(where: str, storm_count: Count) -> None:
    script(
        INTERRUPT
        + f"""
    from support.harness import census, settled_census
    import gc
    rng = random.Random(5)
    where = {where!r}
    synk.fork(2, backend="numpy")
    assert_right(synk.current())
    synk.close()
    gc.collect()
    baseline = census()
    for _ in range({storm_count(2)}):
        rt = None
        timer = None
        try:
            try:
                if where != "fork":
                    rt = synk.fork(2, backend="numpy")
                    assert_right(rt)
                timer = interrupt_after(rng.uniform(0.001, 0.3 if where == "fork" else 0.01))
                timer.start()
                if where == "fork":
                    rt = synk.fork(2, backend="numpy")
                    assert_right(rt)
                elif where == "data":
                    while True:
                        rt.data(np.ones(1 << 16))
                else:
                    rt.close()
                time.sleep(5)
                raise AssertionError("the interrupt was swallowed")
            except KeyboardInterrupt:
                pass
        finally:
            timer.join()
        if where == "data":
            assert_right(rt)
        if rt is not None:
            rt.close()
        try:
            synk.close()
        except synk.errors.NotForkedError:
            pass
        gc.collect()
        left = settled_census(baseline).leftovers(baseline)
        assert not left, left
    """,
        timeout=60,
    ).check("")


MASTER_ENDS = {
    "return": ("", 0, ""),
    "exception": ("raise ValueError('mine')", 1, None),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "os._exit": ("os._exit(4)", 4, ""),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
    "SIGHUP": ("os.kill(os.getpid(), signal.SIGHUP)", -signal.SIGHUP, ""),
    "abort": ("faulthandler.disable(); os.abort()", -signal.SIGABRT, ""),
    "SIGKILL": ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, ""),
}


@pytest.mark.parametrize("end", MASTER_ENDS)
@pytest.mark.sampled(4)
def test_D6_the_master_ends_and_its_workers_with_it(end: str) -> None:
    code, status, stderr = MASTER_ENDS[end]
    result = script(f"""
        from support import saboteurs
        rt = synk.fork(2, backend="numpy")
        data = rt.data(np.ones((1000, 1000)))
        spawn = rt.function(lambda x: saboteurs.start_sleeper(), outputs=None)
        print(len(spawn(data)), flush=True)
        {code}
    """)
    result.check("2\n", returncode=status, stderr=stderr)
    if end == "exception":
        assert result.stderr.endswith("ValueError: mine\n")


MASTER_KILLED = {
    "idle": "wait()",
    "in a call": "rt.function(busy, outputs=None)(np.arange(2))",
    "in a call that holds the interpreter": "rt.function(stuck, outputs=None)(np.arange(2))",
    "in a reduction": "arm('reduce.before').function(lambda x: np.ones(1 << 18))(np.arange(2))",
    "in a collective": "rt.function(lambda row: busy(row) if row[0] else synk.comm.barrier())(np.arange(2))",
    "in the start": "arm('start.import').distribute()",
    "with a forked child alive": "fork_a_child(); wait()",
    "started by a dead thread": "wait()",
}


@pytest.mark.parametrize("phase", MASTER_KILLED)
@pytest.mark.sampled(4)
def test_D7_sigkill_of_the_master(phase: str) -> None:
    """Workers and their children are gone within two seconds, whatever they were doing."""
    with Scenario(f"""
        from support import saboteurs
        from support.harness import armed
        runtimes = []

        def arm(step):
            synk.close()
            with armed((step, 0, 1, "sleep"), (step, 1, 1, "sleep")):
                return synk.fork(2, backend="numpy")

        def busy(row):
            saboteurs.start_sleeper()
            saboteurs.loop_for_ever()

        def stuck(row):
            saboteurs.loop_in_c()

        def fork_a_child():
            if os.fork() == 0:
                time.sleep(1.5)
                os._exit(0)

        def wait():
            print("ready", flush=True)
            time.sleep(100)

        def start():
            runtimes.append(synk.fork(2, backend="numpy"))
            runtimes[0].function(lambda x: x.sum(), outputs="sum")(np.arange(2.0))

        if {phase!r} == "started by a dead thread":
            thread = threading.Thread(target=start)
            thread.start()
            thread.join()
        else:
            start()
        rt = runtimes[0]
        print("ready", flush=True)
        {MASTER_KILLED[phase]}
    """) as scenario:
        scenario.wait_for_line("ready")
        scenario.process.poll()
        in_phase(scenario, phase)
        scenario.send_signal(signal.SIGKILL)
        scenario.finish().check(returncode=-signal.SIGKILL)


def in_phase(scenario: Scenario, phase: str) -> None:
    """Wait until the workers are where the fault shall meet them: sleeping in the armed step, or busy."""
    num_busy = {"in a call": 2, "in a collective": 1}.get(phase)
    if num_busy is not None:
        assert wait_for(lambda: sum(len(children(pid)) for pid in children(scenario.pid)) == num_busy)
    else:
        assert wait_for(lambda: len(children(scenario.pid)) >= 2)
        assert wait_for(lambda: all(process_stat(pid) is not None for pid in children(scenario.pid)))


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


def test_D9_a_signal_handler_calls_a_function_during_a_call() -> None:
    script("""
        from support.harness import assert_right, pids
        from synk.errors import ReentrancyError
        with synk.fork(2, backend="numpy") as rt:
            total = rt.function(lambda x: (time.sleep(0.5), x.sum())[1], outputs="sum")
            before = pids(rt)

            def handler(*_):
                try:
                    total(np.arange(2.0))
                except ReentrancyError as error:
                    print("refused", "handler" in str(error) or "during" in str(error))

            signal.signal(signal.SIGALRM, handler)
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            assert total(np.arange(4.0)) == 6.0
            assert pids(rt) == before
            assert_right(rt)
    """).check("refused True\n")


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


def test_D11_the_master_raises_while_workers_compute(storm_count: Count) -> None:
    """An exception of another kind in the master's own wait: it propagates, and no later call gets the old answer."""
    script(
        f"""
        import random
        from support.harness import assert_right

        class Mine(Exception):
            pass

        def handler(*_):
            raise Mine

        rng = random.Random(11)
        signal.signal(signal.SIGALRM, handler)
        with synk.fork(2, backend="numpy") as rt:
            double = rt.function(lambda x: (time.sleep(0.02), 2 * x)[1], outputs="gather")
            x = np.arange(10.0)
            double(x)
            for step in range({storm_count(25)}):
                try:
                    signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0001, 0.03))
                    double(x + step)
                    time.sleep(1)
                except Mine:
                    pass
                assert (double(x - step) == 2 * (x - step)).all()
            assert_right(rt)
        """,
        timeout=60,
    ).check()


def test_D12_a_signal_that_another_thread_gets(tmp_path: Path) -> None:
    """The system call in which the main thread waits does not notice it, nor one that comes just before the wait."""
    script(
        f"""
    from support.harness import assert_right
    with synk.fork(2, backend="numpy") as rt:
        def work(x, way):
            open(f"{tmp_path}/{{way}} began {{x if way == 'map' else synk.comm.rank}}", "w").close()
            time.sleep(30)
            open(f"{tmp_path}/{{way}} ended", "w").close()
        f = rt.function(work, bcast_inputs="way", outputs=None)
        ways = {{
            "call": lambda: f(np.ones(2), "call"),
            "submitted": lambda: f.submit(np.ones(2), "submitted").result(),
            "map": lambda: list(rt.map(lambda x: work(x, "map"), range(2))),
        }}
        def found(way):
            return sorted(name for name in os.listdir("{tmp_path}") if name.startswith(way))
        def press(way):
            while len(found(way)) < 2:
                time.sleep(0.01)
            time.sleep(0.2)
            signal.pthread_kill(threading.get_ident(), signal.SIGINT)
        for way, wait in ways.items():
            thread = threading.Thread(target=press, args=[way])
            thread.start()
            try:
                wait()
            except KeyboardInterrupt:
                assert found(way) == [f"{{way}} began 0", f"{{way}} began 1"], found(way)
            else:
                raise AssertionError("the signal was swallowed")
            thread.join()
            assert_right(rt)
    """,
        timeout=60,
    ).check("")
