"""One suite for every backend that is installed here, against NumPy. Functions use what all array libraries share."""

from __future__ import annotations

import itertools
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import numpy as np
import pytest
from support import each_backend
from support.each_backend import PARAMETERS, Here, host
from support.harness import script
from support.rank_arrays import DEFINED_FOR, OPS, Median, reduced
from support.tables import combinations

import synk
import synk.torch
from synk.backends import BACKENDS, backend_module
from synk.errors import CollectiveMismatch, RemoteError

cloudpickle.register_pickle_by_value(sys.modules[__name__])

ROWS = np.random.default_rng(0).standard_normal((11, 3))
"""Rows that two ranks do not share evenly."""

LARGE = (1 << 18) + 8
"""Bytes of a large output."""

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128"),
)


# On NumPy and CuPy tests/training has all of this. Each of these imports torch in two workers, which takes seconds.
with_torch = pytest.mark.parametrize(
    "here", [*(each for each in PARAMETERS if each.values[0] == "dpnp"), "cupy by NCCL"], indirect=True
)


GPU = [pytest.param(name, marks=pytest.mark.gpu) for name in ("gpu", "gpu by NCCL")]


@pytest.fixture(params=[*PARAMETERS, "cupy by NCCL", *GPU])
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, reuse: Any) -> Iterator[Here]:
    """A runtime of two workers that serves all tests of its backend; or both on the first GPU."""
    name, _, by_nccl = request.param.partition(" by ")
    if name == "gpu":
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", str(int(bool(by_nccl))))
        made = reuse(request.param, lambda: synk.Runtime(devices=[0, 0], backend="cupy", max_restarts=10**9))
        made.distribute()
        if by_nccl and "NCCL" not in made.info():
            pytest.skip("ranks can share a GPU from NCCL 2.30.3 on")
        yield Here("cupy", made)
        return
    each_backend.require(name, monkeypatch)
    if by_nccl:
        monkeypatch.setenv("SYNK_FAKE_NCCL", "1")
    options: dict[str, Any] = {"backend": name, "max_restarts": 10**9, **each_backend.devices(name, 2)}
    yield Here(name, reuse(("conformance", request.param), lambda: synk.Runtime(2, **options)))


# -- arguments -------------------------------------------------------------------------------------------------------


def test_functions_get_arrays_of_the_backend(here: Here) -> None:
    def kinds(x: Any, w: Any, nested: Any, *, k: Any) -> Any:
        each = (x, w, nested["a"][0], k)
        libraries = [{cls.__module__.partition(".")[0] for cls in type(array).__mro__} for array in each]
        return libraries, nested["text"], type(nested["names"]).__module__, float(k.sum())

    w, nested = here.runtime.shared(np.ones(2)), {"a": [np.ones(2)], "text": "words", "names": np.array(["a", "bc"])}
    f = here.runtime.function(kinds, bcast_inputs=("w", "nested", "k"), outputs=None)
    found, text, names, total = f(ROWS, w, nested, k=np.arange(3.0))[0]
    assert len(found) == 4 and all(here.name in each for each in found)
    assert (text, names, total) == ("words", "numpy", 3.0)
    assert here.runtime.backend == here.name
    assert here.runtime.info().count(f", {here.name} ") == 2  # each worker names the version
    assert len(here.runtime.devices) == 2


def test_arguments_of_all_kinds(here: Here, subtests: Any) -> None:
    """Arrays, ``Data``, lists and variables, and rows by every kind of index, in slices and submitted."""

    def loss_and_grad(w: Any, x: Any, y: Any) -> Any:
        r = x @ w - y
        return 0.5 * (r @ r) / len(x), r @ x / len(x)

    runtime, w, y = here.runtime, np.arange(1.0, 4.0), ROWS.sum(axis=1)
    f = runtime.function(loss_and_grad, bcast_inputs="w", outputs="avg")
    forms = {
        "arrays": (w, ROWS, y),
        "Data": (runtime.shared(w), runtime.data(ROWS), runtime.data(y)),
        "lists": (w, ROWS.tolist(), y.tolist()),
        "shards": (w, runtime.shared(ROWS, sharded=True), y),
    }
    batches = (None, 7, slice(None, None, -1), [5, 3, 3, 10, 0], y > 0)
    for form, batch, num_slices in combinations(20, forms, batches, (1, 3)):
        index = slice(None) if batch is None else slice(batch) if isinstance(batch, int) else batch
        expected = loss_and_grad(w, ROWS[index], y[index])
        with subtests.test(form=form, batch=str(batch), num_slices=num_slices):
            for call in (f, f.serial, lambda *args, **options: f.submit(*args, **options).result()):
                got = host(call(*forms[form], batch=batch, num_slices=num_slices))
                np.testing.assert_allclose(got[0], expected[0], rtol=1e-12)
                np.testing.assert_allclose(got[1], expected[1], rtol=1e-12, atol=1e-14)


