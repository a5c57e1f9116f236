"""Lets asyncio wait for descriptors that other code reads."""

from __future__ import annotations

import contextlib
import select
from collections.abc import Callable, Iterable
from typing import Any

_LONGEST_S = 0.1


async def wait_readable(descriptors: Callable[[], Iterable[int]]) -> None:
    """Return when one of some descriptors is readable, or after a short time, since descriptors may be replaced.

    An event loop knows each descriptor once, but several tasks may wait for the same ones. So each task gives the loop
    an ``epoll`` of its own.
    """
    import asyncio  # takes 30 ms, and the caller already has it

    loop = asyncio.get_running_loop()
    arrived = loop.create_future()
    with contextlib.closing(select.epoll()) as waiting:
        for fd in descriptors():
            with contextlib.suppress(OSError):  # another thread closed it: its worker is replaced
                waiting.register(fd, select.EPOLLIN)
        loop.add_reader(waiting.fileno(), _note, arrived)
        try:
            await asyncio.wait([arrived], timeout=_LONGEST_S)
        finally:
            loop.remove_reader(waiting.fileno())


def _note(arrived: Any) -> None:
    if not arrived.done():
        arrived.set_result(None)
