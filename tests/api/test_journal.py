"""``journal=path``: a map that was broken off goes on from its file, with the results of one that was left alone."""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import sqlite3
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import script

import synk
from synk._api.journal import _OPEN

NUM_ITEMS = 40


def noted_in(path: Path) -> Callable[[int], Any]:
    """Return a function that fails for some items, and adds the number of each item to a file."""

    def rows_of(n: int) -> Any:
        with open(path, "a") as file:
            file.write(f"{n}\n")
        if n % 10 == 7:
            raise ValueError(n)
        return {"square": n * n, "rows": np.full((n % 3, 2), n)}

    return rows_of


def shown(outcomes: list[Any]) -> list[str]:
    """Return results and errors as texts."""
    return [repr(each.exception if isinstance(each, synk.ItemError) else each) for each in outcomes]


def plain(fn: Callable[..., Any], items: range) -> Iterator[str]:
    for item in items:
        try:
            yield repr(fn(item))
        except ValueError as error:
            yield repr(error)


def test_a_map_goes_on_where_it_was(rt: synk.Runtime, tmp_path: Path, subtests: pytest.Subtests) -> None:
    expected = list(plain(noted_in(tmp_path / "plain"), range(NUM_ITEMS)))
    for number, (taken, is_ordered, size) in enumerate([(0, True, 1), (5, True, 3), (12, False, 1), (33, False, None)]):
        with subtests.test(taken=taken, is_ordered=is_ordered, size=size):
            noted, journal = tmp_path / f"noted{number}", tmp_path / f"{number}.journal"
            fn = noted_in(noted)

            def run(fn: Any = fn, **options: Any) -> Any:
                return rt.map(fn, range(NUM_ITEMS), on_error="return", **options)

            first = run(journal=journal, ordered=is_ordered, batch_size=size)
            assert repr(first).startswith("<synk.map of 'rows_of'")
            given = [next(first) for _ in range(taken)]
            del first
            again = shown(list(run(journal=journal)))
            assert again == expected
            assert shown(given) == expected[:taken] if is_ordered else not Counter(shown(given)) - Counter(expected)
            noted.write_text("")
            assert Counter(shown(list(run(journal=journal, ordered=False)))) == Counter(expected)
            assert sorted(map(int, noted.read_text().split())) == [7, 17, 27, 37]  # what has failed is tried again
            assert shown(list(rt.map(fn, range(NUM_ITEMS + 5), on_error="return", journal=journal)))[:-5] == expected


def test_an_exception_comes_after_the_results_before_it(rt: synk.Runtime, tmp_path: Path) -> None:
    fn = noted_in(tmp_path / "noted")
    for _ in range(2):
        results = rt.map(fn, range(NUM_ITEMS), journal=tmp_path / "journal", batch_size=2)
        assert [next(results)["square"] for _ in range(7)] == [n * n for n in range(7)]
        with pytest.raises(ValueError, match="7") as caught:  # whoever holds it does not hold the file
            next(results)
    assert caught.value.args == (7,)

    def broken() -> Iterator[int]:
        yield from range(5)
        raise OSError("no more items")

    results = rt.map(fn, broken(), journal=tmp_path / "journal")
    assert [next(results)["square"] for _ in range(5)] == [0, 1, 4, 9, 16]
    with pytest.raises(OSError, match="no more items"):
        next(results)


class Unstable:
    """Its pickle is another one each time."""

    count = itertools.count()

    def __reduce__(self) -> Any:
        return int, (next(Unstable.count),)


