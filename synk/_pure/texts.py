"""Texts that are shown: short ones of the user's objects, for errors, and those of several lines."""

from __future__ import annotations

import reprlib

_MAX_LENGTH = 80

TEXT_CAP = 20_000
"""How many characters of an exception's text are shown."""

_ARGUMENTS_CAP = 1 << 20

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60


class Text(str):
    """A text of several lines that a REPL and a notebook show without quotes and escapes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def short_repr(value: object) -> str:
    """Return the repr of a value, shortened to one line. It never raises.

    Examples
    --------
    >>> short_repr({"a": [1, 2, 3]})
    "{'a': [1, 2, 3]}"
    >>> len(short_repr("x" * 1000)) <= 80
    True
    """
    try:
        text = " ".join(_repr.repr(value).split())
    except Exception:  # reprlib guards against instances that raise, but not against odd containers
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."


def message_of(error: BaseException) -> str:
    """Return ``str(error)``, cut to a limit. Never formats huge arguments, and never raises."""
    try:
        nbytes = sum(len(argument) for argument in error.args if isinstance(argument, (bytes, bytearray, str)))
        if nbytes > _ARGUMENTS_CAP:
            return f"<arguments of {nbytes} bytes>"
        text = str(error)
    except BaseException as inner:
        return f"<its text could not be made: {type(inner).__name__}>"
    return text if len(text) <= TEXT_CAP else f"{text[:TEXT_CAP]}... ({len(text)} characters)"


def text_of(error: BaseException) -> str:
    """Return the class and the message of an exception. It never raises.

    Examples
    --------
    >>> text_of(KeyError("x"))
    "KeyError: 'x'"
    """
    return f"{type(error).__name__}: {message_of(error)}"
