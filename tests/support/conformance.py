"""One suite for every communicator: each operation, op, dtype and size, against NumPy.

The test of an implementation subclasses ``CommunicatorConformance`` and gives it a fixture ``group``: processes, one
for each rank, that hold a communicator and its memory. What runs on a rank is in ``perform`` and the few functions
beside it; they see the communicator and its buffers through an ``Endpoint`` only.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.rank_arrays import DEFINED_FOR, UFUNCS
from support.seeds import examples
from synk._pure.ops import REDUCE_OPS
from synk.communicators import Buffer, Capabilities
from synk.communicators._host import HostCommunicator
from synk.errors import UnsupportedError

FLOATS = ("float16", "float32", "float64", "bfloat16", "complex64", "complex128")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = ("bool", *INTEGERS, *FLOATS)
REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
KINDS = (*REDUCTIONS, "broadcast", "all_gather", "ring", "barrier")
SEED = 20180104


class Endpoint(Protocol):
    """What a function of the suite gets on its rank."""

    comm: HostCommunicator
    ranks: tuple[int, ...]
    stream: int

    def put(self, array: np.ndarray) -> Any:
        """Copy a 1-d array to memory of the communicator's device; return what holds it."""

    def get(self, held: Any) -> np.ndarray:
        """Wait for the stream and return a copy of what ``put`` returned."""

    def buffer(self, held: Any, start: int, count: int, dtype: str) -> Buffer:
        """Describe ``count`` elements from ``start`` on, under the name ``dtype``."""

    def pass_on(self, send: Buffer, recv: Buffer, after: int, before: int) -> None:
        """Send a message to rank ``after``, and receive one from rank ``before``."""


class Group(Protocol):
    """The processes of one communicator."""

    world_size: int
    capabilities: Capabilities

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return ``function(endpoint, *args)`` of each rank; raise what the lowest failing rank raised."""

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Like ``run``, with the exception in place of the result where a rank raised one."""


@dataclass(frozen=True)
class Step:
    """One operation, as all ranks call it; a ``ring`` passes the array of each rank to the next one."""

    kind: str
    dtype: str = "float32"
    count: int = 1
    op: str = ""
    root_position: int = 0
    is_in_place: bool = False
    weights: tuple[float, ...] | None = None
    seed: int = SEED


# -- values ----------------------------------------------------------------------------------------------------------


def bfloat16_bits(values: np.ndarray) -> np.ndarray:
    """Round float32 values to the nearest bfloat16, ties to even; NumPy has no such dtype, so return the bits."""
    bits = values.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def as_numbers(dtype: str, values: np.ndarray) -> np.ndarray:
    """Return values as numbers that NumPy can reduce: bfloat16 bits as float32, all others as they are."""
    return (values.astype(np.uint32) << 16).view(np.float32) if dtype == "bfloat16" else values


def rank_values(step: Step, position: int, length: int) -> np.ndarray:
    """Return what the rank at ``position`` brings to ``step``: integers of all sizes, floats from 0.5 to 2."""
    generator = np.random.default_rng((step.seed, position))
    if step.dtype == "bool":
        return generator.integers(0, 2, length).astype(bool)
    if step.dtype in INTEGERS:
        limits = np.iinfo(step.dtype)
        return generator.integers(limits.min, limits.max, length, dtype=step.dtype, endpoint=True)
    numbers = generator.uniform(0.5, 2.0, length)
    if step.dtype == "bfloat16":
        return bfloat16_bits(numbers)
    if step.dtype.startswith("complex"):
        numbers = numbers + 1j * generator.uniform(0.5, 2.0, length)
    return numbers.astype(step.dtype)


def send_length(step: Step, size: int) -> int:
    """Return how many elements each of ``size`` ranks sends."""
    return step.count * size if step.kind == "reduce_scatter" else step.count


# -- on a rank -------------------------------------------------------------------------------------------------------


