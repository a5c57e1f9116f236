"""``journal=path``: the results of a map in a file, from which a later map of the same function and items goes on.

The file is a list of records: length, checksum, contents. One that a killed program has left half written is cut off.
The first record says what was mapped; each other one is an item's number, its digest, and a pickle of its result.
"""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import pickle
import struct
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

from synk._api.digest import ItemDigests, Undigested, digests_of
from synk._pure.texts import short_repr
from synk._wire.descriptors import Descriptor
from synk.errors import ItemError

Pairs = Iterator[tuple[int, Any]]
"""Numbers of items, with the items or with their outcomes."""

_MAGIC = b"synk journal 1\n"
_HEAD, _KEY = struct.Struct("<QI"), struct.Struct("<Q16s")


class Journal:
    """An open journal. No other map can open it meanwhile.

    Parameters
    ----------
    path : path-like
        It is made if it does not exist.
    name : str
        The function's, for errors.
    fn : callable
    key : callable or None
        Returns what tells an item from others.
    version : str, int or None
        What stands for the function.

    Raises
    ------
    BlockingIOError, OSError
        If another map has it open, or the file cannot be read and written.
    ValueError
        If it is no journal, or one of another function.
    TypeError
        If it cannot be told whether a function is another one.
    """

    def __init__(self, path: Any, name: str, fn: Any, key: Any = None, version: Any = None) -> None:
        self._path, self._name, self._key = os.fspath(path), name, key
        self._digest = ItemDigests()
        self._places: dict[int, tuple[bytes, int, int]] = {}  # by number: digest, offset and length of the pickle
        own = self._description(fn, version)
        self._fd = Descriptor(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666))
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise self._error("a file that another map is writing", "one map at a time", BlockingIOError) from None
        self._check(own, self._read(own))

    def _error(self, got: str, expected: str, kind: type[Exception] = ValueError) -> Exception:
        return kind(f"cannot map {self._name!r} with journal={self._path!r}: got {got}, expected {expected}.")

    def _description(self, fn: Any, version: Any) -> dict[str, str]:
        """Return the digests of all that results depend on, by part."""
        if version is not None:
            return {"the version": repr(version)}
        try:
            python = f"{sys.version_info.major}.{sys.version_info.minor}"
            return {"the version of Python": python, **digests_of((fn, self._key))}
        except Undigested as error:
            cure = "Pass version=, a text or a number that you change with the function"
            expected = f"what is the same in each run of the program. {cure}"
            raise self._error(", which ".join(error.args), expected, TypeError) from error

    def _check(self, own: dict[str, str], found: dict[str, str]) -> None:
        changed = [part for part in {**found, **own} if own.get(part) != found.get(part)]
        if changed:
            more = f" and {len(changed) - 3} more parts" if len(changed) > 3 else ""
            raise self._error(
                f"results of another function (changed: {', '.join(changed[:3])}{more})",
                "those of this one. Name another file, or change it back",
            )

    # -- the file -----------------------------------------------------------------------------------------------------

    def _read(self, own: dict[str, str]) -> dict[str, str]:
        """Note where the results are, and return what they are results of: of the new function in a new file."""
        begin = self._bytes(0, len(_MAGIC))
        if not _MAGIC.startswith(begin):
            raise self._error("a file that is no journal", "a journal or a new name")
        self._end = len(_MAGIC)
        first = self._next()
        if first is None:
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, _MAGIC, 0)
            self._append(first := json.dumps(own).encode())
        while (record := self._next()) is not None:
            number, digest = _KEY.unpack_from(record)
            self._places[number] = digest, self._end - len(record) + _KEY.size, len(record) - _KEY.size
        os.ftruncate(self._fd, self._end)
        found: dict[str, str] = json.loads(first)
        return found

    def _next(self) -> bytes | None:
        """Return the contents of the next record, or None where there is no whole one."""
        head = self._bytes(self._end, _HEAD.size)
        length, checksum = _HEAD.unpack(head) if len(head) == _HEAD.size else (0, 0)
        if not 0 < length <= os.fstat(self._fd).st_size:
            return None
        contents = self._bytes(self._end + _HEAD.size, length)
        if len(contents) < length or zlib.crc32(contents) != checksum:
            return None
        self._end += _HEAD.size + length
        return contents

    def _bytes(self, offset: int, length: int) -> bytes:
        parts = []
        while length and (part := os.pread(self._fd, length, offset)):
            parts.append(part)
            offset, length = offset + len(part), length - len(part)
        return b"".join(parts)

    def _append(self, contents: bytes) -> None:
        """Append a record. Where this is broken off, the next one takes its place."""
        record = memoryview(_HEAD.pack(len(contents), zlib.crc32(contents)) + contents)
        written = 0
        while written < len(record):
            written += os.pwrite(self._fd, record[written:], self._end + written)
        self._end += written

    # -- results ------------------------------------------------------------------------------------------------------

    def digest(self, number: int, item: Any) -> bytes:
        """Return the digest of an item.

        Raises
        ------
        TypeError
            If it has none that stays the same.
        """
        try:
            return self._digest(item if self._key is None else self._key(item))
        except Undigested as error:
            raise self._error(
                f"item {number} ({short_repr(item)}), which {error.args[1]}",
                "what is the same in each run of the program. Pass key=, a function of the item that returns a name",
                TypeError,
            ) from error

    def has(self, number: int, digest: bytes) -> bool:
        """Whether it has the result of an item.

        Raises
        ------
        ValueError
            If it has the result of another item under this number.
        """
        known = self._places.get(number)
        if known is not None and known[0] != digest:
            raise self._error(
                f"another item {number} than the one whose result is in the file",
                "the same items in the same order. Name another file, or change the items back",
            )
        return known is not None

    def write(self, number: int, digest: bytes, result: Any) -> None:
        """Append the result of an item."""
        try:
            data = pickle.dumps(result, protocol=5)
        except Exception as error:
            why = f"{type(error).__name__}: {str(error).rstrip('.')}"
            raise self._error(
                f"{type(result).__name__} as the result of item {number} ({why})",
                "arrays, numbers, or objects whose class a later run of the program finds by its name",
                TypeError,
            ) from error
        self._append(_KEY.pack(number, digest) + data)
        self._places[number] = digest, self._end - len(data), len(data)

    def read(self, number: int) -> Any:
        _, offset, length = self._places[number]
        return pickle.loads(self._bytes(offset, length))


