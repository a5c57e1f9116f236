"""The NCCL communicator on devices: ranks as processes on one GPU (``gpu``) or on one each (``multi_gpu``).

The same collectives run over a stub library in ``test_nccl_adapter.py``. Run on one H100; not on several GPUs.

- Ranks that share a GPU need NCCL 2.30.3 or later (``NCCL_MULTI_RANK_GPU_ENABLE``). With an older one each rank gets a
  host id of its own, which makes NCCL take sockets; that follows from NCCL's source and has not been tried.
- Each small collective of ranks that share a GPU takes milliseconds, because they take turns on it: only correctness
  is tested here, and every test has a limit.
- NVIDIA's wheel may hold an older one. ``LD_PRELOAD=.../libnccl.so.2 python -m pytest`` gives CuPy and torch another,
  here and in the ranks.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import psutil
import pytest
from nccl_cases import NUMPY_REDUCTIONS, SUPPORTED, random_array
from nccl_gpu_rank import Rank

from synk.cuda._devices import VISIBLE_VARIABLE, choose_devices, visible_gpus
from synk.cuda._nccl import NcclError, nccl_environment

cloudpickle.register_pickle_by_value(sys.modules[__name__])

REPOSITORY = Path(__file__).resolve().parents[2]
ANSWER_LIMIT_S = 120.0


class WorkerProcess:
    """The master's end of one rank."""

    def __init__(self, environment: dict[str, str], flag_fd: int) -> None:
        mine, theirs = socket.socketpair()
        command = [
            sys.executable,
            str(Path(__file__).with_name("nccl_gpu_rank.py")),
            str(theirs.fileno()),
            str(flag_fd),
        ]
        self.process = subprocess.Popen(command, env=environment, pass_fds=(theirs.fileno(), flag_fd))
        theirs.close()
        self.connection = Connection(mine.detach())

    def start(self, function: Callable[[Rank], Any]) -> None:
        self.connection.send_bytes(cloudpickle.dumps(function))

    def answer(self, limit_s: float = ANSWER_LIMIT_S) -> Any:
        assert self.connection.poll(limit_s), f"rank of pid {self.process.pid} did not answer within {limit_s} s"
        is_ok, value = cloudpickle.loads(self.connection.recv_bytes())
        if not is_ok:
            raise value
        return value

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


