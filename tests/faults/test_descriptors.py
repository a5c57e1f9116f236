"""Descriptors have one owner each, wherever a start is broken off and whoever closes; and what ends the workers."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import threading
from collections.abc import Callable
from typing import Any

import pytest
from support.harness import Scenario, assert_right, children, descriptors, script, wait_for, wait_until_dead

from synk._wire import lifeline as _lifeline
from synk._wire.descriptors import Descriptor, pipe

pytestmark = pytest.mark.own_start

Fork = Callable[..., Any]
Count = Callable[[int], int]


def is_open(fd: int) -> bool:
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


def test_a_descriptor_is_closed_with_its_last_reference() -> None:
    fd = Descriptor(os.open(os.devnull, os.O_RDONLY))
    number, held = int(fd), fd
    del fd
    assert is_open(number)
    assert held == number
    del held
    assert not is_open(number)


def test_a_descriptor_that_was_closed_behind_our_back_is_given_up_in_silence() -> None:
    fd = Descriptor(os.open(os.devnull, os.O_RDONLY))
    os.close(fd)
    del fd
    gc.collect()


def test_an_end_that_is_given_up_in_many_threads_is_closed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Owner:
        fd: int

    for _ in range(50):
        owner = Owner()
        owner.fd, other = pipe()
        barrier = threading.Barrier(4)

        def give_up(owner: Owner = owner, barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            owner.fd = -1

        threads = [threading.Thread(target=give_up) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with pytest.raises(BrokenPipeError):
            os.write(other, b"x")


# ----- a start that is broken off

INTERRUPTED_START = """
        import gc, contextlib
        from pathlib import Path
        from support.harness import census, settled_census

        package = str(Path(synk.__file__).parent)

        class InterruptAt:
            '''Ctrl-C at the n-th instruction of the package.'''

            def __init__(self, nth):
                self.nth, self.count, self.where = nth, 0, None

            def enter(self, frame, event, argument):
                if not frame.f_code.co_filename.startswith(package):
                    return None
                if NAMES and frame.f_code.co_name not in NAMES:
                    return None
                frame.f_trace_opcodes, frame.f_trace_lines = True, False
                return self.look

            def look(self, frame, event, argument):
                if event == "opcode":
                    self.count += 1
                    if self.count == self.nth:
                        self.where = (frame.f_code.co_qualname, frame.f_lineno)
                        signal.raise_signal(signal.SIGINT)
                return self.look

        def start(nth):
            at = InterruptAt(nth)
            sys.settrace(at.enter)
            try:
                synk.fork(2, backend="numpy")
                sys.settrace(None)
            except KeyboardInterrupt:
                sys.settrace(None)
                assert nth is not None
                try:
                    was_left = synk.current()
                except (synk.errors.ClosedError, synk.errors.NotForkedError):
                    pass
                else:
                    assert "fork" in at.where[0], at.where  # it was made already
            synk.close()
            return at

        start(None)  # it makes what is made once
        count = start(None).count
        gc.collect()
        baseline = census()
        for nth in POINTS(count):
            at = start(nth)
            assert at.where is not None
            left = settled_census(baseline).leftovers(baseline)
            assert not left, (at.where, left)
"""


@pytest.mark.parametrize("part", ["in between", "at the end"])
def test_D5_ctrl_c_at_any_instruction_of_a_start_leaves_nothing(part: str, storm_count: Count) -> None:
    """As the workers are complete, and their owner not yet, too."""
    num_points = storm_count(50 if part == "at the end" else 20)
    points = {
        "in between": f"range(1, count, max(count // {num_points}, 1))",
        "at the end": f"range(max(count - {num_points}, 1), count)",
    }
    # What is left to do when all processes run: the constructors and their callers give them to one another.
    names = {"__init__", "start", "begin", "fork"} if part == "at the end" else set()
    code = f"POINTS = lambda count: {points[part]}\nNAMES = {names!r}\n" + INTERRUPTED_START.replace("\n        ", "\n")
    script(code, timeout=100).check("")


# ----- a runtime that is closed in several threads at once


class PausedCall:
    """Holds up the first call of ``module.name`` in another thread until ``go`` is set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> None:
        self.arrived, self.go = threading.Event(), threading.Event()
        self._call = getattr(module, name)
        self._is_first = [True]
        monkeypatch.setattr(module, name, self)

    def __call__(self, *args: Any) -> Any:
        with contextlib.suppress(IndexError):
            self._is_first.pop()
            self.arrived.set()
            self.go.wait()
        return self._call(*args)


