"""Quiet calls of functions with a framework: tensors in, tensors out, and what a function keeps of them or writes.

The expected values are torch's own, or those of the same call on the ordinary way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.compiled import is_compiled
from test_quiet_calls import Ordinary, ordinary, submit_all

import synk

torch = pytest.importorskip("torch")

__all__ = ["ordinary"]

KINDS = ("float32", "float64", "int64", "bool", "bfloat16", "int16", "complex64", "float8_e5m2")


def rows(kind: str, number: int) -> Any:
    values = torch.arange(24.0).reshape(8, 3) % 7 + number
    return values > 4 if kind == "bool" else values.to(getattr(torch, kind))


def as_float(x: Any) -> Any:
    return (x.real if x.is_complex() else x).to(torch.float64)


def look(scale: float, x: Any) -> tuple[Any, ...]:
    """Return whether the rank knows the call, a sum, and the elements of what came, as bytes."""
    return (
        is_compiled(),
        as_float(x).sum() * scale,
        x.contiguous().view(torch.uint8).clone(),
        float(len(str(x.dtype))),
    )


def check(result: Any, scale: float, x: Any, *, is_known: bool | None = None) -> None:
    assert is_known is None or result[0] == is_known
    torch.testing.assert_close(result[1], as_float(x).sum() * scale)
    assert type(result[1]) is type(result[2]) is torch.Tensor
    assert torch.equal(result[2], x.contiguous().view(torch.uint8))
    assert result[3] == len(str(x.dtype))


def make(rt: Any) -> Any:
    return rt.function(look, bcast_inputs="scale", outputs=("min", "sum", "gather", "max"), framework="torch")


@pytest.mark.parametrize("num_workers", [1, 2, "inline"])
def test_tensors_and_numbers_are_quiet_on_both_sides(
    shared_runtimes: Any, ordinary: Ordinary, num_workers: Any
) -> None:
    f = make(shared_runtimes[num_workers])
    for kind in KINDS:
        for k in range(6):
            x, before = rows(kind, k), len(ordinary)
            check(f(k * 0.5, x), k * 0.5, x, is_known=k > 2 or None)
            assert k < 3 or len(ordinary) == before
    results = submit_all(f, *[(0.5, rows("float32", k)) for k in range(15)])
    for k, result in enumerate(results):
        check(result, 0.5, rows("float32", k), is_known=k > 9 or None)


def test_an_array_of_the_same_bytes_is_no_tensor_of_another_dtype(shared_runtimes: Any) -> None:
    f = make(shared_runtimes[2])
    for _ in range(3):
        for kind in ("bfloat16", "int16", "float16", "float8_e5m2", "uint8"):
            for k in range(4):
                x = rows(kind, k)
                check(f(2.0, x), 2.0, x)
                if kind in ("int16", "float16", "uint8"):
                    check(f(2.0, x.numpy()), 2.0, x)


def test_any_strides_and_lazy_values(shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x: as_float(x).sum(0), outputs="sum", framework="torch")
    base = torch.arange(48.0).reshape(8, 6) + 1j * torch.arange(48.0).reshape(8, 6)
    views: list[Callable[[Any], Any]] = [
        lambda x: x, lambda x: x.conj(), lambda x: x.conj().imag, lambda x: x.real, lambda x: x[:, ::2],
        lambda x: x.T.contiguous().T, lambda x: x[:1].expand(8, 6), lambda x: x.flip(0),
    ]  # fmt: skip
    for view in views:
        for k in range(5):
            x = view(base + k)
            torch.testing.assert_close(f(x), as_float(x.resolve_conj().resolve_neg()).sum(0))


def test_tensors_that_cannot_travel_are_refused_after_quiet_calls(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    x = rows("float32", 0)
    wrong = [
        x.clone().requires_grad_(),
        torch.nn.Parameter(x),
        x.to_sparse(),
        x.to("meta"),
        rows("bfloat16", 0).requires_grad_(),
    ]
    for each in wrong:
        messages = []
        for count in (0, 4):
            f = make(rt)
            for _ in range(count):
                check(f(1.0, x.to(each.dtype)), 1.0, x.to(each.dtype))
            sent = rt.counters["messages_down"]
            with pytest.raises(TypeError) as caught:
                f(1.0, each)
            messages.append(str(caught.value))
            assert rt.counters["messages_down"] == sent
        assert messages[0] == messages[1]


@pytest.mark.parametrize("num_workers", [2, "inline"])
@pytest.mark.parametrize("as_data", [True, False])
def test_what_a_function_writes_is_gone_with_the_call(
    shared_runtimes: Any, ordinary: Ordinary, num_workers: Any, as_data: bool
) -> None:
    rt = shared_runtimes[num_workers]

    def write(k: int, x: Any, y: Any) -> tuple[Any, Any]:
        if k % 3:
            x.add_(k)
        return is_compiled(), (x * y).sum(0)

    f = rt.function(write, bcast_inputs="k", outputs=("min", "sum"), framework="torch")
    x, y = rows("float64", 0), rows("float64", 1)
    passed = rt.data(x.numpy()) if as_data else x
    for k in range(12):
        before = len(ordinary)
        is_known, total = f(k, passed, y)
        torch.testing.assert_close(total, ((x + k * bool(k % 3)) * y).sum(0))
        assert k < 3 or (is_known and len(ordinary) == before)
        if k == 6:
            x[...] = 2.0
            passed[...] = 2.0


@pytest.mark.parametrize("num_workers", [2, "inline"])
def test_tensors_that_a_function_keeps(shared_runtimes: Any, num_workers: Any) -> None:
    rt = shared_runtimes[num_workers]
    kept: list[Any] = []

    def keep(k: int, x: Any) -> tuple[Any, Any]:
        if k % 3 == 0:
            kept.append((k, x))
        return x.sum(0), float(all(torch.all(each == number) for number, each in kept))

    f = rt.function(keep, bcast_inputs="k", outputs=("sum", "min"), framework="torch")
    for k in range(15):
        total, is_right = f(k, torch.full((8, 2), float(k)))
        assert is_right == 1.0 and total.tolist() == [8.0 * k] * 2


def test_a_kept_tensor_of_data_that_is_written_in_a_call_with_another_outcome(shared_runtimes: Any) -> None:
    """What was written is dropped before the function or after the call, and not between."""
    rt = shared_runtimes[2]
    kept: list[Any] = []

    def write(k: int, x: Any) -> Any:
        kept[:] = [x]
        kept[0].add_(k)
        return kept[0].sum(0) if k % 4 else kept[0]

    f = rt.function(write, bcast_inputs="k", outputs="first", framework="torch")
    other = rt.function(lambda x: x.sum(0), outputs="sum")
    data = rt.data(np.zeros((4, 2)))
    for k in range(1, 14):
        data[...] = k
        result = f(k, data)
        assert torch.equal(result, torch.full((2, 2), 2.0 * k).sum(0) if k % 4 else torch.full((2, 2), 2.0 * k))
        assert other(data).tolist() == [4.0 * k] * 2


def test_variables_and_collectives_in_quiet_calls(shared_runtimes: Any, ordinary: Ordinary) -> None:
    """Tensors in one function and arrays in the next, and assignments that must hold."""
    rt = shared_runtimes[2]
    w = rt.shared(np.ones(3, np.float32))

    def step(x: Any) -> tuple[Any, Any]:
        total = synk.comm.all_reduce(x.sum(0), "sum")
        w.value = w.value + total
        return is_compiled(), total

    tensors = rt.function(step, outputs=("min", "first"), framework="torch")
    arrays = rt.function(step, outputs=("min", "first"))
    x = rows("float32", 0)
    expected = torch.ones(3)
    for k in range(8):
        before = len(ordinary)
        for f, value in ((tensors, x + k), (arrays, (x + k).numpy())):
            is_known, total = f(value)
            expected = expected + (x + k).sum(0)
            torch.testing.assert_close(torch.as_tensor(total), (x + k).sum(0))
            np.testing.assert_allclose(w.value, expected, rtol=1e-6)
            assert k < 5 or is_known
        assert k < 5 or len(ordinary) == before


def test_nested_outputs_and_those_of_the_first_rank(shared_runtimes: Any, ordinary: Ordinary) -> None:
    rt = shared_runtimes[2]

    def nest(x: Any) -> Any:
        is_known = np.full(1, is_compiled())
        return {"rows": (x * 2, [x.sum()]), "none": None, "first": x[0].numpy(), "each": is_known}

    outputs = {"rows": ("gather", ["sum"]), "none": None, "first": "first", "each": None}
    f = rt.function(nest, outputs=outputs, framework="torch")
    for k in range(6):
        x, before = rows("float32", k), len(ordinary)
        result = f(x)
        assert torch.equal(result["rows"][0], x * 2) and result["rows"][1][0] == x.sum()
        assert result["none"] == [None, None] and type(result["first"]) is np.ndarray
        assert result["first"].tolist() == x[0].tolist()
        assert k < 3 or ([float(each[0]) for each in result["each"]] == [1.0, 1.0] and len(ordinary) == before)


@pytest.mark.parametrize("num_workers", [1, 2, "inline"])
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.sampled(3)
def test_any_sequence_of_calls_equals_torch(shared_runtimes: Any, num_workers: Any, seed: int) -> None:
    """Tensors, arrays, Data, numbers, batches, submitted or not; functions write, keep, assign and return others."""
    rt = shared_runtimes[num_workers]
    rng = np.random.default_rng(seed)
    kept: list[Any] = []
    w = rt.shared(np.zeros(3))

    def act(how: str, scale: Any, x: Any) -> tuple[Any, Any]:
        kept[:] = [each for each in kept if how != "drop"]
        assert all(torch.equal(each, value) for each, value in kept)
        if how == "keep":
            kept.append((x, x.clone()))
        if how == "write":
            x = x.add_(1)
        if how == "assign":
            w.value = w.value + 1
        if how == "raise":
            raise LookupError(how)
        first = (x * scale).sum(0)
        return (first if how != "other" else first.reshape(3, 1)), x.to(torch.float64).mean(0)

    functions = [
        rt.function(act, bcast_inputs=("how", "scale"), outputs=("sum", "avg"), framework="torch") for _ in range(2)
    ]
    data = rt.data(rng.normal(size=(8, 3)))
    count = 0
    hows = ("", "", "", "keep", "drop", "write", "assign", "raise", "other")
    for _ in range(120):
        f = functions[rng.integers(2)]
        how, scale = str(rng.choice(hows)), [2, 0.5, np.float32(3), torch.tensor(1.5)][rng.integers(4)]
        x = torch.from_numpy(rng.normal(size=(8, 3)))
        kind = rng.integers(1 if how == "keep" else 0, 4)  # what is kept of Data follows it, by contract
        if kind == 0:
            data[...] = x.numpy()
        passed = (data, x, x.numpy(), x.float())[kind]
        expected = x.float() if kind == 3 else x
        batch = [None, 5, slice(1, 7), [3, 1, 7]][rng.integers(4)]
        expected = expected if batch is None else expected[:batch] if batch == 5 else expected[batch]
        call = f if rng.random() < 0.7 else lambda *args, f=f, **options: f.submit(*args, **options).result()
        if how == "raise":
            with pytest.raises(LookupError, match="raise"):
                call(how, scale, passed, batch=batch)
            continue
        total, mean = call(how, scale, passed, batch=batch)
        expected = expected + (how == "write")
        first = (expected * scale).sum(0)
        torch.testing.assert_close(total, first.reshape(3, 1) if how == "other" else first)
        torch.testing.assert_close(mean, expected.double().mean(0))
        count += how == "assign"
        assert w.value.tolist() == [count] * 3
