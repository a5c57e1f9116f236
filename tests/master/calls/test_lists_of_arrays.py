"""One rule for lists: a list of arrays is refused where rows are divided, for it can mean rows or structure.

Each verb meets each kind of list. What is accepted is compared with the plain function.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import synk
import synk.torch

torch = pytest.importorskip("torch")

X = np.arange(12.0).reshape(6, 2)
T = torch.arange(12.0).reshape(6, 2)

REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "arrays": (lambda: [X, X + 1], "got a list of arrays"),
    "one array": (lambda: [X], "got a list of arrays"),
    "arrays of other lengths": (lambda: [X, X[:2]], "got a list of arrays"),
    "tensors": (lambda: [T, T + 1], "got a list of tensors"),
    "tuples of arrays": (lambda: [(X, X), (X, X)], "got a list of arrays"),
    "lists of arrays": (lambda: [[X, X], [X, X]], "got a list of arrays"),
    "dicts of tensors": (lambda: [{"x": T}, {"x": T}], "got a list of tensors"),
    "an array beside numbers": (lambda: [1.0, X], "got a list of arrays"),
    "deque of arrays": (lambda: collections.deque([X, X]), "got a deque of arrays"),
}
ROWS: dict[str, Callable[[], Any]] = {
    "numbers": lambda: [3.0, 1.0, 2.0],
    "lists of numbers": lambda: [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]],
    "records": lambda: [(1.0, 2.0), (3.0, 4.0), (5.0, 6.0)],
    "numbers of NumPy": lambda: [np.float64(1.0), np.float64(2.0), np.float64(4.0)],
    "arrays without axes": lambda: [np.array(1.0), np.array(2.0), np.array(4.0)],
    "tensors without axes": lambda: [torch.tensor(1.0), torch.tensor(2.0), torch.tensor(4.0)],
}

VERBS: dict[str, Callable[[Any, Any], Any]] = {
    "call": lambda f, value: f(value),
    "submit": lambda f, value: f.submit(value).result(),
    "serial": lambda f, value: f.serial(value),
    "rows": lambda f, value: sum(f.rows(value, batch_size=2)),
}


def total(x: Any) -> Any:
    return np.asarray(x).sum()


@pytest.mark.sampled(20)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", REFUSED)
def test_a_list_of_arrays_is_refused_before_anything_is_sent(shared_runtimes: Any, verb: str, kind: str) -> None:
    rt = shared_runtimes[2]
    f = rt.function(total, outputs="sum")
    f(X)  # sends the function, and what earlier tests have dropped
    before = rt.counters["messages_down"]
    make, text = REFUSED[kind]
    for wrap, place in ((lambda value: value, "x"), (lambda value: {"a": value, "b": X}, "x['a']")):
        with pytest.raises(TypeError, match=text) as caught:
            VERBS[verb](f, wrap(make()))
        stack = "torch.stack" if "tensors" in text else "np.stack"
        assert f"{place} of 'total'" in str(caught.value)
        assert f"{stack}({place}) if" in str(caught.value)
        assert f"tuple({place}) to divide" in str(caught.value)
        assert ("total(*x) if" in str(caught.value)) == (place == "x" and verb != "rows")
    assert rt.counters["messages_down"] == before


@pytest.mark.sampled(20)
@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("kind", ROWS)
def test_a_list_of_numbers_or_records_is_rows(shared_runtimes: Any, verb: str, kind: str) -> None:
    value = ROWS[kind]()
    f = shared_runtimes[2].function(total, outputs="sum")
    assert VERBS[verb](f, value) == total(value)


def test_what_the_error_names_gives_what_the_plain_function_gives(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    pair = [X, X + 1]

    def spread(parts: Any) -> Any:
        return parts[0].mean() - parts[-1].mean()

    assert rt.function(spread)(tuple(pair)) == spread(pair)
    assert rt.function(lambda x: x.mean())(np.stack(pair)) == np.mean(pair)
    assert rt.function(lambda x, y: x.mean() - y.mean())(*pair) == spread(pair)


@pytest.mark.parametrize("kind", REFUSED)
def test_data_has_no_structure(shared_runtimes: Any, kind: str) -> None:
    rt = shared_runtimes[2]
    make, text = REFUSED[kind]
    for value in (make(), tuple(make())):
        with pytest.raises(TypeError, match=text if value is not tuple(value) else "got a tuple") as caught:
            rt.data(value)
        assert ".stack(...) if each of them is one row." in str(caught.value)
        with pytest.raises(TypeError, match=r" of (arrays|tensors), which can mean rows or structure"):
            rt.data(np.zeros((2, 6, 2))).set_value(value)


@pytest.mark.parametrize("kind", ROWS)
def test_data_of_a_list_of_numbers(shared_runtimes: Any, kind: str) -> None:
    value = ROWS[kind]()
    np.testing.assert_array_equal(shared_runtimes[2].data(value), np.asarray(value))


def test_lists_that_are_not_divided_stay_what_they_are(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    pair = [X, X + 1]

    def spread(parts: list[Any]) -> Any:
        assert type(parts) is list
        return parts[0].mean() - parts[-1].mean()

    assert list(rt.map(spread, [pair, pair])) == [spread(pair)] * 2, "the items of a map"
    assert list(rt.map(np.mean, pair)) == [X.mean(), X.mean() + 1], "the iterable of a map"
    whole = rt.function(lambda parts, x: spread(parts) + 0 * x.mean(), bcast_inputs="parts")
    assert whole(pair, X) == spread(pair)
    assert rt.function(lambda x: spread(pair) + 0 * x.mean())(X) == spread(pair), "captured"
    assert [len(rank) for rank in rt.function(lambda x: [x, x + 1], outputs=None)(X)] == [2, 2], "returned"
    f = rt.function(lambda x, y: (x * y).sum(), outputs="sum")
    assert list(f.stream([[X, X + 1], [X, X]])) == [(X * (X + 1)).sum(), (X * X).sum()], "a batch of a loader"
    with pytest.raises(TypeError, match="cannot scatter y of 'f': got a list of arrays"):
        list(rt.function(lambda x, y: 0.0, name="f").stream([(X, pair)]))


def test_steps_of_training(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    model = torch.nn.Linear(2, 1)
    rep = synk.torch.replicate(model, runtime=rt)
    step = rep.function(lambda model, pair: model(pair[0]).mean(), name="step")
    pairs = rep.function(lambda model, x, y: ((model(x) - y) ** 2).mean(), name="pairs")
    for call in (step, step.submit, step.serial):
        with pytest.raises(TypeError, match=r"cannot scatter pair of 'step': got a list of tensors.*step\(\*pair\)"):
            call([T, T])
    batch = [T, T[:, :1]]
    assert float(pairs(*batch)) == pytest.approx(((model(batch[0]) - batch[1]) ** 2).mean().item())


def test_data_parallel(shared_runtimes: Any) -> None:
    class Both(torch.nn.Module):
        def forward(self, parts: Any, scale: Any = None) -> Any:
            return parts[0] + parts[1] * (1.0 if scale is None else scale[0])

    model = synk.torch.DataParallel(Both(), runtime=shared_runtimes[2])
    with pytest.raises(
        TypeError, match=r"cannot scatter args\[0\] of 'Both': got a list of tensors.*model\(\*args\[0\]"
    ):
        model([T, T])
    with pytest.raises(TypeError, match=r"cannot scatter parts\['a'\] of 'Both': got a list of arrays"):
        model(T, parts={"a": [X]})
    assert torch.equal(model((T, T)), T + T)
    assert torch.equal(model((T, T), [2.0]), T + 2 * T), "numbers go whole to each rank"
    whole = synk.torch.DataParallel(Both(), bcast_inputs="scale", runtime=shared_runtimes[2])
    assert torch.equal(whole((T, T), [torch.ones(2)]), T + T)
