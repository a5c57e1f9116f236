"""The NCCL communicator against NumPy, through every binding, over the stub library: no GPU, real sums.

The stub works on host memory with threads as ranks; ``test_nccl_gpu.py`` runs the same collectives on devices.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from nccl_fakes import Stub, as_buffer, run_ranks

from synk.communicators import Buffer, Communicator
from synk.cuda._nccl import NcclCommunicator, pack_scalar, split_count
from synk.cuda._nccl_bindings import Binding
from synk.cuda._nccl_library import NcclError
from synk.errors import ClosedError, UnsupportedError

INTEGERS = ("int8", "uint8", "int32", "uint32", "int64", "uint64")
FLOATS = ("float16", "float32", "float64")
COMPLEXES = ("complex64", "complex128")
NUMPY_REDUCTIONS: dict[str, Any] = {
    "sum": np.add.reduce,
    "prod": np.multiply.reduce,
    "min": np.minimum.reduce,
    "max": np.maximum.reduce,
    "avg": functools.partial(np.mean, axis=0),
}
SUPPORTED = [
    *((op, dtype) for op in ("sum", "prod", "min", "max") for dtype in INTEGERS + FLOATS),
    *(("avg", dtype) for dtype in FLOATS + COMPLEXES),
    *(("sum", dtype) for dtype in COMPLEXES),
    *((op, "bool") for op in ("min", "max")),
]


def random_array(shape: tuple[int, ...], dtype: str, seed: int = 0) -> np.ndarray:
    """Return small integers in ``dtype``: every sum and product of a few of them is exact."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0 if dtype in ("bool", "uint8", "uint32", "uint64") else -2, 3, shape)
    if dtype in COMPLEXES:
        return (values + 1j * rng.integers(-2, 3, shape)).astype(dtype)
    return values.astype(dtype)


# ----- collectives


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize(("op", "dtype"), SUPPORTED)
@pytest.mark.sampled(900)
def test_all_reduce_equals_numpy(binding: Binding, op: str, dtype: str, world_size: int) -> None:
    sent = random_array((world_size, 5), dtype)

    def body(communicator: NcclCommunicator) -> np.ndarray:
        received = np.empty(5, dtype)
        communicator.all_reduce(as_buffer(sent[communicator.rank]), as_buffer(received), op)
        return received

    expected = NUMPY_REDUCTIONS[op](sent).astype(dtype)
    for received in run_ranks(binding, world_size, body):
        np.testing.assert_allclose(received, expected, rtol=1e-3 if dtype == "float16" else 1e-6)


@pytest.mark.parametrize("op", NUMPY_REDUCTIONS)
def test_all_reduce_in_place(binding: Binding, op: str) -> None:
    sent = random_array((3, 4), "float64")

    def body(communicator: NcclCommunicator) -> np.ndarray:
        data = sent[communicator.rank].copy()
        communicator.all_reduce(as_buffer(data), as_buffer(data), op)
        return data

    np.testing.assert_allclose(run_ranks(binding, 3, body), [NUMPY_REDUCTIONS[op](sent)] * 3, rtol=1e-15)


@pytest.mark.parametrize("root", [0, 2])
def test_reduce_leaves_the_result_on_the_root(binding: Binding, root: int) -> None:
    sent = random_array((3, 4), "int32")

    def body(communicator: NcclCommunicator) -> np.ndarray:
        received = np.zeros(4, "int32")
        communicator.reduce(as_buffer(sent[communicator.rank]), as_buffer(received), "sum", root)
        return received

    expected = np.zeros((3, 4), "int32")
    expected[root] = sent.sum(axis=0)
    np.testing.assert_array_equal(run_ranks(binding, 3, body), expected)


@pytest.mark.parametrize("dtype", ["int16", "float32", "complex128", "bool", "datetime64[ns]"])
def test_movement_takes_any_dtype(binding: Binding, dtype: str) -> None:
    values = np.arange(6).reshape(3, 2).astype(dtype)

    def body(communicator: NcclCommunicator) -> tuple[np.ndarray, np.ndarray]:
        gathered, mine = np.zeros(6, dtype), values[communicator.rank].copy()
        communicator.all_gather(as_buffer(mine), as_buffer(gathered))
        communicator.broadcast(as_buffer(mine), root=1)
        return gathered, mine

    for gathered, mine in run_ranks(binding, 3, body):
        np.testing.assert_array_equal(gathered, values.ravel())
        np.testing.assert_array_equal(mine, values[1])


