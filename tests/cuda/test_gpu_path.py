"""The whole path of a call with GPU workers, on a machine without a GPU.

Real worker processes run the backend ``cupy`` over a stand-in for CuPy whose arrays refuse implicit conversion to
NumPy, so that no hidden assumption about host memory survives. Reductions go by a stand-in for NCCL, or through the
host. What a GPU does with it is in ``test_gpu_calls.py``; what holds on every backend, this one too, in
``backends/test_conformance.py``.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import threading
import warnings
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import fake_gpus
from support.fake_gpus import Gpus
from support.harness import kill_and_wait, pids, start_polars
from support.tables import combinations, named

import synk

start_polars()

LARGE = 70_000
"""Elements that are a large output in every dtype."""


# -- calls -----------------------------------------------------------------------------------------------------------


def test_rows_that_go_in_pieces(gpu: Any) -> None:
    """More of them than a pinned buffer takes at once."""
    x = np.arange(5.0 * (1 << 20))
    total = gpu.reused(1).function(lambda x: x.sum(), outputs="sum")
    for batch in (slice(None, None, -2), np.arange(x.size)[::-1]):
        assert total(x, batch=batch) == x[batch].sum()


def pageable_nbytes(rt: synk.Runtime) -> int:
    return sum(each.nbytes for each in rt.profile.transfers if each.kind == "pageable")


@pytest.mark.parametrize("refuse", ["", "1"])
def test_the_device_reads_rows(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests, refuse: str
) -> None:
    """By index, by step and backwards; rows of an odd number of bytes, of one element, and large ones.

    The host copies nothing but indices, unless registering is refused.
    """
    monkeypatch.setenv("SYNK_FAKE_REFUSE", refuse)
    rt, rng = gpu(2), np.random.default_rng(0)
    f = rt.function(lambda x: x, outputs="gather")
    for dtype, rest in combinations(12, ("?", "i1", "f2", "f4", "c16"), ((), (3,), (1001,), (8, 128))):
        rows = rng.integers(0, 2, (200, *rest)).astype(dtype)
        data, is_picked = rt.data(rows), rows.reshape(200, -1)[:, 0] > 0
        for batch in (rng.integers(0, 200, 300), slice(None, 190, 8), slice(None, None, -1), is_picked, [5, 3, 0]):
            with subtests.test(dtype=dtype, rest=rest, batch=str(batch)):
                pending = [f.submit(data, batch=batch) for _ in range(3)]  # two of them are brought beside the function
                for got in (f(data, batch=batch, num_slices=3), *(call.result() for call in pending)):
                    np.testing.assert_array_equal(got, rows[batch])
        data.free_memory()
    copied = sum(each.nbytes for each in rt.profile.transfers if each.kind == "h2d")
    assert refuse or pageable_nbytes(rt) < copied / 10


def test_text_cannot_go_to_a_device(rt: Any) -> None:
    """As rows it is an error, as are tables. Broadcast, or returned by a function, it stays on the host."""
    table = importlib.import_module("pandas").DataFrame({"a": [1.0, 2.0, 3.0]})
    for value, text in (
        (np.array(["a", "b"]), "U1 to cuda:0"),
        (np.ones(2, np.longdouble), f"{np.dtype(np.longdouble)} to cuda:0"),
        (table, r"cannot scatter x of .*DataFrame of pandas, and its inputs are.*x\.to_numpy\(\)"),
    ):
        with pytest.raises(TypeError, match=text):
            rt.function(lambda x: 1.0)(value)

    def body(x: Any, held: Any) -> Any:
        assert type(held["names"]) is np.ndarray
        return held["table"] * int(x.sum()), np.array(["a"] * len(x)), np.array("text"), x.sum(keepdims=True)

    def join(a: Any, b: Any) -> Any:
        return np.concatenate([np.asarray(a), np.asarray(b)])

    f = rt.function(body, bcast_inputs="held", outputs=("sum", "gather", "first", join))
    for num_slices, expected in ((1, [1.0, 5.0]), (2, [0.0, 1.0, 2.0, 3.0])):
        held = {"names": np.array(["a", "b"]), "table": table}
        total, names, text, sums = f(np.arange(4.0), held, num_slices=num_slices)
        assert (list(total["a"]), names.tolist(), str(text)) == ([6.0, 12.0, 18.0], ["a"] * 4, "text")
        assert sums.tolist() == expected


@pytest.mark.parametrize("count", [5, 4 * LARGE], ids=["small", "large"])
def test_a_kernel_on_the_default_stream_is_done_before_its_array_is_copied(gpus: Gpus, count: int) -> None:
    """Numba and libraries that are called by ctypes launch there. With a stand-in, which runs it as late as it may."""

    def body(x: Any) -> Any:
        import cupy

        out = cupy.zeros(count)
        cupy.cuda.runtime.launch_elsewhere(lambda: out.__setitem__(slice(None), x.sum()))
        return out

    got = gpus.reused(2).function(body, outputs="gather")(np.arange(4.0))
    np.testing.assert_array_equal(got, np.repeat([1.0, 5.0], count))


def test_a_torch_function(rt: Any) -> None:
    """Also with a torch that has no CUDA, as here. It computes on the host."""
    torch = pytest.importorskip("torch")
    x = np.arange(12.0).reshape(6, 2)

    def body(x: Any) -> Any:
        import torch

        assert isinstance(x, torch.Tensor)
        return x.sum(0), x.requires_grad_(True).clone()

    total, same = rt.function(body, outputs=("sum", "gather"), framework="torch")(x)
    np.testing.assert_array_equal(total, x.sum(0))
    np.testing.assert_array_equal(same, x)

    def others(x: Any) -> Any:
        return x.to_sparse(), x.to("meta"), x.to(torch.float8_e4m3fn)

    sparse, meta, eighth = rt.function(others, outputs=(None, None, "gather"), framework="torch")(x)
    assert torch.equal(sparse[1].to_dense(), torch.tensor(x[3:])) and meta[0].is_meta
    assert torch.equal(eighth.float(), torch.tensor(x).to(torch.float8_e4m3fn).float())


def test_bfloat16_tensors_of_the_host(rt: Any) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("ml_dtypes")  # the extras for CUDA bring it
    x = np.arange(12.0).reshape(6, 2)

    def communicate(x: Any) -> Any:
        half = x.bfloat16()
        return synk.comm.all_reduce(half, "sum", out=half), synk.comm.scatter(x[:2].bfloat16(), 1)

    total, rows = rt.function(communicate, outputs=("gather", "gather"), framework="torch")(x)
    assert torch.equal(total, torch.tensor(x[:3] + x[3:]).bfloat16().repeat(2, 1))
    assert torch.equal(rows, torch.tensor(x[3:5]).bfloat16())


def test_calls_on_trial_leave_nothing_on_the_devices(rt: Any) -> None:
    """Also with closed-over shards, which are divided as rows are."""
    w, x = rt.shared(np.zeros(3)), np.arange(18.0).reshape(6, 3)

    def step(x: Any) -> Any:
        w.value = w.value + 1
        return x.sum(axis=0)

    wrong, s = rt.function(step), rt.shared(x, sharded=True)
    with pytest.raises(synk.errors.OpMismatch, match="gather"):
        rt.function(lambda x: 2 * x)(np.arange(24.0).reshape(8, 3))
    assert wrong.verify(x).outputs[0].matching == ("sum",)
    np.testing.assert_array_equal(w.value, np.zeros(3))
    np.testing.assert_allclose(wrong(x), x.sum(axis=0) / 2)
    np.testing.assert_array_equal(w.value, np.ones(3))
    f = rt.function(lambda w: ((s.value * w).mean(axis=0), s.value), bcast_inputs="w", outputs=("avg", "gather"))
    for mean, same in (f(2.0), f.serial(2.0), f.submit(2.0).result()):
        np.testing.assert_allclose(mean, 2 * x.mean(axis=0))
        np.testing.assert_array_equal(same, x)
    assert f.verify(2.0)


def test_what_is_copied_to_devices_and_back_is_counted(gpu: Any) -> None:
    """With a stand-in for CuPy: that the counters are in the right places, and nothing about a real device."""
    rt = gpu(2)
    x, y, w = rt.data(np.ones((100, 30))), np.ones((100, 4), np.float32), np.ones(30)
    f = rt.function(lambda x, y, w: x @ w + y.sum(), bcast_inputs="w", outputs="gather")
    for _ in range(3):
        f(x, y, w)
    found = {each.kind: (each.direction, each.nbytes) for each in rt.profile.transfers}
    assert found["h2d"] == ("to devices", 3 * (100 * 30 * 8 + 100 * 4 * 4 + 2 * 30 * 8))
    assert found["d2h"] == ("from devices", 3 * 100 * 8)


def test_what_the_device_works_is_time_of_the_function(gpu: Any) -> None:
    """By CUDA's events: the host has long queued it. With the clock of the stand-in, also over slices."""
    rt = gpu(2)

    def body(x: Any) -> Any:
        import cupy

        runtime = cupy.cuda.runtime
        runtime.spend(runtime.current.streams[-1], 10**11, is_pinned=True)  # 2 s
        return x.sum()

    f = rt.function(body, outputs="sum")
    for num_calls, num_slices in enumerate((1, 3), start=1):
        assert float(f(np.ones(12), num_slices=num_slices)) == 12.0
        expected_s = 2.0 if num_calls == 1 else 2.0 + 6.0
        for rank in rt.profile.ranks:
            assert expected_s <= rank.function_s < expected_s + 1
    with pytest.raises(KeyError):
        rt.function(lambda x: {}[0], outputs="sum")(np.ones(2))
    assert float(rt.function(named("short", lambda x: x.sum()), outputs="sum")(np.ones(12))) == 12.0
    assert max(rank.function_s for rank in rt.profile.ranks if rank.function == "short") < 1


