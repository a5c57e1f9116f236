"""``journal=path``: the results of a map in a file, from which a later map of the same function and items goes on.

The file is a database of SQLite, so a result is in it as a whole or not at all, whenever the program is killed, and no
other program can write to it meanwhile. Row -1 says what was mapped; each other row has the number of an item, its
digest, and a pickle of its result.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import json
import os
import pickle
import sys
import weakref
from collections.abc import Callable, Generator, Iterator
from typing import Any

from synk._api.digest import ItemDigests, Undigested, digests_of
from synk._engine.jobs import is_failure
from synk._pure.words import short_repr, text_of
from synk.errors import ItemError

Pairs = Generator[tuple[int, Any], None, None]
"""Yields numbers of items, with the items or with their outcomes."""

_TABLES = "SELECT tbl_name FROM sqlite_master"
_OPEN = (
    "PRAGMA locking_mode=EXCLUSIVE",
    "PRAGMA journal_mode=WAL",  # a power failure loses the last results at most
    "PRAGMA synchronous=NORMAL",
    "CREATE TABLE IF NOT EXISTS synk_journal (number INTEGER PRIMARY KEY, digest BLOB, data BLOB)",
)
_INSERT = "INSERT OR IGNORE INTO synk_journal VALUES (?, ?, ?)"
_SELECT = "SELECT digest, data FROM synk_journal WHERE number = ?"


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
    ValueError
        If it cannot be opened, is no journal, or is one of another function.
    TypeError
        If it cannot be told whether a function is another one.
    """

    def __init__(self, path: Any, name: str, fn: Any, key: Any, version: Any) -> None:
        import sqlite3  # maps without a journal need none of it

        self._path, self._name, self._key = os.fsdecode(path), name, key
        self._digest = ItemDigests()
        folder = os.path.dirname(os.path.abspath(self._path))
        if self._path in ("", ":memory:"):
            raise self._error("a name under which SQLite keeps nothing", "the path of a file. Name one")
        if not os.path.isdir(folder):
            got = f"a file in the missing folder {folder!r}"
            raise self._error(got, "one in a folder that exists. Make the folder first")
        own = self._parts_of(fn, version)
        try:
            self._db = sqlite3.connect(self._path, timeout=0, isolation_level=None, check_same_thread=False)
            self.close = weakref.finalize(self, _close, self._db, os.getpid())
            tables = {table for (table,) in self._db.execute(_TABLES)}
            if not tables <= {"synk_journal"}:
                expected = "a journal, or a new file. Name another file"
                raise self._error(f"a database of another program (with {short_repr(min(tables))})", expected)
            for command in _OPEN:
                self._db.execute(command)
            self._db.execute(_INSERT, (-1, b"", json.dumps(own)))
            found = json.loads(self._row(-1)[1])
        except sqlite3.DatabaseError as error:
            got, expected = f"a file that cannot be opened ({error})", "a new name, or a journal that no other map uses"
            raise self._error(got, expected) from error
        self._compare(own, found)

    def _error(self, got: str, expected: str, kind: type[Exception] = ValueError) -> Exception:
        return kind(f"cannot map {self._name!r} with journal={self._path!r}: got {got}, expected {expected}.")

    def _parts_of(self, fn: Any, version: Any) -> dict[str, str]:
        """Return the digests of all that results depend on, by part."""
        if version is not None:
            return {"the version": repr(version)}
        try:
            return {"the version of Python": repr(sys.version_info[:2]), **digests_of((fn, self._key))}
        except Undigested as error:
            cure = "Pass version=, a text or a number that you change with the function"
            expected = f"what is the same in each run of the program. {cure}"
            raise self._error(", which ".join(error.args), expected, TypeError) from error

    def _compare(self, own: dict[str, str], found: dict[str, str]) -> None:
        changed = [part for part in {**found, **own} if own.get(part) != found.get(part)]
        if changed:
            more = f" and {len(changed) - 3} more parts" if len(changed) > 3 else ""
            got = f"results of another function (changed: {', '.join(changed[:3])}{more})"
            raise self._error(got, "those of this one. Name another file, or change it back")

    def _row(self, number: int) -> Any:
        return self._db.execute(_SELECT, (number,)).fetchone()

    def missing(self, number: int, item: Any) -> bytes | None:
        """Return the digest of an item whose result is to be written; None if it is there.

        Raises
        ------
        TypeError
            If it has none that stays the same.
        ValueError
            If it has the result of another item under this number.
        """
        try:
            digest = self._digest(item if self._key is None else self._key(item))
        except Undigested as error:
            got = f"item {number} ({short_repr(item)}), which {error.args[1]}"
            cure = "Pass key=, a function of the item that returns a name"
            raise self._error(got, f"what is the same in each run of the program. {cure}", TypeError) from error
        row = self._row(number)
        if row is not None and row[0] != digest:
            got = f"another item {number} than the one whose result is in the file"
            raise self._error(got, "the same items in the same order. Name another file, or change the items back")
        return digest if row is None else None

    def write(self, number: int, digest: bytes, result: Any) -> None:
        """Append the result of an item.

        Raises
        ------
        TypeError
            If it cannot be pickled.
        ValueError
            If the file cannot hold it: the disk is full, or it has more than 1 GB.
        """
        try:
            data = pickle.dumps(result, protocol=5)
        except Exception as error:
            why = text_of(error).rstrip(".")
            got = f"{type(result).__name__} as the result of item {number} ({why})"
            expected = "arrays, numbers, or objects whose class a later run of the program finds by its name"
            raise self._error(got, expected, TypeError) from error
        try:
            self._db.execute(_INSERT, (number, digest, data))
        except (self._db.DatabaseError, OverflowError) as error:
            got = f"{len(data):,} bytes as the result of item {number}, which cannot be written ({error})"
            expected = "at most 1 GB, and room on the disk. Have the function save what is large, and return its path"
            raise self._error(got, expected) from error

    def read(self, number: int) -> Any:
        return pickle.loads(self._row(number)[1])


