"""Memory-mapped arrays as arguments: the workers map the file themselves."""

from __future__ import annotations

import gc
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import census, descriptors, pids, replaced_workers, settled_census
from support.tables import named

import synk
from synk.errors import WorkerDied

ROWS, COLUMNS = 200_000, 4  # 6.4 MB: from 4 MB on arrays are mapped


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "rows.npy"
    np.save(path, np.random.default_rng(0).normal(size=(ROWS, COLUMNS)))
    return path


def copies(rt: Any) -> Any:
    return rt.function(named("copies", lambda x: x * 1), outputs="gather")


def staged(rt: Any, f: Any, *args: Any, **kwargs: Any) -> tuple[int, Any]:
    """Return how many bytes a call copied through the program, and its result."""
    before = rt.counters["bytes_staged"]
    result = f(*args, **kwargs)
    return rt.counters["bytes_staged"] - before, result


@pytest.mark.parametrize("where", [2, 0])
def test_what_lies_in_a_file_is_mapped(subtests: Any, shared_runtimes: Any, path: Path, where: Any) -> None:
    """Views among them, and with any batch. Nothing of it is copied by the program."""
    rt, plain = shared_runtimes[where], np.load(path)
    copy, x, own = copies(rt), np.load(path, mmap_mode="r"), np.load(path, mmap_mode="c")
    own[3] = 77.0
    mapped = {
        "read-only": (x, plain),
        "writeable": (np.load(path, mmap_mode="r+"), plain),
        "a range": (x[1:-3], plain[1:-3]),
        "another shape": (x.reshape(-1, 8), plain.reshape(-1, 8)),
        "an array of it": (np.asarray(x)[10:], plain[10:]),
    }
    views = {"reversed": x[::-1], "columns": x[:, 1:], "reversed columns": x[:, ::-1]}
    mapped |= {name: (view, np.array(view)) for name, view in views.items()}
    copied = {"copy on write": (own, np.array(own)), "big-endian": (x.view(">i8"), plain.view(">i8"))}
    for name, (view, expected) in {**mapped, **copied}.items():
        with subtests.test(name):
            nbytes, result = staged(rt, copy, view)
            np.testing.assert_array_equal(result, expected)
            assert nbytes == (0 if name in mapped else expected.nbytes)
            assert type(result) is np.ndarray
    for batch in (slice(7, 190_000), slice(None, None, -3), [5, 4, 199_999, 5], slice(9)):
        with subtests.test(batch=str(batch)):
            nbytes, result = staged(rt, copy, x, batch=batch)
            np.testing.assert_array_equal(result, plain[batch])
            assert nbytes < 1000
    for call in (copy.serial, lambda x: copy(x, num_slices=3), lambda x: copy.submit(x).result()):
        np.testing.assert_array_equal(call(x), plain)
    dot = rt.function(lambda d, w: d["x"] @ w.T[:, :2], bcast_inputs="w", outputs="gather")
    nbytes, result = staged(rt, dot, {"x": x, "scale": 2}, w=x)
    assert nbytes == 0
    np.testing.assert_allclose(result, plain @ plain.T[:, :2])


def test_records_in_raw_files(rt: Any, tmp_path: Path) -> None:
    dtype = np.dtype([("a", "i4"), ("b", "f8"), ("c", "i4")])
    raw = np.memmap(tmp_path / "raw", dtype, "w+", offset=16, shape=300_000)
    raw["a"], raw["b"] = np.arange(300_000), 0.5
    nbytes, result = staged(rt, rt.function(lambda r: r["a"] * r["b"], outputs="gather"), raw)
    np.testing.assert_array_equal(result, np.arange(300_000) * 0.5)
    assert nbytes == 0


def test_what_is_written_is_seen_by_calls_that_come_later(rt: Any, path: Path) -> None:
    """And not by those that were submitted before."""
    x = np.load(path, mmap_mode="r+")
    read_only = np.load(path, mmap_mode="r")
    total = rt.function(lambda x: x.sum(), outputs="sum")
    pending = []
    for value in (1.0, 2.0, 3.0):
        x[:] = value
        assert staged(rt, total, x) == staged(rt, total, read_only) == (0, value * x.size)
        pending.append(total.submit(x))
    x[:] = 9.0
    assert [call.result() for call in pending] == [x.size, 2.0 * x.size, 3.0 * x.size]


