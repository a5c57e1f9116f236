"""One suite for every backend that is installed here, against NumPy. Functions use what all array libraries share."""

from __future__ import annotations

import os
import signal
import sys
import time
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
REDUCE = {
    "avg": lambda parts: parts.astype(np.result_type(parts, "f4")).mean(axis=0).astype(parts.dtype),
    "sum": lambda parts: (
        parts.astype(np.result_type(parts, "f4") if parts.dtype == "f2" else parts.dtype)
        .sum(axis=0, dtype=None if parts.dtype == "f2" else parts.dtype)
        .astype(parts.dtype)
    ),
    "prod": lambda parts: parts.prod(axis=0, dtype=parts.dtype),
    "min": lambda parts: parts.min(axis=0),
    "max": lambda parts: parts.max(axis=0),
}
KINDS = {"avg": "fc", "sum": "iufc", "prod": "iufc", "min": "biuf", "max": "biuf"}
"""The kinds of dtypes that each op accepts."""


# On NumPy and CuPy tests/training has all of this. Each of these imports torch in two workers, which takes seconds.
with_torch = pytest.mark.parametrize(
    "here", [each for each in PARAMETERS if each.values[0] in ("dpnp", "torch")], indirect=True
)


@pytest.fixture(params=PARAMETERS)
def here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, reuse: Any) -> Iterator[Here]:
    """A runtime of two workers that serves all tests of its backend."""
    name = request.param
    each_backend.require(name, monkeypatch)
    options: dict[str, Any] = {"backend": name, "max_restarts": 10**9, **each_backend.devices(name, 2)}
    yield Here(name, reuse(("conformance", name), lambda: synk.Runtime(2, **options)))


# -- what functions get ----------------------------------------------------------------------------------------------


def test_functions_get_arrays_of_the_backend(here: Here) -> None:
    def kinds(x: Any, w: Any, nested: Any, *, k: Any) -> Any:
        each = (x, w, nested["a"][0], k)
        libraries = [{cls.__module__.partition(".")[0] for cls in type(array).__mro__} for array in each]
        return libraries, nested["text"], float(k.sum())

    w = here.runtime.shared(np.ones(2))
    f = here.runtime.function(kinds, bcast_inputs=("w", "nested", "k"), outputs=None)
    found, text, total = f(ROWS, w, {"a": [np.ones(2)], "text": "words"}, k=np.arange(3.0))[0]
    assert len(found) == 4
    assert all(here.name in each for each in found)
    assert (text, total) == ("words", 3.0)


def test_the_runtime_says_where_it_is(here: Here) -> None:
    assert here.runtime.backend == here.name
    assert here.runtime.info().count(f", {here.name} ") == 2  # each worker names the version
    assert len(here.runtime.devices) == 2


def loss_and_grad(w: Any, x: Any, y: Any) -> Any:
    r = x @ w - y
    return 0.5 * (r @ r) / len(x), r @ x / len(x)


@pytest.mark.parametrize("num_slices", [1, 3])
def test_arguments_of_all_kinds(here: Here, num_slices: int) -> None:
    """Arrays, ``Data``, lists and variables, and rows by every kind of index."""
    runtime = here.runtime
    w, y = np.arange(1.0, 4.0), ROWS.sum(axis=1)
    f = runtime.function(loss_and_grad, bcast_inputs="w", outputs="avg")
    cases = (
        ((w, ROWS, y), (None, 7, slice(2, 10, 3), slice(None, None, -1), [5, 3, 3, 10, 0], y > 0)),
        ((runtime.shared(w), runtime.data(ROWS), runtime.data(y)), (None, [9, 1, 1])),
        ((w, ROWS.tolist(), y.tolist()), (None,)),
    )
    for arguments, batches in cases:
        rows, targets = np.asarray(arguments[1]), np.asarray(arguments[2])
        for batch in batches:
            index = slice(None) if batch is None else slice(batch) if isinstance(batch, int) else batch
            expected = loss_and_grad(w, rows[index], targets[index])
            for call in (f, f.serial):
                got = host(call(*arguments, batch=batch, num_slices=num_slices if call is f else 1))
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


