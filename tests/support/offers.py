"""On a rank: messages of any size are offered, so that the receiver reads them where they lie."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from synk.communicators import _mailbox


@contextlib.contextmanager
def offering(refuses: Callable[[], bool] = lambda: False) -> Iterator[list[int]]:
    """Offer all messages that do not fit into a ring. Yields the sizes of those that this rank was asked to read.

    ``refuses``: whether this rank reads only half of the next one, as if the kernel had stopped there.
    """
    usual = _mailbox.OFFERED_NBYTES, _mailbox.read_memory
    sizes: list[int] = []

    def read_memory(pid: int, address: int, target: np.ndarray) -> bool:
        sizes.append(target.size)
        if refuses():
            usual[1](pid, address, target[: target.size // 2])
            return False
        return usual[1](pid, address, target)

    patched: Any = _mailbox
    patched.OFFERED_NBYTES, patched.read_memory = 1, read_memory
    try:
        yield sizes
    finally:
        patched.OFFERED_NBYTES, patched.read_memory = usual
