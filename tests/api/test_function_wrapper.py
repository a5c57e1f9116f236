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


def mean_of(rt: Any) -> Mean:
    return Mean(rt.function(lambda x: (x.sum(), len(x)), outputs="sum", name="mean"))


@pytest.mark.parametrize("where", [1, 2, 3, "inline"])
def test_a_wrapper_has_what_the_function_has(shared_runtimes: Any, where: Any) -> None:
    rt = shared_runtimes[where]
    mean, x = mean_of(rt), np.arange(7.0)
    (data,) = mean.build_inputs(x)
    assert mean.name == "mean"
    for batch in (None, 3, [6, 0, 1], x > 3):
        expected = (x if batch is None else x[:batch] if isinstance(batch, int) else x[batch]).mean()
        for call in (mean, mean.serial, lambda *args, **options: mean.submit(*args, **options).result()):
            assert call(data, batch=batch, num_slices=2) == expected
        assert mean.verify(data, batch=batch)
    assert mean.num_finished == 12


def test_a_submitted_result_is_finished_once_and_when_it_is_asked_for(shared_runtimes: Any) -> None:
    mean = mean_of(shared_runtimes[2])
    calls = [mean.submit(np.full(4, float(k))) for k in range(3)]
    assert mean.num_finished == 0
    for _ in range(2):
        assert [call.result() for call in calls] == [0.0, 1.0, 2.0]
    assert mean.num_finished == 3
    assert all(call.done() and call.name == "mean" and call.ranks == (0, 1) for call in calls)


def test_errors_come_through(shared_runtimes: Any) -> None:
    mean = mean_of(shared_runtimes[2])
    for call in (mean, mean.serial, mean.submit):
        with pytest.raises(TypeError, match="cannot scatter x of 'mean'"):
            call(3.0)
    failing = synk.FunctionWrapper(shared_runtimes[2].function(lambda x: 1 / 0))
    pending = failing.submit(np.ones(4))
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            pending.result()


def test_streams_and_blocks_are_submitted_by_the_wrapper(shared_runtimes: Any) -> None:
    class Shifted(Mean):
        def submit(self, /, *args: Any, **options: Any) -> Any:
            return super().submit(*(arg + 1 for arg in args), **options)

    mean = Shifted(mean_of(shared_runtimes[2]).function)
    assert list(mean.stream([np.full(4, float(k)) for k in range(5)])) == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert list(mean.rows(np.arange(8.0), batch_size=4)) == [2.5, 6.5]
    assert mean.num_finished == 7
