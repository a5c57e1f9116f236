"""A gate at which functions wait on the workers, and which the test opens when it has seen who stands there.

Imports nothing of pytest, so that workers may import it too.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class Gate:
    """It is closed at first. What workers are sent is a copy of it that knows the same files.

    Parameters
    ----------
    folder : Path
        An empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def wait(self, name: Any = "") -> None:
        """Arrive under a name, and stay until the gate is open."""
        self.arrive(name)
        while not self.is_open():
            time.sleep(0.001)

    def arrive(self, name: Any) -> None:
        """Leave a sign, and go on."""
        (self._folder / f"at {name}").touch()

    def wait_for(self, name: Any) -> None:
        """Wait until somebody has arrived under a name."""
        while not self.has(name):
            time.sleep(0.001)

    def has(self, *names: Any) -> bool:
        """Whether somebody has arrived under each name."""
        return all((self._folder / f"at {name}").exists() for name in names)

    def is_open(self) -> bool:
        return (self._folder / "open").exists()

    def open(self) -> None:
        (self._folder / "open").touch()

    def close(self) -> None:
        """Close it, and forget who has arrived."""
        for path in self._folder.iterdir():
            path.unlink()

    @contextlib.contextmanager
    def opened_meanwhile(self) -> Iterator[None]:
        """Open it during the body, which is to wait for that: were it not to wait, it would find the gate closed."""
        timer = threading.Timer(0.05, self.open)
        timer.start()
        try:
            yield
        finally:
            timer.join()
