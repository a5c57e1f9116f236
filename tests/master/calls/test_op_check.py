"""The check of the halves: a function that is no average is told of once, where its ``outputs`` were not named.

The oracle is the plain function: NumPy combines its values for two parts of the rows.
"""

from __future__ import annotations

import logging
import os
import random
import re
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support.harness import script

import synk
from synk.errors import OpMismatch, RowShapedOutput

X = 1 + np.random.default_rng(5).random((13, 3))
X[4], X[12] = (0.5, 1.5, 2.5), (0.25, 1.5, 3.0)  # the extremes are in no first part, where op "first" would fit, too

TAIL = (
    'To name outputs=, also outputs="avg", silences this; a fixed seed of the function\'s own may be the reason, too.'
)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the check take its time, on a machine where others compute."""
    monkeypatch.setattr("synk._master.calls.op_check._MAX_NS", 10**12)


def wait_long(row: Any) -> None:
    from synk._worker.loop import halves

    halves._MAX_S = 60.0


def patient_on(rt: Any) -> Any:
    rt.function(wait_long, outputs=None)(np.ones(rt.world_size))
    return rt


@pytest.fixture(params=[1, 2, 3, "1+1"])
def rt(request: pytest.FixtureRequest, shared_runtimes: Any) -> Iterator[Any]:
    yield patient_on(shared_runtimes[request.param])


@pytest.fixture(params=[1, 2, 3])
def here(request: pytest.FixtureRequest, shared_runtimes: Any) -> Any:
    """For what does not work over nodes."""
    return patient_on(shared_runtimes[request.param])


def told(call: Callable[[], Any]) -> list[str]:
    """Return what a call warns of, which must be at the line of the program."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    assert all(issubclass(each.category, OpMismatch) and each.filename == __file__ for each in caught)
    return [str(each.message) for each in caught]


# ----- the table


COMBINED: dict[str, Callable[[Any, Any, int, int], Any]] = {
    "avg": lambda a, b, m, n: (m * np.asarray(a) + n * np.asarray(b)) / (m + n),
    "sum": lambda a, b, m, n: np.add(a, b),
    "prod": lambda a, b, m, n: np.multiply(a, b),
    "min": lambda a, b, m, n: np.minimum(a, b),
    "max": lambda a, b, m, n: np.maximum(a, b),
    "gather": lambda a, b, m, n: np.concatenate([a, b]),
    "first": lambda a, b, m, n: a,
}


