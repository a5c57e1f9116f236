"""Repeated calls of functions of torch: tensors in, tensors out, whatever changed since the call before.

The oracle is torch itself, on the whole input.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.seeds import seeds

torch = pytest.importorskip("torch")

KINDS = ("float32", "float64", "int64", "bool", "bfloat16", "int16", "float16", "complex64", "float8_e5m2", "uint8")
HAVE_NUMPY = ("int16", "float16", "uint8", "float64")


def rows(kind: str, number: int) -> Any:
    values = torch.arange(24.0).reshape(8, 3) % 7 + number
    return values > 4 if kind == "bool" else values.to(getattr(torch, kind))


def as_float(x: Any) -> Any:
    return (x.real if x.is_complex() else x).to(torch.float64)


def look(scale: float, x: Any) -> tuple[Any, ...]:
    """Return a sum, the elements of what came as bytes, and the length of the name of its dtype."""
    return as_float(x).sum() * scale, x.contiguous().view(torch.uint8).clone(), float(len(str(x.dtype)))


def make(rt: Any) -> Any:
    return rt.function(look, bcast_inputs="scale", outputs=("sum", "gather", "max"), framework="torch")


def check(result: Any, scale: float, x: Any) -> None:
    torch.testing.assert_close(result[0], as_float(x).sum() * scale)
    assert type(result[0]) is type(result[1]) is torch.Tensor
    assert torch.equal(result[1], x.contiguous().view(torch.uint8))
    assert result[2] == len(str(x.dtype))


@pytest.mark.parametrize("where", [1, 2, "inline"])
def test_tensors_of_any_dtype_and_arrays_of_the_same_bytes(subtests: Any, shared_runtimes: Any, where: Any) -> None:
    f = make(shared_runtimes[where])
    for turn, kind in itertools.product(range(3), KINDS):
        with subtests.test(turn=turn, kind=kind):
            for k in range(1 + 2 * turn):
                x = rows(kind, k)
                check(f(k * 0.5, x), k * 0.5, x)
                check(f.submit(2.0, x).result(), 2.0, x)
                if kind in HAVE_NUMPY:
                    check(f(2.0, x.numpy()), 2.0, x)


def test_tensors_that_cannot_travel_are_refused_as_at_a_first_call(subtests: Any, shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    x = rows("float32", 0)
    wrong = {
        "a gradient": x.clone().requires_grad_(),
        "a parameter": torch.nn.Parameter(x),
        "sparse": x.to_sparse(),
        "meta": x.to("meta"),
        "bfloat16 with a gradient": rows("bfloat16", 0).requires_grad_(),
    }
    for name, each in wrong.items():
        messages = []
        for count in (0, 4):
            with subtests.test(name, count=count):
                f = make(rt)
                for _ in range(count):
                    check(f(1.0, x.to(each.dtype)), 1.0, x.to(each.dtype))
                sent = rt.counters["messages_down"]
                with pytest.raises(TypeError) as caught:
                    f(1.0, each)
                messages.append(str(caught.value))
                assert rt.counters["messages_down"] == sent
                assert messages[0] == messages[-1]


VIEWS: list[Callable[[Any], Any]] = [
    lambda x: x, lambda x: x.conj(), lambda x: x.conj().imag, lambda x: x.real, lambda x: x[:, ::2],
    lambda x: x.T.contiguous().T, lambda x: x[:1].expand(8, 6), lambda x: x.flip(0),
]  # fmt: skip


def test_any_strides_and_lazy_values(subtests: Any, shared_runtimes: Any) -> None:
    f = shared_runtimes[2].function(lambda x: as_float(x).sum(0), outputs="sum", framework="torch")
    base = torch.arange(48.0).reshape(8, 6) + 1j * torch.arange(48.0).reshape(8, 6)
    for (number, view), k in itertools.product(enumerate(VIEWS), range(5)):
        with subtests.test(view=number, k=k):
            x = view(base + k)
            torch.testing.assert_close(f(x), as_float(x.resolve_conj().resolve_neg()).sum(0))


ROUNDED = list(itertools.product(["float16", "float32", "bfloat16"], ["avg", "sum"], [1, 100_000], [True, False]))


def test_slices_and_ranks_round_once(subtests: Any, shared_runtimes: Any) -> None:
    """16-bit floats rounded on each rank and again over the ranks would be another number in a quarter of the cases.

    Of seven rows in two slices per rank. The oracle is torch's float32 arithmetic on the values of all slices.
    """

    def half(x: Any) -> Any:
        return x.float().mean(0).to(x.dtype)

    for dtype, op, size, is_serial in ROUNDED:
        with subtests.test(dtype=dtype, op=op, size=size, is_serial=is_serial):
            x = torch.from_numpy(np.random.default_rng(0).normal(size=(7, size))).to(getattr(torch, dtype))
            f = shared_runtimes[2].function(half, outputs=op, framework="torch")
            ranks = [x] if is_serial else [x[:4], x[4:]]
            on_ranks = []
            for rank in ranks:
                slices = rank.tensor_split(2)
                on_ranks.append(sum(half(part).float() * (len(part) if op == "avg" else 1) for part in slices))
            expected = sum(on_ranks) / (7 if op == "avg" else 1)
            for _ in range(2):
                result = (f.serial if is_serial else f)(x, num_slices=2)
                assert torch.equal(result, expected.to(x.dtype))


# ----- any sequence

HOWS = ("", "", "", "keep", "drop", "write", "assign", "raise", "other")


@pytest.mark.parametrize("framework", [None, "torch"])
@pytest.mark.parametrize("where", [1, 2, "inline"])
@pytest.mark.parametrize("seed", seeds(1, 8))
def test_any_sequence_of_calls_equals_numpy(shared_runtimes: Any, where: Any, seed: int, framework: str | None) -> None:
    """Tensors, arrays, Data, numbers, batches, submitted or not; functions write, keep, assign and return others."""
    rt = shared_runtimes[where]
    rng = np.random.default_rng(seed)
    kept: list[Any] = []
    w = rt.shared(np.zeros(3))

    def act(how: str, scale: float, x: Any) -> tuple[Any, Any]:
        kept[:] = [each for each in kept if how != "drop"]
        assert all(np.array_equal(np.asarray(each), value) for each, value in kept)
        if how == "keep":
            kept.append((x, np.asarray(x).copy()))
        if how == "write":
            x += 1
        if how == "assign":
            w.value = w.value + 1
        if how == "raise":
            raise LookupError(how)
        first = (x * scale).sum(0)
        return (first if how != "other" else first.reshape(3, 1)), x.mean(0)

    options = {"bcast_inputs": ("how", "scale"), "outputs": ("sum", "avg"), "framework": framework}
    functions = [rt.function(act, **options) for _ in range(2)]
    data, count = rt.data(np.zeros((8, 3))), 0
    for _ in range(120):
        how, scale = str(rng.choice(HOWS)), (2, 0.5)[rng.integers(2)]
        if how == "write" and framework is None:  # arrays are read-only
            continue
        x = rng.normal(size=(rng.choice([8, 8, 8, 20_000]), 3))
        kind = rng.integers(1 if how == "keep" else 0, 4)  # what is kept of Data follows it, by contract
        x = x.astype(np.float32) if kind == 3 else x
        if kind == 0:
            data.set_value(x)
        passed = (data, torch.from_numpy(x.copy()), x.copy(), x.copy())[kind]
        passed = passed if framework or kind != 1 else x
        batch = [None, 5, slice(1, 7), [3, 1, 7]][rng.integers(4)]
        rows = x if batch is None else x[:batch] if batch == 5 else x[batch]
        f = functions[rng.integers(2)]
        call = f if rng.random() < 0.7 else lambda *args, f=f, **options: f.submit(*args, **options).result()
        if how == "raise":
            with pytest.raises(LookupError, match="raise"):
                call(how, scale, passed, batch=batch)
            continue
        total, mean = call(how, scale, passed, batch=batch)
        rows = rows + (how == "write")
        tolerance = {"rtol": 1e-3, "atol": 1e-2} if kind == 3 else {"rtol": 1e-9, "atol": 1e-9}
        expected = (rows * scale).sum(0)
        np.testing.assert_allclose(total, expected.reshape(3, 1) if how == "other" else expected, **tolerance)
        np.testing.assert_allclose(mean, rows.mean(0), **tolerance)
        np.testing.assert_array_equal(np.asarray(passed), x)
        count += how == "assign"
        assert w.value.tolist() == [count] * 3
