"""What a user sees of an exception: the lines of the program, and not those of synk between them."""

from __future__ import annotations

import linecache
import os
import re

from synk.errors import RemoteError, SynkError

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in ')
_MISTAKE = re.compile(r"cannot |\S+\(\) ")  # found by synk; or, as Python says it, in how a function was called
_CARETS = re.compile(r"^ +[~^]+[~^ ]*$")


def outline(error: Exception) -> None:
    """Drop the frames that ``error`` has come through, where they are synk's own and say nothing.

    That is so for what a worker's function raised, for errors of the runtime, and for mistakes that synk has found; of
    anything else the frames are kept. ``SYNK_FULL_TRACEBACK=1`` in the environment keeps all.
    """
    is_told = isinstance(error, SynkError) or isinstance(error.__cause__, RemoteError)
    if not is_told and isinstance(error, (TypeError, ValueError, IndexError)):
        is_told = bool(error.args) and _MISTAKE.match(str(error.args[0])) is not None
    if is_told and not os.environ.get("SYNK_FULL_TRACEBACK"):
        BaseException.with_traceback(error, None)


def frames_of(text: str) -> str:
    """Return the frames of a formatted traceback, with source lines that were not known where it was made.

    A cell of a notebook has its lines in the master. One that is followed by others (``During handling of ...``) is
    returned as it is.
    """
    lines: list[str] = []
    given = text.rstrip("\n").split("\n")
    for number, line in enumerate(given):
        if _CARETS.match(line):
            continue
        lines.append(line)
        frame = _FRAME.match(line)
        if frame and not (number + 1 < len(given) and given[number + 1].startswith("    ")):
            source = linecache.getline(frame["file"], int(frame["line"])).strip()
            lines += [f"    {source}"] if source else []
    if sum(line.startswith("Traceback (most recent call last)") for line in lines) == 1:
        ends = [number for number, line in enumerate(lines) if line.startswith("  ")]
        lines = lines[1 : ends[-1] + 1] if ends else lines
    return "\n".join(lines)
