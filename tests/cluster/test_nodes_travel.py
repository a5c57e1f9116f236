"""What functions capture, what settings say, and what is printed and logged, over nodes: as on one machine."""

from __future__ import annotations

import functools
import gc
import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import synk
from synk.errors import StaleCaptureError

X = np.arange(6.0)


class Model:
    def __init__(self) -> None:
        self.scale = 1.0


def test_captured_objects_that_change(nodes: synk.Runtime) -> None:
    """A call computes with what they hold in the program at that moment; what only a rank has changed stays its own."""
    small, numbers, model, seen = np.zeros(3), [1.0], Model(), []
    box = {"offset": 0.0}

    def compute(x: np.ndarray) -> Any:
        seen.append(1)
        return x * model.scale + small[0] + sum(numbers) + box["offset"], len(seen)

    f = nodes.function(compute, outputs=("gather", "min"))
    for round_number in range(1, 4):
        values, calls = f(X)
        np.testing.assert_array_equal(values, X * model.scale + small[0] + sum(numbers) + box["offset"])
        assert calls == round_number
        small[0] += 1
        numbers.append(2.0)
        model.scale *= 2
        box["offset"] = -5.0
    np.testing.assert_array_equal(f.serial(X)[0], X * 8 + 3 + 7 - 5)


def test_large_captured_arrays_that_change(nodes: synk.Runtime) -> None:
    table = np.zeros(100_000)
    f = nodes.function(lambda x: x + table[70_000] + table.sum(), outputs="gather")
    np.testing.assert_array_equal(f(X), X)
    table[:] = 1.0  # a dense change is seen at once
    np.testing.assert_array_equal(f(X), X + 100_001)
    table[70_000] = 3.0
    f.refresh()
    np.testing.assert_array_equal(f(X), X + 100_005)
    table[70_000] = 4.0  # a small one is found in turn, and then no call goes on with old contents
    with pytest.raises(StaleCaptureError):
        for _ in range(100):
            f(X)
    np.testing.assert_array_equal(f(X), X + 100_007)


def test_a_function_whose_code_changes(nodes: synk.Runtime) -> None:
    def compute(x: np.ndarray) -> np.ndarray:
        return x

    f = nodes.function(compute, outputs="gather")
    np.testing.assert_array_equal(f(X), X)
    compute.__code__ = (lambda x: x * 2).__code__
    np.testing.assert_array_equal(f(X), 2 * X)


def test_a_function_that_is_sent_again_as_a_whole(nodes: synk.Runtime) -> None:
    """The plans of the workers were made for the one before."""
    table = np.zeros(3)
    f = nodes.function(functools.partial(lambda table, x: x + table.size, table), outputs="gather")
    for size in (3, 5, 8):
        table.resize(size, refcheck=False)
        np.testing.assert_array_equal(f(X), X + size)


def test_a_module_that_is_reloaded(nodes: synk.Runtime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib

    name = f"edited_{id(nodes)}"
    path = tmp_path / f"{name}.py"
    path.write_text("scale = 2\ndef compute(x):\n    return x * scale\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = importlib.import_module(name)
    f = nodes.function(module.compute, outputs="gather")
    np.testing.assert_array_equal(f(X), 2 * X)
    module.scale = 3
    np.testing.assert_array_equal(f(X), 3 * X)
    path.write_text("scale = 5\ndef compute(x):\n    return x * scale + 1\n")
    importlib.reload(module)
    np.testing.assert_array_equal(f(X), 5 * X + 1)
    del sys.modules[name]


def held_on_ranks(nodes: synk.Runtime) -> list[int]:
    """Return how many functions each rank holds."""

    def count() -> int:
        from synk._wire.cell import cell

        return len(cell.worker.held.functions)

    gc.collect()
    found: list[int] = nodes.function(count, outputs=None, per_rank=True)()
    return found


def test_functions_that_are_dropped_leave_the_ranks() -> None:
    with synk.Runtime((1, 2), cluster="here", nodes=2) as rt:
        before = held_on_ranks(rt)
        functions = [rt.function(lambda x, k=k: x + k, outputs="gather", bcast_inputs="k") for k in range(5)]
        for k, f in enumerate(functions):
            np.testing.assert_array_equal(f(X), X + k)
        assert held_on_ranks(rt) == [count + 5 for count in before]
        del functions, f
        held_on_ranks(rt)  # the message that tells the ranks
        assert held_on_ranks(rt) == before


def test_settings_of_libraries(nodes: synk.Runtime) -> None:
    f = nodes.function(lambda x: 1 / x, outputs="gather")
    with np.errstate(divide="raise"), pytest.raises(FloatingPointError):
        f(X)
    with np.errstate(divide="ignore"):
        np.testing.assert_array_equal(f(X)[1:], 1 / X[1:])


def test_what_ranks_print(nodes: synk.Runtime, capfd: pytest.CaptureFixture[str]) -> None:
    def talk(x: np.ndarray) -> None:
        print("rank", synk.comm.rank)
        print("trouble", file=sys.stderr)

    nodes.function(talk, outputs=None)(np.arange(4.0))
    printed = capfd.readouterr()
    assert sorted(printed.out.splitlines()) == [f"[rank {rank}] rank {rank}" for rank in range(4)]
    assert sorted(printed.err.splitlines()) == [f"[rank {rank}] trouble" for rank in range(4)]


def test_what_ranks_log(nodes: synk.Runtime, caplog: pytest.LogCaptureFixture) -> None:
    def talk(x: np.ndarray) -> None:
        logging.getLogger("mine").warning("row %d", x[0])

    with caplog.at_level(logging.INFO):
        nodes.function(talk, outputs=None)(np.arange(4))
    mine = sorted(caplog.records, key=lambda record: record.rank)  # type: ignore[attr-defined]
    assert [record.getMessage() for record in mine] == [f"[rank {rank}] row {rank}" for rank in range(4)]
    assert [record.processName for record in mine] == [f"rank {rank}" for rank in range(4)]


def test_calls_that_run_out_of_memory_run_in_slices(nodes: synk.Runtime) -> None:
    def greedy(x: np.ndarray) -> Any:
        if len(x) > 1:
            raise MemoryError
        return x.sum()

    assert nodes.function(greedy, outputs="sum", on_oom="slices")(np.arange(8.0)) == 28.0


def test_the_profile_counts_all_ranks() -> None:
    with synk.Runtime(1, cluster="here", nodes=2) as rt:
        f = rt.function(lambda x: x.sum(), outputs="sum", name="total")
        for _ in range(3):
            f(X)
        record = rt.profile.records["total"]
        assert record.num_calls == 3
        assert sorted(record.ranks) == [0, 1]
        assert rt.counters["calls"] == 3
