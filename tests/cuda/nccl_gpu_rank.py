"""One rank of the GPU tests: a process that owns a device and runs the functions it is sent.

Run as ``python nccl_gpu_rank.py <socket fd> <flag fd>``. Functions come by cloudpickle and are called with the
``Rank``; what they return, or raise, goes back.
"""

from __future__ import annotations

import mmap
import os
import sys
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import numpy as np

from synk.cuda._nccl import Buffer, NcclCommunicator, load_nccl

# The first NCCL that allows two ranks on one GPU by NCCL_MULTI_RANK_GPU_ENABLE.
SHARED_GPU_VERSION = 23003


class Rank:
    """The device, NCCL and the communicator of this process."""

    def __init__(self, connection: Connection, flag: mmap.mmap) -> None:
        import cupy

        self.nccl = load_nccl()
        self.cupy = cupy
        self.connection = connection
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        self._flag = flag
        self.communicator: Any = None

    def is_broken(self) -> bool:
        return self._flag[0] != 0

    def join(self, unique_id: bytes, rank: int, world_size: int, is_shared: bool, timeout_s: float) -> None:
        """Join a group; ``is_shared`` says that its ranks are on one GPU."""
        if is_shared and self.nccl.get_version() < SHARED_GPU_VERSION:
            # The older NCCL compares host and bus to find duplicates; with hosts of different names it goes by sockets.
            os.environ["NCCL_HOSTID"] = f"synk-test-{rank}"
        self.stream.synchronize()
        self.communicator = NcclCommunicator(
            self.nccl, unique_id, rank, world_size, is_broken=self.is_broken, timeout_s=timeout_s
        )

    def array(self, host: np.ndarray) -> Any:
        return self.cupy.asarray(host)

    def buffer(self, array: Any, dtype: str = "") -> Buffer:
        return Buffer(array.data.ptr, array.size, dtype or array.dtype.name)

    def finish(self, timeout_s: float = 60.0) -> None:
        """Wait until the stream is done, the way a worker does."""
        self.communicator.wait(lambda: self.stream.done, timeout_s=timeout_s)

    def host(self, array: Any) -> np.ndarray:
        self.finish()
        return self.cupy.asnumpy(array, stream=self.stream)


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    flag = mmap.mmap(int(sys.argv[2]), 1)
    rank: Rank | None = None
    while True:
        try:
            function = cloudpickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)  # no destructor may wait for a peer that is gone
        try:
            if rank is None:
                rank = Rank(connection, flag)
            answer: Any = (True, function(rank))
        except Exception as error:
            answer = (False, error)
        connection.send_bytes(cloudpickle.dumps(answer))


if __name__ == "__main__":
    main()
