"""Wrappers of a function have what it has, and finish each result once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import synk


class Mean(synk.FunctionWrapper):
    """Divides, and counts how often."""

    num_finished = 0

    def finish(self, result: Any) -> Any:
        self.num_finished += 1
        total, rows = result
        return total / rows


def test_a_wrapper_has_what_the_function_has(shared_runtimes: Any) -> None:
    mean = Mean(shared_runtimes[2].function(lambda x: (x.sum(), len(x)), outputs="sum", name="mean"))
    x = np.arange(7.0)
    for batch in (None, 3, [6, 0, 1]):
        expected = (x if batch is None else x[:batch] if isinstance(batch, int) else x[batch]).mean()
        pending = mean.submit(x, batch=batch)
        assert [pending.result(), pending.result(), mean(x, batch=batch), mean.serial(x, batch=batch)] == [expected] * 4
        assert mean.verify(x, batch=batch)
    assert mean.num_finished == 9
    assert list(mean.stream([x, x + 1])) == [3.0, 4.0]
    assert mean.name == "mean"
    for call in (mean, mean.serial, mean.submit):
        with pytest.raises(TypeError, match="cannot scatter x of 'mean'"):
            call(3.0)
