"""Repeated calls of functions of torch: tensors in, tensors out, whatever changed since the call before.

The oracle is torch itself, on the whole input.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from support.seeds import seeds

torch = pytest.importorskip("torch")


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
