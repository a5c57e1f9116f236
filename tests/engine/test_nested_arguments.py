"""Arguments of dicts, tuples, dataclasses: each rank gets the same nesting with its rows, or whole where broadcast.

The oracle is plain Python: the nesting itself, with the rows that NumPy picks.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import random
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime, time, timedelta, timezone
from decimal import Decimal
from typing import Any, ClassVar, NamedTuple

import numpy as np
import pytest
from support.rank_arrays import picked, told
from support.saboteurs import AtPickle, raise_value_error
from support.tables import WHOLE_OR_SAMPLE, named

from synk.errors import SerializationError

WHERE = (1, 2, 3, 0)
X = np.arange(6.0)


class Pair(NamedTuple):
    """A named tuple."""

    x: Any
    y: Any


class Point(tuple):  # type: ignore[type-arg]
    """Built from its elements, where most classes of tuples are built from one sequence."""

    def __new__(cls, *elements: Any) -> Any:
        return tuple.__new__(cls, elements)

    def __getnewargs__(self) -> Any:
        return tuple(self)


class Other(Point):
    """What is known of a class is remembered, so this one is met at another length first."""


@dataclasses.dataclass
class Batch:
    """A dataclass that knows how many rows it has."""

    x: Any
    y: Any = None
    name: str = "train"
    num_rows: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.num_rows = len(self.x)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Frozen:
    """A dataclass with all that makes one hard to build."""

    x: Any
    scale: float = 2.0


class Records(dict):  # type: ignore[type-arg]
    """A dict whose keys are attributes as well."""

    def __getattr__(self, name: str) -> Any:
        return of_key(self, name)


class Encoding(UserDict):  # type: ignore[type-arg]
    """As the batches of Hugging Face."""

    def __getattr__(self, name: str) -> Any:
        return of_key(vars(self).get("data", {}), name)


def of_key(items: Any, name: str) -> Any:
    if name in items:
        return items[name]
    raise AttributeError(name)


# -- any nesting ------------------------------------------------------------------------------------------------------

SINGLE = (None, "text", b"bytes", 3, True, 0.5, np.float32(0.5), np.array(4), {}, (None, {"a": None}))
"""Values without rows: they go whole to every rank."""


def nesting(draw: random.Random, rows: int, depth: int = 3, *, is_whole: bool = False) -> Any:
    """Return a random nesting of arrays with ``rows`` rows and single values; one that is not divided has lists too."""

    def part() -> Any:
        return nesting(draw, rows, depth - 1, is_whole=is_whole)

    def array(*dtypes: str, shapes: tuple[tuple[int, ...], ...] = ((), (2,), (0,), (2, 3))) -> np.ndarray:
        numbers = np.random.default_rng(draw.randrange(99)).integers(0, 100, (rows, *draw.choice(shapes)))
        return numbers.astype(draw.choice(dtypes or ("f8", "f4", "i4", "?", "U3", "c8", "M8[s]")))

    leaves = [
        *[array] * 3,
        lambda: array("f8", "i8", "?", "U3", shapes=((),)).tolist(),
        lambda: draw.choice(SINGLE),
    ]
    containers: list[Callable[[], Any]] = [
        lambda: {draw.choice(("a", "b", 1, (2, 3), True)): part() for _ in range(draw.randrange(4))},
        lambda: (array(), *(part() for _ in range(draw.randrange(3)))),
        lambda: OrderedDict(y=part(), x=part()),
        lambda: defaultdict(list, x=part()),
        lambda: Records(a=part(), b=part()),
        lambda: Encoding({"x": part()}),
        lambda: Pair(part(), part()),
        lambda: Batch(array(), part()),
        lambda: Frozen(x=part()),
    ]
    if is_whole:
        containers.append(lambda: [part() for _ in range(draw.randrange(4))])
        leaves.append(lambda: np.asfortranarray(np.arange(12.0).reshape(3, 4)[::2]))
    return draw.choice((*containers, *leaves) if depth else leaves)()


def with_rows(value: Any, rows: Any) -> Any:
    """Return a nesting with the given rows of its leaves, as plain Python would take them."""
    if isinstance(value, list) or (isinstance(value, np.ndarray) and value.ndim):
        return np.asarray(value)[rows]
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return dataclasses.replace(value, **{name: with_rows(getattr(value, name), rows) for name in names})  # type: ignore[type-var]
    if isinstance(value, Mapping):
        again: Any = copy.copy(value)
        for key, part in value.items():
            again[key] = with_rows(part, rows)
        return again
    if isinstance(value, tuple):
        parts = [with_rows(part, rows) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    return value


@pytest.mark.parametrize("is_whole", WHOLE_OR_SAMPLE)
def test_each_rank_gets_the_nesting_with_its_rows(shared_runtimes: Any, subtests: Any, is_whole: bool) -> None:
    """One function meets all of them, each of them twice by the plan of the first."""
    functions = {where: shared_runtimes[where].function(told, outputs=None) for where in WHERE}
    for seed in range(1000 if is_whole else 40):
        draw = random.Random(seed)
        where, rows = draw.choice(WHERE), draw.randrange(1, 8)
        value = {"rows": np.arange(rows), "value": nesting(draw, rows)}
        batch = draw.choice((None, None, rows - 1 or None, slice(None, None, -1), [0, rows - 1, 0], [True] * rows))
        batch = np.array(batch) if batch == [True] * rows else batch
        positions = picked(batch, np.arange(rows))
        with subtests.test(seed=seed, where=where, batch=str(batch)):
            shares = np.array_split(positions, 1 if where == 0 else where)
            expected = [told(with_rows(value, share)) if len(share) else None for share in shares]
            f = functions[where]
            for _ in range(2):
                assert f(value, batch=batch) == expected
            assert f.submit(value, batch=batch).result() == expected
            assert f.serial(value, batch=batch)[0] == told(with_rows(value, positions))


@pytest.mark.parametrize("is_whole", WHOLE_OR_SAMPLE)
def test_a_broadcast_argument_comes_as_it_is(shared_runtimes: Any, subtests: Any, is_whole: bool) -> None:
    def look(p: Any, x: Any) -> Any:
        return told(p)

    functions = {where: shared_runtimes[where].function(look, bcast_inputs="p", outputs="first") for where in WHERE}
    for seed in range(500 if is_whole else 28):
        draw = random.Random(seed)
        where, value = draw.choice(WHERE), nesting(draw, 3, is_whole=True)
        with subtests.test(seed=seed, where=where):
            for _ in range(3):
                assert functions[where](value, X) == told(value)
            f = functions[where]
            assert f.submit(value, X).result() == f.serial(value, X) == f(value, X, num_slices=2) == told(value)


A, B = np.ones(6), np.ones((6, 1))
LOOK_ALIKE: list[Any] = [
    {"a": A}, {"a": B}, {"b": A}, {"a": A, "n": 1}, {"n": 1, "a": A}, {"a": A, "n": True}, {"a": A, "n": None},
    {"a": A, "n": 2}, OrderedDict(a=A), Records(a=A), {1: A}, {True: A}, {1.0: A}, (A,), (A, A), Pair(A, A),
    {"a": (A,)}, Batch(A), Frozen(x=A), A, A.tolist(), {"a": A.tolist()}, {"a": A.astype("f4")}, {(1,): A},
    {(True,): A}, {(1, (0,)): A}, {(1, (False,)): A}, {np.str_("a"): A}, Point(A), Point(A, A), Other(A, A), Other(A),
]  # fmt: skip


class Number(int):
    """A number of another class."""


WHOLE: list[Any] = [
    10**30, "\ud800", 2j, float("inf"), np.int8(-7), np.str_("numpy"), (1, 2.0), [1, "a", [None]], "x" * 150,
    "x" * 1000, "x" * 1001, Number(3), {"lr": 0.1, "betas": (0.9, 0.99)}, np.array(4.0),
]  # fmt: skip


def test_each_call_sees_what_is_passed_this_time(shared_runtimes: Any) -> None:
    """Also the order of the keys, their types, what is None, and the class."""

    def look(p: Any, x: Any) -> Any:
        return told(p)

    divided, whole = (shared_runtimes[2].function(look, bcast_inputs=names, outputs="first") for names in ((), "p"))
    for value in (*LOOK_ALIKE, *LOOK_ALIKE[::-1]):
        for _ in range(3):
            assert divided(value, X) == told(with_rows(value, slice(3)))
    for value in (*LOOK_ALIKE, *WHOLE, *LOOK_ALIKE[::-1], *WHOLE[::-1]):
        for _ in range(2):
            assert whole(value, X) == whole.submit(value, X).result() == told(value)


class Rated:
    """A key that says itself what equals it."""

    def __init__(self, rate: float) -> None:
        self.rate = rate

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rated)

    def __hash__(self) -> int:
        return 1


rate = 1.0


def rate_of(key: Any) -> Any:
    """Return what a function can tell of a key."""
    return key() if callable(key) else getattr(key, "rate", None) or (str(key), getattr(key, "fold", None))


def test_keys_that_are_equal_are_those_of_this_call(shared_runtimes: Any, subtests: Any) -> None:
    """Functions compute with what there is now, and so do factories of missing values."""

    def current() -> float:
        return rate

    node = Rated(1.0)
    times: list[Any] = [datetime(2026, 1, 1, 12, tzinfo=timezone(timedelta(hours=h))) for h in (0, 0)]
    times += [datetime(2026, 1, 1, 13, tzinfo=timezone(timedelta(hours=1))), *(time(1, fold=k) for k in (0, 1, 0))]
    keys = [current, node, 0.0, -0.0, 0j, -0j, Decimal("1.0"), Decimal("1.00"), frozenset({1}), frozenset({True})]
    look = shared_runtimes[2].function(
        lambda p, x: [rate_of(key) for key in p] + [p.default_factory() if hasattr(p, "default_factory") else 0],
        bcast_inputs="p", outputs="first",
    )  # fmt: skip
    divided = shared_runtimes[2].function(look.__wrapped__, outputs="first")
    given = shared_runtimes[2].function(lambda p, x: {key: x.sum() for key in p}, bcast_inputs="p", outputs="sum")
    makers = (dict, lambda items: defaultdict(current, items))
    for number, (make, key) in enumerate(itertools.product(makers, [*keys, *times, Rated(2.0), current, Rated(3.0)])):
        globals()["rate"] = node.rate = float(number)
        p = make({key: A})
        with subtests.test(key=str(key), number=number, kind=type(p).__name__):
            expected = look.__wrapped__(p, A)
            assert look(p, A) == divided(p, A) == look.serial(p, A) == expected
            if key is not current:  # which has come back as a copy
                assert [rate_of(each) for each in given(p, A)] == [rate_of(key)]


@dataclasses.dataclass
class Halved:
    """Computes with what it is given."""

    x: Any
    y: Any = None
    rate = 1.0

    def __post_init__(self) -> None:
        self.x = self.x / 2


class Doubled(Halved):
    """Computes where an attribute is set."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value * 2 if name == "x" else value)


