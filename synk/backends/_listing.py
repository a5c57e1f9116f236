"""The devices of an array library, of which a child process is asked: the program does not import it."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from synk.errors import UnsupportedError

LIMIT_S = 60.0


def list_devices(code: str, library: str, environment: Mapping[str, str], trial: str = "") -> list[Any]:
    """Return the devices that ``code`` prints, as JSON, when Python runs it in ``environment``.

    Raises
    ------
    UnsupportedError
        If the library cannot be imported, or does not answer. The text ends by asking whether the command ``trial``
        works; by default that is the import.
    """
    child = subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        cwd="/",  # in a folder without files that could hide the library
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        answer, errors = child.communicate(timeout=LIMIT_S)
        reason = (errors.strip().splitlines() or [f"exit status {child.returncode}"])[-1]
    except BaseException as error:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):  # one that sticks in a driver does not even end then
            child.communicate(timeout=1)
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        reason = f"no answer in {LIMIT_S:g} s"
    if child.returncode != 0:
        trial = trial or f"import {library}"
        raise UnsupportedError(f"cannot list the devices of {library}: {reason}. Does `{trial}` work?")
    devices: list[Any] = json.loads(answer.splitlines()[-1])  # what the user's site prints comes first
    return devices