def test_a_close_does_not_wake_a_descriptor_that_was_given_to_somebody_else(
    runtime: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    rt = runtime(1)
    assert_right(rt)
    paused = PausedCall(monkeypatch, os, "eventfd_write")
    late = threading.Thread(target=rt.close)
    late.start()
    paused.arrived.wait()
    rt.close()
    mine = [os.eventfd(0, os.EFD_NONBLOCK) for _ in range(64)]  # they would get the number
    paused.go.set()
    late.join()
    try:
        for fd in mine:
            with pytest.raises(BlockingIOError):
                os.eventfd_read(fd)
    finally:
        for fd in mine:
            os.close(fd)


def test_a_worker_that_is_looked_at_while_it_ends_does_not_cost_a_strangers_life(
    runtime: Fork, monkeypatch: pytest.MonkeyPatch
) -> None:
    rt = runtime(1)
    assert_right(rt)
    paused = PausedCall(monkeypatch, signal, "pidfd_send_signal")
    said: list[str] = []
    looking = threading.Thread(target=lambda: said.append(rt.where()))
    looking.start()
    paused.arrived.wait()
    rt.close()
    strangers = [subprocess.Popen(["sleep", "60"]) for _ in range(2)]
    pidfds = [os.pidfd_open(stranger.pid) for stranger in strangers for _ in range(32)]
    paused.go.set()
    looking.join()
    try:
        assert said
        assert [stranger.poll() for stranger in strangers] == [None, None]
    finally:
        for fd in pidfds:
            os.close(fd)
        for stranger in strangers:
            stranger.kill()
            stranger.wait()


def test_E12_many_threads_close_at_once(runtime: Fork, storm_count: Count) -> None:
    """While another thread opens and closes descriptors of its own, which stay what they are."""
    is_over = threading.Event()
    wrong: list[BaseException] = []

    def use_descriptors() -> None:
        try:
            while not is_over.is_set():
                ends = [os.pipe() for _ in range(8)]
                for number, (_, writer) in enumerate(ends):
                    os.write(writer, bytes([number]))
                for number, (reader, writer) in enumerate(ends):
                    os.close(writer)
                    assert os.read(reader, 64) == bytes([number])
                    os.close(reader)
        except BaseException as error:
            wrong.append(error)

    user = threading.Thread(target=use_descriptors)
    user.start()
    try:
        for _ in range(storm_count(2)):
            rt = runtime(2)
            assert_right(rt)
            barrier = threading.Barrier(6)

            def close(rt: Any = rt, barrier: threading.Barrier = barrier) -> None:
                barrier.wait()
                try:
                    rt.close()
                except BaseException as error:
                    wrong.append(error)

            threads = [threading.Thread(target=close) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert rt.is_closed
    finally:
        is_over.set()
        user.join()
    assert not wrong, wrong


# ----- the end of the master, where a child of it lives on that no hook has seen

BUSY = {
    "idle": "print('ready', flush=True); time.sleep(100)",
    "in a loop of Python": "rt.function(lambda row: saboteurs.start_sleeper() and saboteurs.loop_for_ever(), "
    "outputs=None)(np.arange(2))",
    "in C code that holds the interpreter": "rt.function(saboteurs.loop_in_c, outputs=None)(np.arange(2))",
}


@pytest.mark.parametrize("phase", BUSY)
def test_D7_sigkill_of_the_master_with_a_child_that_was_forked_without_hooks(phase: str) -> None:
    """It holds the write ends of all pipes of the master; the workers end all the same, and what they have started."""
    with Scenario(f"""
        import ctypes
        from support import saboteurs
        from support.harness import pids
        rt = synk.fork(2, backend="numpy")
        workers = pids(rt)
        child = ctypes.PyDLL(None).fork()  # as the C library of an extension would
        if child == 0:
            time.sleep(60)
            os._exit(0)
        print(*workers, child, flush=True)
        {BUSY[phase]}
    """) as scenario:
        *workers, child = map(int, scenario.wait_for_line("").split())
        assert any("pipe" in target for target in descriptors(child))
        if phase == "in a loop of Python":
            assert wait_for(lambda: all(children(pid) for pid in workers))
        scenario.send_signal(signal.SIGKILL)
        for pid in workers:
            assert wait_until_dead(pid)
        assert not wait_until_dead(child, 0.0)
        others = [pid for pid in scenario.processes() if pid != child]
        assert [pid for pid in others if not wait_until_dead(pid)] == []
        os.kill(child, signal.SIGKILL)
        scenario.finish().check(None, returncode=-signal.SIGKILL)


def test_workers_start_where_the_system_has_no_watches_left(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        def inotify_init1(self, flags: int) -> int:
            return -1

    monkeypatch.setattr(_lifeline, "libc", Refusing())
    fd = os.open(os.devnull, os.O_RDONLY)
    assert _lifeline.tie_to_pulse(fd) is None
    assert not is_open(fd)