class ByKeywords(dict):  # type: ignore[type-arg]
    """As the bunches of scikit-learn. What it holds is read in its own way."""

    rate = 1.0

    def __init__(self, **items: Any) -> None:
        super().__init__({name: value + 1 for name, value in items.items()})

    def __getitem__(self, name: str) -> Any:
        return super().__getitem__(name) * 10

    def __setstate__(self, state: Any) -> None:
        """Do nothing, as theirs."""


@dataclasses.dataclass
class Counted:
    """Counts its constructions in this process."""

    x: Any
    times: dataclasses.InitVar[int] = 3
    rate: ClassVar[float] = 0.0

    def __post_init__(self, times: int) -> None:
        Counted.rate += times


class OfItems(UserDict):  # type: ignore[type-arg]
    """Its constructor computes, too."""

    rate = 1.0

    def __init__(self, items: Any) -> None:
        super().__init__({name: 2 * value for name, value in items.items()})


class Labelled(tuple):  # type: ignore[type-arg]
    """A tuple with an attribute."""

    rate = 1.0


COMPUTING: list[Callable[[], Any]] = [
    lambda: Halved(A), lambda: Halved(A, Halved(A)), lambda: Doubled(A), lambda: ByKeywords(x=A),
    lambda: OfItems({"x": A}), lambda: Labelled((A, A)), lambda: Counted(A),
]  # fmt: skip


