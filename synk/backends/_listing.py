"""Facts about an array library that the master gets without importing it: its version, and the devices by a child."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from synk.errors import UnsupportedError

LIMIT_S = 60.0


def version_line(library: str) -> list[str]:
    """Return the line of ``synk.info()`` about a library; no line if it is not installed.

    The version is taken from the name of the folder that pip writes beside the library. ``importlib.metadata`` would
    import ``csv`` and other modules, and the user may have files with these names in the current folder.
    """
    spec = importlib.util.find_spec(library)
    if spec is None or spec.origin is None:
        return []
    beside = Path(spec.origin).parent.parent
    versions = [found.name.split("-")[1].removesuffix(".dist") for found in beside.glob(f"{library}-*.dist-info")]
    return [" ".join([f"backend {library!r}: {library}", *versions[:1]])]


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