def test_work_that_does_not_end_has_the_calls_limit(gpu: Any) -> None:
    """The host waits in the driver, where no signal reaches it."""
    rt = gpu(2)

    def body(x: Any) -> Any:
        import cupy

        if synk.comm.rank:
            runtime = cupy.cuda.runtime
            runtime.stall(runtime.current.streams[-1], lambda: False)
        return x.sum()

    large_sum(rt)
    with pytest.raises(synk.errors.CallTimeout):
        rt.function(body, outputs="sum")(np.ones(4), timeout=0.5)
    large_sum(rt)
    assert rt.counters["restarts"] == 1


# -- memory ----------------------------------------------------------------------------------------------------------


def test_out_of_device_memory(rt: Any) -> None:
    """A call is run once more, and at the end it is an exception; no worker is lost. CUDA itself may report it, too."""
    before, runs = pids(rt), rt.resident([])

    def full(x: Any, num_full: Any) -> Any:
        import cupy

        runs.value.append(len(x))
        if len(runs.value) <= num_full:
            if len(runs.value) == 2:
                raise cupy.cuda.runtime.CUDARuntimeError(2)
            return cupy.empty(1 << 40)
        runs.value.clear()
        return x.sum()

    f = rt.function(full, bcast_inputs="num_full", outputs="sum")
    with pytest.raises(MemoryError, match=r"out of device memory, 67108864 of 17179869184 bytes are free.*num_slices"):
        f(np.arange(70.0), 2)
    assert rt.function(lambda: len(runs.value), per_rank=True, outputs=None)() == [2, 2]
    rt.function(lambda: runs.value.clear(), per_rank=True, outputs=None)()
    assert float(f(np.arange(70.0), 1)) == np.arange(70.0).sum()
    assert pids(rt) == before