def perform(endpoint: Endpoint, steps: Sequence[Step]) -> list[np.ndarray | None]:
    """Run ``steps`` on this rank; return what each left in the receive buffer, None where nothing is received."""
    return [perform_one(endpoint, step) for step in steps]


def perform_one(endpoint: Endpoint, step: Step) -> np.ndarray | None:
    """Run one step on this rank."""
    comm, ranks, count = endpoint.comm, endpoint.ranks, step.count
    size, position = len(ranks), ranks.index(comm.rank)
    root, stream = ranks[step.root_position % size], endpoint.stream
    if step.kind == "barrier":
        comm.barrier()
        return None

    values = rank_values(step, position, send_length(step, size))
    received_count = count * size if step.kind == "all_gather" else count
    if step.is_in_place and step.kind == "all_gather":
        whole = np.zeros(received_count, values.dtype)
        whole[position * count : (position + 1) * count] = values
        held = target = endpoint.put(whole)
        send = endpoint.buffer(held, position * count, count, step.dtype)
        recv = endpoint.buffer(held, 0, received_count, step.dtype)
    elif step.is_in_place and step.kind == "reduce_scatter":
        held = target = endpoint.put(values)
        send = endpoint.buffer(held, 0, values.size, step.dtype)
        recv = endpoint.buffer(held, position * count, count, step.dtype)
    else:
        held = endpoint.put(values)
        target = held if step.is_in_place else endpoint.put(np.zeros(received_count, values.dtype))
        send = endpoint.buffer(held, 0, values.size, step.dtype)
        recv = endpoint.buffer(target, 0, received_count, step.dtype)

    weight = None if step.weights is None else step.weights[position]
    if step.kind == "all_reduce":
        comm.all_reduce(send, recv, step.op, weight=weight, stream=stream)
    elif step.kind == "reduce":
        comm.reduce(send, recv if comm.rank == root else send, step.op, root, weight=weight, stream=stream)
        if comm.rank != root:
            return None
    elif step.kind == "reduce_scatter":
        comm.reduce_scatter(send, recv, step.op, weight=weight, stream=stream)
    elif step.kind == "all_gather":
        comm.all_gather(send, recv, stream=stream)
    elif step.kind == "broadcast":
        comm.broadcast(send, root, stream=stream)
        target = held
    else:
        endpoint.pass_on(send, recv, ranks[(position + 1) % size], ranks[(position - 1) % size])
    result = endpoint.get(target)
    if step.is_in_place and step.kind == "reduce_scatter":
        result = result[position * count : (position + 1) * count]
    return result


def barrier_times(endpoint: Endpoint) -> tuple[float, float]:
    """Return when this rank came to a barrier and when it left it, on the clock that all processes share."""
    came = time.monotonic()
    endpoint.comm.barrier()
    return came, time.monotonic()


def reduce_array(endpoint: Endpoint, arrays: Sequence[np.ndarray], op: str) -> np.ndarray:
    """Reduce ``arrays[rank]`` of all ranks."""
    array = arrays[endpoint.comm.rank]
    held = endpoint.put(array)
    buffer = endpoint.buffer(held, 0, array.size, array.dtype.name)
    endpoint.comm.all_reduce(buffer, buffer, op, stream=endpoint.stream)
    return endpoint.get(held)


def exchange_in_order(endpoint: Endpoint, num_messages: int, count: int) -> list[int]:
    """Send numbered messages to the next rank and return the numbers that came from the one before."""
    comm = endpoint.comm
    after, before = (comm.rank + 1) % comm.world_size, (comm.rank - 1) % comm.world_size
    numbers = []
    for number in range(num_messages):
        sent = endpoint.put(np.full(count, number, np.int32))
        received = endpoint.put(np.full(count, -1, np.int32))
        send, recv = (endpoint.buffer(held, 0, count, "int32") for held in (sent, received))
        endpoint.pass_on(send, recv, after, before)
        numbers.append(endpoint.get(received))
    return [int(each[0]) if (each == each[0]).all() else -1 for each in numbers]