class Ranks:
    """Rank processes, not yet joined."""

    def __init__(self, devices: list[Any], **environ: str) -> None:
        chosen = choose_devices(visible_gpus().devices, devices=devices)
        num_sharing = max(map(chosen.count, chosen))
        self.is_shared = num_sharing > 1
        self._flag_fd = os.memfd_create("flag")
        os.ftruncate(self._flag_fd, 1)
        self.flag = mmap.mmap(self._flag_fd, 1)
        base = nccl_environment(os.environ, ranks_per_device=num_sharing)
        path = os.pathsep.join([str(REPOSITORY), str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
        # Without the last a rank alone does not get past the launch of its first collective: there it waits for peers.
        base |= {"PYTHONPATH": path, "NCCL_RUNTIME_CONNECT": "0", **environ}
        self.processes = [WorkerProcess(base | {VISIBLE_VARIABLE: device.entry}, self._flag_fd) for device in chosen]

    def run(self, function: Callable[[Rank], Any]) -> list[Any]:
        """Run ``function`` on all ranks at once."""
        for process in self.processes:
            process.start(function)
        return [process.answer() for process in self.processes]

    def join(self, timeout_s: float = 60.0) -> None:
        self.processes[0].start(lambda rank: rank.nccl.get_unique_id())
        unique_id, world_size, is_shared = self.processes[0].answer(), len(self.processes), self.is_shared
        for index, process in enumerate(self.processes):
            process.start(lambda rank, index=index: rank.join(unique_id, index, world_size, is_shared, timeout_s))
        for process in self.processes:
            process.answer()

    def close(self) -> None:
        for process in self.processes:
            process.end()
        self.flag.close()
        os.close(self._flag_fd)


@contextlib.contextmanager
def joined(devices: list[Any], **environ: str) -> Iterator[Ranks]:
    ranks = Ranks(devices, **environ)
    try:
        ranks.join()
        yield ranks
    finally:
        ranks.close()


@pytest.fixture(
    params=[
        *(pytest.param([0] * n, marks=pytest.mark.gpu, id=f"{n} on one") for n in (2, 4)),
        pytest.param("all", marks=pytest.mark.multi_gpu, id="one each"),
    ]
)
def ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    devices = request.param
    if devices == "all":
        devices = list(range(len(visible_gpus().devices)))
        if len(devices) < 2:
            pytest.skip("needs two GPUs")
    with joined(devices) as group:
        yield group


@pytest.fixture
def pair() -> Iterator[Ranks]:
    """Two ranks on one GPU."""
    with joined([0, 0]) as group:
        yield group


def test_every_op_and_dtype_equals_numpy(ranks: Ranks) -> None:
    world_size = len(ranks.processes)

    def reduce_all(rank: Rank) -> list[np.ndarray]:
        received = []
        with rank.communicator.group():  # one launch: ranks that share a GPU pay for each
            for op, dtype in SUPPORTED:
                mine = rank.array(random_array((world_size, 1000), dtype)[rank.communicator.rank])
                received.append(rank.cupy.empty(1000, dtype))
                rank.communicator.all_reduce(rank.buffer(mine), rank.buffer(received[-1]), op, stream=rank.stream.ptr)
                rank.kept = [*getattr(rank, "kept", []), mine]
        return [rank.host(array) for array in received]

    for results in ranks.run(reduce_all):
        for (op, dtype), received in zip(SUPPORTED, results, strict=True):
            expected = NUMPY_REDUCTIONS[op](random_array((world_size, 1000), dtype)).astype(dtype)
            tolerance = 1e-2 if dtype == "float16" else 1e-6
            np.testing.assert_allclose(received, expected, rtol=tolerance, atol=tolerance, err_msg=f"{op} {dtype}")


def test_moving_and_scattering_equal_numpy(ranks: Ranks) -> None:
    world_size = len(ranks.processes)
    sent = random_array((world_size, world_size * 3), "float64")

    def move(rank: Rank) -> list[np.ndarray]:
        comm, stream, index = rank.communicator, rank.stream.ptr, rank.communicator.rank
        mine, empty = rank.array(sent[index]), rank.cupy.empty
        gathered, block, at_root = empty(sent.size), empty(3), rank.cupy.zeros(sent.shape[1])
        comm.all_gather(rank.buffer(mine), rank.buffer(gathered), stream=stream)
        comm.reduce_scatter(rank.buffer(mine), rank.buffer(block), "sum", stream=stream)
        comm.reduce(rank.buffer(mine), rank.buffer(at_root), "max", 1, stream=stream)
        copied = mine.copy()
        comm.broadcast(rank.buffer(copied), 1, stream=stream)
        return [rank.host(array) for array in (gathered, block, at_root, copied)]

    total = sent.sum(axis=0)
    for index, (gathered, block, at_root, copied) in enumerate(ranks.run(move)):
        np.testing.assert_array_equal(gathered, sent.ravel())
        np.testing.assert_array_equal(block, total[3 * index : 3 * index + 3])
        np.testing.assert_array_equal(at_root, sent.max(axis=0) if index == 1 else np.zeros_like(total))
        np.testing.assert_array_equal(copied, sent[1])


@pytest.mark.gpu
def test_max_drops_nan(pair: Ranks) -> None:
    sent = np.array([[np.nan, 1.0, np.nan], [2.0, np.nan, np.nan]])

    def reduce_max(rank: Rank) -> np.ndarray:
        data = rank.array(sent[rank.communicator.rank])
        rank.communicator.all_reduce(rank.buffer(data), rank.buffer(data), "max", stream=rank.stream.ptr)
        return rank.host(data)

    for received in pair.run(reduce_max):
        np.testing.assert_array_equal(received, np.fmax.reduce(sent))


@pytest.mark.gpu
def test_more_than_31_bits_of_elements(pair: Ranks) -> None:
    count = 2**31 + 5

    def reduce_large(rank: Rank) -> tuple[bool, list[int]]:
        data = rank.cupy.full(count, rank.communicator.rank + 1, "int8")
        rank.communicator.all_reduce(rank.buffer(data), rank.buffer(data), "sum", stream=rank.stream.ptr)
        rank.finish()
        return bool((data == 3).all()), rank.cupy.asnumpy(data[-7:]).tolist()

    assert pair.run(reduce_large) == [(True, [3] * 7)] * 2


@pytest.mark.gpu
def test_nccl_listens_on_loopback_only(pair: Ranks) -> None:
    for process in pair.processes:
        for connection in psutil.Process(process.process.pid).net_connections(kind="inet"):
            assert connection.laddr.ip in ("127.0.0.1", "::1", "::ffff:127.0.0.1"), connection


@pytest.mark.gpu
def test_a_worker_holds_one_device(pair: Ranks) -> None:
    assert pair.run(lambda rank: rank.cupy.cuda.runtime.getDeviceCount()) == [1, 1]


@pytest.mark.gpu
def test_close_twice_and_join_again(pair: Ranks) -> None:
    def close(rank: Rank) -> bool:
        rank.communicator.close()
        rank.communicator.close()
        return rank.communicator.has_failed

    assert pair.run(close) == [False, False]
    pair.join()
    assert pair.run(lambda rank: rank.communicator.has_failed) == [False, False]


@pytest.mark.gpu
@pytest.mark.parametrize("connects", ["when it joins", "when it launches"])
def test_a_killed_peer_frees_the_survivor(connects: str) -> None:
    """Rank 1 is killed while rank 0 waits for it on the device, or in the launch; then the master's flag is up."""
    with joined([0, 0], NCCL_RUNTIME_CONNECT="01"[connects == "when it launches"]) as pair:
        survivor, victim = pair.processes

        def reduce_alone(rank: Rank) -> Any:
            data = rank.cupy.ones(1 << 20, "float32")
            rank.stream.synchronize()
            rank.connection.send_bytes(cloudpickle.dumps((True, "launching")))
            try:
                rank.communicator.all_reduce(rank.buffer(data), rank.buffer(data), "sum", stream=rank.stream.ptr)
                rank.finish()
            except NcclError as error:
                return error.code, rank.communicator.has_failed
            return "finished"

        survivor.start(reduce_alone)
        assert survivor.answer() == "launching"
        time.sleep(1.0)  # by then it waits; were it not, the test would hold as well
        victim.process.kill()
        victim.process.wait()
        began = time.monotonic()
        pair.flag[0] = 1
        code, has_failed = survivor.answer(limit_s=10.0)
        assert time.monotonic() - began < 5
        assert has_failed
        assert code in (1, 2, 3, 6)  # the flag's code, or NCCL's own where it sees the broken socket first
        pair.flag[0] = 0
        survivor.start(lambda rank: float(rank.cupy.arange(5).sum()))
        assert survivor.answer() == 10.0  # the context is sound


@pytest.mark.gpu
def test_a_peer_that_never_launches_meets_the_deadline(pair: Ranks) -> None:
    def reduce_alone(rank: Rank) -> int:
        data = rank.cupy.ones(8, "float32")
        rank.communicator.all_reduce(rank.buffer(data), rank.buffer(data), "sum", stream=rank.stream.ptr)
        try:
            rank.finish(timeout_s=2.0)
        except NcclError as error:
            return error.code
        return 0

    pair.processes[0].start(reduce_alone)
    assert pair.processes[0].answer(limit_s=15.0) == 8


@pytest.mark.gpu
def test_a_peer_that_never_joins_meets_the_deadline() -> None:
    """The thread that waits for it stays behind, and other groups are joined."""
    ranks = Ranks([0, 0])

    def join_alone(rank: Rank) -> int:
        try:
            rank.join(rank.nccl.get_unique_id(), 0, 2, True, 3.0)
        except NcclError as error:
            return error.code
        return 0

    try:
        ranks.processes[0].start(join_alone)
        assert ranks.processes[0].answer() == 8
        ranks.join()
        assert ranks.run(lambda rank: rank.communicator.has_failed) == [False, False]
    finally:
        ranks.close()