def test_memory_that_the_other_library_keeps_is_given_back(gpu: Any) -> None:
    """With stand-ins, whose memory is full until the one or the other has given back what it does not use.

    What the first attempt changed in a resident object is put back before the second.
    """
    pytest.importorskip("torch")
    rt = gpu(2)
    steps = rt.resident([])

    def full(x: Any, library: str, call: Any) -> Any:
        import cupy
        import torch

        if not hasattr(torch, "synk_given"):
            torch.synk_given = {"torch": 0}
            torch.cuda.is_initialized = lambda: True
            torch.cuda.empty_cache = lambda: torch.synk_given.update(torch=torch.synk_given["torch"] + 1)
        steps.value.append(library)
        given = torch.synk_given["torch"] if library == "torch" else cupy.cuda.Pool.num_freed
        if given == torch.synk_given.setdefault(call["number"], given) and synk.comm.rank == 0:
            raise (cupy.cuda.memory.OutOfMemoryError if library == "torch" else torch.cuda.OutOfMemoryError)(1, 2)
        return x.sum()

    for number, library in enumerate(("torch", "cupy", "torch", "cupy")):
        framework = None if number < 2 else "torch"
        options: dict[str, Any] = {"bcast_inputs": ("library", "call"), "outputs": "sum", "framework": framework}
        f = rt.function(full, **options, updates=steps)
        assert float(f(np.arange(7.0), library, {"number": f"call {number}"})) == 21.0
    assert [steps.get(rank) for rank in range(2)] == [["torch", "cupy", "torch", "cupy"]] * 2