@pytest.mark.parametrize("op", ["sum", "max", "avg"])
def test_reduce_scatter_equals_numpy(binding: Binding, op: str) -> None:
    sent = random_array((3, 3 * 4), "float64")

    def body(communicator: NcclCommunicator) -> np.ndarray:
        received = np.empty(4)
        communicator.reduce_scatter(as_buffer(sent[communicator.rank]), as_buffer(received), op)
        return received

    np.testing.assert_allclose(np.concatenate(run_ranks(binding, 3, body)), NUMPY_REDUCTIONS[op](sent))


def test_a_group_of_collectives_is_launched_at_its_end(binding: Binding, stub: Stub) -> None:
    def body(communicator: NcclCommunicator) -> tuple[np.ndarray, np.ndarray]:
        x, y = np.full(2, communicator.rank + 1.0), np.full(3, communicator.rank + 1, "int64")
        with communicator.group():
            communicator.all_reduce(as_buffer(x), as_buffer(x), "avg")
            communicator.all_reduce(as_buffer(y), as_buffer(y), "prod")
            assert x[0] == communicator.rank + 1.0
        return x, y

    for x, y in run_ranks(binding, 3, body):
        assert x.tolist() == [2.0, 2.0] and y.tolist() == [6, 6, 6]
    assert {call.group_depth for call in stub.calls("all_reduce")} == {1}


def test_empty_buffers_make_no_call(binding: Binding, stub: Stub) -> None:
    def body(communicator: NcclCommunicator) -> None:
        empty = Buffer(0, 0, "float32")
        communicator.all_reduce(empty, empty, "sum")
        communicator.reduce_scatter(empty, empty, "max")
        communicator.all_gather(empty, empty)
        communicator.broadcast(empty, 0)

    run_ranks(binding, 2, body)
    assert stub.calls("all_reduce", "reduce_scatter", "all_gather", "broadcast") == []


def test_nan_is_dropped_by_min_and_max_as_the_capabilities_say(binding: Binding) -> None:
    sent = np.array([[np.nan, 1.0], [2.0, 3.0]])

    def body(communicator: NcclCommunicator) -> np.ndarray:
        assert communicator.capabilities().nan_propagates is False
        received = np.empty(2)
        communicator.all_reduce(as_buffer(sent[communicator.rank]), as_buffer(received), "max")
        return received

    np.testing.assert_array_equal(run_ranks(binding, 2, body), [[2.0, 3.0]] * 2)


def test_the_stream_reaches_nccl(binding: Binding, stub: Stub) -> None:
    def body(communicator: NcclCommunicator) -> None:
        data = np.zeros(1, "float32")
        communicator.all_reduce(as_buffer(data), as_buffer(data), "sum", stream=2**40 + 5)

    run_ranks(binding, 2, body)
    assert [call.stream for call in stub.calls("all_reduce")] == [2**40 + 5] * 2


def test_satisfies_the_protocol(binding: Binding) -> None:
    def body(communicator: NcclCommunicator) -> Communicator:
        return communicator

    for communicator in run_ranks(binding, 2, body):
        methods = [name for name in vars(Communicator) if not name.startswith("_")]
        assert all(callable(getattr(communicator, name)) for name in methods)


# ----- splitting


