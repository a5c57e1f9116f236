"""The state of a program that was pickled or saved. It is checked before any of its code runs."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from synk._pure import files, plain_values
from synk.errors import SerializationError

FORMAT = 1


def read(path: files.Path) -> dict[str, Any]:
    """Return the state of the program in a file. This runs no code.

    Raises
    ------
    ValueError
        If the file is not a program, or is damaged.
    """
    state = plain_values.read(path)
    if not isinstance(state, dict) or not {"format", "python", "synk", "codes"} <= state.keys():
        raise ValueError(
            f"cannot load {os.fspath(path)!r}: got a file of other values, expected a program that Program.save() has "
            "written."
        )
    return state


def check(state: dict[str, Any], python: str) -> None:
    """Raise SerializationError unless this synk and this Python can build the program."""
    if state["format"] > FORMAT:
        raise SerializationError(
            f"cannot load a program: got format {state['format']}, written by synk {state['synk']}, expected format "
            f"{FORMAT} or an older one. Install that version of synk."
        )
    if state["python"] != python:
        raise SerializationError(
            f"cannot load a program: got functions of Python {state['python']}, and this is Python {python}, expected "
            "the same minor version, because they travel as bytecode. Load it there; its values can be read here by "
            "Program.load(path, values_only=True)."
        )


def values_in(parts: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return the values of the shared variables by name: an array, or for a nested value a dict of arrays by path.

    If several variables have one name, the second is ``name 2``.
    """
    found: dict[str, Any] = {}
    for part in parts:
        if part["kind"] != "shared":
            continue
        name, count = part["name"], 2
        while name in found:
            name, count = f"{part['name']} {count}", count + 1
        arrays = dict(part["arrays"])
        found[name] = arrays[""] if list(arrays) == [""] else arrays
    return found
