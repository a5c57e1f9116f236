"""One hint: an array that is passed again and again belongs in ``synk.data``, which is copied once."""

from __future__ import annotations

import weakref
from typing import NamedTuple

import numpy as np

from synk._processes.output import report

_LARGE_NBYTES = 1 << 20
_NUM_CALLS = 4
_NUM_SAMPLES = 64


class _Passed(NamedTuple):
    array: weakref.ref[np.ndarray]
    samples: bytes
    times: int


class Repeated:
    """The large arrays that one function is passed, and how often each was passed in a row.

    Parameters
    ----------
    name : str
        Name of the function.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._passed: dict[str, _Passed] = {}
        self._has_told = False

    def note(self, label: str, value: np.ndarray) -> None:
        """Note an array that is about to be copied. One that has changed in some samples counts as another one."""
        if self._has_told or value.nbytes < _LARGE_NBYTES:
            return
        samples = value.flat[:: max(value.size // _NUM_SAMPLES, 1)].tobytes()
        before = self._passed.get(label)
        is_same = before is not None and before.array() is value and before.samples == samples
        count = before.times + 1 if before is not None and is_same else 1
        self._passed[label] = _Passed(weakref.ref(value), samples, count)
        if count == _NUM_CALLS:
            self._has_told = True
            self._passed.clear()
            report(
                "%s of %r, %.2g MB, was the same array in %d calls and was copied in each. If that is not meant: "
                "synk.data(%s) is copied once; where it does change, write into a Data: d[:] = %s.",
                label, self._name, value.nbytes / 1e6, count, label, label,
            )  # fmt: skip
