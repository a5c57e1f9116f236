"""Devices, streams and memory of the stand-in."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import numpy as np

from . import driver as driver
from . import memory as memory
from . import runtime

_num_streams = 0


class MemoryPointer:
    def __init__(self, mem: Any, offset: int = 0) -> None:
        self.mem = mem
        self.ptr = mem + offset if isinstance(mem, int) else mem.ptr + offset

    def copy_from_host_async(self, mem: int, size: int, stream: Stream) -> None:
        ctypes.memmove(self.ptr, mem, size)
        runtime.spend(stream.ptr, size, is_pinned=mem in runtime.pinned)

    def copy_to_host_async(self, mem: int, size: int, stream: Stream) -> None:
        ctypes.memmove(mem, self.ptr, size)
        runtime.spend(stream.ptr, size, is_pinned=mem in runtime.pinned)


class _Block:
    """A piece of the pool. Filled with rubbish when it comes back: whoever still reads it must notice."""

    def __init__(self, size: int) -> None:
        self.size = max(size, 1)
        self.array = np.ones(self.size, np.uint8)
        self.ptr = self.array.__array_interface__["data"][0]

    def __del__(self) -> None:
        self.array[:] = 251


class UnownedMemory:
    def __init__(self, ptr: int, size: int, owner: Any, device_id: int = -1) -> None:
        self.ptr, self.size, self.owner = ptr, size, owner


def alloc(size: int) -> MemoryPointer:
    return MemoryPointer(_Block(size))


class Pool:
    num_freed = 0

    def free_all_blocks(self) -> None:
        runtime.check()
        Pool.num_freed += 1


class Device:
    def __init__(self, device: int = 0) -> None:
        assert device == 0, "a worker must see one device"
        self.id = device

    def use(self) -> None:
        runtime.check()

    def __enter__(self) -> Device:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


class Stream:
    """Work on the outermost current stream is done at once; on one entered inside it, when somebody waits for it."""

    def __init__(self, null: bool = False, non_blocking: bool = False) -> None:
        global _num_streams
        _num_streams += 1
        self.ptr = 4096 + _num_streams
        if not non_blocking:
            runtime.follow_default(self.ptr)

    def wait_event(self, event: Event) -> None:
        if event.stream is not None:
            runtime.arrive(event.stream, event.count)

    def synchronize(self) -> None:
        runtime.finish(self.ptr)

    @property
    def done(self) -> bool:
        runtime.finish(self.ptr)
        return True

    def launch_host_func(self, function: Any, argument: Any) -> None:
        if self.ptr == runtime.DEFAULT:
            runtime.launch_elsewhere(functools.partial(function, argument))
        else:
            function(argument)

    def use(self) -> None:
        runtime.current.streams[-1:] = [self.ptr]

    def __enter__(self) -> Stream:
        runtime.current.streams.append(self.ptr)
        return self

    def __exit__(self, *exc_info: object) -> None:
        runtime.current.streams.pop()


Stream.null = object.__new__(Stream)  # type: ignore[attr-defined]
Stream.null.ptr = runtime.DEFAULT  # type: ignore[attr-defined]


class Event:
    def __init__(self, block: bool = False, disable_timing: bool = False) -> None:
        self.ms = 0.0
        self.stream: int | None = None
        self.count = 0
        self.ptr = id(self)
        runtime.events[self.ptr] = self

    def record(self, stream: Any = None) -> None:
        self.ms = 0.0 if stream is None else runtime.clock_ms.get(stream.ptr, 0.0)
        if stream is not None:
            self.stream, self.count = stream.ptr, runtime.num_queued(stream.ptr)

    def synchronize(self) -> None:
        runtime.check()
        if self.stream is not None:
            runtime.arrive(self.stream, self.count)

    @property
    def done(self) -> bool:
        return runtime.eventQuery(self.ptr) == 0


def get_elapsed_time(start: Event, end: Event) -> float:
    return end.ms - start.ms


def get_current_stream() -> Stream:
    return Stream()


def alloc_pinned_memory(size: int) -> Any:
    memory = bytearray(size)
    runtime.pinned[np.frombuffer(memory, np.uint8).ctypes.data] = memory
    return memory


fail_launch = runtime.fail_launch
