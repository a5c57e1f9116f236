"""What functions log on the workers comes to the loggers of the master, with its level and the rank."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import harness

import synk

Fork = Callable[..., Any]

ROWS = np.arange(2.0)


def of(caplog: pytest.LogCaptureFixture, name: str) -> list[tuple[int, int, str]]:
    """Return rank, level and text of the records of a logger."""
    return sorted((each.rank, each.levelno, each.getMessage()) for each in caplog.records if each.name == name)


def test_records_come_with_rank_and_level(reused: Fork, caplog: pytest.LogCaptureFixture) -> None:
    def logs(x: Any) -> float:
        logging.getLogger("mine.part").warning("%d rows, 100 %%", len(x), extra={"step": 7})
        return float(x.sum())

    rt = reused(2)
    assert rt.function(logs, outputs="sum")(ROWS) == 1
    assert of(caplog, "mine.part") == [
        (0, logging.WARNING, "[rank 0] 1 rows, 100 %"),
        (1, logging.WARNING, "[rank 1] 1 rows, 100 %"),
    ]
    records = [each for each in caplog.records if each.name == "mine.part"]
    assert {each.processName for each in records} == {"rank 0", "rank 1"}
    assert {each.process for each in records} == set(harness.pids(rt))
    assert {each.step for each in records} == {7}
    assert {(each.funcName, each.filename) for each in records} == {("logs", "test_logging.py")}


def test_levels_are_those_of_the_master(
    reused: Fork, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logs(x: Any) -> float:
        for name in ("levels", "levels.loud", "levels.quiet"):
            logging.getLogger(name).debug("debug")
            logging.getLogger(name).info("info")
            logging.getLogger(name).error("error")
        return float(x.sum())

    monkeypatch.setattr(logging.getLogger("levels.loud"), "level", logging.DEBUG)
    monkeypatch.setattr(logging.getLogger("levels.quiet"), "level", logging.CRITICAL)
    reused(1).function(logs, outputs="sum")(ROWS)
    assert [text for _, _, text in of(caplog, "levels")] == ["[rank 0] error"]
    assert {text for _, _, text in of(caplog, "levels.loud")} == {f"[rank 0] {k}" for k in ("debug", "info", "error")}
    assert of(caplog, "levels.quiet") == []


def test_an_exception_is_logged_with_its_traceback(reused: Fork, caplog: pytest.LogCaptureFixture) -> None:
    def logs(x: Any) -> float:
        try:
            raise KeyError("lost")
        except KeyError:
            logging.getLogger("traced").exception("caught")
        return float(x.sum())

    reused(1).function(logs, outputs="sum")(ROWS)
    (record,) = [each for each in caplog.records if each.name == "traced"]
    assert "KeyError: 'lost'" in record.exc_text and "in logs" in record.exc_text


def test_a_handler_of_the_master_opens_its_file_once(reused: Fork, tmp_path: Path) -> None:
    path = tmp_path / "log"
    handler = logging.FileHandler(path, mode="w")
    logger = logging.getLogger("filed")
    logger.addHandler(handler)

    def logs(x: Any) -> float:
        logging.basicConfig()  # has a handler already: nothing is added
        for k in range(20):
            logging.getLogger("filed").warning("line %d of %d rows", k, len(x))
        return float(x.sum())

    try:
        reused(2).function(logs, outputs="sum")(ROWS)
    finally:
        logger.removeHandler(handler)
        handler.close()
    lines = path.read_text().splitlines()
    assert sorted(lines) == sorted(f"[rank {rank}] line {k} of 1 rows" for rank in range(2) for k in range(20))
    for rank in range(2):
        own = [line for line in lines if line.startswith(f"[rank {rank}]")]
        assert own == [f"[rank {rank}] line {k} of 1 rows" for k in range(20)]


def test_long_texts_and_many_threads(reused: Fork, caplog: pytest.LogCaptureFixture) -> None:
    def logs(x: Any) -> float:
        def talk(number: int) -> None:
            for k in range(20):
                logging.getLogger("long").warning("%d %d %s", number, k, "ü\n" * 20_000)

        threads = [threading.Thread(target=talk, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return float(x.sum())

    reused(1).function(logs, outputs="sum")(ROWS)
    texts = [each.getMessage() for each in caplog.records if each.name == "long"]
    assert sorted(texts) == sorted(f"[rank 0] {number} {k} " + "ü\n" * 20_000 for number in range(3) for k in range(20))


def test_repeated_calls_and_failing_ones_log(reused: Fork, caplog: pytest.LogCaptureFixture) -> None:
    def logs(x: Any, k: Any) -> float:
        logging.getLogger("repeated").warning("call %d", k[0])
        if k[0] == 5:
            raise ValueError("five")
        return float(x.sum())

    f = reused(1).function(logs, bcast_inputs="k", outputs="sum")
    for k in range(5):
        f(ROWS, np.array([k]))
    with pytest.raises(ValueError, match="five"):
        f(ROWS, np.array([5]))
    assert [text for _, _, text in of(caplog, "repeated")] == [f"[rank 0] call {k}" for k in range(6)]


def test_a_handler_that_raises_ends_no_call(reused: Fork, caplog: pytest.LogCaptureFixture) -> None:
    class Broken(logging.Handler):
        def handle(self, record: logging.LogRecord) -> bool:
            raise OSError("no disk")

    def logs(x: Any) -> float:
        logging.getLogger("broken").warning("hello")
        return float(x.sum())

    handler = Broken()
    logging.getLogger("broken").addHandler(handler)
    try:
        assert reused(1).function(logs, outputs="sum")(ROWS) == 1
    finally:
        logging.getLogger("broken").removeHandler(handler)
    assert "a log record of rank 0 is lost: OSError: no disk" in caplog.text


def test_an_inline_rank_logs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def logs(x: Any) -> float:
        logging.getLogger("inline").warning("here")
        return float(x.sum())

    with synk.Runtime(inline=True, backend="numpy") as rt:
        rt.function(logs, outputs="sum")(ROWS)
    assert [each.getMessage() for each in caplog.records if each.name == "inline"] == ["here"]


class _RepliesFirst:
    """A poll object that lets a moment pass, and then names replies before all else."""

    def __init__(self, poll: Any, replies: Any) -> None:
        self._poll, self._replies = poll, replies

    def poll(self, timeout: Any = None) -> Any:
        if self._poll.poll(timeout):
            time.sleep(0.01)  # by then the worker has answered
        return sorted(self._poll.poll(0), key=lambda event: event[0] not in self._replies)


@pytest.mark.parametrize("fails", [False, True])
def test_what_a_rank_logged_before_it_answered_is_logged_before_the_call_returns(
    reused: Fork, caplog: pytest.LogCaptureFixture, fails: bool
) -> None:
    def logs(x: Any, k: Any) -> float:
        if k[0]:
            logging.getLogger("before").warning("here")
        if k[0] == 2:
            raise ValueError("two")
        return float(x.sum())

    f = reused(1).function(logs, bcast_inputs="k", outputs="sum")
    for _ in range(4):
        f(ROWS, np.array([0]))
    doorbells = f._callee.plans.compiled[0]._doorbells
    doorbells._poll = _RepliesFirst(doorbells._poll, doorbells._by_fd)
    with pytest.raises(ValueError, match="two") if fails else contextlib.nullcontext():
        f(ROWS, np.array([1 + fails]))
    assert [text for _, _, text in of(caplog, "before")] == ["[rank 0] here"]
