"""``synk.Program``: functions and their state, moved to other runtimes, other processes and files.

The oracle is NumPy: what the functions compute from the values that moved.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from support.harness import PACKAGE_FOLDER, kill_and_wait, pids

import synk
from synk.errors import ClosedError, SerializationError, SynkError, WorkerDied

Reused = Callable[..., synk.Runtime]
X = np.arange(14.0).reshape(7, 2)


class Pair(NamedTuple):
    low: np.ndarray
    high: np.ndarray


class Walk:
    """A program over a variable, rows, a nested value and an object, with the handles in the parent."""

    def __init__(self, rt: synk.Runtime) -> None:
        self.w = w = rt.shared(np.zeros(2), name="w")
        self.rows = rows = rt.shared(X, sharded=True, name="rows")
        self.nested = nested = rt.shared({"a": Pair(np.ones(3), np.zeros(())), "b": [np.arange(4)]}, name="nested")
        self.log = log = rt.resident([], name="log")
        scale = np.array([2.0, 1.0])

        def step(x: np.ndarray) -> tuple[float, np.ndarray]:
            log.value.append(len(x))
            return float(x.sum()), w.value + 1

        def predict() -> np.ndarray:
            value = nested.value
            return rows.value @ (w.value * scale) + value["a"].low.sum() + value["a"].high + value["b"][0].sum()

        def count(x: np.ndarray) -> int:
            return len(log.value)

        self.step = rt.function(step, updates=[w], changes=[log], outputs="sum", name="step")
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


# -- on another runtime


@pytest.mark.parametrize("kind", [1, 2, 3, "inline"])
def test_copies_run_on_another_number_of_workers(walk: Walk, shared_runtimes: Any, kind: Any) -> None:
    q = walk.program.on(shared_runtimes[kind])
    np.testing.assert_allclose(q.predict(), predicted(1))
    assert q.step(X) == X.sum()
    np.testing.assert_allclose(q.predict(), predicted(2))
    assert q["save"](X) == 2
    assert list(q) == ["step", "predict", "save"]
    np.testing.assert_allclose(walk.predict(), predicted(1))  # the parent is untouched
    q.sync_to_parent()
    np.testing.assert_allclose(walk.predict(), predicted(2))
    assert [walk.log.get(rank)[0] for rank in range(2)] == [4, 4]
    assert len(walk.log.get(0)) == 2
    walk.step.repeat(3, X)
    q.sync_from_parent()
    np.testing.assert_allclose(q.predict(), predicted(5))
    assert q["save"](X) == 5


def test_it_opens_and_closes_a_runtime_of_its_own(walk: Walk) -> None:
    with walk.program.on(num_workers=1, inline=True) as q:
        assert q.runtime.world_size == 1
        q.step(X)
        assert q.runtime._session.workers.processes.seed == walk.program._seed
    assert q.runtime.is_closed
    with pytest.raises(ClosedError):
        q.step(X)
    np.testing.assert_allclose(walk.predict(), predicted(1))


def test_a_given_runtime_stays_open(walk: Walk, shared_runtimes: Any) -> None:
    with walk.program.on(shared_runtimes[1]) as q:
        q.step(X)
    assert not shared_runtimes[1].is_closed


def test_two_programs_on_two_runtimes(walk: Walk, shared_runtimes: Any) -> None:
    one, other = walk.program.on(shared_runtimes[1]), walk.program.on(shared_runtimes[3])
    one.step.repeat(2, X)
    other.step.repeat(7, X)
    np.testing.assert_allclose(one.predict(), predicted(3))
    np.testing.assert_allclose(other.predict(), predicted(8))
    both = walk.program.on(shared_runtimes[3])  # a third one, beside the second
    np.testing.assert_allclose(both.predict(), predicted(1))


def test_one_function_moves_by_itself(walk: Walk, shared_runtimes: Any) -> None:
    predict = walk.predict.on(shared_runtimes[3])
    walk.step(X)
    np.testing.assert_allclose(predict(), predicted(1))
    assert predict.name == "predict"


def test_functions_that_are_added_mean_the_same_variables(walk: Walk, shared_runtimes: Any) -> None:
    rt, w = shared_runtimes[2], walk.w
    walk.program.add("reset", rt.function(lambda: (0, w.value * 0), updates=[w], outputs="first"))
    q = walk.program.on(shared_runtimes[3])
    q.reset()
    np.testing.assert_allclose(q.predict(), predicted(0))
    loaded = pickle.loads(pickle.dumps(walk.program))
    other = shared_runtimes[1].shared(np.ones(3), name="w")
    loaded.add("more", shared_runtimes[1].function(lambda: other.value.sum(), outputs="first"))
    again = pickle.loads(pickle.dumps(loaded)).on(shared_runtimes[3])
    np.testing.assert_allclose(again.predict(), predicted(1))
    assert again.more() == 3
    assert set(loaded.values()) == {"w", "rows", "nested", "w 2"}


def test_all_options_of_a_function_move(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    class Largest(synk.Op):
        def combine(self, values: Any, rows: Any) -> Any:
            return max(values)

    functions = {
        "broadcast": rt.function(lambda k, x: k * x, bcast_inputs="k", outputs="gather"),
        "nested": rt.function(lambda x: {"a": x.sum(), "b": x}, outputs={"a": "sum", "b": "gather"}),
        "per_rank": rt.function(lambda: 1, per_rank=True, outputs="sum"),
        "folded": rt.function(lambda x: x.max(), outputs=max),
        "blocks": rt.function(lambda x: x.sum(), outputs="sum", reproducible=True, block_rows=2),
        "slices": rt.function(lambda x: x.sum(), outputs="sum", on_oom="slices"),
        "retried": rt.function(lambda x: x.sum(), outputs="sum", retry=2),
    }
    q = pickle.loads(pickle.dumps(synk.Program(**functions))).on(shared_runtimes[3])
    np.testing.assert_array_equal(q.broadcast(3, X), 3 * X)
    np.testing.assert_array_equal(q.nested(X)["b"], X)
    assert q.per_rank() == 3
    assert q.folded(X) == 13
    assert q.blocks(X) == q.slices(X) == q.retried(X) == X.sum()
    for name, function in functions.items():
        assert q[name].__synk_recipe__()[2].keys() == function.__synk_recipe__()[2].keys()
    assert q.blocks._callee.block_rows == 2
    assert q.retried._callee.retry == 2


@pytest.mark.parametrize("where", [2, "1+1"])
def test_random_numbers_go_on_where_they_were(where: Any, reused: Reused, shared_runtimes: Any) -> None:
    rt = reused(where)
    draw = rt.function(lambda: synk.comm.rng.random(), per_rank=True, outputs=None)
    program = synk.Program(draw=draw)
    draw()
    q = pickle.loads(pickle.dumps(program)).on(shared_runtimes[where])
    expected = draw()
    assert q.draw() == expected
    q.sync_to_parent()  # a loaded program has no open parent: it keeps the streams itself
    later = q.program.on(shared_runtimes[where])
    assert later.draw() == draw()


def test_modules_of_the_users_travel_by_value(tmp_path: Path, shared_runtimes: Any, monkeypatch: Any) -> None:
    (tmp_path / "walker_of_programs.py").write_text(
        "import numpy as np\nw = None\n"
        "def helper(x):\n    return (x * w.value).sum()\n"
        "def total(x):\n    return helper(x)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import walker_of_programs as module  # type: ignore[import-not-found]

    try:
        module.w = shared_runtimes[2].shared(np.full(2, 3.0))
        program = synk.Program(total=shared_runtimes[2].function(module.total, outputs="sum"))
        q = program.on(shared_runtimes[3])
        module.w.value = np.zeros(2)
        assert q.total(X) == 3 * X.sum()
    finally:
        del sys.modules["walker_of_programs"]


# -- pickles and files


READER = """
import pickle, sys
import numpy as np, synk
p = {how}
with p.on(num_workers=3, backend="numpy") as q:
    q.step(np.ones((4, 2)))
    assert q["save"](np.ones((4, 2))) == 2
    print(repr(q.predict().tolist()))
    q.sync_to_parent()
