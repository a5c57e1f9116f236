"""A file is written whole or not at all: the writer is killed at every instruction, fails, waits for another.

Plain values come back from a file as they were, and a file runs no code.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from support import harness
from support.rank_arrays import told
from support.tables import examples

from synk._pure import files, plain_values


def back(value: Any) -> Any:
    with tempfile.NamedTemporaryFile() as file:
        plain_values.write(value, file)  # type: ignore[arg-type]
        file.flush()
        return plain_values.read(file.name)


keys = st.none() | st.booleans() | st.integers() | st.text() | st.tuples(st.integers(), st.text())
dtypes = st.one_of(hnp.boolean_dtypes(), hnp.integer_dtypes(), hnp.floating_dtypes(), hnp.complex_number_dtypes())
leaves = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers()
    | hnp.arrays(dtypes, hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=3))
    | st.sets(st.integers())
)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.tuples(inner, inner) | st.dictionaries(keys, inner, max_size=3),
    max_leaves=8,
)


@examples(50)
@given(values)
def test_values_come_back_as_they_were(value: Any) -> None:
    assert told(back(value)) == told(value)


def test_other_values_come_back(subtests: Any) -> None:
    """Scalars, dates, texts, records, lone surrogates, bytes without meaning, tensors, bfloat16 of ml_dtypes."""
    record = np.zeros(2, [("a", "i4"), ("b", "f8", 2)])
    values: list[Any] = [np.float32(1.5), np.array(["x", "yz"]), np.datetime64("2020-01-01"), record, "\ud800", 2**200]
    values += [np.void(b"12345678"), np.array([b"123", b"456"], "V3")]
    values += [np.arange(4).astype(pytest.importorskip("ml_dtypes").bfloat16)]
    torch = pytest.importorskip("torch")
    for dtype in ("float32", "bfloat16", "float64", "int64", "bool", "complex64", "float8_e4m3fn"):
        values.append({"a": [torch.arange(6).to(getattr(torch, dtype)).reshape(2, 3).t()]})
    for value in values:
        with subtests.test(value=repr(value)):
            assert told(back(value)) == told(value)


class Trap:
    def __reduce__(self) -> Any:
        return os.mkdir, ("trap",)


def test_other_files_are_refused_and_run_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    good = io.BytesIO()
    plain_values.write({"a": np.arange(1000.0)}, good)
    whole = good.getvalue()
    pickled, arrays, objects = io.BytesIO(), io.BytesIO(), io.BytesIO()
    pickle.dump(Trap(), pickled)
    np.savez(arrays, x=np.ones(2))
    np.savez(objects, values=np.array([Trap()], object), allow_pickle=True)
    flipped = bytearray(whole)
    flipped[2000] ^= 1
    for number, data in enumerate(
        (pickled.getvalue(), arrays.getvalue(), objects.getvalue(), b"", whole[:-100], whole[:500], bytes(flipped))
    ):
        path = tmp_path / str(number)
        path.write_bytes(data)
        with pytest.raises(ValueError, match=r"cannot load .*expected a file that save"):
            plain_values.read(path)
    assert not (tmp_path / "trap").exists()
    with pytest.raises(FileNotFoundError):
        plain_values.read(tmp_path / "none")


OLD, NEW = b"old" * 1000, b"new" * 100_000

SCENARIO = '''
"""Prints, for every so many instructions of the writer, what is at the file's name after SIGKILL there."""
import os, signal, sys
from synk._pure import files

target, step, new = sys.argv[1], int(sys.argv[2]), b"new" * 10_000
files.save(target, lambda: b"old" * 1000, lambda value, file: file.write(value), wait=True)
old = open(target, "rb").read()
seen = [0, 0]

def child(number):
    count = 0
    def trace(frame, event, argument):
        nonlocal count
        if frame.f_code.co_filename != files.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if count == number:
                os.kill(os.getpid(), signal.SIGKILL)
            count += 1
        return trace
    sys.settrace(trace)
    files.save(target, lambda: new, lambda value, file: file.write(value), wait=True)
    os._exit(0)

number = 0
while True:
    pid = os.fork()
    if not pid:
        child(number)
    status = os.waitpid(pid, 0)[1]
    found = open(target, "rb").read()
    assert found in (old, new), (number, len(found))
    seen[found == new] += 1
    if not os.WIFSIGNALED(status):
        break
    files.save(target, lambda: old, lambda value, file: file.write(value), wait=True)
    assert os.listdir(os.path.dirname(target)) == [os.path.basename(target)]
    number += step
