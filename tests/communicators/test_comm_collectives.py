"""Each collective of ``synk.comm`` in each form on each communicator: what MPI defines, computed by NumPy."""

from __future__ import annotations

import hashlib
import itertools
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from support.places import PLACES, SEVERAL_RANKS, on_each
from support.rank_arrays import DEFINED_FOR, OPS, assert_same, reduced

import synk

DTYPES = (
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "float32", "float64", "longdouble", "complex64", "complex128"),
)
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
BLOCKS = ("reduce_scatter", "scatter", "all_to_all")
KINDS = (*REDUCTIONS, "broadcast", "all_gather", "all_gather along an axis", "gather", "scatter", "all_to_all")
FORMS = ("as it is", "fortran", "with gaps", "read-only", "a list", "other byte order")

LENGTHS = (0, 1, 7, 40, 768, 769, 1537, 9_000)
"""Rows: none; in one message; what a rank with little memory can show at once, and one more; several pieces."""
LARGE = 400_001
"""Several pieces of what any rank can show at once."""


@dataclass
class Case:
    """A collective of ``size`` ranks, drawn from a seed: the same on all of them."""

    seed: str
    size: int
    kind: str
    op: str = ""
    dtype: str = ""
    form: str = ""
    root: int = 0
    axis: int = 0
    rest: tuple[int, ...] = ()
    lengths: list[int] | None = field(default_factory=list)
    out: str = ""
    is_started: bool = False
    is_rough: bool = False
    weights: list[float] | None = None
    has_sizes: bool = False

    @classmethod
    def drawn(cls, place: Any, number: int, size: int) -> Case:
        rng = random.Random(seed := f"{place} {number}")
        case = cls(seed, size, KINDS[number % len(KINDS)])
        case.dtype, case.form, case.root = rng.choice(DTYPES), rng.choice(FORMS), rng.randrange(size)
        case.op = rng.choice([op for op in OPS if np.dtype(case.dtype).kind in DEFINED_FOR[op]])
        case.rest, case.is_rough = rng.choice(((), (), (3,), (2, 1, 2))), rng.random() < 0.5
        case.is_started = rng.random() < 0.4
        case.out = rng.choice(("", "", "another array", "the array itself"))
        if case.kind in REDUCTIONS and case.op == "avg" and rng.random() < 0.5:
            case.weights = [2 * (rank + 1) / size / (size + 1) for rank in range(size)]
        case.lengths = case._drawn_lengths(rng)
        if case.kind == "all_gather along an axis":
            case.axis = rng.randrange(-1, 1 + len(case.rest))
        return case

    def _drawn_lengths(self, rng: random.Random) -> list[int] | None:
        """Return the rows of each rank, None where the arrays have no axes."""
        length = rng.choice(LENGTHS)
        if rng.random() < 0.03:
            length, self.rest = LARGE, ()
        if self.kind not in BLOCKS + KINDS[5:] and rng.random() < 0.1:
            self.rest = ()
            return None
        if self.kind in KINDS[5:7] and rng.random() < 0.5:
            return [rng.choice(LENGTHS) for _ in range(self.size)]
        self.has_sizes = self.kind in KINDS[6:] and rng.random() < 0.4
        return [length // self.size * self.size if self.kind in BLOCKS else length] * self.size

    def array(self, rank: int) -> np.ndarray:
        """Return what a rank brings: small whole numbers, or integers of any size, or numbers, some not finite."""
        rng, dtype = np.random.default_rng([zlib.crc32(self.seed.encode()), rank]), np.dtype(self.dtype)
        shape = () if self.lengths is None else (self.lengths[rank], *self.rest)
        shape = tuple(np.roll(shape, self.axis)) if self.axis > 0 else shape
        shape = (*shape[1:], shape[0]) if self.axis == -1 else shape
        if dtype.kind == "b":
            return np.asarray(rng.integers(0, 2, shape)).astype(bool)
        if dtype.kind in "iu":
            limits = np.iinfo(dtype)
            low, high = (limits.min, limits.max) if self.is_rough else (max(limits.min, -3), 3)
            return np.asarray(rng.integers(low, high, shape, dtype=dtype, endpoint=True))
        if not self.is_rough:
            return np.asarray(rng.integers(-3, 4, shape) + (1j if dtype.kind == "c" else 0)).astype(dtype)
        array = np.asarray(rng.normal(size=shape) + (1j * rng.normal(size=shape) if dtype.kind == "c" else 0))
        if dtype.kind == "f" and array.size > 2:
            array.reshape(-1)[rank % 3] = (np.nan, np.inf, -np.inf)[rank % 3]
        return array.astype(dtype)

    def expected(self, rank: int) -> np.ndarray | None:
        arrays = [self.array(each) for each in range(self.size)]
        if self.kind in ("reduce", "gather") and rank != self.root:
            return None
        if self.kind == "broadcast":
            return arrays[self.root]
        if self.kind == "all_gather":
            return np.stack(arrays)
        if self.kind in ("gather", "all_gather along an axis"):
            return np.concatenate(arrays, axis=self.axis)
        if self.kind in ("scatter", "all_to_all"):
            sources = arrays[self.root : self.root + 1] if self.kind == "scatter" else arrays
            return np.concatenate([each[self._block(rank)] for each in sources])
        with np.errstate(all="ignore"):
            whole = reduced(self.op, arrays, self.weights)
        return whole[self._block(rank)] if self.kind == "reduce_scatter" else whole

    def _block(self, rank: int) -> slice:
        bounds = np.cumsum([0, *self._sizes()])
        return slice(bounds[rank], bounds[rank + 1])

    def _sizes(self) -> list[int]:
        """Return the rows of each block; where they are told, the last rank has most."""
        assert self.lengths is not None
        if self.kind == "gather":
            return self.lengths
        each = self.lengths[0] // self.size
        if not self.has_sizes:
            return [each] * self.size
        return [each // 2] * (self.size - 1) + [self.lengths[0] - each // 2 * (self.size - 1)]

    def run(self, comm: Any, array: Any, out: Any) -> Any:
        arguments: list[Any] = [array]
        options: dict[str, Any] = {} if out is None else {"out": out}
        if self.kind in REDUCTIONS:
            arguments.append(self.op)
            if self.weights is not None:
                options["weight"] = self.weights[comm.rank]
        if self.kind in ("reduce", "broadcast", "gather", "scatter"):
            arguments.append(self.root)
        if self.kind == "scatter" and comm.rank != self.root:
            arguments[0] = None
        if self.kind == "all_gather along an axis":
            arguments.append(self.axis)
        if self.has_sizes:
            options["sizes"] = self._sizes()
        verb = getattr(comm, self.kind.partition(" ")[0])
        return verb(*arguments, **options, async_op=True).wait() if self.is_started else verb(*arguments, **options)

    def given(self, array: np.ndarray) -> Any:
        """Return the array in the form in which the function has it."""
        if self.form == "fortran" and array.ndim:
            return np.asfortranarray(array)
        if self.form == "with gaps" and array.ndim:
            return np.repeat(array, 2, axis=0)[::2]
        if self.form == "a list" and array.dtype.name in ("int64", "float64", "bool") and 0 < array.size < 100:
            return array.tolist()
        if self.form == "other byte order":
            return array.astype(array.dtype.newbyteorder())
        array = array.copy()
        array.flags.writeable = self.form != "read-only"
        return array

    def check(self, comm: Any) -> np.ndarray | None:
        """Run it on a rank, and compare; return the result."""
        array, expected = self.array(comm.rank), self.expected(comm.rank)
        given, out = self.given(array), None
        if self.out and expected is not None:
            is_fit = self.form == "as it is" and expected.shape == array.shape
            out = given if is_fit and self.out == "the array itself" else np.empty_like(expected)
        got = self.run(comm, given, out)
        if expected is None:
            assert got is None
            return None
        assert out is None or got is out
        self.compare(got, expected)
        assert got.flags.writeable
        if out is not given:
            assert_same(np.asarray(given).astype(array.dtype), array)
            assert not np.shares_memory(got, given)
        return got

    def compare(self, got: Any, expected: Any) -> None:
        assert_same(got, expected, is_rounded=self.kind in REDUCTIONS and (self.is_rough or self.op == "avg"))


def digest(array: np.ndarray) -> int:
    """Return a number of the array's bits, but for those of a longdouble that mean nothing."""
    return zlib.crc32(np.ascontiguousarray(array, "f8" if array.dtype.char == "g" else None).tobytes())


def perform(comm: Any, cases: list[Case]) -> list[tuple[str, int]]:
    """Run all cases on a rank; return of each what is wrong, and its result's digest.

    Half of the results are held to the end of the next call, and then are still what they were.
    """
    texts, digests, held = [""] * len(cases), [0] * len(cases), getattr(comm, "held", [])
    comm.held = []
    for number, case in enumerate(cases):
        try:
            got = case.check(comm)
        except AssertionError as error:
            texts[number] = str(error) or "false"
            continue
        except Exception as error:
            raise AssertionError(f"{case}") from error
        if got is not None:
            digests[number] = digest(got)
            if number % 2:
                comm.held.append((number, got, digests[number]))
    for number, got, before in held + comm.held:
        if digest(got) != before:
            texts[number] = "the result was changed by what followed"
    return list(zip(texts, digests, strict=True))


@pytest.mark.parametrize("place", PLACES)
def test_collectives_give_what_numpy_gives(at: Any, place: Any, subtests: Any, storm_count: Any) -> None:
    """The ranks' results of an ``all_reduce`` have the same bits, which are those of the next time."""
    runtime, count = at(place), storm_count(27)
    size = runtime.world_size

    def body(comm: Any) -> Any:
        return repr(perform(comm, [Case.drawn(place, number, size) for number in range(count)]))

    first, again = ([eval(text) for text in on_each(runtime, body)] for _ in range(2))
    on_each(runtime, lambda comm: vars(comm).pop("held"))
    for number, by_rank in enumerate(zip(*first, strict=True)):
        case = Case.drawn(place, number, size)
        with subtests.test(case=str(case)):
            assert [text for text, _ in by_rank] == [""] * size
            assert by_rank == tuple(rank[number] for rank in again)
            if case.kind == "all_reduce":
                assert len(set(by_rank)) == 1


# ----- numbers

MANY = 10_000

NUMBERS: dict[str, tuple[str, Callable[[int], Any], Any]] = {
    "16-bit floats are rounded once": (
        *("sum", lambda rank: np.array([[2048, 60000], [1, 1], [1, 10]][rank], "f2")),
        np.array([2050, 60011], "f4").astype("f2"),
    ),
    "16-bit floats overflow at the end only": ("avg", lambda rank: np.array([60000], "f2"), np.array([60000], "f2")),
    "16-bit floats overflow": ("sum", lambda rank: np.array([60000], "f2"), np.array([np.inf], "f2")),
    "integers wrap around": ("sum", lambda rank: np.full(3, 100, "i1"), np.full(3, 44, "i1")),
    "few floats are folded in rank order": (
        *("sum", lambda rank: np.full(3, (1e8, -1e8, 1.5)[rank], "f4")),
        np.full(3, 1.5, "f4"),
    ),
    "many floats are folded in rank order": (
        *("sum", lambda rank: np.full(MANY, (1e8, -1e8, 1.5)[rank], "f4")),
        np.full(MANY, 1.5, "f4"),
    ),
    "NaN is found on any rank": (
        *("max", lambda rank: np.where(np.arange(4) == rank, np.nan, [1.0, np.inf, -np.inf, rank])),
        np.array([np.nan, np.nan, np.nan, 2.0]),
    ),
    "extended precision": ("sum", lambda rank: np.full(2, 1, "g") / 3, np.full(2, sum([np.longdouble(1) / 3] * 3))),
}


@pytest.mark.parametrize("place", [3, "little memory", "1+2"])
def test_numbers_are_those_of_a_fold_in_rank_order(at: Any, place: Any, subtests: Any) -> None:
    runtime = at(place)
    for name, (op, bring, expected) in NUMBERS.items():
        with subtests.test(case=name), np.errstate(all="ignore"):
            found = on_each(runtime, lambda comm, op=op, bring=bring: comm.all_reduce(bring(comm.rank), op))
            for got in found:
                assert_same(got, expected)


def test_ranks_of_nodes_round_as_one(shared_runtimes: Any) -> None:
    """The bits of one machine, whatever the size; 16-bit floats are rounded once."""

    def reduce(comm: Any) -> Any:
        rng = np.random.default_rng(comm.rank)
        found = []
        for dtype, count, op in itertools.product(("f2", "f4", "f8"), (1000, 70_001), ("avg", "sum", "prod")):
            values = rng.normal(size=count).astype(dtype)
            found += [comm.all_reduce(values, op), comm.reduce_scatter(values[: count // 4 * 4], op)]
            total = comm.reduce(values, op, 2)
            found += [] if total is None else [total]
        return hashlib.sha256(b"".join(each.tobytes() for each in found)).hexdigest()

    def average(x: np.ndarray) -> Any:
        values = np.random.default_rng(synk.comm.rank).integers(0, 2048, 50_000).astype("f2")
        return values, synk.comm.all_reduce(values, "avg")

    bits = on_each(shared_runtimes[4], reduce)
    for place in ("1+3", "2+2"):
        assert on_each(shared_runtimes[place], reduce) == bits
        values, averages = shared_runtimes[place].function(average, outputs=(None, None))(np.zeros(7))
        exact = np.average(np.array(values, "f8"), axis=0, weights=[2, 2, 2, 1]).astype("f4").astype("f2")
        for each in averages:
            np.testing.assert_array_equal(each, exact)


@pytest.mark.parametrize("place", [0, 3, "1+2"])
def test_averages_weigh_by_rows_or_as_told(at: Any, place: Any) -> None:
    """The average of means is the mean over all rows, however they are split; ranks without rows do not count."""
    runtime = at(place)

    def mean_of(x: np.ndarray, weights: Any) -> Any:
        comm, share = synk.comm, None
        if weights is not None:
            share = weights[comm.rank] / sum(weights[: comm.world_size])
        mean = x.mean(axis=0)
        started = comm.all_reduce(mean, weight=share, async_op=True)
        at_root, everywhere = comm.reduce(mean, weight=share), comm.all_reduce(mean, "avg", weight=share)
        return everywhere, started.wait(), everywhere if at_root is None else at_root

    f = runtime.function(mean_of, bcast_inputs="weights", outputs=("first", "first", "first"))
    rng, told = np.random.default_rng(0), [1.0, 5.0, 2.0, 0.0]
    for rows in (1, 2, 7, 50):
        x = rng.normal(size=(rows, 3))
        parts = [part for part in np.array_split(x, runtime.world_size) if len(part)]
        means = [part.mean(axis=0) for part in parts]
        for weights, expected in (
            (None, x.mean(axis=0)),
            (told, np.average(means, axis=0, weights=told[: len(parts)])),
        ):
            for got in f(x, weights):
                np.testing.assert_allclose(got, expected, rtol=1e-13)


# ----- forms of their own


def test_nobody_leaves_a_barrier_before_all_have_come(at: Any) -> None:
    def body(comm: Any) -> Any:
        came = []
        for number in range(10):
            now = time.monotonic()
            comm.barrier(async_op=True).wait() if number % 2 else comm.barrier()
            came.append((now, time.monotonic()))
        return repr(came)

    for place in SEVERAL_RANKS:
        for times in zip(*map(eval, on_each(at(place), body)), strict=True):
            came, left = zip(*times, strict=True)
            assert max(came) <= min(left)


@pytest.mark.parametrize("place", [3, "little memory", "blind", "1+2"])
def test_out_may_be_a_part_of_the_array(at: Any, place: Any) -> None:
    """Also where the form is that of the collective before, but the rows of one rank take more pieces now."""
    counts = (100_000, 50_000, 150_000)

    def body(comm: Any) -> bool:
        size, rank = comm.world_size, comm.rank
        for length in (8, 150_000):
            everybody = [np.arange(length * size, dtype=float) * (each + 1) for each in range(size)]
            mine = everybody[rank].copy()
            comm.reduce_scatter(mine, "sum", out=mine[1 : 1 + length])
            assert_same(mine[1 : 1 + length], sum(everybody)[rank * length : (rank + 1) * length])
            whole = np.zeros((size, length))
            whole[rank] = rank + 1
            comm.all_gather(whole[rank], out=whole)
            assert_same(whole, np.repeat(np.arange(1.0, size + 1), length).reshape(size, length))
            shifted = np.arange(length + 1.0)
            comm.all_reduce(shifted[:-1], "sum", out=shifted[1:])
            assert_same(shifted[1:], size * np.arange(float(length)))
            shifted = np.arange(length + 1.0) * (rank + 1)
            comm.broadcast(shifted[:-1], 1, out=shifted[1:])
            assert_same(shifted[1:], 2 * np.arange(float(length)))
            out = np.full(length, -1.0)
            assert (comm.reduce(np.ones(length), "sum", 1, out=out) is out) == (rank == 1)
            assert (out == (size if rank == 1 else -1.0)).all()  # that of other ranks is not touched
        parts = [np.full(count, 10.0 + each) for each, count in enumerate(counts)]
        comm.all_gather(np.zeros(counts[0]), 0)
        out = np.zeros(sum(counts))
        own = out[counts[0] : 2 * counts[0]] if rank == 0 else np.empty(counts[rank])
        own[:] = parts[rank]
        assert comm.all_gather(own, 0, out=out) is out
        assert_same(out, np.concatenate(parts))
        return True

    assert all(on_each(at(place), body))


def test_bfloat16_of_ml_dtypes_stays(shared_runtimes: Any) -> None:
    dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)

    def body(comm: Any) -> bool:
        size, x = comm.world_size, np.arange(6).astype(dtype)
        for name, count, of in (
            ("gather", 6 * size, comm.gather), ("scatter", 6 // size, comm.scatter), ("to all", 6, comm.all_to_all),
            ("joined", 6 * size, lambda array, **given: comm.all_gather(array, 0, **given)),
        ):  # fmt: skip
            for out in (None, np.empty(count, dtype)):
                found = of(x) if out is None else of(x, out=out)
                if found is None:  # of a gather on another rank
                    assert name == "gather" and comm.rank
                    continue
                assert found.dtype == dtype or (name == "scatter" and comm.rank and out is None), name
                assert found.shape == (count,)
                if name == "joined":
                    np.testing.assert_array_equal(found, np.tile(x, size))
        return True

    assert all(on_each(shared_runtimes[2], body))


def test_torch_tensors_stay_tensors(shared_runtimes: Any) -> None:
    """Also those of a dtype that NumPy does not have."""
    torch = pytest.importorskip("torch")

    def body(x: Any) -> Any:
        comm, found = synk.comm, []
        for each in (x, x.bfloat16()):
            found += [comm.all_reduce(each, "sum"), comm.broadcast(each), comm.all_gather(each).sum(0)]
        assert [each.dtype for each in found] == [x.dtype] * 3 + [x.bfloat16().dtype] * 3
        return sum(each.to(x.dtype) for each in found)

    f = shared_runtimes[2].function(body, outputs="first", framework="torch")
    x = torch.tensor([1.5, 2.0, -3.0, 0.25])
    total, first = x[:2] + x[2:], x[:2]
    assert torch.equal(f(x), 4 * total + 2 * first)
