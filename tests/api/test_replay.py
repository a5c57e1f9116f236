"""``SYNK_REPLAY``: a failure is written to a file, and ``synk.replay`` raises the same exception on the same line."""

from __future__ import annotations

import functools
import os
import random
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.gates import Gate
from support.harness import Child, script

import synk
from synk.errors import CallTimeout, UnsupportedError, WorkerDied


class Odd(Exception):
    """An exception of this file, which says what the body saw."""


@pytest.fixture
def rt(shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> synk.Runtime:
    monkeypatch.setenv("SYNK_REPLAY", str(tmp_path / "failures"))
    runtime: synk.Runtime = shared_runtimes[2]
    return runtime


@pytest.fixture
def files(tmp_path: Path) -> Callable[[], list[Path]]:
    """Return the files that are there, oldest first, but only once each."""
    seen: set[Path] = set()

    def new() -> list[Path]:
        found = sorted({*(tmp_path / "failures").glob("*.replay")} - seen, key=lambda path: path.stat().st_mtime_ns)
        seen.update(found)
        return found

    return new


def outcome(call: Callable[[], Any]) -> tuple[type, tuple[Any, ...], str]:
    """Return the exception of a call, and the line that raised it."""
    with pytest.raises(Exception) as caught:
        call()
    remote = getattr(caught.value.__cause__, "traceback_text", "")
    where = remote or "".join(traceback.format_exception(caught.value))
    lines = [line for line in where.splitlines() if line.startswith('  File "' + __file__)]
    return type(caught.value), caught.value.args, lines[-1].strip()


def seen_by_rank(*values: Any) -> None:
    """Raise what a rank sees; the other rank is right."""
    if synk.comm.rank == 1:
        facts = (synk.comm.rank, synk.comm.world_size, synk.comm.rows, synk.comm.total_rows, synk.comm.device)
        raise Odd(*(np.asarray(value).tolist() for value in values), *facts)


def test_a_replayed_call_raises_the_same_exception_on_the_same_line(
    rt: synk.Runtime, files: Callable[[], list[Path]], subtests: pytest.Subtests
) -> None:
    w, rows = rt.shared(np.arange(3.0)), rt.shared(np.arange(5.0), sharded=True)
    nest, number = rt.shared({"b": np.ones((2, 3))}), rt.shared(1.5)
    kept = rt.resident({"steps": np.array(4)})
    scale = {"factor": 3.0}

    def rows_and_captured(x: np.ndarray, k: Any = None) -> Any:
        seen_by_rank(x * scale["factor"], w.value, kept.value["steps"], k)

    def drawn(x: np.ndarray) -> Any:
        seen_by_rank(synk.comm.rng.random(2), np.random.random(), random.random())

    def of_shards(x: np.ndarray) -> Any:
        seen_by_rank(x, rows.value)

    def in_place(x: np.ndarray) -> Any:
        x += 1

    def in_place_of_a_variable(x: np.ndarray) -> Any:
        w.value[:] = x[0]

    def of_variables(x: np.ndarray) -> Any:
        seen_by_rank(w.shape, str(w.dtype), w.name, nest.shape["b"], number.value, w)

    def divided(x: np.ndarray) -> Any:
        return 1 / x

    def of_tensors(x: torch.Tensor, y: Any) -> Any:
        assert isinstance(w.value, torch.Tensor)
        seen_by_rank(x, y["a"], torch.rand(2), type(kept.value["steps"]).__name__)

    def with_errors() -> Any:
        with np.errstate(divide="raise"):
            return build(divided)(np.zeros(4))

    def build(fn: Any, **options: Any) -> Any:
        return rt.function(fn, outputs=None, **options)

    x = np.arange(9.0)
    plain, with_k = build(rows_and_captured), build(rows_and_captured, bcast_inputs="k")
    tensors = build(of_tensors, framework="torch")
    calls: dict[str, Callable[[], Any]] = {
        "rows": lambda: plain(x),
        "broadcast": lambda: with_k(x, k=7),
        "batch": lambda: with_k(x, 7, batch=[5, 1, 1, 0, 8]),
        "slices": lambda: plain(x, num_slices=2),
        "data": lambda: plain(rt.data(x)),
        "a list": lambda: plain(x.tolist()),
        "submit": lambda: plain.submit(x).result(),
        "stream": lambda: next(plain.stream([x])),
        "retry": lambda: build(rows_and_captured, retry=1)(x),
        "generators": lambda: build(drawn)(x),
        "shards": lambda: build(of_shards)(rows),
        "a write to a row": lambda: build(in_place)(x),
        "a write to a variable": lambda: build(in_place_of_a_variable)(x),
        "variables": lambda: build(of_variables)(x),
        "settings": with_errors,
        "tensors": lambda: tensors(torch.arange(4.0), {"a": np.arange(4)}),
    }
    for kind, call in calls.items():
        with subtests.test(kind=kind):
            expected = outcome(call)
            (path,) = files()
            state = np.random.get_state()[1].tolist(), random.getstate()
            assert outcome(lambda path=path: synk.replay(path)) == expected  # type: ignore[misc]
            assert (np.random.get_state()[1].tolist(), random.getstate()) == state
    assert plain.submit(x[:1]).result()[1] is None
    assert not files()


def test_a_replayed_item_raises_the_same_exception_on_the_same_line(
    rt: synk.Runtime, files: Callable[[], list[Path]], tmp_path: Path, subtests: pytest.Subtests
) -> None:
    scale = {"factor": 3.0}

    def drawn(n: int, k: float = 0.5) -> Any:
        facts = synk.comm.rng.random(), np.random.random(), random.random()
        if n == 3:
            raise Odd(n, k, scale["factor"], *facts)
        return n * k

    maps: dict[str, Callable[..., Any]] = {
        "items": lambda: rt.map(drawn, range(9)),
        "several iterables": lambda: rt.map(drawn, range(9), range(9), batch_size=4),
        "a journal": lambda: rt.map(drawn, range(9), journal=tmp_path / "journal", ordered=False),
    }
    for kind, make in maps.items():
        with subtests.test(kind=kind):
            expected = outcome(lambda make=make: list(make()))  # type: ignore[misc]
            (path,) = files()
            assert outcome(lambda path=path: synk.replay(path)) == expected  # type: ignore[misc]
    found = list(rt.map(drawn, range(5), on_error="return"))
    assert found[2] == 1.0 and isinstance(found[3], synk.ItemError)
    assert str(files()[0]) in found[3].exception.__notes__[-1]
    assert not list((tmp_path / "failures").glob(".*"))  # what the ranks note while they run


def test_what_a_replay_cannot_do_is_said(rt: synk.Runtime, files: Callable[[], list[Path]], tmp_path: Path) -> None:
    seen = {"calls": 0}

    @rt.function(outputs=None)
    def body(x: np.ndarray) -> Any:
        seen["calls"] += 1
        raise Odd(seen["calls"])

    @rt.function(outputs=None)
    def talking(x: np.ndarray) -> Any:
        if synk.comm.rank:
            raise Odd(synk.comm.all_reduce(x.sum(), "sum"))
        synk.comm.all_reduce(x.sum(), "sum")

    for number in (1, 2):
        assert outcome(lambda: body(np.arange(4)))[1] == (number,)
    _, second = files()
    assert outcome(lambda: synk.replay(second))[1] == (1,)  # the rank had counted the first call in its own copy
    assert "what a rank itself had changed in its copy is not in it" in second.read_bytes().decode(errors="replace")
    with pytest.raises(Odd):
        talking(np.arange(4))
    with pytest.raises(UnsupportedError, match="runs one rank without the others"):
        synk.replay(*files())
    for text in (b"", b"synk replay 1, Python 2.7\n\n", b"\x80\x05N."):
        (tmp_path / "other").write_bytes(text)
        with pytest.raises(ValueError, match=r"cannot replay .*, expected 'synk replay 1"):
            synk.replay(tmp_path / "other")
    assert not files()


def test_only_the_users_calls_are_recorded(
    rt: synk.Runtime, files: Callable[[], list[Path]], caplog: pytest.LogCaptureFixture
) -> None:
    """Not the runs that synk makes of them, nor those that belong to writing a file."""

    program = os.getpid()

    class FromTheProgram:
        def __reduce__(self) -> Any:
            if os.getpid() != program:
                raise TypeError("not from a rank")
            return FromTheProgram, ()

    def few(x: np.ndarray) -> Any:
        if len(x) < 50:
            raise Odd(len(x))
        return x.mean()

    def failing(x: np.ndarray, it: Any = None) -> Any:
        raise Odd(len(x))

    f = rt.function(failing, bcast_inputs="it", outputs="sum")
    assert rt.function(few)(np.arange(200.0)) == 99.5
    for call in (f.verify, f.serial, lambda x: f.repeat(2, x), lambda x: f(x, FromTheProgram())):
        with pytest.raises(Odd):
            call(np.arange(4.0))
    assert not files()
    assert [record.getMessage() for record in caplog.records] == [
        "a call of 'failing' failed on rank 0, which cannot be written for synk.replay: TypeError: not from a rank"
    ]


def test_a_death_is_replayed_and_kills(rt: synk.Runtime, files: Callable[[], list[Path]]) -> None:
    def body(x: np.ndarray) -> Any:
        if 7 in x:
            os.kill(os.getpid(), signal.SIGKILL)
        return x.sum()

    with pytest.raises(WorkerDied) as caught:
        rt.function(body, outputs="sum")(np.arange(8))
    item = list(rt.map(body, np.arange(9)[:, None], on_error="return"))[7]
    assert isinstance(item, synk.ItemError)
    for error, path in zip([caught.value, item.exception], files(), strict=True):
        assert str(path) in error.__notes__[-1]
        with Child(functools.partial(synk.replay, path), status=-signal.SIGKILL):
            pass


def test_an_item_whose_time_is_over_can_be_replayed(
    rt: synk.Runtime, files: Callable[[], list[Path]], tmp_path: Path
) -> None:
    """The rank has no exception of its own then."""
    gate = Gate(tmp_path / "gate")
    (tmp_path / "gate").mkdir()

    def stays_at_3(n: int) -> Any:
        drawn = synk.comm.rng.random()
        if n == 3:
            gate.wait()
        return n, drawn

    late = list(rt.map(stays_at_3, range(6), on_error="return", item_timeout=0.3))[3]
    assert isinstance(late, synk.ItemError) and isinstance(late.exception, CallTimeout)
    with pytest.raises(CallTimeout):
        list(rt.map(stays_at_3, range(6), item_timeout=0.3))
    first, second = files()
    assert str(first) in late.exception.__notes__[-1]
    gate.open()
    found = [synk.replay(path) for path in (first, second)]
    assert [n for n, _ in found] == [3, 3]
    assert found[0] != found[1]  # each map has its own numbers


PROGRAM = """
    import numpy as np, synk

    class Point:
        def __init__(self, x):
            self.x = x

    def helper(x):
        return x / 0

    def body(x, point):
        y = point.x
        return helper(len(x) + y)

    if __name__ == "__main__":
        with synk.fork(2):
            try:
                synk.function(body, bcast_inputs="point", outputs="sum")(np.arange(4), Point(1))
            except ZeroDivisionError as error:
                print(error.__notes__[-1])
"""


def test_it_is_replayed_in_another_place_and_under_pdb(tmp_path: Path) -> None:
    """Without the program: its functions and classes are in the file."""
    said = script(PROGRAM, env={"SYNK_REPLAY": str(tmp_path)}).check().stdout
    (path,) = tmp_path.glob("*.replay")
    assert f"synk.replay({str(path)!r})" in said
    replay = f"import synk; synk.replay({str(path)!r}, pdb=True)"
    run = subprocess.run(
        [sys.executable, "-c", replay], input="next\nnext\np y\ncontinue\n", cwd="/", capture_output=True, text=True,
        env={**os.environ, "SYNK_REPLAY": ""}, timeout=60,
    )  # fmt: skip
    assert "(Pdb) 1\n" in run.stdout
    assert "in helper" in run.stderr and run.stderr.endswith("ZeroDivisionError: division by zero\n")