@pytest.mark.parametrize("refuse", ["", "1"])
def test_registered_memory_is_given_back(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, refuse: str
) -> None:
    """That of data which was freed. Where registering is refused calls work, and the profile says what was pageable."""
    monkeypatch.setenv("SYNK_FAKE_REFUSE", refuse)
    rt = gpu(2)
    f = rt.function(lambda x: x.sum(), outputs="sum")
    for size in (10, 100_000, 10):
        x = rt.data(np.ones(size))
        assert f(x) == size
        x.free_memory()
    assert pageable_nbytes(rt) == (8 * 100_020 + 2 * 3 * 8 if refuse else 0)
    count = rt.function(lambda x: len(sys.modules["cupy"].cuda.runtime.registered()), outputs=None)
    assert max(count(np.ones(2))) <= 4  # slots, staging, results
    said = [record.getMessage() for record in caplog.records]
    told = "cannot register shared memory with CUDA (cudaError 801): copies take longer."
    assert sorted(said) == ([f"[rank {rank}] {told}" for rank in range(2)] if refuse else []), "each rank says it once"


# -- devices ---------------------------------------------------------------------------------------------------------


def test_auto_takes_the_gpus(gpu: Any) -> None:
    rt = gpu(None)
    assert (rt.backend, rt.devices) == ("cupy", ("cuda:0", "cuda:1", "cuda:2"))
    names = ("CUDA_VISIBLE_DEVICES", "NCCL_SOCKET_IFNAME")
    found = rt.function(lambda row: (*map(os.environ.get, names), synk.comm.device), outputs=None)(np.ones(3))
    assert [(uuid[:12], *others) for uuid, *others in found] == [
        (f"GPU-0000000{rank}", "lo", f"cuda:{rank}") for rank in range(3)
    ]
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert rt.info().count("Fake GPU") == 3 and "NCCL: 2.32.3 by cupy" in rt.info()


def test_workers_share_a_gpu_and_see_it_in_the_users_form(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They go without NCCL."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-00000001")
    rt = gpu(None, devices=[1, 1, 0])
    assert rt.devices == ("cuda:1", "cuda:1", "cuda:0")
    seen = rt.function(lambda row: os.environ["CUDA_VISIBLE_DEVICES"], outputs=None)(np.ones(3))
    assert seen == ["GPU-00000001", "GPU-00000001", "2"]
    large_sum(rt)
    assert "NCCL" not in rt.info()


