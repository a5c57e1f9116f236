"""Memory-mapped arrays as arguments: the workers map the file themselves."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import census, descriptors, replaced_workers, settled_census

import synk
from synk.errors import WorkerDied

ROWS, COLUMNS = 200_000, 4  # 6.4 MB: from 4 MB on arrays are mapped


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rows.npy"
    np.save(path, np.random.default_rng(0).normal(size=(ROWS, COLUMNS)))
    return path


@pytest.fixture(params=[2, "inline"])
def rt(request: Any, shared_runtimes: Any) -> Any:
    return shared_runtimes[request.param]


def staged(rt: Any, f: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[int, Any]:
    """Return how many bytes a call copied through the master, and its result."""
    before = rt._session.counters["bytes_staged"]
    result = f(*args, **kwargs)
    return rt._session.counters["bytes_staged"] - before, result


def copies(rt: Any) -> Any:
    return rt.function(lambda x: x * 1, outputs="gather")


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_the_workers_map_the_file(rt: Any, path: Path, mode: str) -> None:
    x, copy = np.load(path, mmap_mode=mode), copies(rt)
    plain = np.load(path)
    for view, expected in [
        (x, plain),
        (x[1:-3], plain[1:-3]),
        (x.reshape(-1, 8), plain.reshape(-1, 8)),
        (np.asarray(x)[10:], plain[10:]),
    ]:
        nbytes, result = staged(rt, copy, view)
        np.testing.assert_array_equal(result, expected)
        assert nbytes == 0 and type(result) is not np.memmap
    np.testing.assert_array_equal(copy.serial(x), plain)


def test_with_the_options_of_a_call(rt: Any, path: Path) -> None:
    x, plain, copy = np.load(path, mmap_mode="r"), np.load(path), copies(rt)
    for batch in (slice(7, 190_000), slice(None, None, -3), [5, 4, 199_999, 5], 9):
        nbytes, result = staged(rt, copy, x, batch=batch)
        np.testing.assert_array_equal(result, plain[batch if batch != 9 else slice(0, 9)])
        assert nbytes < 1000
    np.testing.assert_array_equal(copy(x, num_slices=3), plain)
    nbytes, result = staged(rt, lambda: copy.submit(x).result())
    assert nbytes == 0 and np.array_equal(result, plain)
    dot = rt.function(lambda d, w: d["x"] @ w.T[:, :2], bcast_inputs="w", outputs="gather")
    nbytes, result = staged(rt, dot, {"x": x, "scale": 2}, w=x)
    assert nbytes == 0
    np.testing.assert_allclose(result, plain @ plain.T[:, :2])


def test_records_and_raw_files(rt: Any, tmp_path: Path) -> None:
    dtype = np.dtype([("a", "i4"), ("b", "f8"), ("c", "i4")])
    raw = np.memmap(tmp_path / "raw", dtype, "w+", offset=16, shape=300_000)
    raw["a"], raw["b"] = np.arange(300_000), 0.5
    nbytes, result = staged(rt, rt.function(lambda r: r["a"] * r["b"], outputs="gather"), raw)
    np.testing.assert_array_equal(result, np.arange(300_000) * 0.5)
    assert nbytes == 0


def test_what_is_written_between_calls_is_seen(rt: Any, path: Path) -> None:
    x = np.load(path, mmap_mode="r+")
    read_only = np.load(path, mmap_mode="r")
    total = rt.function(lambda x: x.sum(), outputs="sum")
    for value in (1.0, 2.0, 3.0):
        x[:] = value
        assert staged(rt, total, x) == (0, value * x.size)
        assert staged(rt, total, read_only) == (0, value * x.size)


def test_a_submitted_call_works_on_what_was_there(shared_runtimes: Any, path: Path) -> None:
    rt, x = shared_runtimes[2], np.load(path, mmap_mode="r+")
    total = rt.function(lambda x: x.sum(), outputs="sum")
    calls = []
    for value in (1.0, 2.0, 3.0):
        x[:] = value
        calls.append(total.submit(x))
    x[:] = 9.0
    assert [call.result() for call in calls] == [x.size, 2.0 * x.size, 3.0 * x.size]


@pytest.mark.parametrize("framework", [None, "torch"])
def test_a_function_that_writes_changes_no_file(shared_runtimes: Any, path: Path, framework: str | None) -> None:
    rt, x, plain = shared_runtimes[2], np.load(path, mmap_mode="r+"), np.load(path)

    def spoil(x: Any) -> Any:
        x *= 0
        return x.sum()

    if framework:
        pytest.importorskip("torch")
        f = rt.function(spoil, outputs="sum", framework=framework)
        assert float(f(x)) == float(f(x)) == 0.0
        total = rt.function(lambda x: x.sum(axis=0), outputs="sum", framework=framework)
        np.testing.assert_allclose(np.asarray(total(x)), plain.sum(axis=0))
    else:
        with pytest.raises(ValueError, match="read-only"):
            rt.function(spoil, outputs="sum")(x)
    np.testing.assert_array_equal(np.load(path), plain)


def removed(path: Path) -> None:
    path.unlink()


def replaced(path: Path) -> None:
    np.save(path.with_name("other.npy"), np.zeros((ROWS, COLUMNS)))
    os.replace(path.with_name("other.npy"), path)


def a_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def emptied_elsewhere(path: Path) -> None:
    path.unlink()
    path.touch()


@pytest.mark.parametrize("change", [removed, replaced, a_pipe, emptied_elsewhere])
@pytest.mark.parametrize("is_known", [False, True])
def test_a_name_that_means_another_file(
    shared_runtimes: Any, path: Path, change: Callable[[Path], None], is_known: bool
) -> None:
    rt, x, plain = shared_runtimes[2], np.load(path, mmap_mode="r"), np.load(path)
    copy = copies(rt)
    if is_known:
        copy(x)
    change(path)
    for _ in range(2):
        nbytes, result = staged(rt, copy, x)
        np.testing.assert_array_equal(result, plain)
        assert nbytes == (0 if is_known else plain.nbytes)


def test_copy_on_write_is_copied(rt: Any, path: Path) -> None:
    x, plain = np.load(path, mmap_mode="c"), np.load(path)
    x[3] = plain[3] = 77.0
    nbytes, result = staged(rt, copies(rt), x)
    np.testing.assert_array_equal(result, plain)
    assert nbytes == plain.nbytes


def test_what_is_no_range_of_its_file_is_copied(rt: Any, path: Path) -> None:
    x, plain, copy = np.load(path, mmap_mode="r"), np.load(path), copies(rt)
    for view in (np.s_[::-1], np.s_[:, 1:], np.s_[:, ::-1]):
        nbytes, result = staged(rt, copy, x[view])
        np.testing.assert_array_equal(result, plain[view])
        assert nbytes == plain[view].nbytes
    swapped = x.view(">i8")
    np.testing.assert_array_equal(copy(swapped), plain.view(">i8"))


def test_a_file_that_was_cut(rt: Any, path: Path) -> None:
    x, copy = np.load(path, mmap_mode="r"), copies(rt)
    copy(x)
    os.truncate(path, 3_000_000)
    with pytest.raises(ValueError, match=r"memory map of .*rows.npy, which has 3000000 bytes by now, expected 6400128"):
        copy(x)
    np.testing.assert_array_equal(copy(np.arange(4.0)), np.arange(4.0))


def test_a_file_that_is_cut_during_a_call(shared_runtimes: Any, path: Path) -> None:
    rt, x = shared_runtimes[2], np.load(path, mmap_mode="r")

    def cut(x: np.ndarray, path: str) -> Any:
        os.truncate(path, 1000)
        return x.sum()

    f = rt.function(cut, bcast_inputs="path", outputs="sum")
    with replaced_workers(rt, [0, 1]), pytest.raises(WorkerDied, match=r"SIGBUS.*has become shorter"):
        f(x, path=str(path))
    np.testing.assert_array_equal(copies(rt)(np.arange(4.0)), np.arange(4.0))


def test_a_worker_that_was_started_later_maps_it_too(shared_runtimes: Any, path: Path) -> None:
    rt, x, plain = shared_runtimes[2], np.load(path, mmap_mode="r"), np.load(path)
    copy = copies(rt)
    copy(x)
    path.unlink()
    rt.restart()
    nbytes, result = staged(rt, copy, x)
    assert nbytes == 0 and np.array_equal(result, plain)


def test_a_mapping_that_is_gone_is_let_go(path: Path) -> None:
    with synk.fork(1) as rt:
        copy = copies(rt)
        copy(np.zeros(3))
        before = descriptors()[str(path)]
        for _ in range(3):
            x = np.load(path, mmap_mode="r")
            copy(x)
            del x
        gc.collect()
        copy(np.zeros(3))
        pid = rt.pids[0] if hasattr(rt, "pids") else rt._session.workers.by_rank[0].process.pid
        assert descriptors()[str(path)] == before
        assert str(path) not in Path(f"/proc/{pid}/maps").read_text()
    assert np.load(path).shape == (ROWS, COLUMNS)


def test_nothing_is_left_of_a_closed_runtime(path: Path) -> None:
    x = np.load(path, mmap_mode="r")
    before = census()
    with synk.fork(1) as rt:
        copies(rt)(x)
    assert not settled_census(before).leftovers(before)
    np.testing.assert_array_equal(x, np.load(path))