def fitting(fn: Callable[[Any], Any], rows: np.ndarray) -> set[str]:
    """Return the ops by which the values of two parts are that of all rows, wherever the rows are cut."""
    whole = np.asarray(fn(rows))
    found = set()
    for op, combined in COMBINED.items():
        try:
            values = [
                combined(fn(rows[:cut]), fn(rows[cut:]), cut, len(rows) - cut)
                for cut in (len(rows) // 2, len(rows) // 4)
            ]
        except ValueError:  # shapes that this op cannot combine
            continue
        if all(np.shape(each) == whole.shape and np.allclose(each, whole, equal_nan=True) for each in values):
            found.add(op)
    return found


def spread(x: np.ndarray) -> Any:
    return x.max() - x.min()


def trimmed(x: np.ndarray) -> Any:
    return np.sort(x, axis=0)[1:-1].sum() / len(x)


def only_of_many(x: np.ndarray) -> Any:
    return x.mean() if len(x) > 2 else np.nan


def hides_from_equal_halves(x: np.ndarray) -> Any:
    return x.sum() / 2 ** np.ceil(np.log2(len(x)))


FUNCTIONS: dict[str, Callable[[np.ndarray], Any]] = {
    "mean": lambda x: x.mean(),
    "mean of columns": lambda x: x.mean(axis=0),
    "mean of squares, float32": lambda x: (x.astype("f4") ** 2).mean(),
    "product of matrices by rows": lambda x: x.T @ x / len(x),
    "complex mean": lambda x: np.exp(1j * x).mean(),
    "constant": lambda x: np.full(3, 2.5),
    "sum": lambda x: x.sum(),
    "sum of columns": lambda x: x.sum(axis=0),
    "sum, float32": lambda x: x.astype("f4").sum(),
    "product of matrices": lambda x: x.T @ x,
    "number of rows": lambda x: float(len(x)),
    "histogram": lambda x: np.histogram(x, 4, (0, 6))[0] / 1.0,
    "density": lambda x: np.histogram(x, 4, (0, 6), density=True)[0],
    "prod": lambda x: x.prod(axis=0),
    "max": lambda x: x.max(),
    "max of columns": lambda x: x.max(axis=0),
    "min": lambda x: x.min(),
    "first row": lambda x: x[0],
    "each row": lambda x: x * 2,
    "a number for each row": lambda x: x.sum(axis=1),
    "sorted": lambda x: np.sort(x[:, 0]),
    "cumulative": lambda x: np.cumsum(x[:, 0]),
    "median": lambda x: np.median(x),
    "percentile": lambda x: np.percentile(x, 90),
    "norm": lambda x: np.linalg.norm(x),
    "root of the mean": lambda x: np.sqrt((x**2).mean()),
    "std": lambda x: x.std(),
    "var of columns": lambda x: x.var(axis=0),
    "logsumexp": lambda x: np.log(np.exp(x).sum()),
    "geometric mean": lambda x: np.exp(np.log(x).mean()),
    "weighted mean": lambda x: (x[:, 0] * x[:, 1]).sum() / x[:, 1].sum(),
    "last row": lambda x: x[-1],
    "spread": spread,
    "trimmed": trimmed,
    "NaN for few rows": only_of_many,
    "NaN": lambda x: np.nan * x.sum(),
    "hidden from equal halves": hides_from_equal_halves,
}


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.sampled(60)
def test_warned_or_silent_as_the_plain_function_demands(rt: Any, name: str) -> None:
    fn = FUNCTIONS[name]
    x = X[: {1: 8, 2: 13, 3: 13}[rt.world_size]]
    rows = x[: -(-len(x) // rt.world_size)]
    f = rt.function(fn, name="f")
    submitted = rt.function(fn, name="f")
    try:
        texts = told(lambda: f(x))
    except synk.errors.CollectiveMismatch as error:  # where ranks have different numbers of rows
        assert fn(rows).shape[0] == len(rows)
        assert 'outputs="gather"' in str(error)
        return
    ops = fitting(fn, rows)
    assert len(texts) == ("avg" not in ops)
    assert told(lambda: submitted.submit(x).result()) == texts
    assert told(lambda: [f(x), f(x[:-1]), f.submit(x).result()]) == []  # once
    confirmed: set[str] = set()
    for text in texts:
        assert text.startswith(f"op 'avg', the default, does not fit the output of {f.name!r}: the value for all rows")
        named = re.findall(r'"(\w+)"', text.partition(" To name outputs=")[0])
        assert set(named) <= ops
        assert bool(named) == bool(ops)
        assert ("No op fits the output" in text) == (not ops)
        assert TAIL in text
        if rt.world_size > 1 and fn is not only_of_many:  # whose ranks have many
            (output,) = f.verify(x).outputs
            assert output.verdict == "different"
            confirmed = set(named) & set(output.matching)
            assert bool(confirmed) == bool(named)
        for op in confirmed:
            silent = rt.function(fn, outputs=op)
            assert told(lambda silent=silent: np.testing.assert_allclose(silent(x), silent.serial(x), rtol=1e-6)) == []


def test_the_table_holds_every_kind() -> None:
    found = {name: fitting(fn, X[:8]) for name, fn in FUNCTIONS.items()}
    for op in COMBINED:
        assert any(op in ops for ops in found.values()), op
    assert sum("avg" in ops for ops in found.values()) >= 6
    assert sum(not ops for ops in found.values()) >= 10


def test_each_output_by_its_name_with_its_op(rt: Any) -> None:
    f = rt.function(lambda x: {"mean": x.mean(), "parts": (x.sum(), x.max(axis=0)), "std": x.std()}, name="f")
    (text,) = told(lambda: f(X))
    assert "does not fit output['parts'][0], output['parts'][1], output['std'] of 'f'" in text
    assert """Use op "sum" for output['parts'][0]. Use op "max" for output['parts'][1].""" in text
    assert "No op fits output['std']" in text
    right = rt.function(lambda x: {"mean": x.mean(), "parts": (x.mean(), None)})
    assert told(lambda: right(X)) == []


def test_rows_of_their_own_have_a_class_of_their_own(rt: Any) -> None:
    x = np.arange(4.0 * rt.world_size)
    with pytest.warns(RowShapedOutput, match='The output has as many rows as its rank: use outputs="gather"') as caught:
        rt.function(lambda x: x * 2)(x)
    assert [each.filename for each in caught] == [__file__]
    with pytest.warns(OpMismatch, match="sum") as caught:
        rt.function(lambda x: x.sum())(x)
    assert [each.category for each in caught] == [OpMismatch]
    assert issubclass(RowShapedOutput, OpMismatch)
    assert issubclass(OpMismatch, UserWarning)


# ----- at which call


WAYS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "matrix": lambda rt, f, x: f(x),
    "Data": lambda rt, f, x: f(rt.data(x)),
    "sharded": lambda rt, f, x: f(rt.shared(x, sharded=True)),
    "list of rows": lambda rt, f, x: f(x, batch=[11, 3, 1, 4, 0, 5, 2, 6, 7, 8, 9, 10]),
    "rows of shards": lambda rt, f, x: f(rt.shared(x, sharded=True), batch=np.arange(24) % 2 == 0),
    "slices": lambda rt, f, x: f(x, num_slices=2),
    "slices of one row": lambda rt, f, x: f(x, num_slices=100),
    "submitted": lambda rt, f, x: f.submit(x).result(),
    "stream": lambda rt, f, x: list(f.stream([x, x, x, x])),
    "rows": lambda rt, f, x: list(f.rows(x, batch_size=12)),
}


@pytest.mark.parametrize("way", WAYS)
def test_however_the_rows_come(shared_runtimes: Any, way: str) -> None:
    rt = patient_on(shared_runtimes[2])
    f = rt.function(lambda x: (x.mean(axis=0), {"sum": x.sum()}))
    (text,) = told(lambda: WAYS[way](rt, f, X[:, :2].repeat(2, axis=0)[:24]))
    assert """Use op "sum" for output[1]['sum'].""" in text


def test_rows_of_a_variable_that_the_function_closes_over(here: Any) -> None:
    rt = here
    s = rt.shared(X, sharded=True)
    assert "sum" in told(rt.function(lambda: s.value.sum()))[0]
    assert told(rt.function(lambda: s.value.mean())) == []
    assert told(lambda: rt.function(lambda x: (x * s.value).sum() / len(s.value))(X)) == []


@pytest.mark.parametrize("pause", [1, 4])  # the fourth call alike is a quiet one
def test_fewer_than_four_rows_first_and_more_later(rt: Any, pause: int) -> None:
    f, g = rt.function(lambda x: x.sum()), rt.function(lambda x: x.sum())
    n, data = rt.world_size, rt.data(X)
    assert told(lambda: [f(X[: 3 * n]) for _ in range(pause)]) == []
    assert "sum" in told(lambda: f(X[: 4 * n]))[0]
    assert told(lambda: [g(data, batch=3 * n) for _ in range(pause)]) == []
    assert "sum" in told(lambda: g(data, batch=4 * n))[0]


def test_serial_calls_trials_and_parts_of_the_outputs_are_not_looked_at(rt: Any) -> None:
    f = rt.function(lambda x: (x.sum(), x.mean()))
    assert told(lambda: [f.serial(X), f.verify(X), f(X, output_subset=[1])]) == []
    assert len(told(lambda: f(X))) == 1


def test_inline_and_wrapped(shared_runtimes: Any) -> None:
    f = patient_on(shared_runtimes["inline"]).function(lambda x: x.sum())
    assert "sum" in told(lambda: f(X))[0]
    script(
        """
        import warnings
        total = synk.wrap(lambda x: x.sum())
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            total(np.arange(80.))
        print([each.category.__name__ for each in caught])
        warnings.simplefilter("ignore", synk.errors.OpMismatch)
        synk.wrap(lambda x: x * 2)(np.arange(80.))
        synk.close()
        """
    ).check("['OpMismatch']\n")


# ----- silent


def counting() -> Callable[[Any], Any]:
    calls: list[int] = []

    def fn(x: Any) -> Any:
        calls.append(len(x))
        return x.sum() * len(calls)

    return fn


def with_captured_generator() -> Callable[[Any], Any]:
    rng = np.random.default_rng(3)
    return lambda x: (x + rng.random(x.shape)).sum()


def only_whole(x: Any) -> Any:
    if len(x) in (1, 2, 3):
        raise ValueError("not the rows I know")
    return x.sum()


def talks_and_gets_over_it(x: Any) -> Any:
    try:
        return synk.comm.all_reduce(x.mean(), "avg")
    except ValueError:
        return x.sum()


SILENT: dict[str, Callable[[], Callable[[Any], Any]]] = {
    "numpy.random": lambda: lambda x: x.sum() + np.random.random(),
    "random": lambda: lambda x: x.sum() + random.random(),
    "comm.rng": lambda: lambda x: x.sum() + synk.comm.rng.random(),
    "captured generator": with_captured_generator,
    "generator of its own": lambda: lambda x: x.sum() * np.random.default_rng().random(),
    "clock": lambda: (
        lambda x: x.sum() * (time.perf_counter_ns() % 997)
    ),  # its seconds differ little, hours after the start
    "captured object changed": counting,
    "raises for other rows": lambda: only_whole,
    "comm.rank": lambda: lambda x: x.sum() * synk.comm.rank,
    "comm.rows": lambda: lambda x: x.sum() / synk.comm.rows,
    "comm.total_rows": lambda: lambda x: x.sum() / synk.comm.total_rows,
    "collective": lambda: lambda x: synk.comm.all_reduce(np.asarray(x.sum()), "sum"),
    "collective in try": lambda: talks_and_gets_over_it,
    "nothing": lambda: lambda x: None,
}


@pytest.mark.sampled(60)
@pytest.mark.parametrize("name", SILENT)
def test_silent_where_the_halves_say_nothing(rt: Any, name: str) -> None:
    f = rt.function(SILENT[name]())
    assert told(lambda: [f(X) for _ in range(3)]) == []


@pytest.mark.sampled(20)
@pytest.mark.parametrize("op", ["avg", "sum", "max", "gather", "first", None, np.add])
def test_an_op_that_was_named_is_the_users_word(rt: Any, op: Any) -> None:
    x = np.arange(4.0 * rt.world_size)
    assert told(lambda: rt.function(lambda x: x + x.sum(), outputs=op)(x)) == []


def test_effects_and_per_rank_are_silent(here: Any) -> None:
    rt = here
    w = rt.shared(np.zeros(3), name="w")
    box = rt.resident([0.0])

    def assign(x: Any) -> Any:
        w.value = x.sum(axis=0)
        return x.sum()

    def assign_later(x: Any) -> Any:
        if len(x) < 4:
            w.value = x.sum(axis=0)
        return x.sum()

    def change(box: Any, x: Any) -> Any:
        box[0] += 1
        return x.sum()

    functions = [
        rt.function(assign),
        rt.function(assign_later),
        rt.function(lambda x: (x.sum(), (x.sum(axis=0),)), updates=w),
        rt.function(lambda x: x.sum(), per_rank=True),
    ]
    assert told(lambda: [f(X) for f in functions]) == []
    assert told(lambda: rt.function(change, bcast_inputs="box", changes=box)(box, X)) == []


def test_a_fixed_seed_is_told_and_the_text_says_so(shared_runtimes: Any) -> None:
    def bootstrap(x: Any) -> Any:
        return np.random.default_rng(0).choice(x[:, 0], 4).mean()

    (text,) = told(lambda: patient_on(shared_runtimes[2]).function(bootstrap)(X))
    assert "a fixed seed of the function's own may be the reason" in text


def test_compiled_functions_are_left_to_verify(shared_runtimes: Any) -> None:
    numba = pytest.importorskip("numba")
    compiled = numba.njit(lambda x: x.sum())
    for fn in (compiled, lambda x: compiled(x)):
        f = patient_on(shared_runtimes[2]).function(fn, name="f")
        assert told(lambda f=f: f(X)) == []
        assert not f.verify(X)


def test_functions_of_jax_are_left_to_verify(shared_runtimes: Any) -> None:
    jax = pytest.importorskip("jax", reason="needs JAX: `make jax` installs it")
    jitted = jax.jit(lambda x: x.sum())
    for options, fn in ({"framework": "jax"}, lambda x: x.sum()), ({}, lambda x: float(jitted(x))):
        assert told(lambda fn=fn, options=options: patient_on(shared_runtimes[2]).function(fn, **options)(X)) == []


def test_process_groups_of_torch_are_left_alone(runtime: Any, tmp_path: Any) -> None:
    """A rank that made one by itself would wait for the others."""
    pytest.importorskip("torch")
    path, rt = str(tmp_path / "store"), patient_on(runtime(2))

    def summed(x: Any, is_kept: bool, path: str) -> Any:
        import torch
        import torch.distributed as dist

        if not dist.is_initialized():
            dist.init_process_group("gloo", init_method=f"file://{path}", rank=int(x[0] > 5), world_size=2)
        total = torch.tensor(x.sum())
        dist.all_reduce(total)
        if not is_kept:
            dist.destroy_process_group()
        return float(total)

    x = np.arange(10.0) + 1
    for is_kept in (False, True):
        f = rt.function(summed, bcast_inputs=["is_kept", "path"])
        values: list[float] = []
        assert told(lambda f=f, k=is_kept, values=values: values.append(f(x, k, f"{path}{k}"))) == []
        assert values == [55.0]


# ----- what it costs, and what it leaves


def test_one_message_to_one_rank_at_one_call(shared_runtimes: Any) -> None:
    rt = patient_on(shared_runtimes[2])

    def messages(call: Callable[[], Any]) -> int:
        before = rt.counters["messages_down"]
        call()
        return rt.counters["messages_down"] - before

    functions = [rt.function(lambda x: x.mean()), rt.function(lambda x: x.mean(), outputs="avg")]
    firsts = []
    for f in functions:
        f.serial(X)  # brings it to the workers
        firsts.append(messages(lambda f=f: f(X)))
    assert firsts[0] == firsts[1] + 1
    for f in functions:
        for call in (lambda f=f: f(X), lambda f=f: f(X[:-1]), lambda f=f: f(X[:-1]), lambda f=f: f(X[:-1])):
            assert messages(call) == 2


def test_the_check_leaves_no_trace(
    reused: Callable[..., Any], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    rt = patient_on(reused(2))
    calls = rt.shared(np.zeros(1), name="calls")

    def step(x: np.ndarray, notes: list[int]) -> Any:
        notes.append(1)
        state["calls"] += 1
        print("here", flush=True)
        logging.getLogger("user").warning("logged")
        return np.array([state["calls"], rng.random(), np.random.random(), len(notes), calls.value[0]])

    state, rng = {"calls": 0}, np.random.default_rng(3)
    results = []
    for options in ({}, {"outputs": "avg"}):  # of these one is checked
        state, rng = {"calls": 0}, np.random.default_rng(3)
        rt.function(lambda x: np.random.seed(1))(X)
        f = rt.function(step, bcast_inputs="notes", **options)
        results.append([f(X, []) for _ in range(3)])
    np.testing.assert_array_equal(results[0], results[1])
    assert [row[0] for row in results[0]] == [1, 2, 3]
    assert capfd.readouterr().out.count("here") == 12
    f.serial(X, [])  # by its end the records of the calls before have come
    assert sum(message.endswith("logged") for message in caplog.messages) in (12, 13)


def test_tensors_that_the_function_writes_into_are_whole_again(shared_runtimes: Any) -> None:
    torch = pytest.importorskip("torch")
    rt = patient_on(shared_runtimes[2])
    f = rt.function(lambda x: x.mul_(2).sum(), framework="torch")
    rows = X[:12]
    data, tensor = rt.data(rows), torch.from_numpy(rows.copy())
    (text,) = told(lambda: np.testing.assert_allclose(float(f(data)), rows.sum()))
    assert 'outputs="sum"' in text
    np.testing.assert_array_equal(data[:], rows)
    assert told(lambda: np.testing.assert_allclose(float(f(tensor)), rows.sum())) == []


def test_a_slow_function_and_a_large_one_are_left_to_verify(
    shared_runtimes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("synk._master.calls.op_check._MAX_NS", 10**9)
    rt, payload = patient_on(shared_runtimes[2]), b"x" * ((1 << 26) + 1)

    def slow(x: Any) -> Any:
        time.sleep(1.1 * len(pauses))
        return x.sum()

    pauses = [1]
    f = rt.function(slow)
    assert told(lambda: [f(X), f(X)]) == []
    pauses.clear()  # as a first call may be slow, which imports something
    assert len(told(lambda: f(X))) == 1
    assert told(lambda: rt.function(lambda x: x.sum() + 0 * len(payload))(X)) == []
    assert told(lambda: rt.function(lambda x: np.full(3_000_000, x.sum()))(X)) == []


@pytest.mark.parametrize("kind", [2, "1+1"])
def test_a_worker_that_ends_in_the_check_is_told_of(reused: Callable[..., Any], kind: Any) -> None:
    """The call before is over, and has its result."""
    rt = patient_on(reused(kind))

    def fragile(x: np.ndarray) -> Any:
        if len(x) < 6:
            os.kill(os.getpid(), signal.SIGKILL)
        return x.sum()

    for verb in (lambda f: f(X), lambda f: f.submit(X).result()):
        f = rt.function(fragile)
        with pytest.warns(RuntimeWarning, match=r"second run of 'fragile'.*rank 0.*SIGKILL"):
            result = verb(f)
        assert result == pytest.approx((7 * X[:7].sum() + 6 * X[7:].sum()) / 13)
        assert f(X) == result
    call = rt.function(fragile).submit(X)
    with warnings.catch_warnings():  # a program that turns warnings into errors
        warnings.simplefilter("error")
        with pytest.raises(RuntimeWarning, match="second run of 'fragile'"):
            call.result()
    assert call.result() == result


@pytest.mark.parametrize("kind", [2, "1+1"])
def test_a_time_limit_ends_no_worker_in_the_check(reused: Callable[..., Any], kind: Any) -> None:
    rt = patient_on(reused(kind))

    def slow(x: np.ndarray) -> Any:
        time.sleep(0.3 if len(x) in (6, 7) else 3600)
        return x.sum()

    pids = rt.function(lambda row: os.getpid(), outputs=None)(np.ones(2))
    f = rt.function(slow)
    assert told(lambda: f(X, timeout=3.0)) == []
    assert rt.function(lambda row: os.getpid(), outputs=None)(np.ones(2)) == pids