def test_a_program_that_holds_device_memory_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus.install(monkeypatch, 1)
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda index: (index + 1) << 20)
    pool = SimpleNamespace(total_bytes=lambda: 4 << 20)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(get_default_memory_pool=lambda: pool, __spec__=1))
    monkeypatch.setattr("synk.cuda._placement.uses_cuda", lambda: True)
    with pytest.warns(RuntimeWarning, match=r"this program itself holds 7 MiB of device memory") as caught:
        synk.Runtime(1).close()
    assert [each.filename for each in caught] == [__file__]


def test_the_master_imports_no_cupy(gpu: Any) -> None:
    before = set(sys.modules)
    rt = gpu(2)
    rt.function(lambda x: x.sum(), outputs="sum")(np.ones(4))
    # Objects and exceptions may hold arrays of the device: they arrive with arrays of the host.
    held = rt.function(lambda x: deque([x.sum(keepdims=True)]), outputs=None)(np.ones(4))
    assert [type(part[0]) for part in held] == [np.ndarray] * 2

    def fail(x: Any) -> None:
        raise ValueError("no", x)

    with pytest.raises(ValueError) as caught:
        rt.function(fail)(np.ones(4))
    np.testing.assert_array_equal(caught.value.args[1], np.ones(2))
    assert not {name.partition(".")[0] for name in set(sys.modules) - before} & {"cupy", "pynccl", "numba", "torch"}


def test_without_cupy_the_error_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus.install_driver(monkeypatch, 2)
    with pytest.raises(synk.errors.UnsupportedError, match=r'pip install "synkhronos\[cuda13\]"'):
        synk.Runtime(backend="cupy")
    with synk.Runtime(1) as rt:
        assert rt.backend == "numpy"


# -- failures --------------------------------------------------------------------------------------------------------


def large_sum(rt: synk.Runtime) -> None:
    """Assert that a sum that goes by NCCL, where there is a group, is right."""
    size = rt.world_size
    got = rt.function(lambda x: x[:1].repeat(LARGE * 4) + 1, outputs="sum")(np.arange(float(size)))
    assert (got == size * (size + 1) / 2).all()


def test_a_poisoned_device_gets_a_new_worker(gpu: Any, capfd: Any) -> None:
    rt = gpu(2)

    def body(x: Any) -> Any:
        import cupy

        if synk.comm.rank == 1:
            cupy.cuda.fail_launch()
        return x.sum()

    with pytest.raises(synk.errors.WorkerDied, match=r"(?s)return x\.sum.*reports errors to every call") as caught:
        rt.function(body, outputs="sum")(np.ones(4))
    assert caught.value.ranks == (1,)
    large_sum(rt)
    assert rt.counters["restarts"] == 1

    def item(number: int) -> int:
        import cupy

        if number == 3:
            cupy.cuda.fail_launch()
            cupy.empty(1).sum()
        return number

    with pytest.raises(synk.errors.WorkerDied, match="reports errors to every call from now on"):
        list(rt.map(item, range(5), batch_size=1))
    assert list(rt.map(item, range(3))) == [0, 1, 2]

    def polls(x: Any) -> None:
        import cupy

        array = x * 1
        request = synk.comm.all_reduce(array, "sum", out=array, async_op=True)
        synk.comm.barrier()
        cupy.cuda.fail_launch()
        while not request.test():
            pass

    with pytest.raises(synk.errors.WorkerDied, match="reports errors to every call from now on"):
        rt.function(polls, outputs=None)(np.ones(4), timeout=60)


def test_a_death_while_the_others_are_in_nccl(gpu: Any) -> None:
    rt = gpu.reused(3)

    def body(x: Any) -> Any:
        from synk._wire.cell import cell
        from synk.cuda._nccl import Buffer

        if synk.comm.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        group = cell.worker.peers.group  # type: ignore[union-attr]
        buffer = Buffer(x.data.ptr, 1, "float64")
        group.communicator.all_reduce(buffer, buffer, "sum", stream=5000)  # without the agreement before it
        return 1.0

    with pytest.raises(synk.errors.WorkerDied) as caught:
        rt.function(body)(np.ones(3))
    assert caught.value.ranks == (1,)
    large_sum(rt)
    assert "NCCL: 2.32.3 by cupy" in rt.info()  # there is a group again


