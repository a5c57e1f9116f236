"""Descriptors have one owner each, wherever a start is broken off and whoever closes; and what ends the workers."""

from __future__ import annotations

import os
import sys
import textwrap
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
from support.harness import assert_right, script

from synk._wire.descriptors import pipe

pytestmark = pytest.mark.own_start

Fork = Callable[..., Any]
Count = Callable[[int], int]


# ----- a start that is broken off


class Raised(Exception):
    """What a handler of a signal of the program's raises."""


def test_a_pipe_has_owners_at_every_instruction() -> None:
    """An exception at any of them leaves no descriptor behind."""
    before, outer = set(os.listdir("/proc/self/fd")), sys.gettrace()
    count = nth = 0

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes = True
        count += event == "opcode"
        if count == nth:
            raise Raised
        return look

    while count >= nth:
        nth, count = nth + 1, 0
        sys.settrace(look)
        ends: Any = None
        try:
            ends = pipe()
        except Raised:
            pass
        finally:
            sys.settrace(outer)
        del ends
        assert set(os.listdir("/proc/self/fd")) == before, f"instruction {nth}"
    assert nth > 20


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
                        self.where = (Path(frame.f_code.co_filename).name, frame.f_code.co_name, frame.f_lineno)
                        signal.raise_signal(signal.SIGINT)
                return self.look

        def start(nth):
            at = InterruptAt(nth)
            try:
                if IS_CLOSED:
                    rt = synk.fork(2, backend="numpy")
                    rt.distribute()
                    sys.settrace(at.enter)
                    rt.close()
                else:
                    sys.settrace(at.enter)
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
                    # it was made already: ``fork`` was about to return, or to let Ctrl-C through
                    assert IS_CLOSED or at.where[0] in ("current.py", "interrupts.py", "tracebacks.py"), at.where
            synk.close()
            return at

        start(None)  # it makes what is made once
        count = start(None).count
        gc.collect()
        baseline = census()
        for nth in POINTS(count):
            at = start(nth)
            assert at.where is not None or IS_CLOSED  # it may have fewer instructions than the first one
            left = settled_census(baseline).leftovers(baseline)
            assert not left, (at.where, left)
"""


@pytest.mark.parametrize("part", ["in between", "at the end", "close"])
def test_D5_ctrl_c_at_any_instruction_of_a_start_or_of_close_leaves_nothing(part: str, storm_count: Count) -> None:
    """As the workers are complete, and their owner not yet, too."""
    points = {
        "in between": f"range(1, count, max(count // {storm_count(20)}, 1))",
        "at the end": f"range(max(count - {storm_count(50)}, 1), count)",
        "close": f"range(1, count, max(count // {storm_count(8)}, 1))",
    }
    # What is left to do when all processes run: the constructors and their callers give them to one another.
    names = {"__init__", "start", "begin", "fork"} if part == "at the end" else set()
    head = f"POINTS = lambda count: {points[part]}\nNAMES, IS_CLOSED = {names!r}, {part == 'close'}\n"
    script(head + textwrap.dedent(INTERRUPTED_START), timeout=100).check("")


# ----- a runtime that is closed in several threads at once


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
