"""Pickles of the user's objects that leave a worker: arrays on a device travel as arrays of the host.

The master must not touch a device: a context there costs memory on every GPU, and ends the use of ``os.fork``.
"""

from __future__ import annotations

import io
from typing import Any

from synk._wire.parcels import Pickler
from synk.backends import on_host


class HostPickler(Pickler):
    """Pickles what cloudpickle does; arrays that lie on a device become NumPy's, and tensors those of the CPU."""

    def reducer_override(self, obj: Any) -> Any:
        moved = on_host(obj)
        if moved is not obj:
            return moved.__reduce_ex__(5)
        return super().reducer_override(obj)


def dumps(obj: Any) -> bytes:
    """Return ``obj`` pickled for the master."""
    file = io.BytesIO()
    HostPickler(file, protocol=5).dump(obj)
    return file.getvalue()