def test_calls_that_are_repeated_and_submitted(here: Here) -> None:
    """Inputs of a call that waits may come while the one before computes."""
    f = here.runtime.function(lambda x, w: (x * w).sum(0), bcast_inputs="w", outputs="sum")
    x = here.runtime.data(ROWS)
    pending = [f.submit(x, np.full(3, float(k)), batch=slice(k, None)) for k in range(6)]
    for k, call in enumerate(pending):
        np.testing.assert_allclose(host(call.result()), ROWS[k:].sum(axis=0) * k, rtol=1e-12, atol=1e-13)
    for k in range(4):
        x[:] = ROWS + k
        np.testing.assert_allclose(host(f(x, np.ones(3))), (ROWS + k).sum(axis=0), rtol=1e-12)
    assert list(here.runtime.map(lambda number: number * 2, range(5))) == [0, 2, 4, 6, 8]


def test_numpys_names_and_repeated_calls(here: Here) -> None:
    """Spreads have NumPy's ``ddof``, elements are repeated as in NumPy, and a call is repeated on its own variables."""
    spreads = here.call(lambda x: (x.std(0), x.var(0, ddof=1), x.repeat(2, 1)), ROWS, outputs=None)
    for got, part in zip(spreads, np.array_split(ROWS, 2), strict=True):
        for one, other in zip(got, (part.std(0), part.var(0, ddof=1), part.repeat(2, 1)), strict=True):
            np.testing.assert_allclose(host(one), other, rtol=1e-12)
    total = here.runtime.shared(np.zeros(3))
    f = here.runtime.function(lambda x: (x.sum(0), total.value + x.sum(0)), outputs="sum", updates=[(total, "sum")])
    np.testing.assert_allclose(host(f.repeat(4, ROWS)), ROWS.sum(0), rtol=1e-12)
    np.testing.assert_allclose(total[1], 4 * ROWS[6:].sum(0), rtol=1e-12)


# -- ops -------------------------------------------------------------------------------------------------------------


