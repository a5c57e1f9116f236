"""How what workers print comes to a stream: lines whole, bars as they move."""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import harness

from synk._master.processes.output import Output, report
from synk._wire.cell import cell
from synk._wire.descriptors import pipe

Fork = Callable[..., Any]


class Printers:
    """Ranks that print, without processes."""

    def __init__(self, count: int) -> None:
        pipes = [pipe() for _ in range(count)]
        self._writers = [write for _, write in pipes]
        self.outputs = [Output(read, rank, "stdout") for rank, (read, _) in enumerate(pipes)]

    def __call__(self, rank: int, text: str | bytes) -> None:
        """Have a rank print, and pass on what there is."""
        os.write(self._writers[rank], text.encode() if isinstance(text, str) else text)
        assert self.outputs[rank].forward()

    def end(self, rank: int) -> None:
        """Have a rank end."""
        self._writers[rank] = -1  # closes it
        assert not self.outputs[rank].forward()
        self.outputs[rank].close()


class Shown:
    """What has come to the master's standard output."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self._text = ""

    def getvalue(self) -> str:
        self._text += self._capsys.readouterr().out
        return self._text


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Shown:
    monkeypatch.setattr(cell, "unfinished", {})
    return Shown(capsys)


def test_lines_are_whole_and_named(shown: Shown) -> None:
    say = Printers(2)
    say(0, "one\ntwo\n")
    say(1, "three\r\n\n")
    assert shown.getvalue() == "[rank 0] one\n[rank 0] two\n[rank 1] three\n[rank 1] \n"


def test_a_line_is_shown_when_it_ends(shown: Shown) -> None:
    say = Printers(2)
    say(0, "loading")
    say(1, "hello\n")
    assert shown.getvalue() == "[rank 1] hello\n"
    say(0, " ... done\nnext\n")
    assert shown.getvalue() == "[rank 1] hello\n[rank 0] loading ... done\n[rank 0] next\n"


def test_a_bar_is_broken_by_the_lines_of_others(shown: Shown) -> None:
    say = Printers(2)
    say(0, "\rloading")
    say(1, "hello\n")
    say(0, " ...\n")
    assert shown.getvalue() == "\r[rank 0] loading\n[rank 1] hello\n[rank 0]  ...\n"


def test_a_bar_moves(shown: Shown) -> None:
    say = Printers(1)
    say(0, "\r 10%")
    say(0, "\r 50%")
    say(0, "\r100%\nready\n")
    assert shown.getvalue() == "\r[rank 0]  10%\r[rank 0]  50%\r[rank 0] 100%\n[rank 0] ready\n"


def test_bars_of_two_ranks_move_in_one_line(shown: Shown) -> None:
    say = Printers(2)
    say(0, "\r 10%")
    say(1, "\r 20%")
    say(0, "\r 30%")
    assert shown.getvalue() == "\r[rank 0]  10%\r[rank 1]  20%\r[rank 0]  30%"
    say(1, "a line\n")  # goes on in its own, which was overwritten
    assert shown.getvalue().endswith("\r[rank 0]  30%\n[rank 1] a line\n")


def test_characters_are_shown_when_all_of_their_bytes_have_come(shown: Shown) -> None:
    say = Printers(1)
    for byte in "\raé█𝄞\n".encode():
        say(0, bytes([byte]))
    assert shown.getvalue() == "\r[rank 0] aé█𝄞\n"
    say(0, b"\r\xff\xc3")
    say(0, b"\n")
    assert shown.getvalue().endswith("\n\r[rank 0] \\xff\\xc3\n")


def test_the_end_of_a_worker_ends_its_line(shown: Shown) -> None:
    say = Printers(2)
    say(0, "half")
    say.end(0)
    say(1, "whole\n")
    assert shown.getvalue() == "[rank 0] half\n[rank 1] whole\n"
    assert say.outputs[0].since(0.0) == ["half"]


def test_the_last_state_of_a_bar_is_what_is_remembered(shown: Shown) -> None:
    say = Printers(1)
    say(0, "\r 10%")
    say(0, "\r 50%\nfatal\n")
    assert say.outputs[0].since(0.0) == [" 50%", "fatal"]


def test_a_bar_inside_a_function_moves_while_it_runs(reused: Fork, shown: Shown, tmp_path: Path) -> None:
    path = tmp_path / "go"

    def slow(x: Any, path: str) -> float:
        sys.stdout.write("\r50%")
        sys.stdout.flush()
        while not os.path.exists(path):
            time.sleep(0.01)
        sys.stdout.write("\r100%\n")
        return float(x.sum())

    function = reused(1).function(slow, bcast_inputs="path", outputs="sum")
    thread = threading.Thread(target=function, args=(np.ones(2), str(path)))
    thread.start()
    try:
        assert harness.wait_for(lambda: "50%" in shown.getvalue())
        assert "100%" not in shown.getvalue()
    finally:
        path.touch()
        thread.join()
    assert shown.getvalue() == "\r[rank 0] 50%\r[rank 0] 100%\n"


@pytest.mark.parametrize("kind", [KeyboardInterrupt, ValueError, BaseException])
def test_what_a_signal_handler_raises_in_a_warning_comes_out(kind: type[BaseException], capfd: Any) -> None:
    """Of a log handler it would be ended there."""

    class Signals(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            signal.raise_signal(signal.SIGUSR1)

    def late(signum: int, frame: Any) -> None:
        raise kind

    handler, before = Signals(), signal.signal(signal.SIGUSR1, late)
    logging.getLogger("synk").addHandler(handler)
    try:
        with pytest.raises(kind):
            report("a warning of %d words", 4)
    finally:
        logging.getLogger("synk").removeHandler(handler)
        signal.signal(signal.SIGUSR1, before)
    assert "a warning of" not in capfd.readouterr().err


@pytest.mark.parametrize("kind", [OSError, SystemExit])
def test_a_warning_whose_log_handler_raises_goes_to_stderr(kind: type[BaseException], capfd: Any) -> None:
    class Broken(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            raise kind

    handler = Broken()
    logging.getLogger("synk").addHandler(handler)
    try:
        report("a warning of %d words", 4)
    finally:
        logging.getLogger("synk").removeHandler(handler)
    told = f"synk: a warning of 4 words\n(a handler of logging raised {kind.__name__})\n"
    assert told in capfd.readouterr().err
