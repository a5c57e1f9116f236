"""Guards of transfers: the same bytes that are sent again and again."""

from __future__ import annotations

import numpy as np
import pytest

import synk
from synk.errors import TransferRefused, WastefulTransfer


def test_the_fourth_call_with_the_same_bytes_is_told_or_refused() -> None:
    """At the user's line; arrays that change pass. It is leaving: the profile's table tells the bytes."""
    with synk.fork(1, backend="numpy") as rt:
        f = rt.function(lambda x: 2 * x, outputs="gather", name="double")
        x, changing = np.ones(10_000), np.zeros(10_000)
        with synk.profiler.transfer_guard("raise"):
            for _ in range(8):
                changing[-1] += 1
                f(changing)
            with pytest.raises(TransferRefused, match=r"x of 'double'.*synk\.data\(x\)"):
                for _ in range(4):
                    f(x.copy())
        with synk.profiler.transfer_guard("warn"), pytest.warns(WastefulTransfer) as caught:
            for _ in range(8):
                f(x)
    assert [told.filename for told in caught] == [__file__]
