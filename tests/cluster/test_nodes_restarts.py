"""``on_restart`` over nodes: each replacement worker runs it before anything else, as it is in the program then."""

from __future__ import annotations

import ast
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import kill_and_wait, pids
from support.nodes import agents

import synk
from synk.errors import StartupError, WorkerDied

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

ran: list[Any] = []
"""On a worker: what on_restart has noted there."""

label = ["first"]


def prepare() -> None:
    ran.append((synk.comm.rank, os.getpid(), label[0]))


@pytest.fixture(scope="module")
def opened(kept_open: Any) -> Iterator[synk.Runtime]:
    with synk.Runtime((1, 2), cluster="here", nodes=2, on_restart=prepare, max_restarts=10**9) as runtime:
        yield runtime


@pytest.fixture
def rt(opened: synk.Runtime) -> synk.Runtime:
    """With workers that have replaced none."""
    label[0] = "first"
    return opened


def notes(rt: synk.Runtime) -> list[list[Any]]:
    """Return what each rank has noted of its own process."""
    own = rt.function(lambda: repr([each for each in ran if each[1] == os.getpid()]), outputs=None, per_rank=True)
    return [ast.literal_eval(text) for text in own()]


def by_call(rt: synk.Runtime) -> None:
    assert rt.function(lambda x: x.sum(), outputs="sum")(np.arange(6.0)) == 15.0


def by_map(rt: synk.Runtime) -> None:
    """The item that a new worker gets finds it prepared."""
    found = list(rt.map(lambda n: len(ran), range(9), batch_size=1))
    assert len(found) == 9


def by_resident(rt: synk.Runtime) -> None:
    rt.resident([1])


NEXT: list[Callable[[synk.Runtime], None]] = [by_call, by_map, by_resident]


def test_a_worker_or_a_node_that_is_replaced(rt: synk.Runtime, subtests: Any) -> None:
    for next_operation, is_node in itertools.product(NEXT, (False, True)):
        with subtests.test(case=f"a {'node' if is_node else 'worker'}, {next_operation.__name__}"):
            before, living = pids(rt), notes(rt)[1]
            kill_and_wait(agents(rt)[1] if is_node else before[2])
            next_operation(rt)
            after = pids(rt)
            assert [mine == his for mine, his in zip(after, before)] == [True, not is_node, False]
            assert notes(rt)[1:] == [[(1, after[1], "first")] if is_node else living, [(2, after[2], "first")]]


def test_it_captures_what_the_program_holds_then(rt: synk.Runtime) -> None:
    """Also if nothing else was called since it has changed."""
    by_call(rt)
    for text in ("second", "third"):
        living = pids(rt)  # this is a call
        label[0] = text
        kill_and_wait(living[1])
        by_call(rt)
        assert [each[2] for each in notes(rt)[1]] == [text]


def test_a_worker_that_dies_in_a_call(rt: synk.Runtime) -> None:
    f = rt.function(lambda x: os.kill(os.getpid(), 9) if x[0] else None, outputs=None)
    with pytest.raises(WorkerDied):
        f(np.array([0, 0, 1]))
    assert [each[2] for each in notes(rt)[2]] == ["first"]


def test_restart(rt: synk.Runtime) -> None:
    """All workers replace others then."""
    rt.restart()
    assert [[each[2] for each in found] for found in notes(rt)] == [["first"]] * 3


def test_workers_of_the_start_do_not_run_it(runtime: Callable[..., Any]) -> None:
    rt = runtime((1, 1), cluster="here", nodes=2, on_restart=prepare, backend="auto")
    assert notes(rt) == [[], []]
    by_call(rt)
    assert notes(rt) == [[], []]


def test_an_error_is_told_and_it_is_run_again(runtime: Callable[..., Any], tmp_path: Path) -> None:
    fine = tmp_path / "fine"

    def load() -> None:
        if not fine.exists():
            raise FileNotFoundError("no checkpoint")

    rt = runtime((1, 1), cluster="here", nodes=2, on_restart=load, backend="auto")
    by_call(rt)
    kill_and_wait(pids(rt)[1])
    with pytest.raises(StartupError, match=r"rank 1 of 2: on_restart ended with FileNotFoundError: no checkpoint"):
        list(rt.map(time.sleep, [0.05] * 9, batch_size=1))  # rank 0 cannot take them all
    kill_and_wait(agents(rt)[0])
    with pytest.raises(StartupError, match=r"rank \d of 2: on_restart ended with"):
        by_call(rt)
    fine.touch()
    by_call(rt)