def test_inputs_of_submitted_calls_are_brought_ahead(here: Here) -> None:
    """On devices; where the host sees the arrays there is nothing to bring."""

    def read(x: Any, w: Any) -> Any:
        from synk._wire.cell import cell

        count = cell.worker.executor.inputs.num_ahead  # type: ignore[union-attr]
        time.sleep(0.01)
        return x.sum(0) * w, float(count)

    f = here.runtime.function(read, bcast_inputs="w", outputs=("sum", "max"))
    x = here.runtime.data(ROWS)
    pending = [f.submit(x, np.full(3, float(k)), batch=[k, 10, 3]) for k in range(8)]
    counts = []
    for k, call in enumerate(pending):
        total, count = host(call.result())
        np.testing.assert_allclose(total, ROWS[[k, 10, 3]].sum(axis=0) * k, rtol=1e-12, atol=1e-13)
        counts.append(count)
    assert (max(counts) > 0) == here.has_devices


def test_minibatches_and_items(here: Here) -> None:
    runtime = here.runtime
    x, pick = runtime.data(ROWS), runtime.data(np.arange(4.0), minibatch=True)
    f = runtime.function(lambda x, k: x * k[:, None], outputs="gather")
    np.testing.assert_array_equal(host(f(x, pick, batch=[9, 0, 3, 3])), ROWS[[9, 0, 3, 3]] * np.arange(4.0)[:, None])
    assert list(runtime.map(lambda number: number * 2, range(5))) == [0, 2, 4, 6, 8]