def journaled_items(
    run: Callable[..., Pairs], journal: Journal, is_ordered: bool, fn: Any, pairs: Iterator[Any], *, is_spread: bool
) -> Pairs:
    """Return the outcomes of numbered items: those in the journal, and those of ``run(fn, pairs, is_spread=)``, which
    goes on after a failure, and gives each outcome as soon as it is there. Their results go into the journal.
    """
    items = _Items(journal, pairs, is_ordered=is_ordered)
    return items.outcomes(run(fn, items.missing(), is_spread=is_spread))


def _close(db: Any, pid: int) -> None:
    """Close a file. A forked copy of the program never does, not even at its end: that would remove the write-ahead log
    to which the program still writes.
    """
    if os.getpid() == pid:
        db.close()
    else:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(db))


class _Items:
    """The items of a map that has a journal, and what has become of them.

    Parameters
    ----------
    journal : Journal
    pairs : iterator
        All items, with their numbers from 0.
    is_ordered : bool
    """

    def __init__(self, journal: Journal, pairs: Iterator[tuple[int, Any]], *, is_ordered: bool) -> None:
        self._journal, self._pairs, self._is_ordered = journal, pairs, is_ordered
        self._digests: dict[int, bytes] = {}  # of items that are running
        # Those that have ended and were not given out; None: the result is in the journal.
        self._ready: dict[int, ItemError | None] = {}
        self._next = 0

    def missing(self) -> Pairs:
        """Yield the items whose results the journal does not have."""
        for number, item in self._pairs:
            if (digest := self._journal.missing(number, item)) is None:
                self._ready[number] = None
            else:
                self._digests[number] = digest
                yield number, item

    def outcomes(self, found: Pairs) -> Pairs:
        """Yield the outcomes of all items. ``found`` yields those of the missing ones as soon as they are there."""
        error = None
        with contextlib.closing(self._journal), contextlib.closing(found):
            for number, item in self._pairs:  # what comes before the first that is missing
                if self._journal.missing(number, item) is not None:
                    self._pairs, self._next = itertools.chain([(number, item)], self._pairs), number
                    break
                yield number, self._journal.read(number)
            try:
                for number, outcome in found:
                    digest, has_failed = self._digests.pop(number), is_failure(outcome)
                    if not has_failed:
                        self._journal.write(number, digest, outcome)
                    self._ready[number] = outcome if has_failed else None
                    yield from self._due()
            except Exception as raised:
                error = raised
            yield from self._due()
            if error is not None:
                raise error

    def _due(self) -> Pairs:
        """Yield what can be given out now."""
        while self._next in self._ready if self._is_ordered else self._ready:
            number = self._next if self._is_ordered else next(iter(self._ready))
            self._next += 1
            yield number, self._ready.pop(number) or self._journal.read(number)
