"""The functions that were sent to the workers of one runtime: once, and later what has changed of what they capture."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from synk._master.code.book import Book
from synk._master.state.captured import unsendable
from synk.errors import SynkError

_NUM_MAPPED = 8


class MappedFunctions:
    """The functions that were mapped last, so that each is sent only once. Holds them and what they capture."""

    def __init__(self) -> None:
        self._known: deque[tuple[Any, bool, Any]] = deque(maxlen=_NUM_MAPPED)

    def get(self, fn: Any, make: Callable[[], Any], *, is_spread: bool = False) -> Any:
        """Return what was made for a function, or make it. Any thread may call it.

        ``is_spread``: whether the function is called with several items as separate arguments.
        """
        for known, was_spread, made in list(self._known):
            # A method is a new object each time it is read. Equal ones belong to the same object.
            is_same = known is fn or (type(fn) is types.MethodType is type(known) and known == fn)
            if is_same and was_spread == is_spread:
                return made
        made = make()
        self._known.append((fn, is_spread, made))
        return made

    def clear(self) -> None:
        self._known.clear()


def packed(
    book: Book, functions: Sequence[tuple[int, Any, dict[str, Any]]], names: str, check: Callable[[int], None]
) -> list[tuple[Any, int]]:
    """Pack functions, and what has changed of what they captured. Return what had changed, with its size.

    Raises
    ------
    SerializationError
        If a function cannot be pickled.
    """
    sent: list[tuple[Any, int]] = []
    for function_id, fn, options in functions:
        try:
            sent += book.update(function_id, fn, options)
        except Exception as error:
            if isinstance(error, SynkError):
                raise
            raise unsendable(names, fn, error) from error
        check(function_id)
    return sent