@pytest.mark.parametrize("count", [1, 4, 5, 11])
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
@pytest.mark.sampled(90)
def test_splitting_changes_no_result(
    binding: Binding, stub: Stub, monkeypatch: pytest.MonkeyPatch, count: int, dtype: str
) -> None:
    monkeypatch.setattr(NcclCommunicator, "max_count", 4)
    sent = random_array((3, 3 * count), dtype)

    def body(communicator: NcclCommunicator) -> list[np.ndarray]:
        mine, total, block, gathered = (
            sent[communicator.rank],
            *(np.zeros(n, dtype) for n in (3 * count, count, count * 9)),
        )
        communicator.all_reduce(as_buffer(mine), as_buffer(total), "sum")
        communicator.reduce_scatter(as_buffer(mine), as_buffer(block), "sum")
        communicator.all_gather(as_buffer(mine), as_buffer(gathered))
        at_root, copied = np.zeros(3 * count, dtype), mine.copy()
        communicator.reduce(as_buffer(mine), as_buffer(at_root), "sum", root=1)
        communicator.broadcast(as_buffer(copied), root=2)
        return [total, block, gathered, at_root, copied]

    results = run_ranks(binding, 3, body)
    total = sent.sum(axis=0)
    for rank, (all_reduced, block, gathered, at_root, copied) in enumerate(results):
        np.testing.assert_array_equal(all_reduced, total)
        np.testing.assert_array_equal(block, total[rank * count : (rank + 1) * count])
        np.testing.assert_array_equal(gathered, sent.ravel())
        np.testing.assert_array_equal(at_root, total if rank == 1 else np.zeros_like(total))
        np.testing.assert_array_equal(copied, sent[2])
    assert max(call.count for call in stub.calls() if call.name not in ("init", "destroy")) <= 4


@pytest.mark.parametrize("count", [2**30, 2**31 + 5, 2**32 + 7])
def test_counts_beyond_31_bits_arrive_whole(binding: Binding, stub: Stub, count: int) -> None:
    stub.set("is_computing", 0)  # no memory is touched: only the arguments matter
    base = 1 << 44

    def body(communicator: NcclCommunicator) -> None:
        buffer = Buffer(base, count, "float32")
        communicator.all_reduce(buffer, buffer, "sum")

    run_ranks(binding, 2, body)
    counts = [call.count for call in stub.calls("all_reduce")]
    assert sum(counts) == 2 * count
    assert max(counts) == 2**30


def test_split_count_covers_every_element_once() -> None:
    assert split_count(2**32 + 7, 2**30) == [*((i << 30, 1 << 30) for i in range(4)), (2**32, 7)]
    assert split_count(0, 4) == []


# ----- weights


@pytest.mark.parametrize("dtype", FLOATS + COMPLEXES)
@pytest.mark.sampled(90)
def test_weighted_average_of_uneven_shards(binding: Binding, dtype: str) -> None:
    rows = [4, 3, 1]
    sent = random_array((3, 6), dtype)
    weights = np.array(rows) / sum(rows)

    def body(communicator: NcclCommunicator) -> np.ndarray:
        rank, received = communicator.rank, np.empty(6, dtype)
        communicator.all_reduce(as_buffer(sent[rank]), as_buffer(received), "avg", weight=weights[rank])
        return received

    expected = np.average(sent.astype("complex128" if dtype in COMPLEXES else "float64"), axis=0, weights=weights)
    for received in run_ranks(binding, 3, body):
        np.testing.assert_allclose(received, expected, rtol=1e-3 if dtype == "float16" else 1e-6, atol=1e-6)


def test_weighted_average_of_bfloat16(binding: Binding) -> None:
    sent = (np.array([[4.0], [8.0]], "float32").view("uint32") >> 16).astype("uint16")  # the upper half is bfloat16

    def body(communicator: NcclCommunicator) -> np.ndarray:
        received = np.empty(1, "uint16")
        weight = (0.75, 0.25)[communicator.rank]
        send = as_buffer(sent[communicator.rank], "bfloat16")
        communicator.all_reduce(send, as_buffer(received, "bfloat16"), "avg", weight=weight)
        return (received.astype("uint32") << 16).view("float32")

    assert [value.tolist() for value in run_ranks(binding, 2, body)] == [[5.0], [5.0]]


def test_weighted_sums_are_freed(binding: Binding, stub: Stub) -> None:
    def body(communicator: NcclCommunicator) -> int:
        data = np.ones(8)
        for _ in range(100):  # the stub has room for 64
            communicator.all_reduce(as_buffer(data), as_buffer(data), "avg", weight=0.5)
        comm = communicator._comm
        return stub.dll.stub_num_custom_ops(getattr(comm, "handle", comm))

    assert run_ranks(binding, 2, body) == [0, 0]


