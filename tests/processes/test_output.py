"""How what workers print comes to the program's own stream: lines whole, bars as they move. A rank's environment."""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import harness
from support.gates import Gate
from support.harness import PACKAGE_FOLDER

from synk._processes.output import Output, report
from synk._processes.placement import Placement
from synk._processes.program import setup_message
from synk._wire.cell import cell
from synk._wire.mapping import pipe
from synk.backends._assignment import DeviceAssignment

END = None
PRINTED: dict[str, tuple[list[tuple[int, str | bytes | None]], str, list[str]]] = {
    "lines are whole and named": (
        [(0, "one\ntwo\n"), (1, "three\r\n\n")],
        "[rank 0] one\n[rank 0] two\n[rank 1] three\n[rank 1] \n",
        ["one", "two"],
    ),
    "a line is shown when it ends": (
        [(0, "loading"), (1, "hello\n"), (0, " ... done\nnext\n")],
        "[rank 1] hello\n[rank 0] loading ... done\n[rank 0] next\n",
        ["loading ... done", "next"],
    ),
    "a bar is broken by the lines of others": (
        [(0, "\rloading"), (1, "hello\n"), (0, " ...\n")],
        "\r[rank 0] loading\n[rank 1] hello\n[rank 0]  ...\n",
        ["loading ..."],
    ),
    "a bar moves, and its last state is remembered": (
        [(0, "\r 10%"), (0, "\r 50%"), (0, "\r100%\nready\n")],
        "\r[rank 0]  10%\r[rank 0]  50%\r[rank 0] 100%\n[rank 0] ready\n",
        ["100%", "ready"],
    ),
    "bars of two ranks move in one line": (  # rank 1 goes on in its own, which was overwritten
        [(0, "\r 10%"), (1, "\r 20%"), (0, "\r 30%"), (1, "a line\n")],
        "\r[rank 0]  10%\r[rank 1]  20%\r[rank 0]  30%\n[rank 1] a line\n",
        [],  # it has not ended
    ),
    "characters are shown when all of their bytes have come": (
        [*((0, bytes([byte])) for byte in "\raé█𝄞\n".encode()), (0, b"\r\xff\xc3"), (0, b"\n")],
        "\r[rank 0] aé█𝄞\n\r[rank 0] \\xff\\xc3\n",
        ["aé█𝄞", "\\xff\\xc3"],
    ),
    "the end of a worker ends its line": (
        [(0, "half"), (0, END), (1, "whole\n")],
        "[rank 0] half\n[rank 1] whole\n",
        ["half"],
    ),
}


@pytest.mark.parametrize("name", PRINTED)
def test_what_is_printed_is_shown_and_remembered(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Two ranks print into pipes; there is no process."""
    monkeypatch.setattr(cell, "unfinished", {})
    printed, shown, remembered = PRINTED[name]
    pipes = [pipe() for _ in range(2)]
    readers, writers = [Output(read, rank, "stdout") for rank, (read, _) in enumerate(pipes)], [w for _, w in pipes]
    del pipes
    for rank, text in printed:
        if text is END:
            writers[rank] = -1  # closes it
        else:
            os.write(writers[rank], text.encode() if isinstance(text, str) else text)
        assert readers[rank].forward() is (text is not END)
    readers[0].close()
    assert capsys.readouterr().out == shown
    assert readers[0].since(0.0) == remembered


def test_a_bar_inside_a_function_moves_while_it_runs(
    reused: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(cell, "unfinished", {})
    gate, shown = Gate(tmp_path), [""]

    def slow(x: Any) -> float:
        sys.stdout.write("\r50%")
        sys.stdout.flush()
        gate.wait()
        sys.stdout.write("\r100%\n")
        return float(x.sum())

    def text() -> str:
        shown[0] += capsys.readouterr().out
        return shown[0]

    thread = threading.Thread(target=reused(1).function(slow, outputs="sum"), args=(np.ones(2),))
    thread.start()
    try:
        assert harness.wait_for(lambda: "50%" in text())
        assert "100%" not in text()
    finally:
        gate.open()
        thread.join()
    assert text() == "\r[rank 0] 50%\r[rank 0] 100%\n"


@pytest.fixture
def handler() -> Any:
    """A handler of synk's log, whose ``emit`` is the test's."""
    handler = logging.Handler()
    logging.getLogger("synk").addHandler(handler)
    yield handler
    logging.getLogger("synk").removeHandler(handler)


@pytest.mark.parametrize("kind", [OSError, SystemExit])
def test_a_warning_whose_log_handler_raises_goes_to_stderr(
    handler: Any, kind: type[BaseException], capfd: pytest.CaptureFixture[str]
) -> None:
    def broken(record: logging.LogRecord) -> None:
        raise kind

    handler.emit = broken
    report("a warning of %d words", 4)
    told = f"synk: a warning of 4 words\n(a handler of logging raised {kind.__name__})\n"
    assert told in capfd.readouterr().err


VARIABLES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of eight cores whose user has set no limit."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    for variable in (*VARIABLES, "VECLIB_MAXIMUM_THREADS"):
        monkeypatch.delenv(variable, raising=False)


def placement(count: int, cpus: tuple[tuple[int, ...], ...] = ()) -> Placement:
    """Ranks on devices that need an environment of their own."""
    environments = tuple({"DEVICE": str(rank)} for rank in range(count))
    devices = tuple(f"cuda:{rank}" for rank in range(count))
    return Placement("cupy", DeviceAssignment(devices, environments, cpus))


def on_cpu(*devices: str) -> Placement:
    return Placement("numpy", DeviceAssignment(devices))


def limits(placed: Placement) -> list[int]:
    """Return each rank's limit of threads, which all libraries must agree on."""
    found = [{int(placed.environment(rank)[name]) for name in VARIABLES} for rank in range(len(placed.devices))]
    assert all(len(each) == 1 for each in found)
    return [each.pop() for each in found]


def test_ranks_share_the_cores_and_keep_their_devices_variables() -> None:
    for count, expected in ((1, 8), (2, 4), (3, 2), (8, 1), (16, 1)):
        on_cores = on_cpu(*(f"cpu:{rank}" for rank in range(count)))
        assert limits(on_cores) == limits(placement(count)) == [expected] * count
        assert [placement(count).environment(rank)["DEVICE"] for rank in range(count)] == [*map(str, range(count))]
    for cpus, each in (  # the cores that they are bound to
        (((0, 1, 2, 3), (4, 5, 6, 7)), [4, 4]),
        (((0, 1, 2, 3), (0, 1, 2, 3), (4, 5, 6, 7)), [2, 2, 4]),
        (((0, 1, 2), (2, 3)), [1, 1]),
    ):
        assert limits(placement(len(cpus), cpus)) == each


def test_a_limit_of_the_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(variable, "3")
            on_device = Placement("cupy", DeviceAssignment(("cuda:0",), ({variable: "3"},)))
            for placed in (on_cpu("cpu:0"), on_device):
                environment = placed.environment(0)
                assert {name: environment[name] for name in VARIABLES if name in environment} == {variable: "3"}


def test_workers_search_the_folder_in_which_the_package_lies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the program found it by a relative path, which workers do not search; and never its inner folders."""
    rest = [entry for entry in sys.path if entry not in ("", str(PACKAGE_FOLDER))]
    monkeypatch.setattr(sys, "path", ["", *rest])
    searched = setup_message(on_cpu("cpu:0"), 0, [])["import_path"]
    assert searched[-1] == str(PACKAGE_FOLDER)
    assert str(PACKAGE_FOLDER / "synk") not in searched