def test_a_rank_that_fails_in_a_reduction_frees_the_others(gpu: Any) -> None:
    """They wait for it in NCCL. The next call has a group of its own."""
    rt = gpu(2)

    def refuses_the_third(row: Any) -> None:
        if synk.comm.rank:
            os.environ["SYNK_FAKE_NCCL"] = "fail 3"

    rt.function(refuses_the_third, outputs=None)(np.ones(2))
    large_sum(rt)  # the second, after the proof
    before = pids(rt)
    with pytest.raises(synk.errors.SynkError, match="NCCL_ERROR_SYSTEM_ERROR"):
        large_sum(rt)
    large_sum(rt)

    def has_no_room(x: Any) -> Any:
        from synk._wire.cell import cell

        def full(array: Any) -> Any:
            raise MemoryError("no room for a copy")

        if synk.comm.rank:
            cell.worker.backend.own_copy = full  # type: ignore[union-attr, method-assign]
        return x[:1].repeat(LARGE * 4)

    f = rt.function(has_no_room, outputs="sum")
    first, second = f.submit(np.ones(2), timeout=60), f.submit(np.ones(2), timeout=60)
    with pytest.raises(MemoryError, match="no room for a copy"):
        first.result()
    with contextlib.suppress(synk.errors.SynkError):  # the group was given up meanwhile
        second.result()
    large_sum(rt)
    assert pids(rt) == before