# -- ops -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("op", REDUCE)
def test_reductions_of_every_dtype(here: Here, op: str) -> None:
    """Small and large outputs; NaN and infinity as in NumPy."""
    for dtype in DTYPES:
        if np.dtype(dtype).kind not in KINDS[op]:
            continue
        f = here.runtime.function(lambda x: x[0], outputs=op)
        for count in (5, LARGE // np.dtype(dtype).itemsize + 1):
            parts = (np.arange(2 * count).reshape(2, count) % 7).astype(dtype)
            if parts.dtype.kind == "f":
                parts[0, 1::1000], parts[1, 2::1000] = np.nan, np.inf
            with np.errstate(all="ignore"):
                expected = REDUCE[op](parts)
            got = host(f(parts))
            assert got.dtype == expected.dtype, dtype
            np.testing.assert_array_equal(got, expected, err_msg=dtype)


@pytest.mark.parametrize("dtype", ["int32", "uint16", "float16", "float32", "complex64"])
def test_reductions_over_slices(here: Here, dtype: str) -> None:
    values = (np.random.default_rng(1).standard_normal((9, 4)) * 20).astype("c8" if dtype[0] == "c" else "f4")
    parts = np.abs(values).astype(dtype) if dtype[0] == "u" else values.astype(dtype)
    ops = [op for op in REDUCE if parts.dtype.kind in KINDS[op] and op != "prod"]
    got = here.runtime.function(lambda x: dict.fromkeys(ops, x[0]), outputs={op: op for op in ops})(
        parts[:8], num_slices=4
    )
    for op, value in host(got).items():
        assert value.dtype == parts.dtype
        np.testing.assert_allclose(value, REDUCE[op](parts[:8]), rtol=1e-3 if dtype == "float16" else 1e-6, err_msg=op)


@pytest.mark.parametrize("num_slices", [1, 2])
def test_other_ops(here: Here, num_slices: int) -> None:
    def body(x: Any) -> dict[str, Any]:
        return {"gather": x * 2, "first": x[0], "each": (len(x), "words", x[:1]), "folded": x[:1], "number": 2.5}

    def join(a: Any, b: Any) -> Any:
        return np.concatenate([np.asarray(a), np.asarray(b)])

    outputs = {"gather": "gather", "first": "first", "each": None, "folded": join, "number": "avg"}
    f = here.runtime.function(body, outputs=outputs)
    got = host(f(ROWS, num_slices=num_slices))
    np.testing.assert_array_equal(got["gather"], ROWS * 2)
    np.testing.assert_array_equal(got["first"], ROWS[0])
    assert got["number"] == 2.5
    starts = [0, 6] if num_slices == 1 else [0, 3, 6, 9]
    np.testing.assert_array_equal(got["folded"], ROWS[starts])
    if num_slices == 1:
        assert [each[:2] for each in got["each"]] == [(6, "words"), (5, "words")]
        np.testing.assert_array_equal(np.stack([each[2] for each in got["each"]]), ROWS[[0, 6], None])


class Median(synk.Op):
    concatenates = True

    def finish(self, value: Any) -> Any:
        return np.median(np.asarray(value), axis=0)


def test_an_op_of_ones_own_gets_arrays_of_the_host(here: Here) -> None:
    got = here.call(lambda x: x * 1, ROWS, outputs=Median())
    np.testing.assert_allclose(got, np.median(ROWS, axis=0))


def test_averages_are_weighted_by_rows(here: Here) -> None:
    values = np.random.default_rng(3).standard_normal((11, 1))
    f = here.runtime.function(lambda x: (x.mean(0), x.mean()), outputs="avg")
    for count in (11, 1):  # with one row one rank does not run
        for got in host(f(values, batch=count)):
            np.testing.assert_allclose(got, np.full(np.shape(got), values[:count].mean()), rtol=1e-12)


def test_no_rows(here: Here) -> None:
    total, rows = here.call(lambda x: (x.sum(0), x * 2), ROWS[:0], outputs=("sum", "gather"))
    np.testing.assert_array_equal(total, np.zeros(3))
    assert rows.shape == (0, 3)
    with pytest.raises(ValueError, match="no rows"):
        here.call(lambda x: x.mean(), ROWS[:0], outputs="avg")


def test_gradients_are_joined_in_one_buffer(here: Here) -> None:
    """By the library of the arrays, whatever it calls its functions."""

    def joined(x: Any) -> Any:
        from synk.extensions.updates import flatten

        (flat,), unflatten = flatten({"w": x[:2], "b": x[2]})
        return flat, unflatten((flat * 2,))["b"]

    flat, doubled = here.call(joined, ROWS, outputs="first")
    np.testing.assert_array_equal(flat, np.concatenate([ROWS[2], ROWS[:2].ravel()]))
    np.testing.assert_array_equal(doubled, ROWS[2] * 2)


# -- objects ---------------------------------------------------------------------------------------------------------


@dataclass
class Box:
    content: Any


def test_objects_that_hold_arrays_reach_the_master_on_the_host(here: Here) -> None:
    boxes = here.runtime.function(lambda x: Box({"rows": x[:1] * 2}), outputs=None)(ROWS)
    for box, start in zip(boxes, (0, 6), strict=True):
        kept = box.content["rows"]
        assert isinstance(kept, np.ndarray) or kept.device.type == "cpu"
        np.testing.assert_array_equal(np.asarray(kept), ROWS[start : start + 1] * 2)


def test_exceptions_that_hold_arrays(here: Here) -> None:
    def fail(x: Any) -> Any:
        error = KeyError("mine")
        error.rows = x[:2] * 1  # type: ignore[attr-defined]
        raise error

    with pytest.raises(KeyError, match="mine") as caught:
        here.runtime.function(fail)(ROWS)
    np.testing.assert_array_equal(np.asarray(caught.value.rows), ROWS[:2])  # type: ignore[attr-defined]
    cause = caught.value.__cause__
    assert isinstance(cause, RemoteError)
    assert cause.device == here.runtime.devices[0]


# -- variables -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [4, LARGE // 8])
def test_variables(here: Here, count: int) -> None:
    runtime, start = here.runtime, np.arange(1.0, count + 1)
    w = runtime.shared(start, name="w")

    def scale(x: Any) -> Any:
        w.value = w.value * (synk.comm.rank + 1)
        return x.sum()

    f = runtime.function(scale, outputs="sum")
    assert f(ROWS) == pytest.approx(ROWS.sum())
    f(ROWS)
    np.testing.assert_array_equal(runtime.gather(w), start * np.array([[1], [4]]))
    runtime.all_reduce(w, "sum")
    np.testing.assert_array_equal(runtime.gather(w), np.stack([start * 5] * 2))
    f(ROWS)
    runtime.broadcast(w)
    np.testing.assert_array_equal(runtime.get_value(w, 1), start * 5)
    w.value = start
    f(ROWS)
    np.testing.assert_array_equal(runtime.reduce(w, "max", in_place=False), start * 2)
    runtime.all_gather(w)
    np.testing.assert_array_equal(runtime.get_value(w, 1), np.concatenate([start, start * 2]))


def test_a_failed_call_changes_no_variable(here: Here) -> None:
    w = here.runtime.shared({"a": np.ones(3), "b": [np.zeros(2)]})

    def body(x: Any) -> Any:
        w.value = {"a": w.value["a"] + 1, "b": [w.value["b"][0] + 2]}
        if synk.comm.rank == 1 and len(x) == 5:
            raise KeyError("no")
        return x.sum()

    f = here.runtime.function(body, outputs="sum")
    with pytest.raises(KeyError):
        f(ROWS)
    np.testing.assert_array_equal(w.value["a"], np.ones(3))
    f(ROWS[:4])
    np.testing.assert_array_equal(w.value["a"], np.full(3, 2.0))
    np.testing.assert_array_equal(w.value["b"][0], np.full(2, 2.0))


@pytest.mark.parametrize("num_slices", [1, 3])
def test_updates(here: Here, num_slices: int) -> None:
    """Slices see the old value; the new ones are reduced by the op, on each rank."""
    runtime = here.runtime
    mean, largest = runtime.shared(np.zeros(3)), runtime.shared(np.zeros(3))

    def body(x: Any) -> Any:
        return x.sum(0), (mean.value + x.mean(0), x[0] * 1)

    f = runtime.function(body, outputs="sum", updates=((mean, "avg"), (largest, "max")))
    x = ROWS[:10]
    for _ in range(2):
        before = runtime.gather(mean)
        np.testing.assert_allclose(host(f(x, num_slices=num_slices)), x.sum(axis=0), rtol=1e-12)
        own = x.reshape(2, 5, 3).mean(axis=1)
        np.testing.assert_allclose(runtime.gather(mean), before + own, rtol=1e-12, atol=1e-14)
    if num_slices == 1:
        np.testing.assert_array_equal(runtime.gather(largest), x[[0, 5]])


def test_shards(here: Here) -> None:
    runtime = here.runtime
    rows = runtime.shared(ROWS, sharded=True, name="rows")
    f = runtime.function(lambda x: (x * 2, x.sum(0)), outputs=("gather", "sum"))
    for batch in (None, [10, 0, 4]):
        index = slice(None) if batch is None else batch
        doubled, total = host(f(rows, batch=batch))
        np.testing.assert_array_equal(doubled, ROWS[index] * 2)
        np.testing.assert_allclose(total, ROWS[index].sum(axis=0), rtol=1e-12)
    np.testing.assert_allclose(host(f.serial(rows))[1], ROWS.sum(axis=0), rtol=1e-12)

    def add(x: Any) -> Any:
        rows.value = rows.value + 1
        return x.sum()

    runtime.function(add, outputs="sum")(ROWS)
    np.testing.assert_array_equal(rows.value, ROWS + 1)


# -- communication ---------------------------------------------------------------------------------------------------


def test_collectives_of_a_function(here: Here) -> None:
    parts = np.arange(24.0).reshape(2, 4, 3)

    def body(x: Any) -> dict[str, Any]:
        comm, other = synk.comm, 1 - synk.comm.rank
        own = x[0]
        place, late = own * 0, own * 1
        found = {op: comm.all_reduce(own, op) for op in ("sum", "avg", "prod", "min", "max")}
        assert comm.all_reduce(own, "sum", out=place) is place
        request = comm.iall_reduce(late, "max", out=late)
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
            **{op: REDUCE[op](parts) for op in REDUCE},
            "place": parts.sum(axis=0), "late": parts.max(axis=0), "received": parts[1 - rank] * 2,
            "root": parts[1], "stack": parts, "block": parts.sum(axis=0)[2 * rank : 2 * rank + 2],
            "rows": parts.reshape(8, 3), "reduced": parts[:, 0].sum(axis=0) if rank else -1.0,
            "swapped": parts[:, 2 * rank : 2 * rank + 2].reshape(4, 3), "dealt": parts[0, 2 * rank : 2 * rank + 2],
            "share": 0.75 * parts[0, 0] + 0.25 * parts[1, 0], "single": parts.sum(),
        }  # fmt: skip
        for name, value in expected.items():
            np.testing.assert_allclose(got[rank][name], value, rtol=1e-12, err_msg=name)


