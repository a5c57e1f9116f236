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

import synk
from synk.errors import ClosedError, SerializationError

X = np.arange(14.0).reshape(7, 2)


class Pair(NamedTuple):
    low: np.ndarray
    high: np.ndarray


class Walk:
    """A program over a variable, rows, a nested value and an object, with the handles in the parent."""

    def __init__(self, rt: synk.Runtime) -> None:
        w = rt.shared(np.zeros(2))
        rows = rt.shared(X, sharded=True)
        nested = rt.shared({"a": Pair(np.ones(3), np.zeros(())), "b": [np.arange(4)]})
        self.log = log = rt.resident([])
        scale = np.array([2.0, 1.0])

        def step(x: np.ndarray) -> tuple[float, np.ndarray]:
            log.value.append(len(x))
            return float(x.sum()), w.value + 1

        def predict() -> np.ndarray:
            value = nested.value
            return rows.value @ (w.value * scale) + value["a"].low.sum() + value["a"].high + value["b"][0].sum()

        self.step = rt.function(step, updates=[w, log], outputs="sum")
        self.predict = rt.function(predict, outputs="gather")
        self.state = {"w": w, "rows": rows, "nested": nested, "log": log}
        count = rt.function(lambda x: len(log.value), outputs="max")
        self.program = synk.Program(count, step=self.step, predict=self.predict, state=self.state)


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
    program = WAYS[way](walk.program, tmp_path / "walk")
    for number, kind in enumerate((1, 2, 3, 0), start=1):
        with subtests.test(workers=kind), program.on(shared_runtimes[kind]) as q:
            np.testing.assert_allclose(q.predict(), predicted(number))
            assert q.step.verify(X)
            assert q(X) == number  # objects are put back
            assert q.step(X) == X.sum()
            np.testing.assert_allclose(q.predict(), predicted(number + 1))
            assert q(X) == number + 1
            np.testing.assert_array_equal(program.values()["w"], [number, number])
            q.sync_to_parent()
            np.testing.assert_array_equal(program.values()["w"], [number + 1, number + 1])
            assert len(program.values()["log"]) == number + 1
        assert not shared_runtimes[kind].is_closed
    np.testing.assert_allclose(walk.predict(), predicted(5 if way == "itself" else 1))