print(p.values()["w"].tolist())
"""


@pytest.mark.parametrize("way", ["pickle", "file"])
def test_a_round_trip_in_a_fresh_process(walk: Walk, tmp_path: Path, way: str) -> None:
    path = tmp_path / "walk.npz"
    if way == "pickle":
        path.write_bytes(pickle.dumps(walk.program))
        how = "pickle.loads(open(sys.argv[1], 'rb').read())"
    else:
        walk.program.save(path)
        how = "synk.Program.load(sys.argv[1])"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [PACKAGE_FOLDER, *Path(__file__).parents[:2]]))}
    ran = subprocess.run(
        [sys.executable, "-c", READER.replace("{how}", how), str(path)],
        env=environment, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.stderr == ""
    first, second = ran.stdout.splitlines()
    np.testing.assert_allclose(eval(first), predicted(2))
    assert eval(second) == [2.0, 2.0]


def test_objects_of_the_scripts_classes_in_a_fresh_process(shared_runtimes: Any, tmp_path: Path) -> None:
    class Price:
        __slots__ = ("value",)

        def __init__(self, value: float) -> None:
            self.value = value

    rt, path = shared_runtimes[2], tmp_path / "prices.npz"
    price = rt.resident(Price(3.5))
    synk.Program(f=rt.function(lambda: price.value.value, outputs="first")).save(path)
    ran = subprocess.run(
        [sys.executable, "-c", "import sys, synk; print(synk.Program.load(sys.argv[1]).on(num_workers=2).f())", path],
        env={**os.environ, "PYTHONPATH": str(PACKAGE_FOLDER)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (ran.stdout, ran.stderr) == ("3.5\n", "")


def test_a_pickle_is_little_more_than_its_values(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    w = rt.shared(np.random.default_rng(0).random(50_000))
    program = synk.Program(
        one=rt.function(lambda x: (x * w.value).sum()), other=rt.function(lambda x: (x + w.value).sum())
    )
    assert 400_000 < len(pickle.dumps(program)) < 400_000 + 2 * 4096


@pytest.mark.parametrize("kind", [1, 3])
def test_bfloat16_and_other_dtypes(shared_runtimes: Any, tmp_path: Path, kind: int) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    rt = shared_runtimes[2]
    values = {
        "half": np.arange(6).astype(ml_dtypes.bfloat16),
        "nested": {"a": np.ones((2, 3), ml_dtypes.float8_e4m3fn), "b": (np.zeros((), "c16"), np.array([True, False]))},
    }
    handles = {name: rt.shared(value, name=name) for name, value in values.items()}
    half, nested = handles["half"], handles["nested"]
    program = synk.Program(f=rt.function(lambda: (half.value, nested.value), outputs=("first", "first")))
    program.save(tmp_path / "p.npz")
    for p in (pickle.loads(pickle.dumps(program)), synk.Program.load(tmp_path / "p.npz")):
        q = p.on(shared_runtimes[kind])
        got = [handle.value for handle in q._handles]
        assert got[0].dtype == ml_dtypes.bfloat16
        np.testing.assert_array_equal(got[0], values["half"])
        assert got[1]["a"].dtype == ml_dtypes.float8_e4m3fn
        assert got[1]["b"][0] == 0
        assert got[1]["b"][1].tolist() == [True, False]


def test_values_load_without_running_code(walk: Walk, tmp_path: Path) -> None:
    path = tmp_path / "walk.npz"
    walk.program.save(path, wait=False).result()  # type: ignore[union-attr]
    script = (
        "import sys, pickle, synk\npickle.loads = pickle.load = None\n"
        "found = synk.Program.load(sys.argv[1], values_only=True)\n"
        "print({name: sorted(value) if isinstance(value, dict) else value.tolist() for name, value in found.items()})"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        env={**os.environ, "PYTHONPATH": str(PACKAGE_FOLDER)}, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert ran.stderr == ""
    assert eval(ran.stdout) == {
        "w": [1.0, 1.0],
        "rows": X.tolist(),
        "nested": ["['a'][0]", "['a'][1]", "['b'][0]"],
    }
    assert not zipfile.ZipFile(path).testzip()


# -- the parent is gone, or something dies


def test_a_program_keeps_what_its_runtime_had_when_it_closed() -> None:
    with synk.Runtime(2, backend="numpy") as rt:
        walk = Walk(rt)
        program = walk.program
        walk.step.repeat(4, X)
    assert "values: its own" in str(program)
    np.testing.assert_array_equal(program.values()["w"], [4.0, 4.0])
    with program.on(num_workers=1, inline=True) as q:
        q.step(X)
        q.sync_to_parent()
        np.testing.assert_allclose(q.predict(), predicted(5))
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(program)).values()["w"], [5.0, 5.0])
    with pytest.raises(ClosedError):
        walk.step(X)


def test_a_program_whose_runtime_ended_by_a_fault_says_so() -> None:
    rt = synk.Runtime(1, backend="numpy", max_restarts=0)
    w = rt.shared(np.zeros(2), name="w")
    program = synk.Program(f=rt.function(lambda x: os.kill(os.getpid(), signal.SIGKILL) or w.value, outputs="first"))
    with pytest.raises(WorkerDied):
        program._functions["f"](X)
    with pytest.raises(SynkError):
        program._functions["f"](X)
    assert rt.is_closed
    with pytest.raises(ClosedError, match=r"cannot copy 'w': the runtime that held it ended by a fault"):
        program.on(num_workers=1)
    rt.close()


def test_a_killed_worker_of_a_copy_leaves_the_parent_alone(walk: Walk, reused: Reused, shared_runtimes: Any) -> None:
    before = pids(shared_runtimes[2])
    rt = reused(2)
    q = walk.program.on(rt)
    q.step(X)
    kill_and_wait(pids(rt)[1])
    with pytest.warns(RuntimeWarning, match="rank 1 .* was started again"):
        np.testing.assert_allclose(q.predict(), predicted(2))
    np.testing.assert_allclose(walk.predict(), predicted(1))
    assert pids(shared_runtimes[2]) == before


def test_all_variables_are_assigned_or_none(walk: Walk, shared_runtimes: Any, monkeypatch: Any) -> None:
    from synk._master import collectives

    q = walk.program.on(shared_runtimes[3])
    q.step.repeat(5, X)
    copied = []

    def copy_two(target: np.ndarray, source: np.ndarray) -> None:
        if len(copied) == 2:
            raise MemoryError("no room for the third")
        copied.append(target)
        target[...] = source

    with monkeypatch.context() as patch:
        patch.setattr(collectives, "copy_into", copy_two)
        with pytest.raises(MemoryError, match="the third"):
            q.sync_to_parent()
    np.testing.assert_allclose(walk.predict(), predicted(1))
    q.sync_to_parent()
    np.testing.assert_allclose(walk.predict(), predicted(6))


# -- objects


class Counter:
    """Cannot be pickled once it has a lock, but dumps its state."""

    def __init__(self) -> None:
        self.count = 0
        self.lock: Any = None

    def add(self) -> int:
        self.lock = threading.Lock()
        self.count += 1
        return self.count

    def dump(self) -> int:
        return self.count

    def load(self, count: int) -> None:
        self.count = count


def test_an_object_that_cannot_be_pickled_moves_by_its_state(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    counter = rt.resident(Counter(), dump=Counter.dump, load=Counter.load)
    f = rt.function(lambda x: counter.value.add(), changes=[counter], outputs="max")
    program = synk.Program(f=f)
    assert f.repeat(3, X) == 3
    q = pickle.loads(pickle.dumps(program)).on(shared_runtimes[1])
    assert q.f(X) == 4
    bare = rt.resident(Counter(), name="bare")
    g = rt.function(lambda x: bare.value.add(), changes=[bare], outputs="max")
    g(X)
    with pytest.raises(TypeError, match=r"cannot pickle '_thread\.lock' object"):
        pickle.dumps(synk.Program(g=g))


def test_a_class_of_the_program_stays_as_it_is(shared_runtimes: Any) -> None:
    class Price:
        scale = 1

    rt = shared_runtimes[2]
    price = rt.resident(Price())
    program = synk.Program(f=rt.function(lambda: type(price.value).__name__, outputs="first"))
    data = pickle.dumps(program)
    Price.scale = 5
    assert pickle.loads(data).on(shared_runtimes[1]).f() == "Price"
    assert Price.scale == 5


def test_a_fault_while_an_object_is_copied_is_no_reason_to_take_its_state(
    shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rt = shared_runtimes[2]
    counter = rt.resident(Counter(), dump=Counter.dump, load=Counter.load)
    program = synk.Program(f=rt.function(lambda x: counter.value.add(), changes=[counter], outputs="max"))

    def late(*args: Any) -> Any:
        raise synk.errors.CallTimeout("nobody answers")

    with monkeypatch.context() as patched:
        patched.setattr(rt._session.residents, "copy_of", late)
        with pytest.raises(synk.errors.CallTimeout, match="nobody answers"):
            pickle.dumps(program)
    assert pickle.dumps(program)


def test_a_train_function_moves_with_its_parameters(shared_runtimes: Any) -> None:
    from synk.extensions.train_function import make_train_function
    from synk.extensions.updates import adam

    def gradient(w: np.ndarray, x: np.ndarray) -> tuple[float, np.ndarray]:
        residual = x @ w - x.sum(1)
        return float(residual @ residual) / len(x), 2 * x.T @ residual / len(x)

    train = make_train_function(gradient, np.zeros(2), adam(0.1), runtime=shared_runtimes[2])
    train(X)
    q = pickle.loads(pickle.dumps(synk.Program(train=train))).on(shared_runtimes[3])
    assert type(q.train) is type(train)
    assert q.train.runtime is shared_runtimes[3]
    for _ in range(3):
        np.testing.assert_allclose(q.train(X), train(X), rtol=1e-12)
    np.testing.assert_allclose(q.train.params.value, train.params.value, rtol=1e-12)


@pytest.mark.parametrize("way", ["pickle", "file"])
def test_a_training_goes_on_bit_for_bit(shared_runtimes: Any, reused: Reused, tmp_path: Path, way: str) -> None:
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
    if way == "file":
        program.save(tmp_path / "p.npz")
        loaded = synk.Program.load(tmp_path / "p.npz")
    else:
        loaded = pickle.loads(pickle.dumps(program))
    generator = torch.get_rng_state()
    q = loaded.on(reused(2))
    assert torch.equal(torch.get_rng_state(), generator)
    expected = [float(step(x)) for _ in range(4)]
    assert [float(q.step(x)) for _ in range(4)] == expected
    (copy,) = q._handles
    assert copy.num_steps == rep.num_steps == 7
    for name, value in copy._objects[0].state_dict().items():
        assert torch.equal(value, model.state_dict()[name]), name
    q.step(x)
    here = program.on(shared_runtimes[3])
    here.step(x)
    here.sync_to_parent()
    assert rep.num_steps == 8
    assert torch.equal(model[0].weight, here._handles[0]._objects[0][0].weight)


# -- what is refused


def test_a_name_that_is_taken(walk: Walk) -> None:
    with pytest.raises(ValueError, match=r"cannot add 'step' to the program: the name is taken"):
        walk.program.add("step", walk.count)


@pytest.mark.parametrize("name", ["", 3, None])
def test_what_is_no_name(walk: Walk, name: Any) -> None:
    with pytest.raises(TypeError, match="expected a text"):
        walk.program.add(name, walk.count)


def test_what_is_no_function() -> None:
    with pytest.raises(TypeError, match=r"cannot add 'f' to a program: got function, expected a synk function"):
        synk.Program(f=lambda x: x)


def test_names_of_a_programs_own(walk: Walk, shared_runtimes: Any) -> None:
    q = walk.program.on(shared_runtimes[1])
    with pytest.raises(AttributeError, match=r"The function of that name is q\['save'\]"):
        _ = q.save
    with pytest.raises(
        AttributeError, match=r"cannot read 'nothing' of a running program: .* 'step', 'predict', 'save'"
    ):
        _ = q.nothing
    with pytest.raises(KeyError, match="cannot find 'nothing' in the running program"):
        q["nothing"]
    assert "predict" in dir(q)


def test_a_running_program_is_not_pickled(walk: Walk, shared_runtimes: Any) -> None:
    q = walk.program.on(shared_runtimes[1])
    with pytest.raises(TypeError, match=r"pickle q\.program"):
        pickle.dumps(q)
    with pytest.raises(TypeError, match=r"synk\.Program\(step=step\)"):
        pickle.dumps(walk.step)


@pytest.mark.parametrize(
    ("changed", "text"),
    [
        ({"python": "3.7"}, r"got functions of Python 3\.7, and this is Python 3\.\d+, expected the same minor"),
        ({"format": 2, "synk": "9.9"}, r"got format 2, written by synk 9\.9, expected format 1"),
    ],
)
def test_programs_of_others(walk: Walk, changed: dict[str, Any], text: str) -> None:
    make, (state,) = walk.program.__reduce__()
    with pytest.raises(SerializationError, match=text):
        make({**state, **changed})


def test_a_file_that_is_none(tmp_path: Path, shared_runtimes: Any) -> None:
    path = tmp_path / "other.npz"
    np.savez(path, a=np.zeros(3))
    with pytest.raises(ValueError, match=r"cannot load .*other\.npz"):
        synk.Program.load(path)
    saved = shared_runtimes[2].resident({"a": 1}, dump=dict, load=dict.update)
    saved.save(path)
    with pytest.raises(ValueError, match=r"a file of other values, expected a program"):
        synk.Program.load(path, values_only=True)


def test_a_missing_backend_is_said_when_it_is_wanted(walk: Walk) -> None:
    loaded = pickle.loads(pickle.dumps(walk.program))
    with pytest.raises((ValueError, ImportError), match="backend"):
        loaded.on(backend="abacus", num_workers=1)


def test_a_missing_module_is_said_when_it_is_wanted(shared_runtimes: Any, monkeypatch: Any) -> None:
    import fractions

    program = synk.Program(f=shared_runtimes[2].function(lambda x: fractions.Fraction(int(x.sum())), outputs=None))
    loaded = pickle.loads(pickle.dumps(program))
    monkeypatch.setitem(sys.modules, "fractions", None)
    with pytest.raises(SerializationError, match=r"cannot build the functions of a program here: .*fractions"):
        loaded.on(shared_runtimes[1])


@pytest.mark.parametrize("given", [3, "numpy", None])
def test_what_is_no_runtime(walk: Walk, given: Any) -> None:
    with pytest.raises(TypeError, match=r"cannot put 'count' on another runtime: got .*, expected a synk\.Runtime"):
        walk.count.on(given)


def test_either_a_runtime_or_options(walk: Walk, shared_runtimes: Any) -> None:
    with pytest.raises(TypeError, match="got num_workers as well"):
        walk.program.on(shared_runtimes[1], num_workers=2)


def test_what_is_left_out_is_named(shared_runtimes: Any) -> None:
    cache: dict[int, int] = {}
    rt = shared_runtimes[2]
    program = synk.Program(f=rt.function(lambda x: cache.setdefault(len(x), 1), outputs="max"))
    assert "left out: what the workers have changed by themselves of 'cache' of 'f'" in str(program)
    assert "'cache' of 'f'" in str(pickle.loads(pickle.dumps(program)))
