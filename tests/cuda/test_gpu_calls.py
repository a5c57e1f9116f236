"""Calls, collectives and variables on real GPUs: the tests of ``test_gpu_path``, and what only a GPU shows.

The same bodies run over a stand-in for CuPy where there is no GPU. Run on one H100, not on several GPUs. Ranks that
share one GPU take turns on it, so nothing here says anything about speed.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from pages.test_demos import DEMOS, SMALL
from support.harness import pids, script
from test_gpu_path import (  # noqa: F401  (collected here, with the fixtures below)
    LARGE,
    pageable_nbytes,
    scaler,
    test_a_rank_that_raises_with_sums_started_leaves_nobody_waiting,
    test_a_torch_function,
    test_calls_on_trial_leave_nothing_on_the_devices,
    test_collectives_inside_functions,
    test_idle_ranks_follow,
    test_replicas_that_differ_are_lost_with_their_worker,
    test_rows_that_go_in_pieces,
    test_text_cannot_go_to_a_device,
    test_the_device_reads_rows,
    test_the_master_imports_no_cupy,
)
from test_gpu_submitted import (  # noqa: F401
    gate,
    test_inputs_are_brought_ahead_and_are_right,
    test_torch_and_slices_and_large_outputs,
    test_variables_on_devices_between_submitted_calls,
)

import synk
from synk.cuda._devices import visible_gpus

pytestmark = pytest.mark.gpu
SHARED_GPU_VERSION = 23003
"""The first NCCL that allows two ranks on one GPU, by ``NCCL_MULTI_RANK_GPU_ENABLE``."""

# torch keeps descriptors of its first backward pass, which a census is to know of
torch.ones(1, requires_grad=True).backward()


class RealGpus:
    """Runtimes whose ranks share GPUs, or have one each."""

    def __init__(self, has_nccl: bool, num_gpus: int = 1) -> None:
        self.has_nccl = has_nccl
        self._num_gpus = num_gpus
        self.opened: list[synk.Runtime] = []

    def __call__(self, num_workers: int | None = 3, **options: Any) -> synk.Runtime:
        if self._num_gpus < 3:
            options.setdefault("devices", [rank % self._num_gpus for rank in range(num_workers or 1)])
            num_workers = None
        self.opened.append(synk.Runtime(num_workers, backend="cupy", **options))
        return self.opened[-1]

    reused = __call__
    """The tests over the stand-in keep their runtimes; here each gets its own."""


def closing(made: RealGpus) -> Iterator[RealGpus]:
    yield made
    while made.opened:
        made.opened.pop().close()


@functools.cache
def nccl_version() -> int:
    """Return the version of the NCCL library that workers load, as NCCL counts it: 23003 is 2.30.3.

    Asked in a program of its own, for torch has loaded one into this process.
    """
    program = "from synk.cuda._nccl import load_nccl; print(load_nccl().get_version())"
    return int(subprocess.check_output([sys.executable, "-c", program], text=True, timeout=60))


@pytest.fixture(
    params=["host, one GPU", "nccl, one GPU", pytest.param("nccl, several", marks=pytest.mark.multi_gpu)],
)
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[RealGpus]:
    has_nccl, num_gpus = request.param.startswith("nccl"), len(visible_gpus().devices)
    if request.param.endswith("one GPU"):
        num_gpus = 1
    elif num_gpus < 2:
        pytest.skip("needs two GPUs")
    if has_nccl and num_gpus < 3:  # of three ranks two share one
        if nccl_version() < SHARED_GPU_VERSION:
            pytest.skip("ranks can share a GPU from NCCL 2.30.3 on")
        monkeypatch.setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1")
    else:
        monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    yield from closing(RealGpus(has_nccl, num_gpus))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[RealGpus]:
    monkeypatch.delenv("NCCL_MULTI_RANK_GPU_ENABLE", raising=False)
    yield from closing(RealGpus(False))


def test_a_segment_is_registered(gpu: Any) -> None:
    """Whether the driver takes a mapping of a memfd: copies at link speed depend on it."""
    rt = gpu(1)
    x = rt.data(np.ones(1 << 24))
    f = rt.function(lambda x: (x.sum(), x), outputs=("sum", "gather"))
    for _ in range(2):
        total, same = f(x)
        assert total == 1 << 24 and same.shape == x.shape

    def refusal(row: Any) -> Any:
        from synk._wire.cell import cell

        return cell.worker.backend._segments.refusal  # type: ignore[union-attr]

    assert rt.function(refusal, outputs=None)(np.ones(1)) == [""]
    assert pageable_nbytes(rt) == 0


def test_what_the_device_works_is_time_of_the_function(gpu: Any) -> None:
    """The host has queued it in no time."""
    rt = gpu(1)
    f = rt.function(spinning, bcast_inputs="cycles", outputs="sum")
    f(np.ones(1), np.int64(1))  # compiles
    rt.profile.reset()
    assert f(np.ones(3), np.int64(1_000_000_000)) == 3.0  # half a second or more
    (rank,) = [each for each in rt.profile.ranks if each.function == "spinning"]
    assert 0.3 < rank.function_s < 5


def test_a_kernel_that_does_not_end_has_the_calls_limit(gpu: Any) -> None:
    rt = gpu(1)
    f = rt.function(spinning, bcast_inputs="cycles", outputs="sum")
    assert f(np.ones(3), np.int64(1)) == 3.0
    began = time.monotonic()
    with pytest.raises(synk.errors.CallTimeout):
        f(np.ones(3), np.int64(1 << 62), timeout=1)
    assert f(np.ones(3), np.int64(1), timeout=60) == 3.0
    assert time.monotonic() - began < 60


def spin(cycles: Any) -> None:
    """Launch a kernel that takes so many cycles."""
    import cupy

    source = 'extern "C" __global__ void spin(long long n) { long long t = clock64(); while (clock64() - t < n); }'
    cupy.RawKernel(source, "spin")((1,), (1,), (cycles.item(),))


def spinning(x: Any, cycles: Any) -> Any:
    """Sum the rows behind that kernel."""
    spin(cycles)
    return x.sum()


def test_torch_is_on_the_stream_of_the_call_from_the_first_one_on(gpu: Any) -> None:
    def are_alike(x: Any) -> bool:
        import cupy

        return torch.cuda.current_stream().cuda_stream == cupy.cuda.get_current_stream().ptr

    f = gpu(1).function(are_alike, outputs=None, framework="torch")
    assert f(np.ones(1)) == f(np.ones(1)) == [True]


def test_the_next_inputs_arrive_while_the_device_computes(gpu: Any) -> None:
    """The event of the copy is over before the kernel that was started ahead of it."""
    rt = gpu(1)

    def work(x: Any, cycles: Any) -> Any:
        from synk._wire.cell import cell

        worker: Any = cell.worker
        ahead = [worker.ahead] if worker.ahead is not None else []
        total = x.sum()
        spin(cycles)
        overtaken = -1.0  # no call was waiting
        for each in ahead:
            limit = time.monotonic() + 5
            while not each.event.done and time.monotonic() < limit:
                time.sleep(0.001)
            overtaken = float(each.event.done and not worker.backend.stream.done)
        return total, overtaken

    f = rt.function(work, bcast_inputs="cycles", outputs="sum")
    rows = [rt.data(np.full(1 << 22, float(k))) for k in range(4)]
    for data in rows:
        f(data, np.int64(1))  # registers its segment
    for _ in range(3):
        pending = [f.submit(rows[k % 4], np.int64(1_000_000_000)) for k in range(8)]
        results = [call.result() for call in pending]
    assert [total for total, _ in results] == [(k % 4) * float(1 << 22) for k in range(8)]
    assert sum(overtaken == 1.0 for _, overtaken in results) >= 3, results
    assert not any(overtaken == 0.0 for _, overtaken in results), results


def test_many_submitted_calls_do_not_mix_their_inputs(gpu: Any) -> None:
    """Device memory that is used again at once, for inputs of many sizes that are read late by long kernels."""
    rt = gpu(2)

    def work(x: Any, k: Any) -> Any:
        for _ in range(20):
            x = x * 1.0
        return x.min(), x.max(), x.sum()

    f = rt.function(work, bcast_inputs="k", outputs=("min", "max", "sum"))
    rng = np.random.default_rng(0)
    cases = [(float(k), int(rng.integers(2, 3_000_000))) for k in range(100)]
    pending = [f.submit(np.full(length, value), np.int64(0)) for value, length in cases]
    for (value, length), call in zip(cases, pending):
        assert call.result() == (value, value, value * length)


def test_out_of_device_memory_and_on(gpu: Any) -> None:
    rt = gpu(1)

    def body(x: Any) -> Any:
        import cupy

        return cupy.empty(1 << 50, "u1")

    with pytest.raises(MemoryError, match=r"out of device memory, \d+ of \d+ bytes are free.*num_slices"):
        rt.function(body)(np.ones(2))
    assert rt.function(lambda x: x.sum(), outputs="sum")(np.ones(4)) == 4.0
    assert rt.counters["restarts"] == 0


def test_an_illegal_address_gets_a_new_worker(gpu: Any) -> None:
    rt = gpu(2)

    def body(x: Any) -> Any:
        import cupy

        if synk.comm.rank == 1:
            source = 'extern "C" __global__ void stray() { *(volatile int*)8 = 1; }'
            cupy.RawKernel(source, "stray")((1,), (1,), ())
        return x.sum()

    with pytest.raises(synk.errors.WorkerDied) as caught:
        rt.function(body, outputs="sum")(np.ones(4))
    assert caught.value.ranks == (1,)
    assert rt.function(lambda x: x.sum(), outputs="sum")(np.ones(4)) == 4.0


@pytest.mark.parametrize("connects", ["when it joins", "when it launches"])
def test_a_death_in_a_collective_frees_the_others(
    gpus: RealGpus, monkeypatch: pytest.MonkeyPatch, connects: str
) -> None:
    """One that waits on the device, or (if the proof has not connected the ranks for it) on the host, in the launch."""
    monkeypatch.setenv("NCCL_RUNTIME_CONNECT", "01"[connects == "when it launches"])
    rt = gpus(2)

    def body(x: Any) -> Any:
        from synk._wire.cell import cell
        from synk.cuda._nccl import Buffer

        if synk.comm.rank == 1:
            time.sleep(1.0)  # the other one waits on the device by then
            os.kill(os.getpid(), signal.SIGKILL)
        group = cell.worker.peers.group  # type: ignore[union-attr]
        if group is None:
            return synk.comm.all_reduce(x.sum(), "sum")
        buffer = Buffer(x.data.ptr, 1, "float64")
        group.communicator.all_reduce(buffer, buffer, "sum", stream=cell.worker.backend.stream_handle)  # type: ignore[union-attr]
        return float(x[0])  # waits in the driver, where only the watch can free it

    started = time.monotonic()
    with pytest.raises(synk.errors.WorkerDied) as caught:
        rt.function(body)(np.ones(2))
    assert 1 in caught.value.ranks
    assert time.monotonic() - started < 15
    got = rt.function(lambda x: x[:1].repeat(LARGE * 4), outputs="sum")(np.ones(2))
    assert (got == 2.0).all()


def test_ranks_listen_on_loopback_only(gpus: RealGpus) -> None:
    rt = gpus(2)
    assert rt.function(lambda x: synk.comm.all_reduce(x.sum(), "sum"), outputs="first")(np.ones(2)) == 2.0
    for pid in pids(rt):
        for connection in psutil.Process(pid).net_connections(kind="inet"):
            assert connection.laddr.ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1"), connection


def test_more_than_two_to_the_31_bytes(gpu: Any) -> None:
    rt = gpu(1)
    count = (1 << 31) + 5
    x = rt.data(np.ones(count, np.uint8))
    assert rt.function(lambda x: x.sum(dtype="i8"), outputs="sum")(x) == count
    same = rt.function(lambda x: x, outputs="gather")(x)
    assert same.shape == (count,)
    assert same[-1] == 1


def test_inline_runs_on_the_gpu() -> None:
    """In a program of its own, for CUDA keeps descriptors for the life of a process. The second one registers anew."""
    script(
        """
        for _ in range(2):
            with synk.Runtime(0, backend="cupy", devices=[0]) as rt:
                w = rt.shared(np.ones(4))
                assert rt.function(lambda x: w.value.sum() * x.mean())(np.full(3, 2.0)) == 8.0
                assert rt.function(lambda x: x.sum(), outputs="sum")(rt.data(np.ones(1 << 20))) == 1 << 20
            assert [thread.name for thread in threading.enumerate()] == ["MainThread"]
    """,
        timeout=120,
    ).check("")


def test_jax_functions(gpu: Any) -> None:
    pytest.importorskip("jax")
    rt = gpu(1)

    def body(x: Any) -> Any:
        import jax.numpy as jnp

        return jnp.sum(x * 2)

    assert rt.function(body, outputs="sum", framework="jax")(np.arange(5.0, dtype="f4")) == 20.0


@pytest.mark.parametrize("path", DEMOS, ids=lambda path: path.stem)
def test_demos_run_unchanged(path: Path) -> None:
    if path.name == "40_two_nodes.py":
        pytest.importorskip("zmq", reason="ranks of several nodes need pyzmq")
    size = ["--size", "small"] if path.name in SMALL else []
    subprocess.run([sys.executable, str(path), *size], check=True, timeout=150, cwd=path.parents[1])


def test_replicated_training_is_that_of_one_process(gpus: Any) -> None:
    """The master's model stays on the host, the ranks' are on their devices."""
    from training.trainings import batches, mlp, plain_step

    def build() -> tuple[Any, Any]:
        model = mlp()
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    plain, objects = build(), build()
    rep = synk.torch.replicate(*objects, runtime=gpus(3))
    step = rep.function(plain_step)
    for x, y in batches(20):
        assert abs(float(step(x, y)) - float(plain_step(*plain, x, y).detach())) < 1e-9
    rep.pull()
    torch.testing.assert_close(objects[0].state_dict(), plain[0].state_dict(), rtol=0, atol=1e-9)
    assert all(parameter.device.type == "cpu" for parameter in objects[0].parameters())


def test_the_demo_of_resnet_trains() -> None:
    path = DEMOS[0].parent / "gpu" / "resnet50.py"
    command = [sys.executable, str(path), "--batch", "32", "--steps", "5"]
    ran = subprocess.run(command, check=True, timeout=300, capture_output=True, text=True)
    assert "1 GPU :" in ran.stdout