def test_it_is_refused_with_what_has_changed(rt: synk.Runtime, tmp_path: Path, subtests: pytest.Subtests) -> None:
    factor, lock, unstable = 2.0, threading.Lock(), Unstable()

    def scaled(n: Any) -> Any:
        return n * factor

    def other(n: Any) -> Any:
        return n + factor

    def made(path: str, fn: Any = scaled, items: Any = range(4), **options: Any) -> list[Any]:
        return list(rt.map(fn, items, journal=tmp_path / path, **options))

    made("scaled"), made("keyed", key=str), made("versioned", version=3)
    (tmp_path / "text").write_text("some text\n" * 1000)
    with contextlib.closing(sqlite3.connect(tmp_path / "database")) as database:
        database.execute("CREATE TABLE notes (text)")
    before = (tmp_path / "database").read_bytes()
    held = rt.map(scaled, range(4), journal=tmp_path / "held")
    next(held)

    def with_another_factor() -> None:
        nonlocal factor
        factor = 3.0
        try:
            made("scaled")
        finally:
            factor = 2.0

    cases: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
        "code": (lambda: made("scaled", other), ValueError, r"another function \(changed: the code of .*scaled"),
        "captured": (with_another_factor, ValueError, r"changed: 'factor' that '.*scaled' captures\), expected those"),
        "items": (lambda: made("scaled", items=[0, 2, 1, 3]), ValueError, "another item 1 than the one whose result"),
        "key": (lambda: made("keyed", key=repr), ValueError, "changed: the function"),
        "version": (lambda: made("versioned", version=4), ValueError, r"changed: the version\)"),
        "a file of text": (lambda: made("text"), ValueError, "file is not a database"),
        "a database": (lambda: made("database"), ValueError, r"a database of another program \(with 'notes'\), exp"),
        "no folder": (lambda: made("none/journal"), ValueError, "in the missing folder '.*none', .* Make the folder"),
        "a folder": (lambda: made(""), ValueError, "unable to open database file"),
        "no name": (lambda: rt.map(scaled, [1], journal=""), ValueError, "journal='': got a name under which SQLite"),
        "memory": (lambda: rt.map(scaled, [1], journal=":memory:"), ValueError, "expected the path of a file"),
        "in use": (lambda: made("held"), ValueError, "database is locked.*that no other map uses"),
        "a captured lock": (lambda: made("new", lambda n: lock), TypeError, "'lock' that .* captures.*Pass version="),
        "a lock as an item": (lambda: made("new", items=[lock]), TypeError, r"item 0 \(<unlocked.*Pass key="),
        "a captured object": (lambda: made("new", lambda n: unstable), TypeError, "'unstable' .* differs from its own"),
        "an item": (lambda: made("new3", items=[unstable]), TypeError, "item 0 .* differs from its own.*Pass key="),
        "a class of a function": (
            lambda: made("new2", lambda n: type("Own", (), {})()), TypeError, "Own as the result of item"
        ),
        "key alone": (lambda: list(rt.map(scaled, [1], key=str)), ValueError, "key= or version= without journal="),
    }  # fmt: skip
    for kind, (call, error, text) in cases.items():
        with subtests.test(kind=kind), pytest.raises(error, match=text):
            call()
    assert (tmp_path / "database").read_bytes() == before
    assert made("scaled") == [0.0, 2.0, 4.0, 6.0]
    assert made("keyed", key=str) == made("versioned", version=3) == made("scaled")
    assert made("versioned", lambda n: "not called: the version is the same", version=3) == made("scaled")
    assert made("cured", lambda n: n * 0 + len([unstable]), items=[unstable], version=1, key=type) == [1]


@pytest.mark.parametrize("on_error", ["raise", "return"])
def test_a_result_for_which_there_is_no_room(
    rt: synk.Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, on_error: Any
) -> None:
    """What was written before stays."""

    def zeros(n: int) -> bytes:
        return bytes(n * 10**5)

    with monkeypatch.context() as patched:
        patched.setattr("synk._api.journal._OPEN", (*_OPEN, "PRAGMA max_page_count=4"))
        assert list(rt.map(zeros, [0, 0], journal=tmp_path / "journal")) == [b"", b""]
        results = rt.map(zeros, [0, 0, 1], journal=tmp_path / "journal", on_error=on_error)
        assert [next(results), next(results)] == [b"", b""]
        with pytest.raises(
            ValueError, match=r"got 100,0\d\d bytes as the result of item 2, .* full\), expected .*path\.$"
        ):
            next(results)
    assert [len(each) for each in rt.map(zeros, [0, 0, 1], journal=tmp_path / "journal")] == [0, 0, 10**5]


IMPORTED = """
import synk

class Model:
    def __init__(self):
        self.scale = 2.0
        self.total = synk.function(self._total, outputs="sum")
    def _total(self, x): return self.scale * x.sum()
    def one(self, item): return self.scale * item
    @classmethod
    def of_class(cls, item): return -item
"""


def test_methods_of_an_imported_class(rt: synk.Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their functions are those that the class holds, in each run. The object may keep synk functions."""
    (tmp_path / "imported_by_a_journal.py").write_text(IMPORTED)
    monkeypatch.syspath_prepend(tmp_path)
    model = __import__("imported_by_a_journal").Model()
    for name, fn in {"method": model.one, "class": model.of_class, "partial": functools.partial(model.one)}.items():
        assert list(rt.map(fn, [1, 2], journal=tmp_path / name)) == [fn(1), fn(2)]
    model.scale = 3.0
    with pytest.raises(ValueError, match=r"another function \(changed: the function\)"):
        rt.map(model.one, [1, 2], journal=tmp_path / "method")
    del sys.modules["imported_by_a_journal"]


FORKS = """
    import contextlib
    with synk.fork(2, backend="numpy"):
        results = synk.map(abs, range(100), journal={path!r}, batch_size=1)
        next(results)
        for ends_at_once in (True, False):
            if os.fork() == 0:
                if ends_at_once:
                    sys.exit()
                with contextlib.suppress(synk.errors.ReentrancyError):
                    list(results)  # it ends the map, and so closes the file
                os._exit(0)
            os.wait()
        for _ in range(98):
            next(results)
        os.kill(os.getpid(), signal.SIGKILL)
"""


def test_forked_copies_of_the_program_take_nothing_away(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    script(FORKS.format(path=str(path))).check(returncode=-signal.SIGKILL)
    with contextlib.closing(sqlite3.connect(path)) as database:
        (found,) = database.execute("SELECT count(*) FROM synk_journal WHERE number >= 0").fetchone()
    assert found >= 99
    with synk.fork(2, backend="numpy") as rt:
        assert list(rt.map(abs, range(100), journal=path)) == [*range(100)]