print(number, *seen)
'''


@pytest.mark.parametrize("step", [3, pytest.param(1, marks=pytest.mark.storm)])
def test_killed_at_any_instruction_it_leaves_the_old_file_or_the_new_one(tmp_path: Path, step: int) -> None:
    environment = {**os.environ, "PYTHONPATH": str(harness.PACKAGE_FOLDER)}
    command = [sys.executable, "-c", SCENARIO, str(tmp_path / "file"), str(step)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    number, old, new = map(int, done.stdout.split())
    assert number > 100
    assert old > new > 3  # both were met


def write(value: bytes, file: Any) -> None:
    file.write(value)


def test_a_write_that_fails_leaves_the_old_file_and_no_part(tmp_path: Path) -> None:
    """Also where the kernel refuses to write beyond a limit, as on a full disk: some of the bytes are there by then."""
    target = tmp_path / "file"
    files.save(target, lambda: OLD, write, wait=True)

    def fail(value: bytes, file: Any) -> None:
        file.write(value)
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        files.save(target, lambda: NEW, fail, wait=True)
    with pytest.raises(ZeroDivisionError):
        files.save(target, lambda: 1 // 0, fail, wait=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(NEW) // 2, hard))
    try:
        with pytest.raises(OSError, match="File too large"):
            files.save(target, lambda: NEW, write, wait=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert target.read_bytes() == OLD
    assert os.listdir(tmp_path) == ["file"]
    with pytest.raises(FileNotFoundError):
        files.save(tmp_path / "none" / "file", lambda: NEW, write, wait=True)


def test_what_is_no_regular_file_keeps_its_name(tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    for path in (pipe, folder, os.devnull):
        with pytest.raises(ValueError, match="got what is no regular file"):
            files.save(path, lambda: NEW, write, wait=True)
    assert pipe.is_fifo() and folder.is_dir() and not os.path.isfile(os.devnull)
    assert sorted(os.listdir(tmp_path)) == ["folder", "pipe"]


def test_in_the_background_the_last_one_to_save_is_the_last_one_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """An error is told at once."""
    target, go_on = tmp_path / "file", threading.Event()

    def slow(value: bytes, file: Any) -> None:
        go_on.wait()
        file.write(value)

    first = files.save(target, lambda: OLD, slow, wait=False)
    assert not first.done() and not target.exists()
    go_on.set()
    second = files.save(target, lambda: NEW, write, wait=False)  # waits for the first
    assert first.result() is second.result() is None
    assert target.read_bytes() == NEW
    with pytest.raises(ZeroDivisionError):
        files.save(target, lambda: OLD, lambda value, file: 1 / 0, wait=False).result()  # type: ignore[arg-type, return-value]
    assert "was not saved: ZeroDivisionError" in caplog.text
    assert os.listdir(tmp_path) == ["file"]


def test_ctrl_c_ends_the_wait_for_another_writer(tmp_path: Path) -> None:
    part, main = files._Part(tmp_path / "file"), threading.get_ident()

    def is_in_the_file() -> bool:
        return sys._current_frames()[main].f_code.co_filename == files.__file__

    gc.disable()  # what Ctrl-C raises while Python calls back for an object that it collects, Python drops
    try:
        with pytest.raises(KeyboardInterrupt), harness.ctrl_c_when(is_in_the_file):
            files.save(tmp_path / "file", lambda: NEW, write, wait=True)
    finally:
        gc.enable()
    part.remove()
    assert os.listdir(tmp_path) == []


def test_links_modes_and_parts_of_killed_programs(tmp_path: Path) -> None:
    """A link stays a link, the mode is the program's, and a part that was left is taken."""
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "file.part").write_bytes(b"longer than what is written now" * 10_000)
    link, plain = tmp_path / "link", tmp_path / "plain"
    link.symlink_to(tmp_path / "real" / "file")
    files.save(link, lambda: OLD, write, wait=True)
    assert link.is_symlink()
    assert (tmp_path / "real" / "file").read_bytes() == OLD
    assert os.listdir(tmp_path / "real") == ["file"]
    plain.write_bytes(b"")
    assert (tmp_path / "real" / "file").stat().st_mode == plain.stat().st_mode
