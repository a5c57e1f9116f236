"""The functions that were sent to the workers of one runtime: once, and later what has changed of what they capture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from synk._code.book import Book
from synk._code.captured import unsendable
from synk.errors import SynkError


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
