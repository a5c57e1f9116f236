"""NCCL between GPUs, by ``cupy.cuda.nccl``: a blocking communicator, and the one thread that watches and aborts it.

CuPy's calls release the GIL, and each of them may wait for ever for a peer that is gone: joining, launching (NCCL
connects ranks at their first collectives), ending. So a thread of its own joins the group, watches it while it lives,
and ends it; torch does the same. The thread learns of a dead peer from NCCL's asynchronous error, or from ``is_broken``
because the program has told the group, and aborts this rank's communicator. That ends the launch in which the main
thread may be stuck, and the kernels on the device. No rank waits for a peer to abort first.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from synk.errors import SynkError, UnsupportedError

logger = logging.getLogger("synk")

_OPS = {"sum": 0, "prod": 1, "max": 2, "min": 3, "avg": 4}
_BYTE = 1
_DTYPES = {
    "int8": 0, "uint8": _BYTE, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5,
    "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
# Dtypes that NCCL lacks, as a number of elements of a dtype that it has.
_STORED_AS = {"bool": ("uint8", 1), "complex64": ("float32", 2), "complex128": ("float64", 2)}

INTERNAL_ERROR, REMOTE_ERROR, TIMEOUT = 3, 6, 8
_LOST = REMOTE_ERROR, "a broken group: another worker died or failed"
_WATCH_INTERVAL_S = 0.05
_MAX_PAUSE_S = 0.001
# How long the thread waits for a launch in progress before it aborts. A launch that takes longer is stuck.
_LAUNCH_PATIENCE_S = 0.5


class NcclError(SynkError):
    """NCCL refused or lost an operation.

    Attributes
    ----------
    code : int
        NCCL's status: 1 CUDA, 2 system, 3 internal, 4 argument, 5 usage, 6 a peer or the group is gone, 8 time limit.
    """

    def __init__(self, code: int, problem: str, action: str) -> None:
        super().__init__(code, problem, action)  # all of it, so that it can be pickled
        self.code = code

    def __str__(self) -> str:
        return f"cannot {self.args[2]}: got {self.args[1]}."


@dataclass(frozen=True)
class Buffer:
    """A contiguous piece of device memory that NCCL may read or write.

    Attributes
    ----------
    ptr : int
        Address of the first element.
    count : int
        Number of elements.
    dtype : str
        The name as in ``numpy.dtype(...).name``, or ``"bfloat16"``.
    """

    ptr: int
    count: int
    dtype: str

    @property
    def nbytes(self) -> int:
        # NumPy knows bfloat16 only while ml_dtypes is imported.
        return self.count * (2 if self.dtype == "bfloat16" else np.dtype(self.dtype).itemsize)


def load_nccl(environ: Mapping[str, str] = os.environ) -> Any:
    """Return ``cupy.cuda.nccl``, or what stands for it if ``SYNK_NCCL_BINDING`` is ``pynccl``. For workers only.

    Raises
    ------
    ValueError
        If the variable has another value.
    UnsupportedError
        If there is no NCCL library.
    """
    choice = environ.get("SYNK_NCCL_BINDING", "cupy")
    if choice not in ("cupy", "pynccl"):
        raise ValueError(f"cannot choose a binding of NCCL: got SYNK_NCCL_BINDING={choice!r}, expected cupy or pynccl.")
    if choice == "pynccl":
        return importlib.import_module("synk.cuda._pynccl").load()
    nccl = importlib.import_module("cupy.cuda.nccl")
    if not nccl.available:
        raise UnsupportedError(
            "cannot load NCCL: CuPy has not found libnccl.so.2. Install NVIDIA's wheel "
            '(pip install "synkhronos[cuda12]" or "synkhronos[cuda13]").'
        )
    return nccl


def version_text(version: int) -> str:
    """Return ``ncclGetVersion``'s number as text.

    Examples
    --------
    >>> version_text(23203)
    '2.32.3'
    """
    return f"{version // 10_000}.{version % 10_000 // 100}.{version % 100}"


def nccl_environment(environ: Mapping[str, str], *, ranks_per_device: int = 1) -> dict[str, str]:
    """Return the environment for a GPU worker: ``environ`` with NCCL restricted to this machine's loopback.

    NCCL opens TCP listeners even between the GPUs of one machine. The user's own settings stay, except for those that
    would let anybody join, or keep the worker from noticing a dead peer.

    Parameters
    ----------
    environ : mapping
        The environment to start from. It is not changed.
    ranks_per_device : int
        How many workers share one GPU. More than one need NCCL 2.30.3 or later.

    Returns
    -------
    dict
        A complete environment.

    Notes
    -----
    ``NCCL_COMM_ID`` is dropped: with it NCCL's handshake is a constant, and two groups would meet at one address.
    ``NCCL_COMM_BLOCKING=1`` overrides a file of NCCL's settings, too: CuPy takes its "in progress" for an error.
    Source: the environment chapter of the NCCL user guide, ``src/bootstrap.cc`` and ``src/init.cc``.
    """
    result = dict(environ)
    result.pop("NCCL_COMM_ID", None)
    result["NCCL_COMM_BLOCKING"] = "1"
    result.setdefault("NCCL_SOCKET_IFNAME", "lo")
    result.setdefault("NCCL_RAS_ENABLE", "0")
    # Plug-ins of a cluster's image and InfiniBand cards are for other machines, and looking for them can fail or hang.
    result.setdefault("NCCL_NET_PLUGIN", "none")
    result.setdefault("NCCL_IB_DISABLE", "1")
    if ranks_per_device > 1:
        # Ranks on one GPU share its processors. With too many channels each they would wait for each other for ever.
        result.setdefault("NCCL_MULTI_RANK_GPU_ENABLE", "1")
        result.setdefault("NCCL_MAX_CTAS", str(max(1, 8 // ranks_per_device)))
        result["NCCL_NVLS_ENABLE"] = "0"  # NCCL refuses to start with it when ranks share a GPU
    return result


def _problem_of(error: Exception) -> tuple[int, str]:
    """Return the status and the text of an error of the binding."""
    if isinstance(error, KeyError):  # CuPy knows no name for the statuses that came after 2.18
        return error.args[0], f"NCCL's status {error.args[0]}"
    return getattr(error, "status", INTERNAL_ERROR), str(error)


class NcclCommunicator:
    """A rank's end of a group of two or more GPUs.

    Buffers are device memory of this rank. Methods with a ``stream`` return when NCCL has queued the operation there,
    and the memory must stay allocated until the stream has passed it. ``all_gather`` in place means that ``send`` is
    the rank's own block of ``recv``; ``reduce_scatter`` in place means that ``recv`` is the rank's own block of
    ``send``. NCCL compares nothing between ranks, and refuses few dtypes and ops by name: the caller must have done so.
    One thread of the process launches collectives; any may call ``abort``.

    Parameters
    ----------
    nccl : module
        From ``load_nccl``.
    unique_id : bytes
        128 bytes from one rank's ``nccl.get_unique_id()``, the same on every rank.
    rank, world_size : int
        This rank and the number of ranks, at least 2.
    is_broken : callable
        Tells whether the runtime has given the group up. It is called in every wait, so it must be cheap.
    give_up : callable
        Has the runtime give the group up. Called before this rank aborts, so that nobody takes unfinished sums.
    timeout_s : float
        Time limit for joining the group. If it passes, or a peer dies meanwhile, the thread stays behind in NCCL, and
        ends with the process, or aborts what it gets later.
    end_timeout_s : float
        Time limit for ``abort`` and ``close``. If NCCL is not done by then, the thread is left to the end of the
        process.

    Raises
    ------
    NcclError
        If the group cannot be joined: code 8 after ``timeout_s``, 6 if the runtime gave the group up.
    """

    def __init__(
        self,
        nccl: Any,
        unique_id: bytes,
        rank: int,
        world_size: int,
        *,
        is_broken: Callable[[], bool] = lambda: False,
        give_up: Callable[[], None] = lambda: None,
        timeout_s: float = 60.0,
        end_timeout_s: float = 5.0,
    ) -> None:
        self.rank, self.world_size = rank, world_size
        self._nccl, self._is_broken, self._give_up = nccl, is_broken, give_up
        self._end_timeout_s = end_timeout_s
        self._comm: Any = None
        self._problem: tuple[int, str] | None = None
        # Held during a launch, so that the thread's abort does not free the communicator in between.
        self._lock = threading.RLock()
        self._joined, self._end = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._live, args=(unique_id,), name="synk-nccl", daemon=True)
        self._thread.start()
        action = f"join an NCCL group as rank {rank} of {world_size}"
        self.wait(self._joined.is_set, timeout_s=timeout_s, action=action)

    # -- the thread ---------------------------------------------------------------------------------------------------

    def _live(self, unique_id: bytes) -> None:
        """Join the group, watch it, and end it."""
        try:
            comm = self._nccl.NcclCommunicator(self.world_size, unique_id, self.rank)
        except Exception as error:  # ``wait`` raises it
            self._fail(*_problem_of(error))
            return
        self._comm = comm
        self._joined.set()
        while not self._end.wait(_WATCH_INTERVAL_S):
            if self._is_broken():
                self._fail(*_LOST)
                break
            try:
                comm.check_async_error()
            except (self._nccl.NcclError, KeyError) as error:
                self._fail(*_problem_of(error))
        is_held = self._lock.acquire(timeout=_LAUNCH_PATIENCE_S)
        self._comm = None
        if is_held:
            self._lock.release()
        comm.destroy() if self._problem is None else comm.abort()

    def _fail(self, code: int, problem: str) -> None:
        """Have the thread abort, and everybody know it before."""
        self._problem = self._problem or (code, problem)
        self._give_up()
        self._end.set()

    @property
    def has_failed(self) -> bool:
        """Whether results of this communicator may be unfinished."""
        return self._problem is not None

    def wait(
        self, is_done: Callable[[], bool], *, timeout_s: float | None = None, action: str = "finish a collective"
    ) -> None:
        """Return when ``is_done()``, typically an event of the stream, is true. This never blocks in the driver.

        Raises
        ------
        NcclError
            If NCCL reports an error, the runtime gives the group up (code 6), or ``timeout_s`` passes (code 8). The
            communicator is then aborted, which also ends the kernels that wait for peers on the device.
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        pause_s = 0.0
        while True:
            is_over = is_done()  # asked first: an abort, too, ends what runs on the device
            if self._is_broken():
                self._fail(*_LOST)
            elif not is_over and deadline is not None and time.monotonic() > deadline:
                self._fail(TIMEOUT, f"ncclTimeout (not done after {timeout_s:g} s)")
            if self._problem is not None:
                self._ended()
                raise NcclError(*self._problem, action)
            if is_over:
                return
            time.sleep(pause_s)  # 0 at first, since most waits are short; even then other threads can run
            pause_s = min(_MAX_PAUSE_S, pause_s + 0.00002)

    def _ended(self) -> None:
        """Wait for the thread, but not for one that waits in NCCL for peers to join."""
        if self._joined.is_set():
            self._thread.join(self._end_timeout_s)
            if self._thread.is_alive():
                logger.warning("NCCL did not end its group in %g s; it ends with the process.", self._end_timeout_s)

    def abort(self) -> None:
        """Break off all pending operations of this rank and free the communicator. Safe to repeat."""
        self._fail(REMOTE_ERROR, "a communicator that was aborted")
        self._ended()

    def close(self) -> None:
        """Free the communicator after its last operation, or abort it if it is broken. Safe to repeat."""
        if self._is_broken():
            self._fail(*_LOST)
        self._end.set()
        self._ended()

    # -- collectives --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _launching(self, action: str) -> Iterator[Any]:
        """Yield CuPy's communicator for one launch."""
        with self._lock:
            if self._comm is None or self._problem is not None:
                raise NcclError(*(self._problem or (REMOTE_ERROR, "a communicator that is closed")), action)
            try:
                yield self._comm
            except (self._nccl.NcclError, KeyError) as error:
                # A launch that was aborted fails in any way; what broke the group says more.
                raise NcclError(*(self._problem or _problem_of(error)), action) from error

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Launch the operations of the ``with`` body as one. Groups may be nested. Nothing runs before the body ends.

        If the body raises, the group of ranks is given up, because the others would wait for what is missing.
        """
        with self._launching("launch a group"):  # for the whole body: NCCL's group refers to the communicator
            self._nccl.groupStart()
            try:
                yield
            except BaseException:
                self._fail(REMOTE_ERROR, "a group of operations that was broken off")
                with contextlib.suppress(Exception):  # NCCL counts open groups for each thread
                    self._nccl.groupEnd()
                raise
            self._nccl.groupEnd()

    def _run(self, action: str, name: str, send: int, recv: int, count: int, *others: int) -> None:
        if count:
            with self._launching(action) as comm:
                getattr(comm, name)(send, recv, count, *others)

    def _reduce(self, kind: str, name: str, send: Buffer, recv: Buffer, op: str, *others: int) -> None:
        stored_as, factor = _STORED_AS.get(send.dtype, (send.dtype, 1))
        numbers = _DTYPES[stored_as], _OPS[op], *others
        self._run(
            f"{kind} {send.count} {send.dtype} by {op!r}", name, send.ptr, recv.ptr, recv.count * factor, *numbers
        )

    def all_reduce(self, send: Buffer, recv: Buffer, op: str, *, stream: int = 0) -> None:
        """Reduce ``send`` of all ranks into ``recv`` of every rank; ``avg`` weights them equally."""
        self._reduce("all_reduce", "allReduce", send, recv, op, stream)

    def reduce(self, send: Buffer, recv: Buffer, op: str, root: int, *, stream: int = 0) -> None:
        """Reduce ``send`` of all ranks into ``recv`` of rank ``root``."""
        self._reduce("reduce", "reduce", send, recv, op, root, stream)

    def reduce_scatter(self, send: Buffer, recv: Buffer, op: str, *, stream: int = 0) -> None:
        """Reduce ``send`` (``world_size * recv.count``) and leave this rank's block in ``recv``."""
        self._reduce("reduce_scatter", "reduceScatter", send, recv, op, stream)

    # For copies NCCL's dtype does not matter, so every dtype travels as uint8.

    def broadcast(self, buffer: Buffer, root: int, *, stream: int = 0) -> None:
        """Copy ``buffer`` of rank ``root`` into ``buffer`` of every rank."""
        action = f"broadcast {buffer.count} {buffer.dtype}"
        self._run(action, "broadcast", buffer.ptr, buffer.ptr, buffer.nbytes, _BYTE, root, stream)

    def all_gather(self, send: Buffer, recv: Buffer, *, stream: int = 0) -> None:
        """Concatenate ``send`` of all ranks, in rank order, into ``recv`` (``world_size * send.count``)."""
        action = f"all_gather {send.count} {send.dtype}"
        self._run(action, "allGather", send.ptr, recv.ptr, send.nbytes, _BYTE, stream)
