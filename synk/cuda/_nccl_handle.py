"""The life of one NCCL communicator: joining, launching, waiting, aborting, each with a time limit.

This file owns NCCL's communicator and the rule when it may be used. It knows no op and no dtype: its subclass in
``_nccl`` has the collectives. NCCL's calls can block for ever when a peer is gone. So the calls that may block run in
daemon threads, which are left behind if need be, and every wait polls.

A peer may be dead at any line. This rank learns of it in two ways: NCCL reports an error, or ``is_broken`` returns True
because the master has told the group. Either way the rank aborts its own communicator. It never waits for a peer to do
so first.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from synk.cuda._nccl_bindings import Binding
from synk.cuda._nccl_library import IN_PROGRESS, REMOTE_ERROR, SUCCESS, TIMEOUT, NcclError
from synk.errors import ClosedError

logger = logging.getLogger("synk")

_DONE, _BROKEN, _LATE = "done", "broken", "late"
_PAUSE_STEP_S = 0.00002
_MAX_PAUSE_S = 0.001
# How long abort waits for a launch in progress. A launch that takes longer is stuck, and the abort frees it.
_LAUNCH_PATIENCE_S = 0.5


class _Aside:
    """A call in a daemon thread. If the call never ends, its thread is left behind and ends with the process."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._result: Any = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="synk-nccl", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._result = self._function()
        except BaseException as error:  # result() raises it again
            self._error = error

    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def result(self) -> Any:
        if self._error is not None:
            raise self._error
        return self._result