def test_collectives_of_every_dtype(here: Here) -> None:
    for dtype in DTYPES:
        parts = (np.arange(10).reshape(2, 5) % 7).astype(dtype)
        op = "max" if dtype == "bool" else "sum"
        total, stack = here.call(
            lambda x, op: (synk.comm.all_reduce(x[0], op), synk.comm.all_gather(x[0])),
            parts, op, bcast_inputs="op", outputs="first",
        )  # fmt: skip
        assert total.dtype == stack.dtype == parts.dtype
        np.testing.assert_array_equal(total, REDUCE[op](parts), err_msg=dtype)
        np.testing.assert_array_equal(stack, parts)


def test_ranks_that_disagree_are_told(here: Here) -> None:
    with pytest.raises(CollectiveMismatch):
        here.runtime.function(lambda x: synk.comm.all_reduce(x[: synk.comm.rank + 1], "sum"), outputs=None)(ROWS)
    with pytest.raises(ValueError, match="out"):
        here.runtime.function(lambda x: synk.comm.all_reduce(x, "sum", out=x[:1] * 1), outputs=None)(ROWS[:10])
    assert here.call(lambda x: synk.comm.all_reduce(x.sum(), "sum"), ROWS, outputs="first") == pytest.approx(ROWS.sum())


# -- errors and deaths -----------------------------------------------------------------------------------------------


