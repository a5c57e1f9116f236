"""``synk.Program``: functions and their values, on other runtimes, in other processes and in files.

The oracle is NumPy: what the functions compute from the values that moved.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.harness import PACKAGE_FOLDER, kill_and_wait, pids
from support.names import named

import synk
from synk.errors import ClosedError, SerializationError

X = np.arange(14.0).reshape(7, 2)


class Pair(NamedTuple):
    low: np.ndarray
    high: np.ndarray


class Walk:
    """A program over a variable, rows, a nested value and an object, with the handles in the parent."""

    def __init__(self, rt: synk.Runtime) -> None:
        self.w = w = rt.shared(np.zeros(2), name="w")
        rows = rt.shared(X, sharded=True, name="rows")
        nested = rt.shared({"a": Pair(np.ones(3), np.zeros(())), "b": [np.arange(4)]}, name="nested")
        self.log = log = rt.resident([], name="log")
        scale = np.array([2.0, 1.0])

        def step(x: np.ndarray) -> tuple[float, np.ndarray]:
            log.value.append(len(x))
            return float(x.sum()), w.value + 1

        def predict() -> np.ndarray:
            value = nested.value
            return rows.value @ (w.value * scale) + value["a"].low.sum() + value["a"].high + value["b"][0].sum()

        self.step = rt.function(step, updates=[w, log], outputs="sum")
        self.predict = rt.function(predict, outputs="gather")
        self.program = synk.Program(step=self.step, predict=self.predict)
        self.program.add("count", rt.function(named("count", lambda x: len(log.value)), outputs="max"))


def predicted(num_steps: int) -> np.ndarray:
    return X @ (np.full(2, num_steps) * [2.0, 1.0]) + 3 + 6


@pytest.fixture
def walk(shared_runtimes: Any) -> Walk:
    walk = Walk(shared_runtimes[2])
    walk.step(X)
    return walk


def saved_and_loaded(program: synk.Program, path: Path) -> synk.Program:
    program.save(path)
    return synk.Program.load(path)


WAYS: dict[str, Callable[[synk.Program, Path], synk.Program]] = {
    "itself": lambda program, path: program,
    "pickle": lambda program, path: pickle.loads(pickle.dumps(program)),
    "file": saved_and_loaded,
}


@pytest.mark.parametrize("way", WAYS)
def test_it_goes_on_from_its_values_wherever_it_is_put(
    walk: Walk, shared_runtimes: Any, tmp_path: Path, way: str, subtests: pytest.Subtests
) -> None:
    program = WAYS[way](walk.program, tmp_path / "walk.npz")
    for number, kind in enumerate((1, 2, 3, "inline"), start=1):
        with subtests.test(workers=kind), program.on(shared_runtimes[kind]) as q:
            np.testing.assert_allclose(q.predict(), predicted(number))
            assert q.step(X) == X.sum()
            np.testing.assert_allclose(q.predict(), predicted(number + 1))
            assert q["count"](X) == number + 1
            assert list(q) == ["step", "predict", "count"]
            np.testing.assert_array_equal(program.values()["w"], [number, number])
            q.sync_to_parent()
            np.testing.assert_array_equal(program.values()["w"], [number + 1, number + 1])
        assert not shared_runtimes[kind].is_closed
    np.testing.assert_allclose(walk.predict(), predicted(5 if way == "itself" else 1))


def test_the_parent_and_its_copies_are_apart_until_they_are_told(walk: Walk, shared_runtimes: Any) -> None:
    one, other = walk.program.on(shared_runtimes[1]), walk.program.on(shared_runtimes[3])
    one.step(X)
    other.step.repeat(7, X)
    for function, num_steps in ((one.predict, 2), (other.predict, 8), (walk.predict, 1)):
        np.testing.assert_allclose(function(), predicted(num_steps))
    walk.step.repeat(3, X)
    one.sync_from_parent()
    np.testing.assert_allclose(one.predict(), predicted(4))
    assert one["count"](X) == 4


def test_a_runtime_of_its_own_is_closed_and_a_closed_ones_values_are_kept(runtime: Any) -> None:
    rt = runtime(2)
    walk = Walk(rt)
    walk.step.repeat(4, X)
    rt.close()
    np.testing.assert_array_equal(walk.program.values()["w"], [4.0, 4.0])
    with walk.program.on(num_workers=1, inline=True) as q:
        q.step(X)
        q.sync_to_parent()
    assert q.runtime.is_closed
    np.testing.assert_array_equal(walk.program.values()["w"], [5.0, 5.0])
    for step in (q.step, walk.step):
        with pytest.raises(ClosedError):
            step(X)


def test_random_numbers_go_on_where_they_were(reused: Any, shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    for where in (2, "1+1"):
        with subtests.test(where=where):
            draw = reused(where).function(lambda: synk.comm.rng.random(), per_rank=True, outputs=None)
            draw()
            q = pickle.loads(pickle.dumps(synk.Program(draw=draw))).on(shared_runtimes[where])
            assert q.draw() == draw()


def test_options_classes_and_dtypes_are_kept(shared_runtimes: Any) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16

    class Price:
        scale = 1

    rt = shared_runtimes[2]
    price, half = rt.resident(Price()), rt.shared(np.arange(6).astype(bfloat16))
    program = synk.Program(
        broadcast=rt.function(lambda k, x: k * x, bcast_inputs="k", outputs="gather"),
        nested=rt.function(lambda x: {"a": x.sum(), "b": x}, outputs={"a": "sum", "b": "gather"}),
        per_rank=rt.function(lambda: 1, per_rank=True, outputs="sum"),
        folded=rt.function(lambda x: x.max(), outputs=max),
        blocks=rt.function(lambda x: x.sum(), outputs="sum", reproducible=True, retry=2),
        kept=rt.function(lambda: (type(price.value).__name__, half.value), outputs="first"),
    )
    data = pickle.dumps(program)
    Price.scale = 5
    q = pickle.loads(data).on(shared_runtimes[3])
    np.testing.assert_array_equal(q.broadcast(3, X), 3 * X)
    np.testing.assert_array_equal(q.nested(X)["b"], X)
    assert (q.per_rank(), q.folded(X), q.blocks(X)) == (3, 13, X.sum())
    name, values = q.kept()
    assert (name, values.dtype, values.tolist()) == ("Price", bfloat16, [0, 1, 2, 3, 4, 5])
    assert Price.scale == 5


def test_a_training_goes_on_bit_for_bit(shared_runtimes: Any, reused: Any, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    x = torch.linspace(-1, 1, 44).reshape(22, 2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.4), torch.nn.Linear(8, 1))
    rep = synk.torch.replicate(model, torch.optim.Adam(model.parameters(), lr=0.1), seed=3, runtime=shared_runtimes[2])

    @rep.function
    def step(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    for _ in range(3):
        step(x)
    q = saved_and_loaded(synk.Program(step=step), tmp_path / "p.npz").on(reused(2))
    assert [float(step(x)) for _ in range(4)] == [float(q.step(x)) for _ in range(4)]


READER = """
import pickle, sys
import numpy as np, synk

