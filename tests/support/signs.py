"""What one process tells another in the middle of a test: a pipe with a name, in the folder of the test.

Imports nothing of pytest, so that workers may import it too.
"""

from __future__ import annotations

import os
from pathlib import Path


def sign(path: Path) -> str:
    """Make the pipe. Return its name, for ``say`` in one process and ``hear`` in another."""
    os.mkfifo(path)
    return str(path)


def say(name: str) -> None:
    """Say "now". Returns when it was heard."""
    os.close(os.open(name, os.O_WRONLY))


def hear(name: str) -> None:
    """Wait until it is said."""
    os.close(os.open(name, os.O_RDONLY))
