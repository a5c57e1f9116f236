"""Log records on their way from a worker to the loggers of the program, as lines of JSON; levels on the way back."""

from __future__ import annotations

import base64
import json
import logging
import os
import pickle
from collections.abc import Callable
from typing import Any, NamedTuple

from synk._pure.words import short_repr, text_of
from synk._wire.mapping import Descriptor

_OWN = frozenset(vars(logging.makeLogRecord({})))
_SENT = (
    "name", "levelno", "pathname", "filename", "module", "lineno", "funcName", "created", "msecs",
    "thread", "threadName", "process", "stack_info",
)  # fmt: skip
_PLAIN = (str, int, float, bool, type(None))
_PICKLED = "synk_pickled"
"""Extra attributes that JSON cannot hold, by name, each as the base64 text of a pickle."""

_formatter = logging.Formatter()


def pack_record(record: logging.LogRecord, dumps: Callable[[Any], bytes]) -> bytes:
    """Return a record as a line. Its message is formatted here. Of an extra attribute that ``dumps`` cannot pickle only
    the ``repr`` travels.

    The line also starts with a newline, so that a line that an interrupt cut off does not spoil it.
    """
    content = {name: getattr(record, name, None) for name in _SENT}
    content["msg"] = record.getMessage()
    content["exc_text"] = record.exc_text or (_formatter.formatException(record.exc_info) if record.exc_info else None)
    extra = {name: value for name, value in vars(record).items() if name not in _OWN}
    pickled = content[_PICKLED] = extra.pop(_PICKLED, {})  # on an agent, those of a worker
    for name, value in extra.items():
        if isinstance(value, _PLAIN):
            content[name] = value
            continue
        try:
            pickled[name] = base64.b64encode(dumps(value)).decode("ascii")
        except KeyboardInterrupt:
            raise
        except BaseException:  # the user's classes run code here
            content[name] = short_repr(value)
    return b"\n" + json.dumps(content).encode("ascii") + b"\n"


def unpack_record(line: bytes, rank: int | None) -> logging.LogRecord:
    """Return the record in a line that the worker of ``rank`` wrote; None: an agent, which knows its workers' ranks.

    Raises
    ------
    ValueError
        If the line was cut off.
    """
    content: dict[str, Any] = json.loads(line)
    if rank is not None:
        content |= {"msg": f"[rank {rank}] {content['msg']}", "rank": rank}
    content |= {"args": None, "processName": f"rank {content['rank']}" if "rank" in content else "agent"}
    content["levelname"] = logging.getLevelName(content["levelno"])
    if not any(isinstance(each, PipeHandler) for each in logging.root.handlers):  # not an agent, which passes it on
        content |= {name: _loaded(data) for name, data in content.pop(_PICKLED).items()}
    return logging.makeLogRecord(content)


def _loaded(data: str) -> Any:
    try:
        return pickle.loads(base64.b64decode(data))
    except Exception as error:
        return f"<it cannot be loaded: {text_of(error)}>"


class PipeHandler(logging.Handler):
    """Writes all records to a pipe to the program."""

    def __init__(self, fd: Descriptor, dumps: Callable[[Any], bytes]) -> None:
        super().__init__()
        self._fd, self._dumps = fd, dumps

    def emit(self, record: logging.LogRecord) -> None:
        try:
            data = memoryview(pack_record(record, self._dumps))
            # The lock of the handler keeps other threads out. An interrupt may end this loop in the middle of a long
            # record. The program drops the torn line, and the newline before the next record ends it.
            while data:
                data = data[os.write(self._fd, data) :]
        except Exception:  # as in any handler: the record's message could not be formatted
            self.handleError(record)


def send_records(fd: Descriptor, dumps: Callable[[Any], bytes] = pickle.dumps) -> None:
    """Have all loggers of this process send their records to the program: only there do the user's handlers exist."""
    logging.root.addHandler(PipeHandler(fd, dumps))


class Levels(NamedTuple):
    """The log levels of a process.

    Attributes
    ----------
    root : int
        The level of the root logger.
    disabled : int
        The level given to ``logging.disable``.
    by_logger : dict of str to int
    """

    root: int
    disabled: int
    by_logger: dict[str, int]


def levels() -> Levels:
    """Return the log levels of this process."""
    loggers = list(logging.root.manager.loggerDict.items())
    by_logger = {name: logger.level for name, logger in loggers if isinstance(logger, logging.Logger) and logger.level}
    return Levels(logging.root.level, logging.root.manager.disable, by_logger)


def set_levels(wanted: Levels) -> None:
    """Give the loggers of this process the levels of another process."""
    logging.disable(wanted.disabled)
    logging.root.setLevel(wanted.root)
    for name, level in wanted.by_logger.items():
        logging.getLogger(name).setLevel(level)
