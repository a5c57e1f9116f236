"""What functions log on the workers comes to the loggers of the master, with its level and the rank."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import harness

ROWS = np.arange(2.0)


def of(caplog: pytest.LogCaptureFixture, name: str) -> list[tuple[int, int, str]]:
    """Return rank, level and text of the records of a logger."""
    return sorted((each.rank, each.levelno, each.getMessage()) for each in caplog.records if each.name == name)


def test_records_come_with_rank_and_level(rt: Any, caplog: pytest.LogCaptureFixture) -> None:
    def logs(x: Any) -> float:
        logging.getLogger("mine.part").warning("%d rows, 100 %%", len(x), extra={"step": 7})
        try:
            raise KeyError("lost")
        except KeyError:
            logging.getLogger("traced").exception("caught")
        return float(x.sum())

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
    traced = [each.exc_text for each in caplog.records if each.name == "traced"]
    assert len(traced) == 2 and all("KeyError: 'lost'" in text and "in logs" in text for text in traced)


def test_levels_are_those_of_the_master(
    reused: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
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


class Context:
    def __init__(self, name: str) -> None:
        self.name = name


class Unsent(Context):
    def __reduce__(self) -> Any:
        raise SystemExit

    def __repr__(self) -> str:
        return f"<{self.name}>"


@pytest.mark.parametrize("kind", [2, "1+1"])
def test_a_formatter_has_the_master_s_names_of_levels_and_what_a_record_brings(
    shared_runtimes: Any, kind: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def logs(x: Any) -> None:
        extra = {"ctx": Context("mine"), "unsent": Unsent("here"), "many": [np.ones(1 << 20)], "step": 3}
        logging.getLogger("brings").log(25, "noticed", extra=extra)

    caplog.set_level(25)
    monkeypatch.setitem(logging._levelToName, 25, "NOTICE")
    shared_runtimes[kind].function(logs, outputs=None)(ROWS)
    assert harness.wait_for(lambda: len(of(caplog, "brings")) == 2)  # over nodes they may come after the call's end
    records = [each for each in caplog.records if each.name == "brings"]
    assert [each.levelname for each in records] == ["NOTICE"] * 2
    for each in records:
        assert (type(each.ctx), each.ctx.name, each.unsent, each.step) == (Context, "mine", "<here>", 3)
        assert isinstance(each.many, str) and each.many.startswith("[array([1., 1.")


def test_a_handler_of_the_master_opens_its_file_once(reused: Any, tmp_path: Path) -> None:
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
    assert len(lines) == 40
    for rank in range(2):
        own = [line for line in lines if line.startswith(f"[rank {rank}]")]
        assert own == [f"[rank {rank}] line {k} of 1 rows" for k in range(20)]


def test_long_texts_and_many_threads(reused: Any, caplog: pytest.LogCaptureFixture) -> None:
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


def test_what_a_rank_logged_is_logged_before_its_call_returns_or_fails(
    reused: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def logs(x: Any, k: Any) -> float:
        logging.getLogger("repeated").warning("call %02d", k[0])
        if k[0] == 30:
            raise ValueError("the last")
        return float(x.sum())

    def texts() -> list[str]:
        return [text for _, _, text in of(caplog, "repeated")]

    f = reused(1).function(logs, bcast_inputs="k", outputs="sum")
    for k in range(30):
        f(ROWS, np.array([k]))
        assert texts()[-1] == f"[rank 0] call {k:02}"
    with pytest.raises(ValueError, match="the last"):
        f(ROWS, np.array([30]))
    assert texts() == [f"[rank 0] call {k:02}" for k in range(31)]


def test_a_handler_that_raises_ends_no_call(reused: Any, caplog: pytest.LogCaptureFixture) -> None:
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


def test_an_inline_rank_logs_as_it_is(shared_runtimes: Any, caplog: pytest.LogCaptureFixture) -> None:
    shared_runtimes[0].function(lambda x: logging.getLogger("inline").warning("here"), outputs=None)(ROWS)
    assert [each.getMessage() for each in caplog.records if each.name == "inline"] == ["here"]