def call_with_counts(endpoint: Endpoint, kind: str, send_count: int, recv_count: int, dtypes: Sequence[str]) -> None:
    """Call a collective with the counts given."""
    held = endpoint.put(np.zeros(64))
    send = endpoint.buffer(held, 0, send_count, dtypes[0])
    recv = endpoint.buffer(held, 32, recv_count, dtypes[1])
    if kind == "all_gather":
        endpoint.comm.all_gather(send, recv, stream=endpoint.stream)
    else:
        getattr(endpoint.comm, kind)(send, recv, "sum", *((0,) if kind == "reduce" else ()), stream=endpoint.stream)


def place(endpoint: Endpoint) -> tuple[int, int]:
    """Return the communicator's rank and its number of ranks."""
    return endpoint.comm.rank, endpoint.comm.world_size


# -- by NumPy --------------------------------------------------------------------------------------------------------


def expected_reduction(step: Step, values: Sequence[np.ndarray]) -> np.ndarray:
    """Reduce ``values``, one array for each rank, as NumPy does; 16-bit floats in float32."""
    stack = np.stack([as_numbers(step.dtype, each) for each in values])
    if step.dtype == "float16":
        stack = stack.astype(np.float32)
    if step.op == "avg":
        wide = stack.astype(np.complex128 if stack.dtype.kind == "c" else np.float64)
        return np.mean(wide, axis=0) if step.weights is None else np.asarray(step.weights) @ wide
    with np.errstate(all="ignore"):
        return UFUNCS[step.op].reduce(stack, axis=0, dtype=stack.dtype)


def expected_results(step: Step, size: int) -> list[np.ndarray | None]:
    """Return what ``step`` leaves on each of ``size`` ranks."""
    values = [rank_values(step, position, send_length(step, size)) for position in range(size)]
    root = step.root_position % size
    if step.kind in REDUCTIONS:
        reduced = expected_reduction(step, values)
        if step.kind == "all_reduce":
            return [reduced] * size
        if step.kind == "reduce":
            return [reduced if position == root else None for position in range(size)]
        return list(reduced.reshape(size, step.count))
    if step.kind == "all_gather":
        return [as_numbers(step.dtype, np.concatenate(values))] * size
    if step.kind == "broadcast":
        return [as_numbers(step.dtype, values[root])] * size
    if step.kind == "ring":
        return [as_numbers(step.dtype, values[position - 1]) for position in range(size)]
    return [None] * size


def tolerance(step: Step, size: int) -> float:
    """Return the relative error allowed: none for what is exact, a few roundings for the rest."""
    if step.dtype not in FLOATS or step.op in ("min", "max"):
        return 0.0
    if step.dtype == "bfloat16":
        return 2.0**-7
    return float(np.finfo(step.dtype).eps) * (2 * size + 2)


def check_results(steps: Sequence[Step], results: Sequence[Sequence[np.ndarray | None]]) -> None:
    """Compare ``results[rank][step]`` with NumPy, and those of an all_reduce bit by bit between the ranks."""
    size = len(results)
    for index, step in enumerate(steps):
        found = [each[index] for each in results]
        for position, (got, expected) in enumerate(zip(found, expected_results(step, size), strict=True)):
            where = f"{step} at position {position} of {size}"
            assert (got is None) == (expected is None), where
            if got is not None and expected is not None:
                got = as_numbers(step.dtype, got)
                np.testing.assert_allclose(got, expected, rtol=tolerance(step, size), atol=0, err_msg=where)
        if step.kind == "all_reduce":
            assert len({each.tobytes() for each in found if each is not None}) == 1, f"{step}: the ranks differ"


def is_defined(op: str, dtype: str) -> bool:
    """Whether ``op`` has a meaning for ``dtype``."""
    return ("f" if dtype == "bfloat16" else np.dtype(dtype).kind) in DEFINED_FOR[op]