def _watch(is_done: Callable[[], bool], is_broken: Callable[[], bool], timeout_s: float | None) -> str:
    """Poll until ``is_done()``, the group is broken, or the time is over. Return which of them happened."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    pause_s = 0.0
    while not is_done():
        if is_broken():
            return _BROKEN
        if deadline is not None and time.monotonic() > deadline:
            return _LATE
        time.sleep(pause_s)  # 0 at first, since most waits are short; even then other threads can run
        pause_s = min(_MAX_PAUSE_S, pause_s + _PAUSE_STEP_S)
    return _DONE


def _failure(outcome: str, action: str, timeout_s: float | None) -> NcclError:
    if outcome == _LATE:
        return NcclError(TIMEOUT, f"not done after {timeout_s:g} s", action)
    return NcclError(REMOTE_ERROR, "the group is broken; another worker died or failed", action)


class NcclHandle:
    """This rank's NCCL communicator, without its collectives.

    Parameters
    ----------
    binding : Binding
    is_broken : callable
        Tells whether the runtime has given the group up. It is called in every wait.
    timeout_s : float
        Time limit for joining and for each launch.
    abort_timeout_s : float
        Time limit for ``abort`` and ``close``.
    """

    def __init__(
        self, binding: Binding, is_broken: Callable[[], bool], *, timeout_s: float, abort_timeout_s: float
    ) -> None:
        self._binding = binding
        self._is_broken = is_broken
        self._timeout_s = timeout_s
        self._abort_timeout_s = abort_timeout_s
        self._comm: Any = None
        self._is_closed = False
        self._depth = 0
        self._num_issued = 0
        # Held while NCCL reads the communicator, from the start to the end of a group, so that another thread's abort
        # does not free it in between.
        self._lock = threading.RLock()

    def _join(self, unique_id: bytes, rank: int, world_size: int) -> None:
        """Join the group of ``unique_id``. Return when all ranks have joined.

        Raises
        ------
        NcclError
            Code 8 after ``timeout_s``, 6 if the runtime gave the group up, else NCCL's own code.
        """
        action = f"join an NCCL group as rank {rank} of {world_size}"
        # A blocking start (an old NCCL, NCCL_COMM_BLOCKING=1) waits for the peers inside the call, so it needs a thread
        # that can be left behind. A communicator that such a thread makes later belongs to nobody until the process
        # ends.
        call = _Aside(functools.partial(self._binding.init, world_size, unique_id, rank))
        outcome = _watch(call.is_done, self._is_broken, self._timeout_s)
        if outcome != _DONE:
            raise _failure(outcome, action, self._timeout_s)
        status, comm = call.result()
        self._comm = comm or None  # a refused start leaves a null pointer
        try:
            self._settle(status, action)
        except NcclError:
            self.abort()
            raise

    def _require(self, action: str) -> Any:
        """Return NCCL's communicator, or raise if it no longer exists."""
        if self._is_closed:
            raise ClosedError(f"cannot {action}: the communicator is closed. Fork again.")
        comm = self._comm
        if comm is None:
            raise NcclError(REMOTE_ERROR, "the communicator was aborted", action)
        return comm

    def _raise_for(self, status: int, action: str) -> None:
        if status not in (SUCCESS, IN_PROGRESS):
            raise NcclError(status, self._binding.last_error(), action)

    def _settle(self, status: int, action: str) -> None:
        """Return once NCCL has accepted the call that returned ``status``.

        Until then the communicator accepts no other call. A call that returned success may be in progress: see
        ``Binding``. If NCCL does not accept it in time, or the group is broken, the communicator is aborted.
        """

        def is_settled() -> bool:
            nonlocal status
            status = self._state()
            return status != IN_PROGRESS

        if status in (SUCCESS, IN_PROGRESS):
            outcome = _watch(is_settled, self._is_broken, self._timeout_s)
            if outcome != _DONE:
                self.abort()
                raise _failure(outcome, action, self._timeout_s)
        self._raise_for(status, action)

    # Launching

    def _call(self, call: Callable[[Any], int], action: str) -> None:
        """Run ``call(comm)``. Return when NCCL has accepted it. Inside a group return at once."""
        with self._lock:
            status = call(self._require(action))
        if self._depth:
            self._raise_for(status, action)
            self._num_issued += 1
        else:
            self._settle(status, action)

    def _launch(self, calls: Sequence[Callable[[Any], int]], action: str) -> None:
        """Run ``calls``, as a group if there are several."""
        with self.group() if len(calls) > 1 else contextlib.nullcontext():
            for call in calls:
                self._call(call, action)

    @contextlib.contextmanager
    def group(self) -> Iterator[None]:
        """Launch the operations of the ``with`` body as one. Groups may be nested. Nothing runs before the body ends.

        If the body raises after it issued an operation, the communicator is aborted, because the other ranks would wait
        for the operations that are missing.
        """
        # The lock is held for the whole body: NCCL's group is a state of this thread that refers to the communicator,
        # so another thread's abort waits for its end, up to ``_LAUNCH_PATIENCE_S``.
        with self._lock:
            self._require("open a group")
            self._raise_for(self._binding.group_start(), "open a group")
            self._num_issued = self._num_issued if self._depth else 0
            self._depth += 1
            try:
                yield
            except BaseException:
                self._depth -= 1
                # NCCL counts open groups for each thread, so this one must be closed. Its status is ignored: the
                # exception at hand says more.
                self._binding.group_end()
                if self._num_issued:
                    self.abort()
                raise
            self._depth -= 1
            status = self._binding.group_end()
        if not self._depth:
            self._settle(status, "launch a group")

    @contextlib.contextmanager
    def _weighted_sum(self, weight: bytes, dtype: int, action: str) -> Iterator[int]:
        """Yield an op that multiplies by ``weight`` before it sums."""
        with self._lock:
            status, op = self._binding.create_weighted_sum(weight, dtype, self._require(action))
        self._raise_for(status, action)
        try:
            yield op
        finally:
            # NCCL reads the op when it accepts a collective, so the op may be destroyed before the stream has run.
            with self._lock:
                if self._comm is not None:
                    self._binding.destroy_op(op, self._comm)

    # Watching

    def _state(self) -> int:
        """Return NCCL's status of the communicator. While another thread is launching it counts as in progress."""
        if not self._lock.acquire(blocking=False):
            return IN_PROGRESS
        try:
            return REMOTE_ERROR if self._comm is None else self._binding.async_error(self._comm)
        finally:
            self._lock.release()

    def poll(self) -> str:
        """Return ``"ok"``, ``"pending"`` (NCCL has not accepted the last operation yet) or ``"error"``."""
        return {SUCCESS: "ok", IN_PROGRESS: "pending"}.get(self._state(), "error")

    def wait(self, is_done: Callable[[], bool], *, timeout_s: float | None = None) -> None:
        """Return when ``is_done()``, typically an event of the stream, is true. This never blocks in the driver.

        Raises
        ------
        NcclError
            If NCCL reports an error, the runtime gives the group up (code 6), or ``timeout_s`` passes (code 8). The
            communicator is then aborted, which also ends the kernels that wait for peers on the device.
        """
        action = "finish a collective"
        status = SUCCESS

        def is_over() -> bool:
            nonlocal status
            if is_done():
                return True
            status = self._state()
            return status not in (SUCCESS, IN_PROGRESS)

        outcome = _watch(is_over, self._is_broken, timeout_s)
        if outcome != _DONE:
            self.abort()
            raise _failure(outcome, action, timeout_s)
        if status not in (SUCCESS, IN_PROGRESS):
            try:
                self._require(action)
                self._raise_for(status, action)
            finally:
                self.abort()

    # Ending

    def _end(self, word: str, call: Callable[[Any], int], comm: Any) -> None:
        """Abort or destroy a communicator, and leave it behind if NCCL takes too long."""
        thread = _Aside(functools.partial(call, comm))
        if _watch(thread.is_done, lambda: False, self._abort_timeout_s) != _DONE:
            logger.warning("NCCL did not %s its group in %g s; it ends with the process.", word, self._abort_timeout_s)

    def _take_comm(self) -> Any:
        """Return the communicator and forget it, so that only one caller ends it.

        Usually the lock is free, or becomes free when a launch ends. A launch that holds it longer hangs in NCCL for a
        peer that is gone. Then the communicator is taken without the lock: NCCL's abort is what ends the launch.
        """
        is_held = self._lock.acquire(timeout=_LAUNCH_PATIENCE_S)
        comm, self._comm = self._comm, None
        if is_held:
            self._lock.release()
        return comm

    def abort(self) -> None:
        """Break off all pending operations of this rank and free the communicator.

        Any thread may call this, any number of times. All ranks of the group must abort: the device of a rank that does
        not abort goes on waiting for this one.
        """
        comm = self._take_comm()
        if comm is not None:
            self._end("abort", self._binding.abort, comm)

    def close(self) -> None:
        """Free the communicator after its last operation, or abort it if it is broken. A second call does nothing."""
        is_sound = not self._is_broken() and self._state() == SUCCESS
        self._is_closed = True
        comm = self._take_comm()
        if comm is not None:
            self._end("close", self._binding.destroy if is_sound else self._binding.abort, comm)
