"""``synk.Program``: functions and their state, moved to other runtimes, other processes and files.

The oracle is NumPy: what the functions compute from the values that moved.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.harness import script

import synk
from synk.errors import ClosedError, SerializationError, WorkerDied

X = np.arange(14.0).reshape(7, 2)


class Walk:
    """A program over a variable, rows, a nested value and an object, with the handles in the parent."""

    def __init__(self, rt: synk.Runtime) -> None:
        class Pair(NamedTuple):
            low: np.ndarray
            high: np.ndarray

        class Log:
            """Of a class that only this script has."""

            __slots__ = ("sizes",)

            def __init__(self) -> None:
                self.sizes: list[int] = []

        self.w = w = rt.shared(np.zeros(2), name="w")
        rows = rt.shared(X, sharded=True, name="rows")
        nested = rt.shared({"a": Pair(np.ones(3), np.zeros(())), "b": [np.arange(4)]}, name="nested")
        self.log = log = rt.resident(Log(), name="log")
        scale = np.array([2.0, 1.0])

        def step(x: np.ndarray) -> tuple[float, np.ndarray]:
            log.value.sizes.append(len(x))
            return float(x.sum()), w.value + 1

        def predict() -> np.ndarray:
            value = nested.value
            return rows.value @ (w.value * scale) + value["a"].low.sum() + value["a"].high + value["b"][0].sum()

        def count(x: np.ndarray) -> int:
            return len(log.value.sizes)

        self.step = rt.function(step, updates=[w, log], outputs="sum", name="step")
        self.predict = rt.function(predict, outputs="gather", name="predict")
        self.count = rt.function(count, outputs="max", name="count")
        self.program = synk.Program(step=self.step, predict=self.predict)
        self.program.add("save", self.count)


def predicted(num_steps: int) -> np.ndarray:
    return X @ (np.full(2, num_steps) * [2.0, 1.0]) + 3 + 6


@pytest.fixture
def walk(shared_runtimes: Any) -> Walk:
    walk = Walk(shared_runtimes[2])
    walk.step(X)
    return walk


# ----- on another runtime


def test_copies_run_on_another_number_of_workers(shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    for kind in (1, 2, 3, "inline"):
        with subtests.test(kind=kind):
            walk = Walk(shared_runtimes[2])
            walk.step(X)
            alone, beside = walk.predict.on(shared_runtimes[kind]), walk.program.on(shared_runtimes[kind])
            with walk.program.on(shared_runtimes[kind]) as q:
                assert list(q) == ["step", "predict", "save"]
                assert q.step(X) == X.sum()
                np.testing.assert_allclose(q.predict(), predicted(2))
                assert q["save"](X) == 2
                np.testing.assert_allclose(walk.predict(), predicted(1))  # the parent is untouched
                q.sync_to_parent()
                np.testing.assert_allclose(walk.predict(), predicted(2))
                assert [walk.log.get(rank).sizes[0] for rank in range(2)] == [4, 4]
                walk.step.repeat(3, X)
                q.sync_from_parent()
                np.testing.assert_allclose(q.predict(), predicted(5))
                assert q["save"](X) == 5
            assert not shared_runtimes[kind].is_closed
            for copy in (alone, beside.predict):
                np.testing.assert_allclose(copy(), predicted(1))


def test_a_program_keeps_what_its_runtime_had_when_it_closed() -> None:
    with synk.Runtime(inline=True) as rt:
        walk = Walk(rt)
        walk.step.repeat(4, X)
    with walk.program.on(num_workers=1, inline=True) as q:
        q.step(X)
        q.sync_to_parent()
    assert q.runtime.is_closed
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(walk.program)).values()["w"], [5.0, 5.0])
    for closed in (q, walk):
        with pytest.raises(ClosedError):
            closed.step(X)


def test_a_program_whose_runtime_ended_by_a_fault_says_so() -> None:
    with synk.Runtime(1, backend="numpy", max_restarts=0) as rt:
        w = rt.shared(np.zeros(2), name="w")
        f = rt.function(lambda x: os.kill(os.getpid(), signal.SIGKILL) or w.value, outputs="first")
        program = synk.Program(f=f)
        for error in (WorkerDied, ClosedError):
            with pytest.raises(error):
                f(X)
        with pytest.raises(ClosedError, match=r"cannot copy 'w': the runtime that held it ended by a fault"):
            program.on(num_workers=1)


def test_functions_that_are_added_mean_the_same_variables(walk: Walk, shared_runtimes: Any) -> None:
    w = walk.w
    reset = shared_runtimes[2].function(lambda: (0, w.value * 0), updates=[w], outputs="first")
    walk.program.add("reset", reset)
    q = pickle.loads(pickle.dumps(walk.program)).on(shared_runtimes[3])
    q.reset()
    np.testing.assert_allclose(q.predict(), predicted(0))


def test_all_options_of_a_function_move(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    program = synk.Program(
        broadcast=rt.function(lambda k, x: k * x, bcast_inputs="k", outputs="gather"),
        nested=rt.function(lambda x: {"a": x.sum(), "b": x}, outputs={"a": "sum", "b": "gather"}),
        per_rank=rt.function(lambda: 1, per_rank=True, outputs="sum"),
        folded=rt.function(lambda x: x.max(), outputs=max),
        blocks=rt.function(len, outputs=max, reproducible=True, block_rows=2),
        slices=rt.function(lambda x: x.sum(), outputs="sum", on_oom="slices", retry=2),
    )
    q = pickle.loads(pickle.dumps(program)).on(shared_runtimes[3])
    np.testing.assert_array_equal(q.broadcast(3, X), 3 * X)
    np.testing.assert_array_equal(q.nested(X)["b"], X)
    assert (q.per_rank(), q.folded(X), q.blocks(X), q.slices(X)) == (3, 13, 2, X.sum())


def test_random_numbers_go_on_where_they_were(shared_runtimes: Any, reused: Callable[..., synk.Runtime]) -> None:
    for where in (2, "1+1"):
        draw = reused(where).function(lambda: synk.comm.rng.random(), per_rank=True, outputs=None)
        draw()
        q = pickle.loads(pickle.dumps(synk.Program(draw=draw))).on(shared_runtimes[where])
        assert q.draw() == draw()
        q.sync_to_parent()  # a loaded program has no open parent: it keeps the streams itself
        assert q.program.on(shared_runtimes[where]).draw() == draw()


# ----- pickles and files


def test_a_round_trip_in_a_fresh_process(walk: Walk, tmp_path: Path) -> None:
    walk.program.save(tmp_path / "walk.npz", wait=False).result()  # type: ignore[union-attr]
    (tmp_path / "walk.pkl").write_bytes(pickle.dumps(walk.program))
    shown = script(
        f"""
        import pickle
        from pathlib import Path

        path, loads = Path({str(tmp_path)!r}, "walk.npz"), pickle.loads
        pickle.loads = None  # to load values runs no code
        print(sorted(synk.Program.load(path, values_only=True)))
        pickle.loads, x = loads, np.ones((4, 2))
        for p in (synk.Program.load(path), loads(path.with_suffix(".pkl").read_bytes())):
            with p.on(num_workers=2, backend="numpy") as q:
                q.step(x)
                print(q["save"](x), q.predict().tolist())
                q.sync_to_parent()
            print(p.values()["w"].tolist())
        """
    ).check()
    expected = [["nested", "rows", "w"], *[f"2 {predicted(2).tolist()}", [2.0, 2.0]] * 2]
    assert shown.stdout.splitlines() == list(map(str, expected))


def test_dtypes_that_numpy_lacks_are_kept(shared_runtimes: Any, tmp_path: Path) -> None:
    half = np.arange(6).astype(pytest.importorskip("ml_dtypes").bfloat16)
    w = shared_runtimes[2].shared({"half": half}, name="w")
    program = synk.Program(f=shared_runtimes[2].function(lambda: w.value["half"].astype("f8"), outputs="first"))
    program.save(tmp_path / "p.npz")
    for again in (pickle.loads(pickle.dumps(program)), synk.Program.load(tmp_path / "p.npz")):
        np.testing.assert_array_equal(again.on(shared_runtimes[1]).f(), np.arange(6.0))
        assert [value.dtype for value in again.values()["w"].values()] == [half.dtype]


def test_modules_of_the_users_travel_by_value(
    tmp_path: Path, shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "walker_of_programs.py").write_text(
        "w = None\ndef helper(x):\n    return (x * w.value).sum()\ndef total(x):\n    return helper(x)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import walker_of_programs as module  # type: ignore[import-not-found]

    del sys.modules["walker_of_programs"]
    module.w = shared_runtimes[2].shared(np.full(2, 3.0))
    q = synk.Program(total=shared_runtimes[2].function(module.total, outputs="sum")).on(shared_runtimes[3])
    module.w.value = np.zeros(2)
    assert q.total(X) == 3 * X.sum()


# ----- objects


class Counter:
    """Cannot be pickled once it has a lock, but dumps its state."""

    step = 1

    def __init__(self) -> None:
        self.count = 0
        self.lock: Any = None

    def add(self) -> int:
        self.lock = threading.Lock()
        self.count += self.step
        return self.count

    def dump(self) -> int:
        return self.count

    def load(self, count: int) -> None:
        self.count = count


def test_an_object_that_cannot_be_pickled_moves_by_its_state(
    shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rt = shared_runtimes[2]
    counter = rt.resident(Counter(), dump=Counter.dump, load=Counter.load)
    f = rt.function(lambda x: counter.value.add(), updates=[counter], outputs="max")
    assert f.repeat(3, X) == 3
    data = pickle.dumps(synk.Program(f=f))
    monkeypatch.setattr(Counter, "step", 5)
    assert pickle.loads(data).on(shared_runtimes[1]).f(X) > 3
    assert Counter.step == 5, "to load a program changes no class of this one"
    bare = rt.resident(Counter(), name="bare")
    g = rt.function(lambda x: bare.value.add(), updates=[bare], outputs="max")
    g(X)
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object"):
        pickle.dumps(synk.Program(g=g))


def test_a_training_goes_on_bit_for_bit(
    shared_runtimes: Any, reused: Callable[..., synk.Runtime], tmp_path: Path
) -> None:
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

    program = synk.Program(step=step)
    for _ in range(3):
        step(x)
    program.save(tmp_path / "p.npz")
    generator = torch.get_rng_state()
    q = synk.Program.load(tmp_path / "p.npz").on(reused(2))
    assert torch.equal(torch.get_rng_state(), generator)
    assert [float(step(x)) for _ in range(4)] == [float(q.step(x)) for _ in range(4)]
    here = program.on(shared_runtimes[3])
    here.step(x)
    here.sync_to_parent()
    assert rep.num_steps == 8


# ----- what is refused, and what is said


def loaded(walk: Walk, **changed: Any) -> synk.Program:
    """Return the program from a pickle whose head tells of another origin."""
    make, (state,) = walk.program.__reduce__()
    return make({**state, **changed})


REFUSED: list[tuple[Callable[[Walk, Any], Any], type[Exception], str]] = [
    (lambda walk, q: walk.program.add("step", walk.count), ValueError, "cannot add 'step' .* the name is taken"),
    (lambda walk, q: walk.program.add("", walk.count), TypeError, "expected a text"),
    (lambda walk, q: walk.program.add(3, walk.count), TypeError, "expected a text"),
    (lambda walk, q: synk.Program(f=len), TypeError, "cannot add 'f' to a program: got .*expected a synk function"),
    (lambda walk, q: q.save, AttributeError, r"The function of that name is q\['save'\]"),
    (lambda walk, q: q.nothing, AttributeError, "cannot read 'nothing' .* 'step', 'predict', 'save'"),
    (lambda walk, q: q["nothing"], KeyError, "cannot find 'nothing' in the running program"),
    (lambda walk, q: pickle.dumps(q), TypeError, r"pickle q\.program"),
    (lambda walk, q: pickle.dumps(walk.step), TypeError, r"synk\.Program\(step=step\)"),
    (lambda walk, q: walk.count.on("numpy"), TypeError, r"cannot put 'count' .* expected a synk\.Runtime"),
    (lambda walk, q: walk.program.on(q.runtime, num_workers=2), TypeError, "got num_workers as well"),
    (lambda walk, q: walk.program.on(backend="abacus", num_workers=1), ValueError, "backend"),
    (lambda walk, q: loaded(walk, python="3.7"), SerializationError, r"of Python 3\.7, and this is Python 3\.\d+"),
    (lambda walk, q: loaded(walk, format=2, synk="9.9"), SerializationError, r"format 2, written by synk 9\.9, exp"),
]


def test_what_is_refused(walk: Walk, shared_runtimes: Any, subtests: pytest.Subtests) -> None:
    q = walk.program.on(shared_runtimes[1])
    assert "predict" in dir(q)
    for number, (attempt, error, text) in enumerate(REFUSED):
        with subtests.test(text, number=number), pytest.raises(error, match=text):
            attempt(walk, q)


def test_a_file_of_other_values(tmp_path: Path, shared_runtimes: Any) -> None:
    path = tmp_path / "other.npz"
    np.savez(path, a=np.zeros(3))
    with pytest.raises(ValueError, match=r"cannot load .*other\.npz"):
        synk.Program.load(path)
    shared_runtimes[2].resident({"a": 1}, dump=dict, load=dict.update).save(path)
    with pytest.raises(ValueError, match=r"a file of other values, expected a program"):
        synk.Program.load(path, values_only=True)


def test_what_is_missing_here_and_what_was_left_out(shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import fractions

    cache: dict[int, Any] = {}
    f = shared_runtimes[2].function(lambda x: cache.setdefault(len(x), fractions.Fraction(len(x))), outputs=None)
    program = synk.Program(f=f)
    assert "left out: what the workers have changed by themselves of 'cache' of 'f'" in str(program)
    again = pickle.loads(pickle.dumps(program))
    assert "'cache' of 'f'" in str(again)
    monkeypatch.setitem(sys.modules, "fractions", None)
    with pytest.raises(SerializationError, match=r"cannot build the functions of a program here: .*fractions"):
        again.on(shared_runtimes[1])