def test_what_a_constructor_computes_is_not_computed_again(shared_runtimes: Any, subtests: Any) -> None:
    """And attributes that are no parts come along."""

    def total(p: Any) -> Any:
        x = p.x if hasattr(p, "x") else p["x"] if hasattr(p, "keys") else p[0]
        return x.sum() * getattr(p, "rate", 1.0)

    for make in COMPUTING:
        f, p = shared_runtimes[2].function(total, outputs="sum"), make()
        with subtests.test(kind=type(p).__name__):
            for number in range(3):
                assert f(p) == f.serial(p) == f(p, num_slices=2) == total(p)
                p.rate = 2.0 + number


# -- options, leaves that are not the caller's ------------------------------------------------------------------------

BATCHES = (None, 5, slice(1, 20, 3), slice(None, None, -1), [3, 3, -1, 0], np.arange(23) % 2 == 0)
KINDS = ("array", "list", "Data", "sharded")


def test_leaves_of_every_kind_with_every_option(shared_runtimes: Any, subtests: Any) -> None:
    x, y = np.random.default_rng(0).normal(size=(23, 3)), np.arange(23)

    def compute(scale: Any, fields: Any, *, extra: Any) -> Any:
        return {"rows": fields["x"] * scale + extra[1], "sum": (fields["pair"].x * extra[0][:, None]).sum(axis=0)}

    functions = {
        where: shared_runtimes[where].function(compute, bcast_inputs="scale", outputs={"rows": "gather", "sum": "sum"})
        for where in WHERE
    }
    cases = list(itertools.product(WHERE, KINDS, KINDS, range(len(BATCHES)), (1, 3)))
    for where, kind, other, number, num_slices in random.Random(0).sample(cases, 40):
        rt, batch = shared_runtimes[where], BATCHES[number]
        leaves = {"array": x, "list": x.tolist(), "Data": rt.data(x), "sharded": rt.shared(x, sharded=True)}
        arguments = (2.0, {"x": leaves[kind], "pair": Pair(leaves[other], None), "zero": rt.data(np.array(2.5))})
        rows = picked(batch, x)
        expected = compute(2.0, {"x": rows, "pair": Pair(rows, None)}, extra=(picked(batch, y), rows))
        with subtests.test(where=where, kinds=(kind, other), batch=str(batch), num_slices=num_slices):
            f = functions[where]
            for call in (f, f.serial, lambda *args, f=f, **options: f.submit(*args, **options).result()):
                result = call(*arguments, extra=(y, x), batch=batch, num_slices=num_slices)
                np.testing.assert_allclose(result["rows"], expected["rows"])
                np.testing.assert_allclose(result["sum"], expected["sum"])
    assert functions[2].verify(2.0, {"x": x, "pair": Pair(x, None)}, extra=(y, x), batch=[3, 3, -1, 0])


