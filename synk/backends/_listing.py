"""Facts about an array library that the master gets without importing it: its version, and the devices by a child."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from synk.errors import UnsupportedError

_LIMIT_S = 120


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


def list_devices(code: str, library: str, environment: Mapping[str, str]) -> list[Any]:
    """Return the devices that ``code`` prints, as JSON, when Python runs it in ``environment``.

    Raises
    ------
    UnsupportedError
        If the library cannot be imported, or does not answer.
    """
    command = [sys.executable, "-c", code]
    try:  # in a folder without files that could hide the library
        done = subprocess.run(command, env=environment, cwd="/", capture_output=True, text=True, timeout=_LIMIT_S)
    except subprocess.TimeoutExpired:
        raise UnsupportedError(f"cannot list the devices of {library}: it did not answer in {_LIMIT_S} s.") from None
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise UnsupportedError(f"cannot list the devices of {library}: {reason}. Does `import {library}` work?")
    devices: list[Any] = json.loads(done.stdout)
    return devices
