"""What a likely mistake is told in a function on a worker."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import synk
from synk._api.current import NotebookCell

Fork = Callable[..., Any]


def test_breakpoint_names_inline(reused: Fork) -> None:
    def stops(x: Any) -> float:
        breakpoint()
        return float(x.sum())

    with pytest.raises(RuntimeError, match=r"cannot stop at breakpoint\(\).*fork\(inline=True\)"):
        reused(1).function(stops)(np.ones(2))


@pytest.mark.parametrize(
    "function",
    (
        lambda x: torch.nn.functional.linear(x, torch.ones(1, 3)).sum(),
        lambda x: torch.relu(x).sum(),
        lambda x: x.relu().sum(),
    ),
)
def test_arrays_where_tensors_are_meant_name_the_framework(reused: Fork, function: Any) -> None:
    with pytest.raises((TypeError, AttributeError)) as caught:
        reused(1).function(function)(np.ones((4, 3), np.float32))
    told = str(caught.value.__cause__) + "".join(getattr(caught.value, "__notes__", ()))
    assert 'framework="torch"' in told
    rt = reused(1)
    assert rt.function(function, framework="torch", outputs="sum")(np.ones((4, 3), np.float32)) == 12


def test_a_cell_of_a_notebook_is_known_again() -> None:
    first = NotebookCell("a", 1)
    assert NotebookCell("a", 2).is_run_again(first)
    assert not first.is_run_again(first) and not NotebookCell("b", 2).is_run_again(first)
    assert not first.is_run_again(None)


def test_outside_of_a_notebook_a_second_fork_is_an_error() -> None:
    with synk.fork(1, backend="numpy", inline=True), pytest.raises(synk.errors.SynkError, match="already running"):
        synk.fork(1, backend="numpy", inline=True)


def test_a_large_array_that_is_copied_again_and_again_is_told_once(
    reused: Fork, caplog: pytest.LogCaptureFixture
) -> None:
    rt = reused(1)
    x = np.ones((4, 1 << 19))
    total = rt.function(lambda x: x[0, 0], outputs="sum", name="total")
    total(x), total(x), total(x)
    assert not caplog.records
    for _ in range(5):
        assert total(x) == 1
    (record,) = caplog.records
    assert record.getMessage().startswith("x of 'total', 17 MB, is copied at every call")
    assert "synk.data(x)" in record.getMessage()
    fresh = rt.function(lambda x: x[0, 0], outputs="sum")
    for _ in range(6):  # it changes, so a copy is what is meant
        x[0, 0] += 1
        assert fresh(x) == x[0, 0]
    assert len(caplog.records) == 1