def test_weights_are_refused_where_nccl_has_none(binding: Binding, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "has_weighted_sum", False)

    def body(communicator: NcclCommunicator) -> None:
        assert not communicator.capabilities().has_weighted_avg
        data = np.ones(1)
        with pytest.raises(UnsupportedError, match=r"has no weighted sum\. Multiply the buffer by its weight"):
            communicator.all_reduce(as_buffer(data), as_buffer(data), "avg", weight=0.5)

    run_ranks(binding, 2, body)


@pytest.mark.parametrize("value", [0.0, 1.0, 1 / 3, 0.1, 2**-14, 0.999999])
def test_pack_scalar_rounds_as_numpy(value: float) -> None:
    for dtype in FLOATS:
        assert pack_scalar(value, dtype) == np.array(value, dtype).tobytes()


def test_pack_scalar_rounds_bfloat16_to_the_nearest() -> None:
    torch = pytest.importorskip("torch")
    halfway = [0.5 + 2**-9, 0.5 + 3 * 2**-9]  # to the even neighbour: one down, one up
    for value in [*halfway, *np.random.default_rng(0).random(200)]:
        expected = torch.tensor(value, dtype=torch.float32).to(torch.bfloat16).view(torch.int16).numpy()
        assert pack_scalar(float(np.float32(value)), "bfloat16") == expected.tobytes()


# ----- refusals, before anything is launched


@pytest.mark.parametrize(
    ("op", "dtype", "error"),
    [
        ("avg", "int32", TypeError),
        ("avg", "bool", TypeError),
        ("sum", "bool", TypeError),
        ("max", "complex64", TypeError),
        ("prod", "complex64", UnsupportedError),
        ("sum", "int16", UnsupportedError),
        ("sum", "datetime64[ns]", UnsupportedError),
        ("median", "float32", ValueError),
    ],
)
def test_what_a_dtype_does_not_have_is_refused(
    binding: Binding, stub: Stub, op: str, dtype: str, error: type[Exception]
) -> None:
    def body(communicator: NcclCommunicator) -> None:
        data = np.zeros(2, dtype)
        for reduce in (communicator.all_reduce, functools.partial(communicator.reduce, root=0)):
            with pytest.raises(error, match="cannot"):
                reduce(as_buffer(data), as_buffer(data), op)

    run_ranks(binding, 2, body)
    assert stub.calls("all_reduce", "reduce") == []


def test_buffers_that_do_not_fit_are_refused(binding: Binding) -> None:
    def body(communicator: NcclCommunicator) -> None:
        x, y = Buffer(64, 4, "float32"), Buffer(64, 5, "float32")
        refused: list[Callable[[], None]] = [
            lambda: communicator.all_reduce(x, y, "sum"),
            lambda: communicator.all_reduce(x, Buffer(64, 4, "float64"), "sum"),
            lambda: communicator.all_gather(x, x),
            lambda: communicator.reduce_scatter(y, y, "sum"),
            lambda: communicator.broadcast(x, 2),
            lambda: communicator.reduce(x, x, "sum", -1),
            lambda: communicator.all_reduce(x, x, "sum", weight=0.5),
            lambda: communicator.all_reduce(x, x, "avg", weight=1.5),
        ]
        for call in refused:
            with pytest.raises(ValueError, match=r"cannot .*: got"):
                call()
        with pytest.raises(ZeroDivisionError), communicator.group():
            raise ZeroDivisionError
        assert communicator.poll() == "ok"  # the group held nothing, so nothing had to be aborted

    run_ranks(binding, 2, body)


def test_a_group_needs_two_ranks_and_a_whole_id(binding: Binding) -> None:
    for unique_id, rank, world_size in ((b"x" * 128, 0, 1), (b"x" * 127, 0, 2), (b"x" * 128, 2, 2)):
        with pytest.raises(ValueError, match="cannot join an NCCL group"):
            NcclCommunicator(binding, unique_id, rank, world_size)