def journaled(run: Callable[[Pairs], Pairs], journal: Journal, pairs: Pairs, *, is_ordered: bool) -> Pairs:
    """Yield the outcomes of all items: those in the journal from it, the others by ``run``, which are written to it.

    Parameters
    ----------
    run : callable
        Yields the outcome of each item as soon as it is there.
    """
    digests: dict[int, bytes] = {}  # of items that are running
    ready: dict[int, ItemError | None] = {}  # those that have ended and were not yielded; None: the journal has it
    upcoming = 0

    def missing(pairs: Pairs) -> Pairs:
        for number, item in pairs:
            digest = journal.digest(number, item)
            if journal.has(number, digest):
                ready[number] = None
            else:
                digests[number] = digest
                yield number, item

    def due() -> Pairs:
        nonlocal upcoming
        while upcoming in ready if is_ordered else ready:
            number = upcoming if is_ordered else next(iter(ready))
            upcoming += 1
            yield number, ready.pop(number) or journal.read(number)

    for number, item in pairs:  # what comes before the first that is missing
        if not journal.has(number, journal.digest(number, item)):
            pairs, upcoming = itertools.chain([(number, item)], pairs), number
            break
        yield number, journal.read(number)
    error = None
    try:
        for number, outcome in run(missing(pairs)):
            digest, failed = digests.pop(number), isinstance(outcome, ItemError)
            if not failed:
                journal.write(number, digest, outcome)
            ready[number] = outcome if failed else None
            yield from due()
    except Exception as raised:
        error = raised
    yield from due()
    if error is not None:
        raise error