def test_a_function_that_writes_changes_no_file(rt: Any, path: Path) -> None:
    pytest.importorskip("torch")
    x, plain = np.load(path, mmap_mode="r+"), np.load(path)

    def spoil(x: Any) -> Any:
        x *= 0
        return x.sum()

    with pytest.raises(ValueError, match="read-only"):
        rt.function(spoil, outputs="sum")(x)
    f = rt.function(spoil, outputs="sum", framework="torch")
    assert float(f(x)) == float(f(x)) == 0.0
    total = rt.function(lambda x: x.sum(axis=0), outputs="sum", framework="torch")
    np.testing.assert_allclose(np.asarray(total(x)), plain.sum(axis=0))
    np.testing.assert_array_equal(np.load(path), plain)


# ----- files that change


CHANGES: dict[str, Callable[[Path], Any]] = {
    "removed": Path.unlink,
    "replaced": lambda path: (np.save(f"{path}.npy", np.zeros((ROWS, COLUMNS))), os.replace(f"{path}.npy", path)),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "empty elsewhere": lambda path: (path.unlink(), path.touch()),
}


def test_a_name_that_means_another_file(subtests: Any, rt: Any, path: Path) -> None:
    """The workers get a copy, whether they have mapped the file before or not."""
    plain = np.load(path)
    for (name, change), is_known in itertools.product(CHANGES.items(), (False, True)):
        with subtests.test(change=name, is_known=is_known):
            path.unlink(missing_ok=True)
            np.save(path, plain)
            x, copy = np.load(path, mmap_mode="r"), copies(rt)
            if is_known:
                copy(x)
            change(path)
            for _ in range(2):
                nbytes, result = staged(rt, copy, x)
                np.testing.assert_array_equal(result, plain)
                assert nbytes == plain.nbytes


@pytest.mark.parametrize("where", [2, 0])
def test_a_file_that_was_cut(shared_runtimes: Any, path: Path, where: Any) -> None:
    x, copy = np.load(path, mmap_mode="r"), copies(shared_runtimes[where])
    copy(x)
    os.truncate(path, 3_000_000)
    with pytest.raises(ValueError, match=r"memory map of .*rows.npy, which has 3000000 bytes by now, expected 6400128"):
        copy(x)
    np.testing.assert_array_equal(copy(np.arange(4.0)), np.arange(4.0))


def test_a_file_that_is_cut_during_a_call(rt: Any, path: Path) -> None:
    x = np.load(path, mmap_mode="r")

    def cut(x: np.ndarray, path: str) -> Any:
        if path and synk.comm.rank == 1:  # the other's death would end it while it reads, or not
            return 0.0
        if path:
            os.truncate(path, 1000)
        return x.sum()

    f = rt.function(cut, bcast_inputs="path", outputs="sum")
    f(x, path="")  # both ranks map the file
    with replaced_workers(rt, [0]), pytest.raises(WorkerDied, match=r"SIGBUS.*has become shorter"):
        f(x, path=str(path))


def test_mappings_end_with_their_functions_and_with_the_runtime(path: Path) -> None:
    """The program opens nothing, and a worker maps a file once for all calls alike."""
    outside = np.load(path, mmap_mode="r")
    before = census()
    with synk.fork(1) as rt:
        copy = copies(rt)
        copy(outside)
        num_open = descriptors()[str(path)]
        for _ in range(3):
            copy(np.load(path, mmap_mode="r"))
        maps = Path(f"/proc/{pids(rt)[0]}/maps")
        assert maps.read_text().count(str(path)) == 1
        assert descriptors()[str(path)] == num_open
        del copy
        gc.collect()
        rt.function(lambda x: x.sum(), outputs="sum")(np.zeros(3))
        assert not maps.read_text().count(str(path))
    assert not settled_census(before).leftovers(before)
