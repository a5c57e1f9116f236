"""Pickles of the user's objects that leave a worker: arrays on a device travel as arrays of the host.

The program must not touch a device: a context there costs memory on every GPU, and rules out ``os.fork``.
"""

from __future__ import annotations

import io
import math
from typing import Any

from synk._wire.parcels import TravelPickler
from synk.backends import on_host


class CappedFile(io.BytesIO):
    """A file that refuses to grow beyond ``max_nbytes``, so that a huge payload is never copied."""

    def __init__(self, max_nbytes: float) -> None:
        super().__init__()
        self._max_nbytes = max_nbytes

    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > self._max_nbytes:
            raise ValueError(f"more than {self._max_nbytes} bytes")
        return super().write(data)


class HostPickler(TravelPickler):
    """Pickles what cloudpickle does; arrays that lie on a device become NumPy's, and tensors move to the CPU."""

    has_word = True

    def reducer_override(self, obj: Any) -> Any:
        moved = on_host(obj)
        if moved is not obj:
            return moved.__reduce_ex__(5)
        return super().reducer_override(obj)


def dumps(obj: Any, max_nbytes: float = math.inf) -> bytes:
    """Return ``obj`` pickled for the program.

    Raises
    ------
    ValueError
        If the pickle is larger than ``max_nbytes``.
    """
    file = io.BytesIO() if max_nbytes == math.inf else CappedFile(max_nbytes)
    HostPickler(file, protocol=5).dump(obj)
    return file.getvalue()
