"""What other threads do while a test goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def beside(*actions: Callable[[], Any]) -> Iterator[None]:
    """Repeat each action in a thread of its own while the body runs; raise what it raises."""
    is_over, failures = threading.Event(), []

    def repeat(action: Callable[[], Any]) -> None:
        try:
            while not is_over.is_set():
                action()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=repeat, args=(action,)) for action in actions]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()
    assert not failures