def itemsize(dtype: str) -> int:
    """Return the size of one element, in bytes."""
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


def is_supported(group: Group, dtype: str) -> bool:
    """Whether the communicator says that it takes ``dtype``."""
    return dtype in group.capabilities.dtypes


def assert_all_raise(outcomes: Sequence[Any], kind: type[BaseException]) -> None:
    """Assert that every rank raised ``kind``."""
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome, kind), f"rank {rank}: {outcome!r}"


# -- the suite -------------------------------------------------------------------------------------------------------


def step_sequences() -> st.SearchStrategy[list[Step]]:
    """Return sequences of operations that every communicator has."""

    def steps(kind: str, dtype: str) -> st.SearchStrategy[Step]:
        ops = [op for op in REDUCE_OPS if is_defined(op, dtype)]
        return st.builds(
            Step,
            kind=st.just(kind),
            dtype=st.just(dtype),
            count=st.one_of(st.integers(0, 40), st.integers(0, 5000)),
            op=st.sampled_from(ops) if kind in REDUCTIONS else st.just(""),
            root_position=st.integers(0, 3),
            is_in_place=st.booleans() if kind != "ring" else st.just(False),
            seed=st.integers(0, 1000),
        )

    names = st.tuples(st.sampled_from(KINDS), st.sampled_from(("bool", "int16", "float32", "float64", "int64")))
    return st.lists(names.flatmap(lambda pair: steps(*pair)), min_size=1, max_size=8)