# ----- joining, failing, ending


def join(binding: Binding, **options: Any) -> NcclCommunicator:
    """Return rank 0 of a group of two whose other rank never comes."""
    return NcclCommunicator(binding, binding.new_unique_id(), 0, 2, **options)


def test_joining_waits_while_nccl_is_in_progress(binding: Binding, stub: Stub) -> None:
    stub.set("init_polls", 5)
    communicator = join(binding)
    assert communicator.poll() == "ok"
    communicator.close()


def test_launching_waits_while_nccl_is_in_progress(binding: Binding, stub: Stub) -> None:
    stub.set("launch_polls", 3)  # the stub refuses an operation on a communicator in progress

    def body(communicator: NcclCommunicator) -> list[float]:
        data = np.ones(1)
        for _ in range(3):
            communicator.all_reduce(as_buffer(data), as_buffer(data), "sum")
        with communicator.group():
            communicator.all_reduce(as_buffer(data), as_buffer(data), "sum")
            communicator.all_reduce(as_buffer(data), as_buffer(data), "avg", weight=0.5)
        return data.tolist()

    assert run_ranks(binding, 2, body) == [[16.0], [16.0]]


def test_joining_ends_at_the_deadline(binding: Binding, stub: Stub) -> None:
    stub.set("init_polls", -1)
    with pytest.raises(NcclError, match=r"cannot join an NCCL group as rank 0 of 2: .*not done after 0\.05 s") as info:
        join(binding, timeout_s=0.05)
    assert (info.value.code, info.value.name) == (8, "ncclTimeout")
    assert len(stub.calls("abort")) == 1


def test_a_blocking_start_ends_at_the_deadline(binding: Binding, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    stub.set("is_stuck", 1)
    monkeypatch.setattr(binding, "_is_non_blocking", False)
    with pytest.raises(NcclError) as info:
        join(binding, timeout_s=0.05)
    assert info.value.code == 8


def test_joining_ends_when_the_runtime_gives_up(binding: Binding, stub: Stub) -> None:
    stub.set("is_stuck", 1)
    stub.set("init_polls", -1)
    broken = threading.Event()
    threading.Thread(target=broken.set).start()
    with pytest.raises(NcclError, match="another worker died or failed") as info:
        join(binding, is_broken=broken.is_set)
    assert info.value.code == 6


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 6, 8])
def test_a_refused_start_raises(binding: Binding, stub: Stub, code: int) -> None:
    unique_id = binding.new_unique_id()
    stub.set("fail_code", code)
    with pytest.raises(NcclError) as info:
        NcclCommunicator(binding, unique_id, 0, 2)
    assert info.value.code == code


@pytest.mark.parametrize("code", [1, 2, 3, 4, 5, 6, 8])
def test_a_refused_collective_raises(binding: Binding, stub: Stub, code: int) -> None:
    communicator = join(binding)
    stub.set("fail_code", code)
    data = np.ones(3)
    with pytest.raises(NcclError, match=r"cannot all_reduce 3 float64 by 'sum': got nccl\w+ \(\d\)") as info:
        communicator.all_reduce(as_buffer(data), as_buffer(data), "sum")
    assert info.value.code == code
    assert info.value.last_error == "the stub was told to fail"
    assert communicator.poll() == "error"
    communicator.close()
    assert len(stub.calls("abort")) == 1 and not stub.calls("destroy")


def test_wait_returns_when_it_is_done(binding: Binding) -> None:
    communicator = join(binding)
    answers = iter([False] * 20 + [True])
    communicator.wait(lambda: next(answers), timeout_s=60)
    communicator.close()


def test_wait_ends_when_the_runtime_gives_up(binding: Binding, stub: Stub) -> None:
    broken = threading.Event()
    communicator = join(binding, is_broken=broken.is_set)
    threading.Thread(target=broken.set).start()
    with pytest.raises(NcclError) as info:
        communicator.wait(lambda: False)
    assert info.value.code == 6
    assert len(stub.calls("abort")) == 1