def test_buffers_that_are_used_again_and_shared_by_two_places(rt: Any) -> None:
    f = rt.function(
        lambda p, fields: (fields["x"] + fields["same"] + p["w"], fields["n"], p["w"] is p["again"]),
        bcast_inputs="p",
        outputs=("gather", None, None),
    )
    buffer, weight = np.zeros(100), np.zeros(())
    results, calls = [], []
    for number in range(9):
        buffer[:], weight[()] = number, number
        arguments = {"w": weight, "again": weight}, {"x": buffer, "same": buffer, "n": number}
        results.append(f(*arguments))
        calls.append(f.submit(*arguments))
        buffer[:], weight[()] = -1, -1  # what was submitted has been copied
    for number, (result, call) in enumerate(zip(results, calls)):
        for rows, names, is_one in (result, call.result()):
            assert (rows == 3 * number).all()
            assert names == [number] * 2
            assert is_one == [True] * 2, "an array in two places is one there, too"


def test_what_a_function_keeps_or_writes_is_its_own(shared_runtimes: Any, tmp_path: Any) -> None:
    """And rows are read-only. Masks, maps of files and a structure that holds itself come as they are."""
    kept: list[Any] = []
    np.save(tmp_path / "a.npy", np.arange(4.0))
    loop: dict[str, Any] = {"a": np.ones(1)}
    loop["self"] = loop

    def keep(p: Any, fields: Any, loop: Any) -> Any:
        kept.append((fields["x"], p["w"]))
        p["w"] = p["w"] + 1
        p["layers"].append(1)
        seen = p["masked"].mask.tolist(), p["file"].tolist(), loop["self"] is loop
        return [float(each[0]) for pair in kept for each in pair], len(p["layers"]), seen

    f = shared_runtimes[2].function(keep, bcast_inputs=("p", "loop"), outputs=None)
    for number in range(4):
        masked, file = np.ma.masked_array([1.0, 2.0], [True, False]), np.load(tmp_path / "a.npy", mmap_mode="r")
        params = {"w": np.full(2, 9.0 + number), "layers": [np.zeros(1)], "masked": masked, "file": file}
        found = f(params, {"x": np.full(6, float(number))}, loop)
        values = [float(each) for k in range(number + 1) for each in (k, 9 + k)]
        assert found == [(values, 2, ([True, False], [0.0, 1.0, 2.0, 3.0], True))] * 2
        assert (params["w"][0], len(params["layers"])) == (9 + number, 1)
    with pytest.raises(ValueError, match="read-only"):
        shared_runtimes[2].function(lambda fields: fields["x"].fill(1), outputs=None)({"x": np.ones(4)})


