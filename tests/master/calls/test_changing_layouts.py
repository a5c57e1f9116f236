"""Calls whose outputs change their layout while their arguments change, too: every one computes with its own."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from support.seeds import seeds


def some_outputs(x: Any, n: Any = 1, tag: Any = "") -> Any:
    """Return an array whose length depends on the first row, or a text."""
    total = float(np.asarray(x, np.float64).sum()) * n
    size = 2 + int(x[0]) % 3
    return f"{total} {size}" if tag == "text" else np.full(size, total, np.float32 if int(x[0]) % 2 else np.float64)


def expected(num_workers: int, x: np.ndarray, n: Any, tag: Any) -> list[Any]:
    return [some_outputs(part, n, tag) for part in np.array_split(x, num_workers)]


def as_text(results: Any) -> str:
    return repr([(str(getattr(each, "dtype", "")), np.asarray(each).tolist()) for each in results])


def test_a_layout_that_changes_does_not_mix_up_the_arguments(shared_runtimes: Any) -> None:
    """The call that fitted had forgotten its arguments, and was compiled without them: 768 for 256."""
    for submitted in (False, True):
        f = shared_runtimes[2].function(
            lambda x, n=1: np.zeros(3 if x[0] > 100 else 2) + x.sum() * n, bcast_inputs="n", outputs="sum"
        )
        call = (lambda *args, f=f: f.submit(*args).result()) if submitted else f
        for _ in range(4):
            np.testing.assert_array_equal(call(np.ones(256), 3), [768.0] * 2)
        np.testing.assert_array_equal(call(np.full(256, 101.0), 3), [101 * 768.0] * 3)
        np.testing.assert_array_equal(call(np.ones(256, np.uint8)), [256.0] * 2)
        np.testing.assert_array_equal(call(np.ones(256), 3), [768.0] * 2)


@pytest.mark.parametrize("seed", seeds(1, 12))
@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_random_layouts_and_arguments(shared_runtimes: Any, num_workers: int, seed: int) -> None:
    rng = random.Random(seed * 10 + num_workers)
    f = shared_runtimes[num_workers].function(some_outputs, bcast_inputs=("n", "tag"), outputs=None)
    in_flight: list[tuple[Any, Any]] = []
    x, n, tag = np.ones(256), 3, ""
    for _ in range(60):
        if rng.random() < 0.5:
            length = rng.choice([256, 256, 256, num_workers, 64])
            x = np.full(length, rng.choice([0, 1, 2, 3, 101])).astype(
                rng.choice([np.float64, np.float64, np.uint8, np.int64])
            )
        if rng.random() < 0.3:
            n = rng.choice([1, 3, 3.5, True])
        if rng.random() < 0.2:
            tag = rng.choice(["", "text", "other"])
        args: tuple[Any, ...] = rng.choice([(x, n, tag), (x, n, tag), (x, n), (x,)])
        kwargs = {"tag": tag} if len(args) == 2 and rng.random() < 0.5 else {}
        bound = {"n": 1, "tag": "", **dict(zip(("n", "tag"), args[1:])), **kwargs}
        want = as_text(expected(num_workers, x, bound["n"], bound["tag"]))
        if rng.random() < 0.4:
            in_flight.append((f.submit(*args, **kwargs), want))
        else:
            assert as_text(f(*args, **kwargs)) == want
        if len(in_flight) > 3 or (in_flight and rng.random() < 0.4):
            pending, want = in_flight.pop(0)
            assert as_text(pending.result()) == want
    for pending, want in in_flight:
        assert as_text(pending.result()) == want