def test_text_stays_on_the_host(here: Here) -> None:
    """As rows of a device it is an error that names the dtype; in a broadcast object it arrives as it is."""
    text = np.array(["a", "bc", "d"])
    if here.has_devices:
        with pytest.raises(TypeError, match="<U2"):
            here.runtime.function(lambda x: 1.0)(text)
    f = here.runtime.function(
        lambda x, names: (type(names["a"]).__module__, len(names["a"])), bcast_inputs="names", outputs="first"
    )
    assert f(ROWS, {"a": text}) == ("numpy", 3)


def test_what_has_no_meaning_is_refused(here: Here) -> None:
    for body, op, message in (
        (lambda x: x[0] > 0, "sum", r"cannot sum .*: got dtype bool"),
        (lambda x: x[0] > 0, "avg", r"cannot average .*: got dtype bool"),
        (lambda x: x[0] + 1j, "max", r"cannot take the max of .*: got dtype complex128"),
    ):
        with pytest.raises(TypeError, match=message):
            here.runtime.function(body, outputs=op)(ROWS)
    with pytest.raises(ValueError, match=r"\(6, 3\).*\(5, 3\)"):
        here.runtime.function(lambda x: x, outputs="sum")(ROWS)


@with_torch
def test_a_framework_of_ones_own(here: Here) -> None:
    def body(x: Any, w: Any) -> Any:
        import torch

        assert isinstance(x, torch.Tensor)
        return torch.nn.functional.relu(x @ w["w"]).sum(0)

    w = np.random.default_rng(4).standard_normal((3, 2))
    f = here.runtime.function(body, bcast_inputs="w", outputs="sum", framework="torch")
    np.testing.assert_allclose(host(f(ROWS, {"w": w})), np.maximum(ROWS @ w, 0).sum(axis=0), rtol=1e-12)
    np.testing.assert_allclose(host(f(ROWS, {"w": w}, num_slices=2)), np.maximum(ROWS @ w, 0).sum(axis=0), rtol=1e-12)


def small_model() -> Any:
    import torch

    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1)).double()


