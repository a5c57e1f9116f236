"""On the torch backend, functions that name no library may use NumPy's names: they mean what they do in NumPy."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.seeds import drawn

NAMES = ("std", "var", "np.std", "np.var")
OPTIONS: tuple[dict[str, Any], ...] = ({}, {"ddof": 1}, {"ddof": 0}, {"keepdims": True}, {"dtype": "float32"})
AXES = (None, 0, 1, -1, (0, 1))
DTYPES = ("float64", "float32", "int64", "complex128")


def spread(x: Any, name: str, axis: Any, options: dict[str, Any]) -> Any:
    if name.startswith("np."):
        return getattr(np, name.removeprefix("np."))(x, axis=axis, **options)
    return getattr(x, name)(axis=axis, **options) if axis is not None else getattr(x, name)(**options)


def test_std_and_var_have_numpys_ddof_and_torchs_keep_theirs(runtime: Callable[..., Any], subtests: Any) -> None:
    """Torch's names, and functions for torch, mean what they do in torch."""
    torch = pytest.importorskip("torch")
    rt = runtime(2, backend="torch", devices=["cpu", "cpu"])
    f = rt.function(spread, bcast_inputs=("name", "axis", "options"), outputs=None)
    table = np.random.default_rng(0).normal(size=(9, 5)) * 10
    for name, axis, options, dtype in drawn(itertools.product(NAMES, AXES, OPTIONS, DTYPES), False, 60):
        if dtype == "complex128" and "dtype" in options:
            continue
        with subtests.test(name=name, axis=axis, options=options, dtype=dtype):
            x = table.astype(dtype)
            for got, part in zip(f(x, name, axis, options), np.array_split(x, 2)):
                expected = spread(part, name, axis, options)
                assert str(got.dtype).removeprefix("torch.") == str(expected.dtype)
                np.testing.assert_allclose(got.numpy(), expected, 1e-5)
    x = torch.arange(8.0).reshape(2, 4)
    own: tuple[Callable[[Any], Any], ...] = (
        lambda x: x.std(dim=1), lambda x: x.var(1, unbiased=True), lambda x: x.std(1, keepdim=True)[:, 0],
        lambda x: x.std(1, correction=1), lambda x: torch.std(x, 1),
    )  # fmt: skip
    for fn in own:
        torch.testing.assert_close(rt.function(fn, outputs="gather")(x), fn(x))
    named = rt.function(lambda x: x.std(1), outputs="gather", framework="torch")
    torch.testing.assert_close(named(x), x.std(1))


def repeated(x: Any, args: Any, kind: str) -> Any:
    return x.repeat(*args) if kind == "x" else np.repeat(x, *args)


def test_repeat_has_numpys_meaning(runtime: Callable[..., Any], subtests: Any) -> None:
    """Of elements, along an axis or of the flat array; three sizes, and functions for torch, are torch's."""
    torch = pytest.importorskip("torch")
    rt = runtime(1, backend="torch", devices=["cpu"])
    x = np.arange(6.0).reshape(2, 3)
    for args in ((2,), (2, 0), (2, 1), (3, -1), ([1, 2, 0], 1), ([2], None), (range(6),)):
        for kind in ("x", "np"):
            with subtests.test(args=args, kind=kind):
                f = rt.function(repeated, bcast_inputs=("args", "kind"), outputs=None)
                (got,) = f(x, args, kind)
                np.testing.assert_array_equal(np.asarray(got), x.repeat(*args))
    tensor = torch.from_numpy(x)
    (got,) = rt.function(lambda x: x.repeat(2, 1, 1), outputs=None)(x)
    assert torch.equal(got, tensor.repeat(2, 1, 1))
    (got,) = rt.function(lambda x: x.repeat(2, 1), outputs=None, framework="torch")(x)
    assert torch.equal(got, tensor.repeat(2, 1))