# -- what is rows, and what is refused --------------------------------------------------------------------------------


def test_what_is_rows_and_what_is_structure(shared_runtimes: Any, subtests: Any, tmp_path: Any) -> None:
    """A mapping that cannot be built comes as a dict."""
    f = shared_runtimes[2].function(lambda value: value, outputs="gather")
    np.savez(tmp_path / "arrays.npz", x=np.arange(4), y=np.ones((4, 2)))
    with np.load(tmp_path / "arrays.npz") as arrays:
        assert told(f(arrays)) == told(dict(arrays))
    for value in (
        [[1, 2], [3, 4]], (1, 2.5, 3), ("a", "bc"), [(1, 2), (3, 4), (5, 6)], (X, X + 1), ([1, 2], [3, 4]),
        ((1, 2), (3, 4)), ([[1, 2], [3, 4]], (1, 2)), {"text": ["a", "bcd", "e"], "label": [0, 1, 2]},
    ):  # fmt: skip
        with subtests.test(value=str(value)):
            is_rows = isinstance(value, list) or (type(value) is tuple and not np.ndim(value[0]))
            parts: Any = [value] if is_rows else value.values() if isinstance(value, dict) else value
            result = f(value)
            found = [result] if is_rows else result.values() if isinstance(value, dict) else result
            assert is_rows or type(result) is type(value)
            assert [told(each) for each in found] == [told(np.asarray(part)) for part in parts]


@dataclasses.dataclass(slots=True)
class Initialised:
    """Cannot be built from its fields alone."""

    x: Any
    seed: dataclasses.InitVar[int]