loads, pickle.loads = pickle.loads, None
print(synk.Program.load(sys.argv[1], values_only=True)["w"].tolist())
pickle.loads = loads
p = synk.Program.load(sys.argv[1])
with p.on(num_workers=3, backend="numpy") as q:
    q.step(np.ones((4, 2)))
    print(q["count"](np.ones((4, 2))), q.predict().tolist())
    q.sync_to_parent()
print(p.values()["w"].tolist())
"""


def test_a_file_in_a_fresh_process(walk: Walk, tmp_path: Path) -> None:
    """Its values are read without running code."""
    path = tmp_path / "walk.npz"
    walk.program.save(path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [PACKAGE_FOLDER, *Path(__file__).parents[:2]]))}
    ran = subprocess.run(
        [sys.executable, "-c", READER, str(path)], env=environment, capture_output=True, text=True, check=False
    )
    assert ran.stderr == ""
    assert ran.stdout.splitlines() == ["[1.0, 1.0]", f"2 {predicted(2).tolist()}", "[2.0, 2.0]"]


def test_a_killed_worker_of_a_copy_leaves_the_parent_alone(walk: Walk, reused: Any, shared_runtimes: Any) -> None:
    before, rt = pids(shared_runtimes[2]), reused(2)
    q = walk.program.on(rt)
    q.step(X)
    kill_and_wait(pids(rt)[1])
    with pytest.warns(RuntimeWarning, match="rank 1 .* was started again"):
        np.testing.assert_allclose(q.predict(), predicted(2))
    np.testing.assert_allclose(walk.predict(), predicted(1))
    assert pids(shared_runtimes[2]) == before


def test_what_is_refused(walk: Walk, shared_runtimes: Any, tmp_path: Path, subtests: pytest.Subtests) -> None:
    program, rt = walk.program, shared_runtimes[1]
    q, other = program.on(rt), tmp_path / "other.npz"
    np.savez(other, a=np.zeros(3))
    make, (state,) = program.__reduce__()
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "cannot add 'step' to the program: the name is taken", lambda: program.add("step", walk.step)),
        (TypeError, "expected a text", lambda: program.add("", walk.step)),
        (TypeError, "got function, expected a synk function", lambda: synk.Program(f=lambda x: x)),
        (AttributeError, "cannot read 'nothing' of a running program", lambda: q.nothing),
        (KeyError, "cannot find 'nothing' in the running program", lambda: q["nothing"]),
        (TypeError, r"pickle q\.program", lambda: pickle.dumps(q)),
        (TypeError, "expected a synk.Runtime", lambda: walk.step.on(3)),
        (TypeError, "got num_workers as well", lambda: program.on(rt, num_workers=2)),
        (ValueError, r"cannot load .*other\.npz", lambda: synk.Program.load(other)),
        (SerializationError, r"of Python 3\.7, and this is Python 3\.\d+", lambda: make({**state, "python": "3.7"})),
        (SerializationError, "format 99, written by synk", lambda: make({**state, "format": 99})),
    ]
    for error, text, act in refused:
        with subtests.test(text), pytest.raises(error, match=text):
            act()
