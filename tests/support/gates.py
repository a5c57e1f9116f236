"""Gates at which functions wait until the test opens them, pipes by which processes tell each other, and threads.

Imports nothing of pytest, so that workers may import it too.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


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


@contextmanager
def beside(*actions: Callable[[], Any], switch_s: float | None = None) -> Iterator[None]:
    """Repeat each action in a thread of its own while the body runs; raise what it raises.

    ``switch_s``: how long a thread has the interpreter before another gets it.
    """
    is_over, failures, usual_s = threading.Event(), [], sys.getswitchinterval()

    def repeat(action: Callable[[], Any]) -> None:
        try:
            while not is_over.is_set():
                action()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=repeat, args=(action,)) for action in actions]
    sys.setswitchinterval(switch_s or usual_s)
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        sys.setswitchinterval(usual_s)
        is_over.set()
        for thread in threads:
            thread.join()
    assert not failures