@with_torch
@pytest.mark.parametrize("count", [5, LARGE // 2 + 1])
@pytest.mark.parametrize("num_slices", [1, 3])
def test_bfloat16(here: Here, count: int, num_slices: int) -> None:
    """It accumulates in float32 and is rounded once, as torch does it."""
    import torch

    x = torch.from_numpy(np.random.default_rng(5).standard_normal((6, count))).to(torch.bfloat16)
    f = here.runtime.function(
        lambda x: {"sum": x[0], "avg": x[0], "max": x[0]}, outputs={"sum": "sum", "avg": "avg", "max": "max"},
        framework="torch",
    )  # fmt: skip
    parts = x[:: 3 // num_slices].float()
    expected = {"sum": parts.sum(0), "avg": parts.mean(0), "max": parts.max(0).values}
    for name, value in f(x, num_slices=num_slices).items():
        assert torch.equal(value, expected[name].to(torch.bfloat16)), name


@with_torch
def test_a_model_and_its_gradients(here: Here) -> None:
    """Each call divides a batch; torch follows to the device where it can."""
    import torch

    x = torch.from_numpy(ROWS)
    model, serial = small_model(), small_model()
    parallel = synk.torch.DataParallel(model, runtime=here.runtime)
    for each in (parallel, serial):
        (each(x) ** 2).mean().backward()
    for parameter, expected in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected.grad)


@with_torch
def test_a_training_loop(here: Here) -> None:
    import torch

    x = torch.from_numpy(ROWS)

    def step(model: Any, optimizer: Any, x: Any) -> Any:
        optimizer.zero_grad()
        loss = (model(x) ** 2).mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    model, serial = small_model(), small_model()
    optimizer = torch.optim.Adam(serial.parameters(), lr=0.1)
    replicated = synk.torch.replicate(model, torch.optim.Adam(model.parameters(), lr=0.1), runtime=here.runtime)
    train = replicated.function(step)
    for _ in range(4):
        np.testing.assert_allclose(host(train(x)), host(step(serial, optimizer, x)), rtol=1e-12)
    for parameter, expected in zip(model.parameters(), serial.parameters(), strict=True):
        torch.testing.assert_close(parameter, expected)


@with_torch
def test_autograd_goes_through_the_collectives(here: Here) -> None:
    def slope(x: Any) -> Any:
        import torch

        w = torch.tensor([2.0, 3.0], dtype=torch.float64, requires_grad=True)
        total = synk.torch.all_reduce((x[0, :2] * w).sum(), "sum")
        (total * (synk.comm.rank + 1)).backward()
        return w.grad

    got = here.runtime.function(slope, outputs=None, framework="torch")(ROWS[:2])
    for rank in range(2):
        np.testing.assert_allclose(host(got[rank]), 3 * ROWS[rank, :2], rtol=1e-12)


def test_after_a_death_values_that_agreed_are_back(here: Here) -> None:
    """Rows that only the dead worker's device had are lost: calls that use them refuse until they are set."""
    runtime = here.runtime
    alike, shard = runtime.shared(np.ones(4), name="alike"), runtime.shared(np.ones(4), sharded=True, name="shard")

    def step(x: Any) -> Any:
        alike.value = alike.value + 1
        return x.sum(0)

    def scale(x: Any) -> Any:
        shard.value = shard.value * (synk.comm.rank + 2)
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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # of what the dead rank held
        np.testing.assert_allclose(host(f(ROWS)), ROWS.sum(axis=0), rtol=1e-12)
    np.testing.assert_array_equal(runtime.gather(alike), np.full((2, 4), 3.0))
    if here.has_devices:
        with pytest.raises(synk.errors.WorkerDied, match="'shard'"):
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


@pytest.mark.parametrize("name", [each for each in PARAMETERS if each.values[0] != "cupy"])
def test_an_inline_rank(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    each_backend.require(name, monkeypatch)
    with synk.Runtime(inline=True, backend=name, **each_backend.devices(name, 1)) as runtime:
        total = runtime.function(lambda x: synk.comm.all_reduce(x.sum(0), "sum"), outputs="first")(ROWS)
        np.testing.assert_allclose(host(total), ROWS.sum(axis=0), rtol=1e-12)


@pytest.mark.parametrize("name", [each for each in PARAMETERS if each.values[0] in ("dpnp", "torch")])
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


# -- choosing a backend ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["opencl", "sycl"])
def test_opencl_names_dpnp(name: str) -> None:
    with pytest.raises(ValueError, match=rf"got backend='{name}'.*use backend='dpnp' \(pip install"):
        synk.Runtime(1, backend=name)


@pytest.mark.parametrize("name", ["numpyy", "", None, ["numpy"]])
def test_a_name_that_is_no_backend(name: Any) -> None:
    with pytest.raises(ValueError, match=r"expected one of \('auto', 'numpy', 'cupy', 'dpnp', 'torch'\)\.$"):
        synk.Runtime(1, backend=name)


@pytest.mark.parametrize("name", [name for name in BACKENDS if name not in ("numpy", "cupy")])
def test_a_backend_that_is_not_installed_says_what_to_install(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[backend_module(name).place.__module__].importlib.util, "find_spec", lambda _: None)
    with pytest.raises(synk.errors.UnsupportedError, match=rf"{name} is not installed.*synkhronos\[{name}\]"):
        synk.Runtime(1, backend=name)


@pytest.mark.parametrize("here", ["torch"], indirect=True)
def test_tensors_are_not_arrays_of_jax(here: Here) -> None:
    f = here.runtime.function(lambda x: x, framework="jax")
    with pytest.raises(ValueError, match=r"got framework='jax', expected 'torch' or None"):
        f(ROWS)
