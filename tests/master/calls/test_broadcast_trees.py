"""Broadcast arguments with arrays in dicts, lists, tuples and dataclasses: what the plain function gets, and quick."""

from __future__ import annotations

import collections
import dataclasses
import random
from typing import Any

import numpy as np
import pytest
import torch
from support.seeds import seeds

import synk
from synk._pure.nested import LEAF, build, take_apart_whole

X = np.arange(12.0).reshape(6, 2)
Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Layer:
    weight: Any
    bias: Any = 0.0

    def __post_init__(self) -> None:
        self.made = "by its constructor"

    def scaled(self) -> Any:
        return self.weight * 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    weight: Any


class Custom(dict):  # type: ignore[type-arg]
    """A dict of which a pickle keeps more than its items."""


def told(value: Any) -> Any:
    """Return all that can be told of a value, down to dtypes and classes."""
    if isinstance(value, (np.ndarray, np.generic)):
        return type(value).__name__, value.dtype.str, value.shape, value.tolist()
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), value.float().tolist()
    if isinstance(value, dict):
        return type(value).__name__, [(key, told(part)) for key, part in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [told(part) for part in value]
    if dataclasses.is_dataclass(value):
        return type(value).__name__, [(key, told(part)) for key, part in vars(value).items()]
    return type(value).__name__, repr(value)


def asked(rt: Any, **options: Any) -> Any:
    return rt.function(lambda p, x: told(p), bcast_inputs="p", outputs="first", **options)


CONTAINERS = ("dict", "list", "tuple", "pair", "layer", "frozen", "custom")


def made(draw: random.Random, depth: int = 3) -> Any:
    """Return a random nesting, with arrays and without."""
    kind = draw.choice((*CONTAINERS, "array", "array", "array", "scalar", "text", "none", "numbers"))
    if depth == 0 and kind in CONTAINERS:
        kind = "array"
    parts = [made(draw, depth - 1) for _ in range(draw.randrange(4))] if depth else []
    dtype = draw.choice(["f8", "f4", "i4", "?", "c16", "U3", "M8[s]"])
    return {
        "dict": lambda: {draw.choice(["a", "b", "c", 1, (2, 3)]): part for part in parts},
        "list": lambda: parts,
        "tuple": lambda: tuple(parts),
        "pair": lambda: Pair(made(draw, depth - 1), 1),
        "layer": lambda: Layer(made(draw, depth - 1), 2.5),
        "frozen": lambda: Frozen(made(draw, depth - 1)),
        "custom": lambda: Custom(a=made(draw, depth - 1)),
        "array": lambda: np.zeros(draw.choice([(), (0,), (3,), (2, 2)])).astype(dtype),
        "scalar": lambda: np.float32(draw.random()),
        "text": lambda: "x" * draw.randrange(400),
        "none": lambda: None,
        "numbers": lambda: [1, 2.5, True],
    }[kind]()


@pytest.mark.parametrize("seed", seeds(4, 60))
def test_a_function_gets_what_was_passed(shared_runtimes: Any, seed: int) -> None:
    draw = random.Random(seed)
    f = asked(shared_runtimes[2])
    for _ in range(4):
        value = made(draw)
        for _ in range(3):
            assert f(value, X) == told(value)
        assert f.submit(value, X).result() == f.serial(value, X) == f(value, X, num_slices=2) == told(value)


@pytest.mark.parametrize("seed", seeds(20, 200))
def test_what_is_taken_apart_is_built_again(seed: int) -> None:
    value = made(random.Random(seed), 4)
    leaves, structure = take_apart_whole(value)
    assert told(build(structure, iter(leaves))) == told(value)


def test_parameters_are_as_quick_as_arrays(shared_runtimes: Any) -> None:
    """Nothing of them is bound again, however many there are and whatever they hold."""
    rt = shared_runtimes[2]
    f = rt.function(lambda p, x: sum(w.sum() for w in p["layers"]) + p["rate"], bcast_inputs="p", outputs="first")
    layers = [np.full(3, float(k)) for k in range(50)]
    for k in range(3):
        f({"layers": layers, "rate": float(k)}, X)
    before = f._callee.record.num_new
    for k in range(5):
        layers[k] = layers[k] + 1  # another array
        layers[0] += 1  # the same one, changed in place
        assert f({"layers": layers, "rate": float(k)}, X) == sum(w.sum() for w in layers) + k
    assert f._callee.record.num_new == before


def test_another_shape_structure_or_class_is_seen(shared_runtimes: Any) -> None:
    f = asked(shared_runtimes[2])
    a, b = np.ones(2), np.ones(3)
    values = [{"a": a}, {"a": b}, {"b": a}, [a], (a,), Layer(a), Pair(a, 1), {"a": [a]}, {"a": a, "n": 1}, {"a": None}]
    for value in values * 2:
        for _ in range(3):
            assert f(value, X) == told(value)


def test_a_class_that_is_changed_in_place_is_seen(shared_runtimes: Any) -> None:
    @dataclasses.dataclass
    class Own:
        w: Any

        def value(self) -> Any:
            return self.w * 2

    f = shared_runtimes[2].function(lambda p, x: p.value(), bcast_inputs="p", outputs="first")
    w = np.ones(2)
    for _ in range(4):
        assert f(Own(w), X).tolist() == [2, 2]
    Own.value = lambda self: self.w * 3  # type: ignore[method-assign]
    for _ in range(4):
        assert f(Own(w), X).tolist() == [3, 3]


def test_an_object_keeps_what_its_constructor_does_not_take(shared_runtimes: Any) -> None:
    layer = Layer(np.ones(2))
    layer.extra = np.zeros(1)  # type: ignore[attr-defined]
    f = shared_runtimes[2].function(
        lambda p, x: repr((p.made, p.extra.tolist(), p.scaled().tolist())), bcast_inputs="p", outputs="first"
    )
    for _ in range(3):
        assert f(layer, X) == repr(("by its constructor", [0.0], [2.0, 2.0]))


def test_an_array_in_two_places_is_one_there_too(shared_runtimes: Any) -> None:
    w = np.ones(2)
    f = shared_runtimes[2].function(lambda p, x: p["a"] is p["b"], bcast_inputs="p", outputs=None)
    for _ in range(3):
        assert f({"a": w, "b": w}, X) == [True, True]


def test_what_holds_itself_is_refused_or_sent_as_ever(shared_runtimes: Any) -> None:
    value: dict[str, Any] = {"a": np.ones(1)}
    value["self"] = value
    f = shared_runtimes[2].function(lambda p, x: p["self"] is p, bcast_inputs="p", outputs=None)
    assert f(value, X) == [True, True]


def test_what_a_function_writes_into_parameters_is_its_own(shared_runtimes: Any) -> None:
    params = {"w": np.zeros(2), "layers": [np.zeros(1)]}

    def bump(p: Any, x: Any) -> Any:
        p["w"] = p["w"] + 1
        p["layers"].append(1)
        return p["w"].copy()

    f = shared_runtimes[2].function(bump, bcast_inputs="p", outputs="first")
    for _ in range(4):
        assert f(params, X).tolist() == [1, 1]
    assert params["w"].tolist() == [0, 0] and len(params["layers"]) == 1


def test_what_a_function_keeps_of_parameters_stays_as_it_was(shared_runtimes: Any) -> None:
    kept: list[Any] = []

    def keep(p: Any, x: Any) -> Any:
        kept.append(p["w"])
        return [each.tolist() for each in kept]

    f = shared_runtimes[2].function(keep, bcast_inputs="p", outputs="first")
    for k in range(4):
        found = f({"w": np.full(2, float(k))}, X)
    assert found == [[float(k)] * 2 for k in range(4)]


@pytest.mark.parametrize("framework", [None, "torch"])
def test_tensors_among_them(shared_runtimes: Any, framework: str | None) -> None:
    f = asked(shared_runtimes[2], framework=framework)
    tensors = {"w": torch.ones(3), "h": torch.ones(2, dtype=torch.bfloat16), "list": [torch.zeros(1)], "k": 3}
    for k in range(4):
        tensors["w"] = tensors["w"] + k
        assert f(tensors, X) == told(tensors)
    with pytest.raises(TypeError, match=r"p\['w'\] of .*requires grad"):
        f({"w": torch.ones(1, requires_grad=True)}, X)


def test_arrays_become_the_frameworks_as_alone(shared_runtimes: Any) -> None:
    f = asked(shared_runtimes[2], framework="torch")
    for _ in range(3):
        assert f({"w": np.ones(3), "more": [np.zeros(2)]}, X) == told(
            {"w": torch.ones(3).double(), "more": [torch.zeros(2).double()]}
        )


def test_what_lives_on_the_workers_is_no_leaf(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    f = asked(rt)
    for value in (rt.shared(np.ones(2)), rt.data(np.ones(2))):
        with pytest.raises(synk.errors.SerializationError):
            f({"w": np.ones(2), "there": value}, X)
    assert f({"w": np.ones(2)}, X) == told({"w": np.ones(2)})


def test_a_leaf_that_cannot_be_sent_is_named(shared_runtimes: Any) -> None:
    f = asked(shared_runtimes[2])
    with pytest.raises(synk.errors.SerializationError, match=r"p\['bad'\]"):
        f({"w": np.ones(2), "bad": (n for n in range(3))}, X)


def test_views_masks_and_maps_of_files(shared_runtimes: Any, tmp_path: Any) -> None:
    f = asked(shared_runtimes[2])
    np.save(tmp_path / "a.npy", np.arange(4.0))
    plain = {"view": np.arange(8.0)[::2], "order": np.asfortranarray(np.ones((2, 3)))}
    for _ in range(3):
        assert f(plain, X) == told(plain)
    file = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert f({"file": file, "w": np.ones(1)}, X) == told({"file": np.asarray(file), "w": np.ones(1)})
    masked = np.ma.masked_array([1.0, 2.0], [True, False])
    g = shared_runtimes[2].function(lambda p, x: type(p["m"]).__name__, bcast_inputs="p", outputs="first")
    assert g({"m": masked, "w": np.ones(1)}, X) == "MaskedArray"


def test_inline_and_one_worker(shared_runtimes: Any) -> None:
    for kind in ("inline", 1):
        f = asked(shared_runtimes[kind])
        for _ in range(3):
            assert f({"w": [np.ones(2), "text"]}, X) == told({"w": [np.ones(2), "text"]})


def test_without_arrays_it_is_one_leaf() -> None:
    assert take_apart_whole({"a": [1, 2, {"b": "c"}]})[1] is LEAF