def test_wait_ends_at_the_deadline(binding: Binding, stub: Stub) -> None:
    communicator = join(binding)
    with pytest.raises(NcclError, match=r"not done after 0\.02 s"):
        communicator.wait(lambda: False, timeout_s=0.02)
    assert len(stub.calls("abort")) == 1


def test_wait_ends_on_an_asynchronous_error(binding: Binding, stub: Stub) -> None:
    communicator = join(binding)
    stub.set("fail_code", 6)
    with pytest.raises(NcclError, match="cannot finish a collective: got ncclRemoteError"):
        communicator.wait(lambda: False)
    assert len(stub.calls("abort")) == 1


def test_abort_from_another_thread_frees_a_waiting_rank(binding: Binding, stub: Stub) -> None:
    communicator = join(binding)
    data = np.ones(1)
    in_collective = threading.Event()

    def abort() -> None:
        in_collective.wait()
        communicator.abort()

    watchdog = threading.Thread(target=abort)
    watchdog.start()
    in_collective.set()
    with pytest.raises(NcclError) as info:  # rank 1 never comes: without the abort this waits for ever
        communicator.all_reduce(as_buffer(data), as_buffer(data), "sum")
    watchdog.join()
    assert info.value.code == 6
    with pytest.raises(NcclError, match="was aborted"):
        communicator.all_reduce(as_buffer(data), as_buffer(data), "sum")
    assert communicator.poll() == "error"
    communicator.abort()
    communicator.close()
    assert len(stub.calls("abort")) == 1


def test_poll_and_abort_do_not_wait_for_a_stuck_launch(binding: Binding, stub: Stub) -> None:
    communicator = join(binding)
    stub.set("is_stuck", 1)
    data = np.ones(1)
    errors: list[NcclError] = []

    def launch() -> None:
        with pytest.raises(NcclError) as info:
            communicator.all_reduce(as_buffer(data), as_buffer(data), "sum")
        errors.append(info.value)

    thread = threading.Thread(target=launch)
    thread.start()
    while not stub.calls("all_reduce"):
        pass
    assert communicator.poll() == "pending"
    communicator.abort()
    assert communicator.poll() in ("pending", "error")
    stub.set("is_stuck", 0)
    thread.join()
    assert len(errors) == 1
    assert communicator.poll() == "error"


def test_an_abort_that_does_not_end_is_left_behind(
    binding: Binding, stub: Stub, caplog: pytest.LogCaptureFixture
) -> None:
    communicator = join(binding, abort_timeout_s=0.05)
    stub.set("is_abort_stuck", 1)
    stub.set("is_stuck", 1)
    communicator.abort()
    assert "NCCL did not abort its group in 0.05 s" in caplog.text


def test_an_error_inside_a_group_aborts_what_was_issued(binding: Binding, stub: Stub) -> None:
    stub.set("is_computing", 0)

    def body(communicator: NcclCommunicator) -> None:
        data = np.ones(1)
        with pytest.raises(ZeroDivisionError), communicator.group():
            communicator.all_reduce(as_buffer(data), as_buffer(data), "sum")
            raise ZeroDivisionError
        assert communicator.poll() == "error"

    run_ranks(binding, 2, body)
    assert len(stub.calls("abort")) == 2


def test_close_twice_and_use_after(binding: Binding, stub: Stub) -> None:
    communicator = join(binding)
    communicator.close()
    communicator.close()
    communicator.abort()
    assert len(stub.calls("destroy")) == 1 and not stub.calls("abort")
    with pytest.raises(ClosedError, match="cannot broadcast 1 int8: the communicator is closed"):
        communicator.broadcast(Buffer(64, 1, "int8"), 0)
    assert communicator.poll() == "error"


def test_capabilities_name_the_library(binding: Binding, stub: Stub) -> None:
    communicator = join(binding)
    capabilities = communicator.capabilities()
    communicator.close()
    assert capabilities.version == "2.32.3"
    assert capabilities.library_path == str(stub.path)
    assert set(capabilities.ops) == set(NUMPY_REDUCTIONS)
    assert {"bool", "bfloat16", "complex64"} <= set(capabilities.dtypes) and "int16" not in capabilities.dtypes
    assert capabilities.has_weighted_avg
