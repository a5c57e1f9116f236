"""The CUDA runtime of the stand-in: copies, registered memory, errors that stay.

The environment says what is broken or slow: ``SYNK_FAKE_REFUSE`` makes registering fail, ``SYNK_FAKE_STREAM=race`` no
stream follows the default one, ``SYNK_FAKE_OOM=stick`` the device fails after it ran out of memory,
``SYNK_FAKE_DELAY_S`` each wait for a stream takes so long, ``SYNK_FAKE_GBPS`` is how fast events say that pageable and
pinned memory are copied.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import threading
import time
import types
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = 1, 2, 3, 4

_sticky = 0
_pending: dict[int, list[tuple[int, bytes]]] = {}
_registered: dict[int, int] = {}
_on_their_way: dict[int, list[Callable[[], object]]] = {}
_num_arrived: dict[int, int] = {}
DEFAULT = 0
"""The legacy default stream, on which other libraries launch."""

clock_ms: dict[int, float] = {}
pinned: dict[int, Any] = {}
"""Page-locked memory by address."""

events: Any = weakref.WeakValueDictionary()
"""The events by their handles."""

_following: set[int] = set()  # the streams that run behind what is on the default stream


class _Current(threading.local):
    """The streams that a thread has entered, outermost first."""

    def __init__(self) -> None:
        self.streams: list[int] = []


current = _Current()

_lock = threading.Lock()


class CUDARuntimeError(RuntimeError):
    def __init__(self, status: int) -> None:
        self.status = status
        super().__init__("cudaErrorMemoryAllocation: out of memory" if status == 2 else f"cudaError {status}")


def check() -> None:
    if _sticky:
        raise CUDARuntimeError(_sticky)


def fail_launch() -> None:
    """Do what a kernel with an illegal address does: every later call reports it."""
    global _sticky
    _sticky = 719


def queue(stream: int, act: Callable[[], object]) -> bool:
    """Do ``act`` when somebody waits for the stream, unless it is the outermost current one; return whether so."""
    if not current.streams or current.streams[0] == stream:
        return False
    _on_their_way.setdefault(stream, []).append(act)
    return True


def num_queued(stream: int) -> int:
    """Return how much was queued on a stream so far."""
    return _num_arrived.get(stream, 0) + len(_on_their_way.get(stream, []))


def has_arrived(stream: int, count: int) -> bool:
    return _num_arrived.get(stream, 0) >= count


def arrive(stream: int, count: int) -> None:
    """Do the first ``count`` things that were queued on a stream."""
    waiting = _on_their_way.get(stream, [])
    while waiting and _num_arrived.get(stream, 0) < count:
        waiting.pop(0)()
        _num_arrived[stream] = _num_arrived.get(stream, 0) + 1


def launch_elsewhere(act: Callable[[], object]) -> None:
    """Launch a kernel as another library does: on the legacy default stream. It runs when somebody must wait for it."""
    _on_their_way.setdefault(DEFAULT, []).append(act)


def follow_default(stream: int) -> None:
    """Have a stream run behind the legacy default stream from now on, as all do that are not non-blocking."""
    if os.environ.get("SYNK_FAKE_STREAM") != "race":
        _following.add(stream)


def launch(act: Callable[[], object]) -> None:
    """Launch a kernel on the current stream."""
    if current.streams and current.streams[-1] == DEFAULT:
        launch_elsewhere(act)
    elif not (current.streams and queue(current.streams[-1], act)):
        act()


def spend(stream: int, nbytes: int, *, is_pinned: bool) -> None:
    """Let the clock that events read go on for a copy."""
    rates = [float(rate) for rate in os.environ.get("SYNK_FAKE_GBPS", "0.1 50").split()]
    clock_ms[stream] = clock_ms.get(stream, 0.0) + nbytes / rates[is_pinned] / 1e6


class _Stall:
    """Work on a stream that ends when something else happens."""

    def __init__(self, is_over: Callable[[], bool]) -> None:
        self.is_over = is_over

    def __call__(self) -> None:
        # As in the driver, whose waits no signal ends. To mask it is not enough: another thread takes it then, and this
        # one runs the handler.
        if threading.current_thread() is not threading.main_thread():
            self._wait()
            return
        held: list[int] = []
        before = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
        try:
            self._wait()
        finally:
            signal.signal(signal.SIGINT, before)
        if held:
            signal.raise_signal(signal.SIGINT)

    def _wait(self) -> None:
        while not self.is_over():
            time.sleep(0.001)


def stall(stream: int, is_over: Callable[[], bool]) -> None:
    """Queue work on a stream that does not end before ``is_over()``."""
    _on_their_way.setdefault(stream, []).append(_Stall(is_over))


def is_stalled(stream: int) -> bool:
    """Whether a stream works on something that does not end yet."""
    waiting = _on_their_way.get(stream, [])
    return bool(waiting) and isinstance(waiting[0], _Stall) and not waiting[0].is_over()


def _catch_up(stream: int) -> None:
    if stream in _following:
        arrive(DEFAULT, num_queued(DEFAULT))


def finish(stream: int) -> None:
    check()
    time.sleep(float(os.environ.get("SYNK_FAKE_DELAY_S", 0)))
    _catch_up(stream)
    arrive(stream, num_queued(stream))
    for target, data in _pending.pop(stream, []):
        ctypes.memmove(target, data, len(data))


def registered() -> dict[int, int]:
    return dict(_registered)


def _check_registration(start: int, nbytes: int) -> None:
    with _lock:
        for low, size in _registered.items():
            inside = max(start, low) < min(start + nbytes, low + size)
            if inside and not (low <= start and start + nbytes <= low + size):
                raise CUDARuntimeError(1)


def memcpyAsync(dst: int, src: int, size: int, kind: int, stream: int) -> None:
    check()
    assert stream > 4096, "the legacy stream waits for all others"
    _catch_up(stream)
    if kind == memcpyDeviceToHost:
        _check_registration(dst, size)
        _pending.setdefault(stream, []).append((dst, ctypes.string_at(src, size)))
    else:
        if kind == memcpyHostToDevice:
            _check_registration(src, size)
            if queue(stream, partial(ctypes.memmove, dst, src, size)):
                return
        ctypes.memmove(dst, src, size)


def hostRegister(ptr: int, size: int, flags: int) -> None:
    if os.environ.get("SYNK_FAKE_REFUSE"):
        raise CUDARuntimeError(801)
    if ptr % mmap.PAGESIZE or size % mmap.PAGESIZE or flags or not _is_writable(ptr):
        raise CUDARuntimeError(1)
    with _lock:
        if any(max(ptr, low) < min(ptr + size, low + length) for low, length in _registered.items()):
            raise CUDARuntimeError(712)
        _registered[ptr] = size


def _is_writable(ptr: int) -> bool:
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as file:
        for line in file:
            low, high = (int(bound, 16) for bound in line.split()[0].split("-"))
            if low <= ptr < high:
                return line.split()[1][1] == "w"
    return False


def hostUnregister(ptr: int) -> None:
    with _lock:
        if ptr not in _registered:
            raise CUDARuntimeError(713)
        del _registered[ptr]


def eventQuery(ptr: int) -> int:
    """Return 0, 600 if the device has not come there, or the error that stays."""
    event = events[ptr]
    if _sticky or event.stream is None or has_arrived(event.stream, event.count):
        return _sticky
    if not is_stalled(event.stream):
        arrive(event.stream, event.count)  # the device goes on while one asks
    return 600


def getDeviceCount() -> int:
    return 1


def getDeviceProperties(device: int) -> dict[str, Any]:
    return {"name": b"Fake GPU", "totalGlobalMem": 1 << 34}


def driverGetVersion() -> int:
    return 13000


def runtimeGetVersion() -> int:
    return 12090


def memGetInfo() -> tuple[int, int]:
    check()
    return 1 << 26, 1 << 34


def pointerGetAttributes(ptr: int) -> Any:
    return types.SimpleNamespace(devicePointer=ptr if ptr in _registered else 0)
