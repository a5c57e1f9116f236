"""Texts that are shown: short ones of the user's objects, for errors, and those of several lines."""

from __future__ import annotations

import reprlib

_MAX_LENGTH = 80

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
