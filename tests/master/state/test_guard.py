"""Guards of transfers: the same bytes that are sent again and again."""

from __future__ import annotations

import warnings

import numpy as np
import pytest

import synk
from synk.errors import TransferRefused, WastefulTransfer


def test_the_fourth_call_with_the_same_bytes_is_told_or_refused() -> None:
    """At the user's line, before anything is sent; ``Data``, small arrays and those that change pass."""
    with synk.fork(1, backend="numpy") as rt:
        f = rt.function(lambda x: 2 * x, outputs="gather", name="double")
        x, changing, passing = np.ones(10_000), np.zeros(10_000), [np.ones(1000), rt.data(np.ones(10_000))]
        with synk.profiler.transfer_guard("warn"), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(8):
                f(x)
        assert [(told.category, told.filename) for told in caught] == [(WastefulTransfer, __file__)]
        with synk.profiler.transfer_guard("raise"):
            for _ in range(8):
                changing[-1] += 1
                for each in (changing, *passing):
                    f(each)
            with pytest.raises(TransferRefused, match=r"x of 'double'.*0\.08 MB.*synk\.data\(x\)"):
                for _ in range(4):
                    f(x.copy())
