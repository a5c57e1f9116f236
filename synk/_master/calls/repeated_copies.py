"""Large arrays that are copied at each call although their bytes are the same: told once, with what to do instead."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from synk._master.processes.output import report

_TELL_AT = 2  # calls that found the bytes of the one before


class RepeatedCopies:
    """The large arrays that one function is passed.

    Parameters
    ----------
    name : str
        Of the function.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._counts: dict[str, int] = {}
        self._is_over = False

    def ignore(self, labels: Iterable[str]) -> None:
        """Tell nothing of these, for which ``synk.data`` is no way out."""
        self._counts.update(dict.fromkeys(labels, -1))

    def look(self, label: str, target: np.ndarray, value: Any) -> None:
        """Compare an array with what lies where it is to be copied: what the call before was passed.

        One that was different once is not compared again, and nothing is after something was told.
        """
        count = self._counts.get(label, 0)
        if self._is_over or count < 0:
            return
        self._counts[label] = count + 1 if np.array_equal(target, value) else -1
        if self._counts[label] == _TELL_AT:
            self._is_over = True
            report(
                "%s of %r (%.0f MB) is copied at every call, and its bytes were the same in three calls. If it does "
                "not change, synk.data(%s) is copied once; else write into a Data: d[:] = %s.",
                label, self._name, target.nbytes / 1e6, label, label,
            )  # fmt: skip