def test_a_damaged_file_is_told(walk: Walk, tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Wherever the damage is."""
    path = tmp_path / "walk"
    walk.program.save(path)
    whole = path.read_bytes()
    step = len(whole) // 60 + 1
    damaged = {f"cut at {at}": whole[:at] for at in range(0, len(whole), step)}
    for at in range(0, len(whole), step):
        for flip in (0xFF, 1, 0x20):
            damaged[f"byte {at} ^ {flip}"] = whole[:at] + bytes([whole[at] ^ flip]) + whole[at + 1 :]
    damaged |= {
        "huge": b"\x80\x05\x8e" + b"\xff" * 7 + b"\x0f",
        "no such module": b"cno_such_module\nname\n.",
        "no program": pickle.dumps({"a": 1}),
    }
    for name, data in damaged.items():
        path.write_bytes(data)
        with subtests.test(name):
            try:
                loaded = synk.Program.load(path)
            except ValueError as error:
                assert "cannot load" in str(error)
            else:  # a byte of the pickle's own may not matter
                assert pickle.dumps(loaded) == whole
    with pytest.raises(FileNotFoundError):
        synk.Program.load(tmp_path / "missing")


def test_a_program_and_its_copies_are_apart(walk: Walk, shared_runtimes: Any) -> None:
    one, other = walk.program.on(shared_runtimes[1]), walk.program.on(shared_runtimes[3])
    one.step(X)
    other.step.repeat(7, X)
    last = other.on(shared_runtimes[2])  # a copy is a program
    last.step(X)
    for program, num_steps in ((one, 2), (other, 8), (walk.program, 1), (last, 9)):
        np.testing.assert_allclose(program.predict(), predicted(num_steps))
        np.testing.assert_array_equal(program.values()["w"], [num_steps, num_steps])


def test_a_runtime_that_it_made_is_closed_with_it(runtime: Any) -> None:
    """The values are gone with the runtime, unless they were brought back or stored."""
    rt = runtime(2)
    walk = Walk(rt)
    stored = pickle.loads(pickle.dumps(walk.program))
    with walk.program.on("numpy", num_workers=0) as q:
        q.step(X)
        q.sync_to_parent()
    np.testing.assert_array_equal(walk.program.values()["w"], [1.0, 1.0])
    rt.close()
    for act in (q.values, q.predict, walk.program.values, walk.program.on, lambda: pickle.dumps(walk.program)):
        with pytest.raises(ClosedError):
            act()
    np.testing.assert_array_equal(stored.values()["w"], [0.0, 0.0])


def test_options_classes_and_dtypes_are_kept(rt: Any, shared_runtimes: Any) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16

    class Price:
        scale = 1

    price, half = rt.resident(Price()), rt.shared(np.arange(6).astype(bfloat16))
    program = synk.Program(
        broadcast=rt.function(lambda k, x: k * x, bcast_inputs="k", outputs="gather"),
        nested=rt.function(lambda x: {"a": x.sum(), "b": x}, outputs={"a": "sum", "b": "gather"}),
        per_rank=rt.function(lambda: 1, per_rank=True, outputs="sum"),
        folded=rt.function(lambda x: x.max(), outputs=max),
        blocks=rt.function(lambda x: x.sum(), outputs="sum", reproducible=True, retry=2),
        kept=rt.function(lambda: (type(price.value).__name__, half.value), outputs="first"),
        state={"price": price, "half": half},
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


MODULE = """
w = None
def helper(x):
    return (x * w.value).sum()
def total(x):
    return helper(x)
"""
READER = """
import sys
import numpy as np, synk

p = synk.Program.load(sys.argv[1])
with p.on("numpy", num_workers=1) as q:
    print(q(np.ones((4, 2))))
    q.sync_to_parent()
print(p.values()["w"].tolist())
"""


def test_a_file_in_a_fresh_process_that_lacks_the_users_module(
    tmp_path: Path, shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "walker_of_programs.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    import walker_of_programs as module  # type: ignore[import-not-found]

    monkeypatch.delitem(sys.modules, "walker_of_programs")
    module.w = shared_runtimes[2].shared(np.full(2, 3.0))
    f = shared_runtimes[2].function(module.total, outputs="sum")
    synk.Program(f, state={"w": module.w}).save(tmp_path / "p")
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE_FOLDER)}
    ran = subprocess.run(
        [sys.executable, "-c", READER, str(tmp_path / "p")],
        env=environment, cwd="/", capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (ran.stderr, ran.stdout) == ("", "24.0\n[3.0, 3.0]\n")


def test_a_killed_worker_of_a_copy_leaves_the_parent_alone(walk: Walk, reused: Any, shared_runtimes: Any) -> None:
    before, rt = pids(shared_runtimes[2]), reused(2)
    q = walk.program.on(rt)
    q.step(X)
    kill_and_wait(pids(rt)[1])
    with pytest.warns(RuntimeWarning, match="rank 1 .* was started again"):
        np.testing.assert_allclose(q.predict(), predicted(2))
    np.testing.assert_allclose(walk.predict(), predicted(1))
    assert pids(shared_runtimes[2]) == before


def test_what_is_refused(
    walk: Walk, shared_runtimes: Any, tmp_path: Path, subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    rep = synk.torch.replicate(torch.nn.Linear(2, 1), runtime=shared_runtimes[2])
    trained = rep.function(lambda model, x: model(x).sum(), outputs="sum")
    twice = shared_runtimes[2].shared(0.0)
    program, rt, paths = walk.program, shared_runtimes[1], [tmp_path / "other.npz", tmp_path / "other.pkl"]
    np.savez(paths[0], a=np.zeros(3))
    paths[1].write_bytes(pickle.dumps([]))
    stored = pickle.loads(pickle.dumps(program))
    with monkeypatch.context() as patch:
        patch.setattr("synk._api.program._PYTHON", "3.7")
        older = pickle.loads(pickle.dumps(program))
    refused: list[tuple[type[Exception], str, Callable[[], Any]]] = [
        (ValueError, "got a function named 'save', expected a name", lambda: synk.Program(save=walk.step)),
        (ValueError, "got a function named '_parent', expected", lambda: synk.Program(_parent=walk.step)),
        (TypeError, "got Function as its state.* cannot be named 'state'", lambda: synk.Program(state=walk.step)),
        (
            ValueError,
            "got one object as 'a' and 'b' of its state",
            lambda: synk.Program(state={"a": twice, "b": twice}),
        ),
        (TypeError, "got function as f, expected a synk function", lambda: synk.Program(f=lambda x: x)),
        (TypeError, r"step is stored by its rep\.save\(path\)", lambda: synk.Program(step=trained)),
        (TypeError, "got ndarray as 'w' of its state", lambda: synk.Program(state={"w": X})),
        (SerializationError, r"refers to <synk\.S.* not in its state", lambda: synk.Program(walk.predict)),
        (AttributeError, "'Program' object has no attribute 'nothing'", lambda: program.on(rt).nothing),
        (AttributeError, r"program on no runtime\. Put it on one: p\.on\(backend\)\.step", lambda: stored.step),
        (AttributeError, r"It was in synk 0\.1\. Write synk\.Program\(f", lambda: walk.step.on(rt)),
        (TypeError, "got num_workers as well", lambda: program.on(rt, num_workers=2)),
        (ValueError, "backend", lambda: program.on("abacus")),
        (ValueError, "got one without a parent", program.sync_to_parent),
        *[(ValueError, r"cannot load .*other\.", lambda path=path: synk.Program.load(path)) for path in paths],  # type: ignore[misc]
        (SerializationError, r"of Python 3\.7, and this is", older.on),
    ]
    for error, text, act in refused:
        with subtests.test(text), pytest.raises(error, match=text):
            act()
