"""What other threads do while a test goes on."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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