FAULTS = {
    "refuse": "of 2: got NCCL_ERROR_SYSTEM_ERROR",
    "fail": "cannot all_reduce 262144 int32 by 'sum': got NCCL_ERROR_SYSTEM_ERROR",
    "hang": "cannot finish a collective: got ncclTimeout",
    "wrong": "cannot prove the group: got 262144 wrong sums of 262144",
    "peers": "",
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_group_that_does_not_work_is_found_when_it_is_made(
    gpu: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    """It is tried again in new workers, without peer access. Else calls go through host memory, with one warning."""
    monkeypatch.setenv("SYNK_FAKE_NCCL", fault)
    monkeypatch.setenv("SYNK_FAKE_PROOF_S", "1")
    rt = gpu(2)
    for _ in range(3):
        large_sum(rt)
    warned = [record.getMessage() for record in caplog.records if "NCCL" in record.getMessage()]
    assert len(warned) == bool(FAULTS[fault])
    assert all(FAULTS[fault] in text for text in [*warned, rt.info()])
    assert ("NCCL: 2.32.3 by cupy" in rt.info()) != bool(FAULTS[fault])
    assert rt.counters["restarts"] == 2
    f = rt.function(lambda x: os.environ.get("NCCL_P2P_DISABLE"), outputs=None)
    assert f(np.ones(2)) == ["1", "1"]


def test_a_group_that_works_again_is_used_again(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A collective that hangs after the proof ends with the call's limit, on the workers that were there."""
    monkeypatch.setenv("SYNK_FAKE_NCCL", "hang 2")
    rt = gpu(2)
    before = pids(rt)
    with pytest.raises(synk.errors.CallTimeout):
        rt.function(lambda x: x[:1].repeat(LARGE * 4), outputs="sum")(np.arange(2.0), timeout=1)
    large_sum(rt)
    assert pids(rt) == before
    assert "NCCL: 2.32.3 by cupy" in rt.info()


def test_nccl_that_cannot_start_again_is_not_waited_for(gpu: Any) -> None:
    """The workers were told to reduce by NCCL; once it is given up they must hear that, too."""
    rt = gpu(2)
    large_sum(rt)
    for environment in rt._session.processes.placement.assignment.environments:
        environment["SYNK_FAKE_NCCL"] = "refuse"
    kill_and_wait(*pids(rt))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # deaths that were seen between two calls
        with contextlib.suppress(synk.errors.WorkerDied):
            large_sum(rt)
        for _ in range(4):
            large_sum(rt)


# -- comm ------------------------------------------------------------------------------------------------------------


def test_collectives_inside_functions(gpus: Gpus) -> None:
    """Ranks are those of the call: whether NCCL joins them, where all take part, or not. NaN is found by max."""
    rt = gpus.reused(3)

    def body(x: Any) -> dict[str, Any]:
        comm = synk.comm
        rank, size = comm.rank, comm.world_size
        out = x.copy()
        request = comm.irecv((rank - 1) % size, 1, out=out)
        comm.isend(x, (rank + 1) % size, 1)
        comm.barrier()
        assert request.wait() is out
        reduced = comm.reduce(x[0], "sum", size - 1)
        return {
            "sum": comm.all_reduce(x.sum(axis=0), "sum"),
            "nan": comm.all_reduce(x[0] * (float("nan") if rank == size - 1 else 1.0), "max"),
            "stack": comm.all_gather(x),
            "root": comm.broadcast(x, size - 1),
            "block": comm.reduce_scatter(comm.all_gather(x).reshape(-1, 2) * (rank + 1)),
            "before": out,
            "reduced": -1.0 if reduced is None else reduced,
        }

    f = rt.function(body, outputs=None)
    for rows in (9, 2, 1):
        x = np.arange(2.0 * rows).reshape(rows, 2)
        size = min(rows, 3)
        parts = x.reshape(size, -1, 2)
        for rank, found in enumerate(each for each in f(x) if each is not None):
            expected = {
                "sum": x.sum(axis=0), "nan": np.nan, "stack": parts, "root": parts[-1],
                "block": parts[rank] * (size * (size + 1) / 2), "before": parts[rank - 1],
                "reduced": parts[:, 0].sum(axis=0) if rank == size - 1 else -1.0,
            }  # fmt: skip
            for name, value in expected.items():
                np.testing.assert_array_equal(found[name], value, name)


def test_a_sum_that_is_started_runs_beside_the_function(gpus: Gpus) -> None:
    """With NCCL, on a stream that the stand-in runs when somebody waits for it; it is there wherever it is needed."""
    rt = gpus.reused(3)

    def body(x: Any) -> dict[str, Any]:
        import cupy

        comm = synk.comm

        def own() -> Any:
            return cupy.zeros(4, "float32") + comm.rank + 1

        def start(array: Any, op: str = "sum") -> Any:
            request = comm.all_reduce(array, op, out=array, async_op=True)
            comm.barrier()  # the ranks have agreed on all that was started before it
            return request

        threaded, polled, waited, first, second, left = (own() for _ in range(6))
        thread = threading.Thread(target=lambda: start(threaded))  # as autograd's, which run the hooks of parameters
        thread.start()
        thread.join()
        early = [threaded.copy()]
        request = start(polled)
        answers = [request.test(), request.test()]
        request = start(waited)
        early.append(waited.copy())
        assert request.wait() is waited
        before = start(first), start(second)
        blocking = comm.all_reduce(own(), "sum")  # behind both
        sums = (first.copy() + second.copy()) / 2
        assert [each.wait() is not None for each in before] == [True, True]
        halves = (own() / 2).astype("float16")
        start(halves).wait()
        largest = own() * (float("nan") if comm.rank == 1 else 1.0)
        start(largest, "max").wait()
        start(left)  # and the function ends
        start(own())  # of which nobody keeps the array
        done = [polled, waited, sums, blocking, halves * 2, left]
        return {"early": early, "answers": answers, "done": done, "largest": largest}

    for rank, found in enumerate(rt.function(body, outputs=None)(np.arange(3))):
        for each in found["early"]:
            assert each.tolist() == [rank + 1 if gpus.has_nccl else 6] * 4
        assert found["answers"] == [not gpus.has_nccl, True]
        assert [each.tolist() for each in found["done"]] == [[6] * 4] * 6
        assert np.isnan(found["largest"]).all()


def test_a_rank_that_raises_with_sums_started_leaves_nobody_waiting(gpus: Gpus) -> None:
    """The others may have given them to NCCL, where they would wait for ever."""
    rt = gpus.reused(3)

    def body(x: Any, failing: Any) -> Any:
        import cupy

        array = cupy.zeros(4, "float32")
        requests = [synk.comm.all_reduce(array, "sum", out=array, async_op=True) for _ in range(3)]
        if synk.comm.rank in failing["ranks"]:
            raise KeyError("mine")
        return [request.wait() for request in requests][-1]

    f = rt.function(body, bcast_inputs="failing", outputs=None)
    for ranks in ((1,), (0, 1, 2), (1,)):
        with pytest.raises(KeyError, match="mine"):
            f(np.arange(3), {"ranks": ranks}, timeout=60)
        assert rt.function(lambda x: synk.comm.all_reduce(x.sum(), "sum"), outputs="first")(np.ones(9)) == 9.0


# -- shared variables ------------------------------------------------------------------------------------------------


def scaler(rt: synk.Runtime, variable: Any) -> Any:
    """Return a function that multiplies the variable by rank + 1."""

    def body(x: Any) -> Any:
        assert type(variable.value).__module__ == "cupy"
        variable.value = variable.value * (synk.comm.rank + 1)
        return x.sum()

    return rt.function(body, outputs="sum")


def test_idle_ranks_follow(gpus: Gpus) -> None:
    rt = gpus.reused(3)
    w = rt.shared(np.ones(LARGE), name="w")
    scale = scaler(rt, w)
    scale(np.ones(3))
    scale(np.ones(1))  # on rank 0 alone
    np.testing.assert_array_equal(synk.gather(w)[:, 0], [1, 1, 1])


def test_replicas_that_differ_are_lost_with_their_worker(gpus: Gpus) -> None:
    """What becomes of those that do not, and of shards: ``backends/test_conformance.py``."""
    rt = gpus.reused(3)
    own = rt.shared(np.ones(5), name="own")
    scale = scaler(rt, own)
    scale(np.ones(3))
    kill_and_wait(pids(rt)[1])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with contextlib.suppress(synk.errors.WorkerDied):
            large_sum(rt)  # may meet the death
    with pytest.raises(synk.errors.WorkerDied, match="cannot call 'body': the value of 'own' of rank 1 lay"):
        scale(np.ones(3))
    with pytest.raises(synk.errors.WorkerDied, match="cannot read variable 'own'"):
        synk.gather(own)
    synk.broadcast(own)
    scale(np.ones(3))
    np.testing.assert_array_equal(synk.gather(own)[:, 0], [1, 2, 3])


def test_resident_objects_keep_their_arrays_on_the_devices(gpu: Gpus) -> None:
    """After a call that fails, on ranks that had no rows, and on one that is new."""
    rt = gpu(3)
    held = rt.resident({})

    def step(x: Any, failing: Any) -> Any:
        import cupy

        held.value["sum"] = held.value.get("sum", cupy.zeros(2)) + x.sum()
        if synk.comm.rank in failing["ranks"]:
            raise KeyError("mine")
        return type(held.value["sum"]).__module__, held.value["sum"]

    f = rt.function(step, bcast_inputs="failing", updates=[held], outputs=None)
    f(np.ones(1), {"ranks": ()})  # on rank 0 alone
    for rows, ranks in ((6, (1,)), (6, ())):
        with pytest.raises(KeyError) if ranks else contextlib.nullcontext():
            found = f(np.ones(rows), {"ranks": ranks})
    assert [(name, total.tolist()) for name, total in found] == [("cupy", [3.0, 3.0])] * 3
    kill_and_wait(pids(rt)[2])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with contextlib.suppress(synk.errors.WorkerDied, KeyError):
            f(np.ones(3), {"ranks": (0, 1, 2)})
    assert [name for name, _ in f(np.ones(6), {"ranks": ()})] == ["cupy"] * 3
