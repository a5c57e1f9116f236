"""Guards of transfers: what is wasteful, what is not, and what each mode does about it."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import synk
from synk._wire.cell import cell
from synk.errors import TransferRefused, WastefulTransfer
from synk.profiler import transfer_guard

LARGE = 10_000
SMALL = 8_000


@pytest.fixture
def rt(shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A runtime with two workers, which is the current one."""
    runtime = shared_runtimes[2]
    monkeypatch.setattr(cell, "runtime", runtime)
    monkeypatch.setattr(cell, "session", runtime._session)
    return runtime


def total_of(rt: Any, name: str = "total") -> Any:
    return rt.function(lambda x: x.sum(), outputs="sum", name=name)


def calls_until_refused(call: Callable[[], Any], most: int = 8) -> int:
    """Return in which call the guard refuses; 0 for in none."""
    with transfer_guard("raise"):
        for number in range(1, most + 1):
            try:
                call()
            except TransferRefused:
                return number
    return 0


ARRAYS = {
    "float64": np.linspace(0, 1, LARGE),
    "two axes": np.ones((LARGE, 2)),
    "columns": np.asfortranarray(np.ones((LARGE, 2))),
    "every other row": np.ones((2 * LARGE, 2))[::2],
    "backwards": np.arange(float(LARGE))[::-1],
    "NaN": np.full(LARGE, np.nan),
    "bool": np.ones(100_000, bool),
    "int8": np.ones(100_000, np.int8),
    "complex": np.ones(LARGE, np.complex128),
    "big endian": np.ones(LARGE, ">f8"),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_the_fourth_call_with_the_same_bytes_is_refused(rt: Any, name: str) -> None:
    total = rt.function(lambda x: x.size, outputs="sum")
    assert calls_until_refused(lambda: total(ARRAYS[name])) == 4
    assert total(ARRAYS[name]) == ARRAYS[name].size  # outside of the guard it passes


@pytest.mark.parametrize("name", ARRAYS)
def test_equal_bytes_in_other_objects_are_the_same(rt: Any, name: str) -> None:
    total = rt.function(lambda x: x.size, outputs="sum")
    assert calls_until_refused(lambda: total(ARRAYS[name].copy())) == 4


@pytest.mark.parametrize("position", [0, 1, LARGE // 2, LARGE - 1])
def test_an_array_of_which_one_element_changes_is_never_refused(rt: Any, position: int) -> None:
    total, x = total_of(rt), np.zeros(LARGE)

    def call() -> None:
        x[position] += 1
        assert total(x) == x[position]

    assert calls_until_refused(call) == 0


def test_small_arrays_data_and_other_arguments_pass(rt: Any) -> None:
    total = total_of(rt)
    small, data = np.ones(SMALL), rt.data(np.ones(LARGE))
    assert calls_until_refused(lambda: total(small)) == 0
    assert calls_until_refused(lambda: total(data)) == 0


def test_the_error_names_what_to_do_and_nothing_was_sent(rt: Any) -> None:
    pair = rt.function(lambda x, y: (x * y).sum(), outputs="sum", name="pair")
    x, y = np.ones(LARGE), np.ones(LARGE)
    with transfer_guard("raise"):
        for number in range(3):
            y[0] = number
            pair(x, y)
        before = rt.counters
        with pytest.raises(TransferRefused) as caught:
            pair(x, y + 1)
    assert all(part in str(caught.value) for part in ("x of 'pair'", "0.08 MB", "3 calls", "synk.data(x)"))
    after = rt.counters
    assert (after["calls"], after["messages_down"]) == (before["calls"], before["messages_down"])
    assert pair(x, y) == LARGE + 1  # y[0] is 2


def test_a_result_that_comes_back_is_refused_at_once(rt: Any) -> None:
    double = rt.function(lambda x: 2 * x, outputs="gather", name="double")
    total = total_of(rt)
    with transfer_guard("raise"):
        result = double(np.ones(LARGE))
        with pytest.raises(TransferRefused, match="the result of 'double', and is sent back"):
            total(result)
        assert total(result + 0) == 2 * LARGE
    assert total(result) == 2 * LARGE


def test_functions_that_take_turns_are_told_apart(rt: Any) -> None:
    first, second, x = total_of(rt, "first"), total_of(rt, "second"), np.ones(LARGE)

    def both() -> None:
        first(x), second(x + first(x))

    assert calls_until_refused(both) == 2  # the fourth call of the first


def test_warnings_come_once_for_each_argument_at_the_users_line(rt: Any) -> None:
    total, x = total_of(rt), np.ones(LARGE)
    with transfer_guard("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(8):
            total(x)
    (told,) = caught
    assert told.category is WastefulTransfer and told.filename == __file__


def test_log_lines_come_once(rt: Any, caplog: pytest.LogCaptureFixture) -> None:
    total, x = total_of(rt), np.ones(LARGE)
    with transfer_guard("log"), caplog.at_level(logging.WARNING, "synk"):
        for _ in range(8):
            total(x)
    assert [record.getMessage().partition(",")[0] for record in caplog.records] == ["x of 'total'"]


def test_a_guard_is_that_of_its_thread(rt: Any) -> None:
    total, x = total_of(rt), np.ones(LARGE)
    found: list[Any] = []

    def run() -> None:
        found.extend(total(x) for _ in range(8))

    with transfer_guard("raise"):
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        assert found == [LARGE] * 8
        with transfer_guard("allow"):
            assert total(x) == LARGE
        with pytest.raises(TransferRefused):
            for _ in range(4):
                total(x)


def test_a_runtime_can_be_guarded_for_all_threads(reused: Callable[..., Any]) -> None:
    with synk.Runtime(1, backend="numpy", transfer_guard="raise") as rt:
        total, x = total_of(rt), np.ones(LARGE)
        with pytest.raises(TransferRefused):
            for _ in range(4):
                total(x)


@pytest.mark.parametrize("mode", ["", "Raise", None, 1])
def test_unknown_modes_are_refused(rt: Any, mode: Any) -> None:
    with pytest.raises(ValueError, match="cannot guard transfers: got"), transfer_guard(mode):
        pass
    with pytest.raises(ValueError, match="cannot guard transfers"):
        synk.Runtime(1, transfer_guard=mode)


def test_what_was_compared_stands_in_the_profile(rt: Any) -> None:
    total, x = total_of(rt, "compared"), np.ones(LARGE)
    with transfer_guard("log"):
        for _ in range(6):
            total(x)
    (transfer,) = (each for each in rt.profile.transfers if (each.function, each.kind) == ("compared", "staged"))
    assert (transfer.calls, transfer.nbytes, transfer.num_unchanged) == (6, 6 * x.nbytes, 4)


def test_the_program_of_seed_004_names_its_two_culprits(rt: Any) -> None:
    """Three arrays of 4 MB, ``m @ x + b``, and only x changes from call to call."""
    rng = np.random.default_rng(0)
    m, x, b = (rng.standard_normal((1000, 1000)).astype("float32") for _ in range(3))
    f = rt.function(lambda m, x, b: m @ x + b, bcast_inputs="x", outputs="gather", name="GpuFromHost")
    with synk.profiler.trace(compare=True):
        for number in range(20):
            x[number, number] += 1
            result = f(m, x, b)
    np.testing.assert_allclose(result, m @ x + b, atol=1e-3)
    found = {each.argument: each for each in rt.profile.transfers if each.function == "GpuFromHost"}
    # The first call has nothing to compare with, and the second one keeps what the others are compared with.
    assert [found[name].num_unchanged for name in "mxb"] == [18, 0, 18]
    assert [found[name].nbytes for name in "mxb"] == [20 * 4_000_000] * 3
    with transfer_guard("warn"), pytest.warns(WastefulTransfer) as caught:
        for _ in range(4):
            x += 1
            f(m, x, b)
    assert [str(each.message).partition(", ")[0] for each in caught] == ["m of 'GpuFromHost'", "b of 'GpuFromHost'"]


def test_submitted_calls_are_guarded_at_submission(rt: Any) -> None:
    total, x = total_of(rt), np.ones(LARGE)
    with transfer_guard("raise"):
        calls = [total.submit(x) for _ in range(3)]
        with pytest.raises(TransferRefused):
            total.submit(x)
        assert [call.result() for call in calls] == [LARGE] * 3