def test_reductions_of_every_dtype(here: Here, subtests: Any) -> None:
    """Small and large outputs, and those of slices; NaN and infinity as in NumPy."""
    for op, dtype in itertools.product(OPS, DTYPES):
        if np.dtype(dtype).kind not in DEFINED_FOR[op]:
            continue
        f = here.runtime.function(lambda x: x[0], outputs=op)
        for count, num_slices in ((5, 1), (LARGE // np.dtype(dtype).itemsize + 1, 1), (5, 2)):
            parts = (np.arange(2 * num_slices * count).reshape(2 * num_slices, count) % 7).astype(dtype)
            if parts.dtype.kind == "f":
                parts[0, 1::1000], parts[1, 2::1000] = np.nan, np.inf
            with subtests.test(op=op, dtype=dtype, count=count, num_slices=num_slices), np.errstate(all="ignore"):
                got, expected = host(f(parts, num_slices=num_slices)), reduced(op, parts)
                assert got.dtype == expected.dtype
                np.testing.assert_allclose(got, expected, rtol=1e-6 if num_slices > 1 else 0)


def test_other_ops(here: Here) -> None:
    """An op of one's own gets arrays of the host; averages are weighted by rows; without rows one rank runs."""

    def body(x: Any) -> dict[str, Any]:
        return {
            "gather": x * 2, "first": x[0], "each": (len(x), "words", x[:1]), "folded": x[:1], "number": 2.5,
            "median": x * 1, "mean": (x.mean(0), x.mean()),
        }  # fmt: skip

    def join(a: Any, b: Any) -> Any:
        return np.concatenate([np.asarray(a), np.asarray(b)])

    outputs = {"gather": "gather", "first": "first", "each": None, "folded": join, "number": "avg", "median": Median()}
    f = here.runtime.function(body, outputs={**outputs, "mean": "avg"})
    for num_slices, starts in ((1, [0, 6]), (2, [0, 3, 6, 9])):
        got = host(f(ROWS, num_slices=num_slices))
        np.testing.assert_array_equal(got["gather"], ROWS * 2)
        np.testing.assert_array_equal(got["first"], ROWS[0])
        np.testing.assert_array_equal(got["folded"], ROWS[starts])
        np.testing.assert_allclose(got["median"], np.median(ROWS, axis=0))
        np.testing.assert_allclose(got["mean"][0], ROWS.mean(axis=0), rtol=1e-12)
        assert (got["number"], got["mean"][1]) == (2.5, pytest.approx(ROWS.mean()))
        if num_slices == 1:
            assert [each[:2] for each in got["each"]] == [(6, "words"), (5, "words")]
            np.testing.assert_array_equal(np.stack([each[2] for each in got["each"]]), ROWS[[0, 6], None])
    total, rows = here.call(lambda x: (x.sum(0), x * 2), ROWS[:0], outputs=("sum", "gather"))
    np.testing.assert_array_equal(total, np.zeros(3))
    assert rows.shape == (0, 3)


@dataclass
class Box:
    content: Any


def test_objects_and_exceptions_bring_their_arrays_to_the_host(here: Here) -> None:
    def fail(x: Any) -> Any:
        error = KeyError("mine")
        error.rows = x[:2] * 1  # type: ignore[attr-defined]
        raise error

    boxes = here.runtime.function(lambda x: Box({"rows": x[:1] * 2}), outputs=None)(ROWS)
    for box, start in zip(boxes, (0, 6), strict=True):
        kept = box.content["rows"]
        assert isinstance(kept, np.ndarray) or kept.device.type == "cpu"
        np.testing.assert_array_equal(np.asarray(kept), ROWS[start : start + 1] * 2)
    with pytest.raises(KeyError, match="mine") as caught:
        here.runtime.function(fail)(ROWS)
    np.testing.assert_array_equal(np.asarray(caught.value.rows), ROWS[:2])  # type: ignore[attr-defined]
    assert isinstance(caught.value.__cause__, RemoteError)
    assert caught.value.__cause__.device == here.runtime.devices[0]


# -- variables and communication -------------------------------------------------------------------------------------


def test_variables(here: Here, subtests: Any) -> None:
    runtime = here.runtime
    for count in (4, LARGE // 8):
        start = np.arange(1.0, count + 1)
        w = runtime.shared(start, name="w")

        def scale(x: Any) -> Any:
            w.value = w.value * (synk.comm.rank + 1)  # noqa: B023
            return x.sum()

        f = runtime.function(scale, outputs="sum")
        with subtests.test(count=count):
            f(ROWS)
            f(ROWS)
            np.testing.assert_array_equal(synk.gather(w), start * np.array([[1], [4]]))
            synk.all_reduce(w, "sum")
            np.testing.assert_array_equal(synk.gather(w), np.stack([start * 5] * 2))
            f(ROWS)
            synk.broadcast(w)
            np.testing.assert_array_equal(w[1], start * 5)
            w.value = start
            f(ROWS)
            np.testing.assert_array_equal(synk.reduce(w, "max", in_place=False), start * 2)
            synk.all_gather(w)
            np.testing.assert_array_equal(w[1], np.concatenate([start, start * 2]))
    rows = runtime.shared(ROWS, sharded=True, name="rows")

    def add(x: Any) -> Any:
        rows.value = rows.value + 1
        return x.sum()

    runtime.function(add, outputs="sum")(ROWS)
    np.testing.assert_array_equal(rows.value, ROWS + 1)


def test_updates_and_failed_calls(here: Here) -> None:
    """Slices see the old value; the new ones are reduced by the op, on each rank. A failed call changes nothing."""
    runtime, x = here.runtime, ROWS[:10]
    mean, largest = runtime.shared(np.zeros(3)), runtime.shared(np.zeros(3))
    nest = runtime.shared({"a": np.ones(3), "b": [np.zeros(2)]})

    def body(x: Any) -> Any:
        return x.sum(0), (mean.value + x.mean(0), x[0] * 1)

    def assign(x: Any) -> Any:
        nest.value = {"a": nest.value["a"] + 1, "b": [nest.value["b"][0] + 2]}
        if synk.comm.rank == 1 and len(x) == 5:
            raise KeyError("no")
        return x.sum()

    f = runtime.function(body, outputs="sum", updates=((mean, "avg"), (largest, "max")))
    for num_slices in (1, 3):
        before = synk.gather(mean)
        np.testing.assert_allclose(host(f(x, num_slices=num_slices)), x.sum(axis=0), rtol=1e-12)
        own = x.reshape(2, 5, 3).mean(axis=1)
        np.testing.assert_allclose(synk.gather(mean), before + own, rtol=1e-12, atol=1e-14)
        if num_slices == 1:
            np.testing.assert_array_equal(synk.gather(largest), x[[0, 5]])
    g = runtime.function(assign, outputs="sum")
    with pytest.raises(KeyError):
        g(ROWS)
    np.testing.assert_array_equal(nest.value["a"], np.ones(3))
    g(ROWS[:4])
    np.testing.assert_array_equal(nest.value["a"], np.full(3, 2.0))
    np.testing.assert_array_equal(nest.value["b"][0], np.full(2, 2.0))


def test_collectives_of_a_function(here: Here) -> None:
    parts = np.arange(24.0).reshape(2, 4, 3)

    def body(x: Any) -> dict[str, Any]:
        comm, other = synk.comm, 1 - synk.comm.rank
        own = x[0]
        place, late = own * 0, own * 1
        found = {op: comm.all_reduce(own, op) for op in OPS}
        assert comm.all_reduce(own, "sum", out=place) is place
        request = comm.all_reduce(late, "max", out=late, async_op=True)
        assert request.wait() is late
        received = comm.irecv(other, like=own)
        comm.isend(own * 2, other)
        return {
            **found, "place": place, "late": late, "received": received.wait(),
            "root": comm.broadcast(own * 1, 1), "stack": comm.all_gather(own),
            "block": comm.reduce_scatter(own), "rows": comm.all_gather(own, axis=0),
            "reduced": -1.0 if (total := comm.reduce(own[0], "sum", 1)) is None else total,
            "swapped": comm.all_to_all(own), "dealt": comm.scatter(own, 0),
            "share": comm.all_reduce(own[0], "avg", weight=0.25 if comm.rank else 0.75),
            "single": comm.all_reduce(own.sum(), "sum"),
        }  # fmt: skip

    got = host(here.runtime.function(body, outputs=None)(parts))
    for rank in range(2):
        expected = {
            **{op: reduced(op, parts) for op in OPS},
            "place": parts.sum(axis=0), "late": parts.max(axis=0), "received": parts[1 - rank] * 2,
            "root": parts[1], "stack": parts, "block": parts.sum(axis=0)[2 * rank : 2 * rank + 2],
            "rows": parts.reshape(8, 3), "reduced": parts[:, 0].sum(axis=0) if rank else -1.0,
            "swapped": parts[:, 2 * rank : 2 * rank + 2].reshape(4, 3), "dealt": parts[0, 2 * rank : 2 * rank + 2],
            "share": 0.75 * parts[0, 0] + 0.25 * parts[1, 0], "single": parts.sum(),
        }  # fmt: skip
        for name, value in expected.items():
            np.testing.assert_allclose(got[rank][name], value, rtol=1e-12, err_msg=name)


def test_where_results_go(here: Here) -> None:
    """To host memory, and to memory that overlaps the array. The ranks communicate as before it afterwards."""

    def body(x: Any) -> dict[str, Any]:
        comm, found, own = synk.comm, {}, x.reshape(-1)
        of = {
            "sum": lambda array, **given: comm.all_reduce(array, "sum", **given),
            "max": lambda array, **given: comm.all_reduce(array, "max", **given),
            "started": lambda array, **given: comm.all_reduce(array, "sum", async_op=True, **given).wait(),
            "share": lambda array, **given: comm.all_reduce(array, "avg", weight=0.5, async_op=True, **given).wait(),
            "root": lambda array, **given: comm.broadcast(array, 1, **given),
            "stack": comm.all_gather,
            "block": lambda array, **given: comm.reduce_scatter(array, "sum", **given),
        }  # fmt: skip
        for name, collective in of.items():
            first = collective(own[:6] * 1)
            place = np.empty(first.shape)
            assert collective(own[:6] * 1, out=place) is place
            for begin in (0, 2, 3):
                room = own * 1
                out = room[begin : begin + first.size].reshape(first.shape)
                collective(room[:6], out=out)
                found[name, begin] = out
            found[name] = first, place
        return found

    for found in host(here.runtime.function(body, outputs=None)(np.arange(36.0).reshape(2, 18))):
        for name in [each for each in found if type(each) is str]:
            first, place = found[name]
            for each in (place, *(found[name, begin] for begin in (0, 2, 3))):
                np.testing.assert_array_equal(each, first, name)


def test_collectives_of_every_dtype(here: Here, subtests: Any) -> None:
    for dtype in DTYPES:
        parts = (np.arange(10).reshape(2, 5) % 7).astype(dtype)
        op = "max" if dtype == "bool" else "sum"
        with subtests.test(dtype=dtype):
            total, stack = here.call(
                lambda x, op: (synk.comm.all_reduce(x[0], op), synk.comm.all_gather(x[0])),
                parts, op, bcast_inputs="op", outputs="first",
            )  # fmt: skip
            assert total.dtype == stack.dtype == parts.dtype
            np.testing.assert_array_equal(total, reduced(op, parts))
            np.testing.assert_array_equal(stack, parts)


# -- errors and deaths -----------------------------------------------------------------------------------------------

REFUSED: list[tuple[Any, Any, type[Exception], str]] = [
    (lambda x: x[0] > 0, "sum", TypeError, r"cannot sum .*: got dtype bool"),
    (lambda x: x[0] > 0, "avg", TypeError, r"cannot average .*: got dtype bool"),
    (lambda x: x[0] + 1j, "max", TypeError, r"cannot take the max of .*: got dtype complex128"),
    (lambda x: x, "sum", ValueError, r"\(6, 3\).*\(5, 3\)"),
    (lambda x: synk.comm.all_reduce(x[: synk.comm.rank + 1], "sum"), None, CollectiveMismatch, ""),
    (lambda x: synk.comm.all_reduce(x[:5] * 1, "sum", out=x[:1] * 1), None, ValueError, "out"),
]


def test_what_has_no_meaning_is_refused(here: Here, subtests: Any) -> None:
    """Text as rows of a device, too: the error names the dtype."""
    for number, (body, op, error, words) in enumerate(REFUSED):
        with subtests.test(number=number, words=words), pytest.raises(error, match=words or None):
            here.runtime.function(body, outputs=op)(ROWS)
    if here.has_devices:
        with pytest.raises(TypeError, match="<U2"):
            here.runtime.function(lambda x: 1.0)(np.array(["a", "bc", "d"]))
    assert here.call(lambda x: synk.comm.all_reduce(x.sum(), "sum"), ROWS, outputs="first") == pytest.approx(ROWS.sum())


def test_after_a_death_values_that_agreed_are_back(here: Here) -> None:
    """Rows that only the dead worker's device had are lost: calls that use them refuse until they are set."""
    runtime = here.runtime
    alike, own = runtime.shared(np.ones(4), name="alike"), runtime.shared(np.ones(4), name="own")
    shard, untouched = runtime.shared(np.ones(4), sharded=True, name="shard"), runtime.shared(np.arange(3.0))

    def step(x: Any) -> Any:
        alike.value = alike.value + 1
        return x.sum(0)

    def scale(x: Any) -> Any:
        shard.value = shard.value * (synk.comm.rank + 2)
        own.value = own.value * (synk.comm.rank + 2)
        return x.sum(0)

    def die(x: Any) -> Any:
        if synk.comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return synk.comm.all_reduce(x[0] * 1, "sum")

    f, g = runtime.function(step, outputs="sum"), runtime.function(scale, outputs="sum")
    f(ROWS)
    g(ROWS)
    with pytest.raises(synk.errors.WorkerDied, match="rank 1 of 2"):
        runtime.function(die, outputs="first")(ROWS)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RuntimeWarning)
        np.testing.assert_allclose(host(f(ROWS)), ROWS.sum(axis=0), rtol=1e-12)
    np.testing.assert_array_equal(synk.gather(alike), np.full((2, 4), 3.0))
    assert ["'alike' of rank 1; 'own' of rank 1" in str(each.message) for each in told] == [True] * here.has_devices
    np.testing.assert_array_equal(synk.gather(own), 2.0 if here.has_devices else [[2.0] * 4, [3.0] * 4])
    np.testing.assert_array_equal(synk.gather(untouched), np.stack([np.arange(3.0)] * 2))
    if here.has_devices:
        with pytest.raises(synk.errors.WorkerDied, match="the value of 'shard' of rank 1"):
            g(ROWS)
        shard.value = np.array([2.0, 2.0, 3.0, 3.0])
    g(ROWS)
    np.testing.assert_array_equal(shard.value, [4.0, 4.0, 9.0, 9.0])


@pytest.mark.parametrize("here", [each for each in PARAMETERS if each.values[0] == "dpnp"], indirect=True)
def test_out_of_device_memory(here: Here) -> None:
    """An exception of the call, that says what to do; the same workers go on."""

    def body(x: Any) -> Any:
        import dpnp

        return dpnp.empty(1 << 44)

    restarts = here.runtime.counters["restarts"]
    with pytest.raises(MemoryError, match=r"cannot run 'body' on cpu: out of device memory.*num_slices"):
        here.runtime.function(body)(ROWS)
    np.testing.assert_allclose(here.call(lambda x: x.sum(0), ROWS, outputs="sum"), ROWS.sum(axis=0), rtol=1e-12)
    assert here.runtime.counters["restarts"] == restarts


@pytest.mark.parametrize("name", [each for each in PARAMETERS if each.values[0] == "dpnp"])
def test_the_master_imports_no_array_library(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So the program may fork, whatever the workers do."""
    each_backend.require(name, monkeypatch)
    result = script(
        f"""
        import os, sys
        import numpy as np, synk

        with synk.Runtime(backend={name!r}, devices=["cpu"]) as runtime:
            w = runtime.shared(np.ones(3))
            f = runtime.function(lambda x: float((x * w.value).sum()), outputs="sum")
            assert f(np.ones((4, 3))) == 12.0
            assert w.value.sum() == 3.0
            print(sorted({{"torch", "dpnp", "dpctl"}} & set(sys.modules)))
            if (pid := os.fork()) == 0:
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        """
    )
    assert (result.returncode, result.stdout.strip()) == (0, "[]"), result.stderr


# -- torch on the backend --------------------------------------------------------------------------------------------


@with_torch
def test_bfloat16(here: Here, subtests: Any) -> None:
    """It accumulates in float32 and is rounded once, as torch does it."""
    import torch

    ops = {op: op for op in ("sum", "avg", "max")}
    f = here.runtime.function(lambda x: dict.fromkeys(ops, x[0]), outputs=ops, framework="torch")
    for count, num_slices in itertools.product((5, LARGE // 2 + 1), (1, 3)):
        x = torch.from_numpy(np.random.default_rng(5).standard_normal((6, count))).to(torch.bfloat16)
        parts = x[:: 3 // num_slices].float()
        expected = {"sum": parts.sum(0), "avg": parts.mean(0), "max": parts.max(0).values}
        with subtests.test(count=count, num_slices=num_slices):
            for name, value in f(x, num_slices=num_slices).items():
                assert torch.equal(value, expected[name].to(torch.bfloat16)), name


@with_torch
def test_models_and_their_gradients(here: Here) -> None:
    """Each call divides a batch; torch follows to the device where it can, and goes through the collectives."""
    import torch

    x = torch.from_numpy(ROWS)

    def small_model() -> Any:
        torch.manual_seed(0)
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)).double()

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    model, serial = small_model(), small_model()
    (synk.torch.DataParallel(model, runtime=here.runtime)(x) ** 2).mean().backward()
    (serial(x) ** 2).mean().backward()
    for parameter, expected in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)
    optimizer = torch.optim.Adam(serial.parameters(), lr=0.1)
    replicated = synk.torch.replicate(model, torch.optim.Adam(model.parameters(), lr=0.1), runtime=here.runtime)
    train = replicated.function(step)
    for _ in range(4):
        np.testing.assert_allclose(host(train(x)), host(step(serial, optimizer, x)), rtol=1e-12)
    replicated.pull()
    for parameter, expected in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)


# -- choosing a backend ----------------------------------------------------------------------------------------------


def test_a_name_that_is_no_backend_and_one_without_devices(subtests: Any) -> None:
    expected = r"expected one of \('auto', 'numpy', 'cupy', 'dpnp'\)\.$"
    use_dpnp = "use backend='dpnp' \\(pip install"
    others = {"opencl": use_dpnp, "sycl": use_dpnp, "torch": r"use synk.function\(fn, framework='torch'\)"}
    for name, words in {**others, "numpyy": expected, "": expected, None: expected}.items():
        with subtests.test(name=name), pytest.raises(ValueError, match=words):
            synk.Runtime(1, backend=name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="devices"):
        synk.Runtime(2, backend="numpy", devices=[0, 1])


@pytest.mark.parametrize("name", [name for name in BACKENDS if name not in ("numpy", "cupy")])
def test_a_backend_that_is_not_installed_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[backend_module(name).place.__module__].importlib.util, "find_spec", lambda _: None)
    with pytest.raises(synk.errors.UnsupportedError, match=rf"{name} is not installed.*synkhronos\[{name}\]"):
        synk.Runtime(1, backend=name)
