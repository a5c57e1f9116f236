"""Descriptors have one owner each, wherever a start is broken off and whoever closes; and what ends the workers."""

from __future__ import annotations

import os
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from support.beside import beside
from support.harness import script

from synk.errors import ClosedError

Fork = Callable[..., Any]
Count = Callable[[int], int]


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


START = pytest.mark.own_start


@pytest.mark.parametrize(
    "part", [pytest.param("in between", marks=START), pytest.param("at the end", marks=START), "close"]
)
def test_D5_ctrl_c_at_any_instruction_of_a_start_or_of_close_leaves_nothing(part: str, storm_count: Count) -> None:
    """As the workers are complete, and their owner not yet, too."""
    points = {
        "in between": f"range(1, count, max(count // {storm_count(12)}, 1))",
        "at the end": f"range(max(count - {storm_count(50)}, 1), count, 2)",
        "close": f"range(1, count, max(count // {storm_count(5)}, 1))",
    }
    # What is left to do when all processes run: the constructors and their callers give them to one another.
    names = {"__init__", "start", "begin", "fork"} if part == "at the end" else set()
    head = f"POINTS = lambda count: {points[part]}\nNAMES, IS_CLOSED = {names!r}, {part == 'close'}\n"
    script(head + textwrap.dedent(INTERRUPTED_START), timeout=100).check("")


# ----- a runtime that is closed in several threads at once


def use_descriptors() -> None:
    ends = [os.pipe() for _ in range(8)]
    for number, (_, writer) in enumerate(ends):
        os.write(writer, bytes([number]))
    for number, (reader, writer) in enumerate(ends):
        os.close(writer)
        assert os.read(reader, 64) == bytes([number])
        os.close(reader)


def test_E6_E12_many_threads_close_at_once_and_others_call(runtime: Fork, storm_count: Count) -> None:
    """While another thread opens and closes descriptors of its own, which stay what they are."""
    with beside(use_descriptors):
        for number in range(storm_count(2)):
            rt = runtime(2)
            slow = rt.function(lambda x: (time.sleep(0.1), x.sum())[1], outputs="sum")
            results: list[float] = []

            def call(slow: Any = slow, results: list[float] = results) -> None:
                with pytest.raises(ClosedError):
                    while True:
                        results.append(slow(np.arange(4.0)))

            barrier = threading.Barrier(6)
            with ThreadPoolExecutor(7) as pool:
                calling = pool.submit(call)
                while len(results) < number % 2:
                    time.sleep(0.001)
                closing = [pool.submit(lambda rt=rt, barrier=barrier: (barrier.wait(), rt.close())) for _ in range(6)]
                for each in (calling, *closing):
                    each.result(60)
            assert set(results) <= {6.0}
            assert rt.is_closed
