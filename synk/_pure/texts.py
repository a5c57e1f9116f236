"""Short texts of the user's objects, for errors."""

from __future__ import annotations

import reprlib

from synk._pure.interrupts import is_from_handler

_MAX_LENGTH = 80

_repr = reprlib.Repr()
_repr.maxstring = _repr.maxother = 60


def short_repr(value: object) -> str:
    """Return the repr of a value in one line and not too long; never an exception.

    Examples
    --------
    >>> short_repr({"a": [1, 2, 3]})
    "{'a': [1, 2, 3]}"
    >>> len(short_repr("x" * 1000)) <= 80
    True
    """
    try:
        text = " ".join(_repr.repr(value).split())
    except Exception as error:  # reprlib guards instances, but no containers of odd classes
        if is_from_handler(error):
            raise
        text = f"<{type(value).__name__}>"
    return text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."