class Endless(Mapping):  # type: ignore[type-arg]
    """A mapping that holds itself."""

    def __getitem__(self, key: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(["a"])

    def __len__(self) -> int:
        return 1


SEEDS = np.random.SeedSequence(1)
REFUSED: list[tuple[Callable[[Any], Any], type[Exception], str]] = [
    (lambda rts: {"x": X, "mask": np.ones(5)}, ValueError, r"x\['x'\] with 6 rows and x\['mask'\] with 5"),
    (lambda rts: {"x": X, "t": (X, [1, 2])}, ValueError, r"x\['x'\] with 6 rows and x\['t'\]\[1\] with 2"),
    (lambda rts: Batch(X, X[:3]), ValueError, r"x\.x with 6 rows and x\.y with 3"),
    (lambda rts: {"x": X, "set": {1, 2}}, TypeError, r"cannot share x\['set'\] of 'f': got dtype object \(from set\)"),
    (lambda rts: {"x": X, "y": [[1, 2], [3]]}, TypeError, r"share x\['y'\] of 'f': got a list whose entries differ"),
    (lambda rts: {"x": X, "y": object()}, TypeError, r"x\['y'\]"),
    (lambda rts: SEEDS.spawn(6), TypeError, r"got seeds as Python objects \(from list\).*generate_state"),
    (lambda rts: {"x": X, "y": np.array(SEEDS.spawn(6))}, TypeError, r"x\['y'\].*got seeds.*generate_state"),
    (lambda rts: {"x": X, "y": (k for k in range(6))}, TypeError, r"x\['y'\].*generator"),
    (lambda rts: {"x": X, "y": np.array([1, None])}, TypeError, r"x\['y'\]"),
    (lambda rts: {}, TypeError, r"cannot scatter x of 'f': got a dict in which nothing has rows.*bcast_inputs='x'"),
    (lambda rts: {"a": 1, "b": None, "c": "text"}, TypeError, "got a dict in which nothing has rows"),
    (lambda rts: Pair(1, 2), TypeError, "got a Pair in which nothing has rows"),
    (lambda rts: Initialised(X, 3), TypeError, r"scatter x of 'f': the dataclass Initialised cannot be built.*slots"),
    (lambda rts: Endless(), ValueError, "holds itself"),
    (lambda rts: {"x": X, "w": rts[2].shared(X)}, ValueError, r"cannot pass x\['w'\] of 'f'.*replicated; pass it as"),
    (lambda rts: {"w": rts[1].data(X)}, ValueError, r"x\['w'\] of 'f'.*another runtime"),
    (lambda rts: {AtPickle(raise_value_error): X}, SerializationError, r"structure of the arguments of 'f'.*saboteur"),
]
REFUSED_WHOLE: list[tuple[Callable[[Any], Any], str]] = [
    (lambda rts: {"w": X, "bad": (n for n in range(3))}, r"p\['bad'\]"),
    (lambda rts: {"w": X, "there": rts[2].shared(X)}, "cannot pickle"),
    (lambda rts: {"w": X, "there": rts[2].data(X)}, "cannot pickle"),
]


def test_mistakes_are_named_by_their_place(shared_runtimes: Any, subtests: Any) -> None:
    rt = shared_runtimes[2]
    f = rt.function(named("f", lambda x: 1.0))
    g = rt.function(named("g", lambda p, x: 1.0), bcast_inputs="p")
    for make, error, text in REFUSED:
        with subtests.test(text=text):
            value = make(shared_runtimes)
            for call in (f, f.submit, f.serial):
                with pytest.raises(error, match=text):
                    call(value)
    for make, text in REFUSED_WHOLE:
        with subtests.test(broadcast=text), pytest.raises(SerializationError, match=text):
            g(make(shared_runtimes), X)
    assert f({"x": X}) == g({"w": X}, X) == 1.0
