"""Shortens tracebacks: a user sees the lines of the program, and not the frames of synk between them."""

from __future__ import annotations

import functools
import linecache
import os
import re
import sys
from collections.abc import Callable, Generator, Iterator
from itertools import chain
from types import TracebackType
from typing import Any, ParamSpec, TypeVar, cast

from synk import errors
from synk._pure.interrupts import holding
from synk._pure.words import explain, message_of

P = ParamSpec("P")
R = TypeVar("R")

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in ')
_MISTAKE = re.compile(r"cannot |\S+\(\) ")  # a mistake that synk found, or that Python words as a wrong function call
_CARETS = re.compile(r"^ +[~^]+[~^ ]*$")
_FOLDER = os.path.dirname(os.path.abspath(errors.__file__)) + os.sep
_MISTAKEN = (TypeError, ValueError, IndexError, ModuleNotFoundError)
_PACKAGES = re.compile(r"[/\\](site|dist)-packages[/\\]")


def verb(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function that does something: it holds Ctrl-C back, and is :func:`outlined`."""

    @functools.wraps(fn)
    def held(*args: P.args, **kwargs: P.kwargs) -> R:
        with holding():
            return fn(*args, **kwargs)

    return outlined(held)


def outlined(fn: Callable[P, R]) -> Callable[P, R]:
    """Decorate a public function: its exceptions show the program's lines and none of synk's."""

    @functools.wraps(fn)
    def told(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return fn(*args, **kwargs)
        except BaseException as error:
            __tracebackhide__ = True
            if kwargs and isinstance(error, TypeError):
                explain(error, fn, kwargs)
            outline(error)
            if sys.version_info < (3, 11):  # there a bare raise brings all frames back
                raise error
            raise

    return told


class Results(chain[R]):
    """The results of a verb, one by one. An exception that ends them shows only the program's lines, as one of a
    :func:`verb` does.

    None of them is kept once it was given. It is a :class:`chain` of the lists, so that no line of Python runs for a
    result that is there.
    """

    _verb: str
    _name: str
    _now: _Run
    _runs: Generator[Iterator[Any], None, None]

    @classmethod
    def of(cls, runs: Iterator[list[R]], verb: str, name: str) -> Results[R]:
        """Return the results that come in lists, as they become known. The lists are used up.

        ``verb`` and ``name`` say for ``repr`` what it is, and of which function.
        """
        now = _Run()
        used_up = _used_up(runs, now)
        results = cast("Results[R]", cls.from_iterable(used_up))
        results._verb, results._name, results._now, results._runs = verb, name, now, used_up
        return results

    def close(self) -> None:
        """End it: no more results are computed."""
        self._runs.close()
        self._now.takes.clear()

    def __repr__(self) -> str:
        count = self._now.count - len(self._now.results)
        return f"<{self._verb} of {self._name!r}, {count} result{'s' * (count != 1)} so far>"


class _Run:
    """Where an iterator over lists of results is.

    Attributes
    ----------
    results : list
        What is left of the present list, the next one last.
    takes : list of int
        A -1 for each result that may be taken.
    count : int
        How many results were in all lists so far.
    """

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.takes: list[int] = []
        self.count = 0


def _used_up(runs: Iterator[list[R]], now: _Run) -> Generator[Iterator[R], None, None]:
    """Yield an iterator over each list, which uses it up. It does not hold the :class:`Results`: they end at once."""
    try:
        for run in runs:
            run.reverse()
            now.results, now.takes = run, [-1] * len(run)
            now.count += len(run)
            yield map(run.pop, now.takes)
    except BaseException as error:
        __tracebackhide__ = True
        outline(error)
        if sys.version_info < (3, 11):
            raise error
        raise


def outline(error: BaseException) -> None:
    """Drop all but the program's own frames from the traceback of ``error`` if the others say nothing.

    They say nothing about an exception of a worker's function, an error of the runtime, a mistake that synk found, or
    Ctrl-C. For any other exception all frames are kept.
    ``SYNK_FULL_TRACEBACK=1`` in the environment always keeps them.
    """
    if os.environ.get("SYNK_FULL_TRACEBACK") or not (_is_told(error) or isinstance(error, KeyboardInterrupt)):
        return
    each: BaseException | None = error
    seen: set[int] = set()
    while each is not None and id(each) not in seen:
        seen.add(id(each))
        BaseException.with_traceback(each, of_the_program(each.__traceback__))
        each = each.__cause__ or (None if each.__suppress_context__ else each.__context__)


def _is_told(error: BaseException) -> bool:
    """Whether the text of an error says everything, so that synk's lines are not needed."""
    if isinstance(error, errors.SynkError) or isinstance(error.__cause__, errors.RemoteError):
        return True
    return isinstance(error, _MISTAKEN) and _is_mistake(message_of(error))


def _is_mistake(text: str) -> bool:
    return _MISTAKE.match(text) is not None


def of_the_program(traceback: TracebackType | None) -> TracebackType | None:
    """Return a traceback without synk's frames and those of the libraries that synk called."""
    frames = []
    is_synks = False
    while traceback is not None:
        frame = traceback.tb_frame
        name = str(frame.f_globals.get("__name__")).partition(".")[0]
        is_library = name in sys.stdlib_module_names or _PACKAGES.search(frame.f_code.co_filename) is not None
        is_synks = name == "synk" or (is_synks and is_library)
        if not is_synks:
            frames.append(traceback)
        traceback = traceback.tb_next
    kept: TracebackType | None = None
    for each in reversed(frames):
        kept = TracebackType(kept, each.tb_frame, each.tb_lasti, each.tb_lineno)
    return kept


def frames_of(text: str, type_name: str = "", message: str = "") -> str:
    """Return the frames of a formatted traceback, with the source lines that were missing where it was made.

    The source of a notebook cell is known only in the program. synk's own frames are left out, unless the exception was
    raised in one of them and is not a mistake that synk found. A traceback that other text follows (``During handling
    of ...``) keeps all of its frames.
    """
    lines: list[str] = []
    is_own: list[bool] = []
    given = text.rstrip("\n").split("\n")
    for number, line in enumerate(given):
        if _CARETS.match(line):
            continue
        frame = _FRAME.match(line)
        is_own.append(frame["file"].startswith(_FOLDER) if frame else line.startswith("    ") and is_own[-1:] == [True])
        lines.append(line)
        if frame and not (number + 1 < len(given) and given[number + 1].startswith("    ")):
            source = linecache.getline(frame["file"], int(frame["line"])).strip()
            lines += [f"    {source}"] if source else []
            is_own += [is_own[-1]] if source else []
    if sum(line.startswith("Traceback (most recent call last)") for line in lines) == 1:
        ends = [number for number, line in enumerate(lines) if line.startswith("  ")]
        end = ends[-1] + 1 if ends else 0
        is_told = hasattr(errors, type_name) or (
            type_name in {each.__name__ for each in _MISTAKEN} and _is_mistake(message)
        )
        if end and not os.environ.get("SYNK_FULL_TRACEBACK") and (is_told or not is_own[end - 1]):
            lines = [line for line, own in zip(lines[1:end], is_own[1:end]) if not own]
        elif end:
            lines = lines[1:end]
    return "\n".join(lines)