class CommunicatorConformance:
    """What every communicator must do. A subclass may widen ``counts``.

    A dtype that is missing from the capabilities must be refused by ``UnsupportedError``.
    """

    def counts(self, dtype: str, size: int) -> tuple[int, ...]:
        """Return the element counts to try; an implementation adds those around its own limits."""
        return (0, 1, 7, 1000)

    def check(self, group: Group, steps: Sequence[Step]) -> None:
        """Run the steps and compare, or see them refused."""
        refused = [step for step in steps if not is_supported(group, step.dtype)]
        for step in refused[:1]:
            assert_all_raise(group.outcomes(perform, [step]), UnsupportedError)
        allowed = [step for step in steps if is_supported(group, step.dtype)]
        check_results(allowed, group.run(perform, allowed))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("op", REDUCE_OPS)
    @pytest.mark.sampled(30)
    def test_reductions(self, group: Group, op: str, dtype: str) -> None:
        steps = [
            Step(kind, dtype, count, op, root_position=count, is_in_place=is_in_place)
            for kind in REDUCTIONS
            for count in self.counts(dtype, group.world_size)
            for is_in_place in ((False, True) if dtype in ("float16", "float32") else (False,))
        ]
        if is_defined(op, dtype):
            self.check(group, steps)
        elif is_supported(group, dtype):
            for kind in REDUCTIONS:
                assert_all_raise(group.outcomes(perform, [Step(kind, dtype, 3, op)]), TypeError)

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.sampled(90)
    def test_copies(self, group: Group, dtype: str) -> None:
        steps = [
            Step(kind, dtype, count, root_position=count, is_in_place=is_in_place)
            for kind in ("broadcast", "all_gather")
            for count in self.counts(dtype, group.world_size)
            for is_in_place in ((False, True) if dtype in ("float16", "float32") else (False,))
        ]
        self.check(group, steps)

    @pytest.mark.parametrize("dtype", ("uint8", "float32", "complex128"))
    @pytest.mark.sampled(90)
    def test_a_ring_of_messages(self, group: Group, dtype: str) -> None:
        if group.world_size > 1:
            self.check(group, [Step("ring", dtype, count) for count in self.counts(dtype, group.world_size)])

    def test_messages_keep_their_order(self, group: Group) -> None:
        if group.world_size > 1:
            assert group.run(exchange_in_order, 20, 33) == [list(range(20))] * group.world_size

    @pytest.mark.parametrize("dtype", FLOATS)
    @pytest.mark.sampled(90)
    def test_weighted_avg(self, group: Group, dtype: str) -> None:
        shares = np.arange(group.world_size) if group.world_size > 1 else np.ones(1)  # a rank of no weight among them
        weights = tuple((shares / shares.sum()).tolist())
        steps = [
            Step(kind, dtype, count, "avg", weights=weights)
            for kind in REDUCTIONS
            for count in self.counts(dtype, group.world_size)
        ]
        if group.capabilities.has_weighted_avg:
            self.check(group, steps)

    @pytest.mark.parametrize("op", ("min", "max"))
    @pytest.mark.sampled(90)
    def test_nan_propagates_from_every_rank(self, group: Group, op: str) -> None:
        if not group.capabilities.nan_propagates:
            pytest.skip("its capabilities say that NaN is dropped")
        for holder in range(group.world_size):
            arrays = [np.array([1.0, np.inf, -np.inf, rank]) for rank in range(group.world_size)]
            arrays[holder][3] = np.nan
            expected = {"min": np.minimum, "max": np.maximum}[op].reduce(arrays)
            for result in group.run(reduce_array, arrays, op):
                np.testing.assert_array_equal(result, expected)

    def test_integers_wrap_around(self, group: Group) -> None:
        arrays = [np.full(3, 100, np.int8)] * group.world_size
        expected = np.add.reduce(arrays, axis=0, dtype=np.int8)
        for result in group.run(reduce_array, arrays, "sum"):
            np.testing.assert_array_equal(result, expected)

    def test_the_same_call_gives_the_same_bits(self, group: Group) -> None:
        steps = [Step("all_reduce", "float32", count, "sum") for count in self.counts("float32", group.world_size)]
        first, second = group.run(perform, steps), group.run(perform, steps)
        for one, other in zip(first, second, strict=True):
            assert [each.tobytes() for each in one] == [each.tobytes() for each in other]

    def test_nobody_leaves_a_barrier_before_all_have_come(self, group: Group) -> None:
        for _ in range(10):
            came, left = zip(*group.run(barrier_times), strict=True)
            assert max(came) <= min(left)

    @examples(10)
    @given(steps=step_sequences())
    def test_any_sequence_of_operations(self, group: Group, steps: list[Step]) -> None:
        self.check(group, [step for step in steps if step.kind != "ring" or group.world_size > 1])

    @pytest.mark.parametrize("kind", (*REDUCTIONS, "all_gather"))
    @pytest.mark.sampled(90)
    def test_buffers_that_do_not_fit_are_refused(self, group: Group, kind: str) -> None:
        counts = (1, group.world_size + 1) if kind == "all_gather" else (group.world_size + 1, group.world_size + 2)
        assert_all_raise(group.outcomes(call_with_counts, kind, *counts, ("float64", "float64")), ValueError)
        assert_all_raise(group.outcomes(call_with_counts, kind, 0, 0, ("float64", "int64")), ValueError)

    def test_an_unknown_op_is_refused(self, group: Group) -> None:
        assert_all_raise(group.outcomes(perform, [Step("all_reduce", op="median")]), ValueError)

    def test_a_root_outside_is_refused(self, group: Group) -> None:
        assert_all_raise(group.outcomes(broadcast_from, group.world_size), ValueError)
        assert_all_raise(group.outcomes(broadcast_from, -1), ValueError)

    def test_it_says_what_it_is(self, group: Group) -> None:
        assert group.run(place) == [(rank, group.world_size) for rank in range(group.world_size)]
        capabilities = group.capabilities
        assert capabilities.name
        assert set(capabilities.ops) == set(REDUCE_OPS)
        assert dataclasses.is_dataclass(capabilities)


def broadcast_from(endpoint: Endpoint, root: int) -> None:
    """Broadcast one number from ``root``."""
    held = endpoint.put(np.zeros(1))
    endpoint.comm.broadcast(endpoint.buffer(held, 0, 1, "float64"), root, stream=endpoint.stream)
