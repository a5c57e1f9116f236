"""The CUDA backend: one GPU, CuPy arrays, one stream on which a whole call happens in order.

Copies to the device are queued before the user's function runs, and copies from it afterwards. The host waits once, at
the end of a call. The user's kernels, the copies and the collectives share the stream, so they need no events to follow
one another. It follows the legacy default stream, on which other libraries launch: what they have queued is done before
outputs are copied. Two more streams do not. If the next call is known before the current one has ended,
a second stream copies its inputs while the first computes, and an event says when they are there. Sums that a function
starts into arrays of its own run on a third stream, behind an event of the first; the first waits for them when the
function does. In one file because it is one protocol, whose parts share these streams.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from synk._pure.arrays import address_of
from synk._pure.dtypes import dtype_name
from synk._wire.memory import Segment
from synk._wire.messages import DEVICE_DTYPES
from synk.backends._device_arrays import DeviceArrays
from synk.backends._frameworks import Converter, computes_on_gpus, device_converters
from synk.cuda._pinned import PinnedSegments

_NOT_READY = 600  # cudaErrorNotReady


class _Borrowed:
    """Owns a block of device memory for an array. It passes the block to ``returned`` when the array is gone."""

    def __init__(self, memory: Any, returned: list[Any]) -> None:
        self._memory = memory
        self._returned = returned

    def __del__(self) -> None:
        self._returned.append(self._memory)


class CupyBackend(DeviceArrays):
    """One worker's GPU.

    Parameters
    ----------
    device : str
        For instance ``"cuda:1"``: the number among the devices that the program sees. A worker process sees only one
        device, number 0. An inline rank uses the number.

    Raises
    ------
    ImportError
        If CuPy is missing.
    """

    name = "cupy"

    def __init__(self, device: str) -> None:
        import cupy

        super().__init__(device, cupy)
        self._runtime = runtime = cupy.cuda.runtime
        ordinal = 0 if runtime.getDeviceCount() == 1 else int(device.partition(":")[2])
        self._cuda_device = cupy.cuda.Device(ordinal)
        self._cuda_device.use()
        self.stream = cupy.cuda.Stream(non_blocking=False)
        self.stream_handle = int(self.stream.ptr)
        self._copy_stream = cupy.cuda.Stream(non_blocking=True)
        # For sums of gradients during the backward pass. Operations on this stream take no memory from the pool.
        self._communication_stream = cupy.cuda.Stream(non_blocking=True)
        self._communicated: Any = None  # the last event of that stream that the first one has not waited for
        self._input_stream = self.stream  # the stream for the inputs that are being copied now
        # Blocks of inputs that were copied ahead and are gone. The pool would reuse a block in the order of the second
        # stream, that is at once, while the first stream may still read it. So ``synchronize`` gives the blocks back,
        # when the first stream is done.
        self._returned: list[Any] = []
        # Host arrays that copies may still read. If a device reads pageable memory itself (Grace Hopper), a copy may
        # still run when memcpyAsync has returned.
        self._sources: list[np.ndarray] = []
        self._ahead: tuple[Any, list[np.ndarray]] = None, []  # the event behind copies of the second stream, and theirs
        self._segments = PinnedSegments(runtime)
        self._begin, self._end = cupy.cuda.Event(), cupy.cuda.Event()
        self._has_begun = False
        self._entered = threading.local()
        self._ordinal = ordinal
        self._torch_stream: Any = None
        self._contexts = contextlib.ExitStack()  # of the call that runs

    # -- segments -----------------------------------------------------------------------------------------------------

    def note_segment(self, segment: Segment) -> None:
        self._segments.add(segment)

    def forget_segment(self, segment: Segment) -> None:
        self._segments.forget(segment)

    # -- arrays ------------------------------------------------------------------------------------------------------

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    # -- to the device ------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return an array of ``shape`` on the device with undefined contents."""
        nbytes = math.prod(shape) * dtype.itemsize
        if self._input_stream is self.stream or nbytes == 0:
            return self.xp.empty(shape, dtype)
        cuda = self.xp.cuda
        memory = cuda.alloc(nbytes)
        borrowed = cuda.UnownedMemory(memory.ptr, nbytes, _Borrowed(memory, self._returned), self._ordinal)
        return self.xp.ndarray(shape, dtype, cuda.MemoryPointer(borrowed, 0))

    def has_dtype(self, array: np.ndarray) -> bool:
        return dtype_name(array.dtype) in DEVICE_DTYPES

    def from_host(self, host: np.ndarray) -> Any:
        host = self.checked(host)
        if not host.flags.c_contiguous:
            array = self._read_rows(host)
            if array is not None:
                return array
            host = np.ascontiguousarray(host)
        array = self.empty(host.shape, host.dtype)
        if host.size:
            self._sources.append(host)
            self._note_copy(0, host)
            kind = self._runtime.memcpyHostToDevice
            self._runtime.memcpyAsync(array.data.ptr, address_of(host), host.nbytes, kind, self._input_stream.ptr)
        return array

    def take_rows(self, host: np.ndarray, indices: np.ndarray) -> Any:
        host = self.checked(host)
        array = self._read_rows(host, indices) if indices.size else None
        return self.from_host(host.take(indices, axis=0)) if array is None else array

    def _read_rows(self, host: np.ndarray, indices: np.ndarray | None = None) -> Any:
        """Return the rows of a host array, or those at ``indices``, read by the device; None where it cannot read them.

        A row counts as a row of words, as wide as the rows allow, so that the same kernels do for all dtypes.
        """
        if host.size == 0 or not host[0].flags.c_contiguous:
            return None
        low, high = np.lib.array_utils.byte_bounds(host)
        seen = self._segments.on_device(low, high - low)
        if not seen:
            return None
        array = self.empty((len(host) if indices is None else len(indices), *host.shape[1:]), host.dtype)
        self._sources.append(host)
        self._num_copied[0] += int(array.nbytes)
        start, stride, nbytes = seen + address_of(host) - low, host.strides[0], host[0].nbytes
        cuda, word = self.xp.cuda, math.gcd(start, stride, nbytes, 8)
        pointer = cuda.MemoryPointer(cuda.UnownedMemory(start, high - low, host, self._ordinal), 0)
        rows = self.xp.ndarray((len(host), nbytes // word), f"u{word}", pointer, (stride, word))
        out = self.xp.ndarray((len(array), nbytes // word), f"u{word}", array.data)
        with self._input_stream:
            if indices is None:
                out[...] = rows
            else:
                rows.take(self.from_host(indices), axis=0, out=out)
        return array

    def _note_copy(self, way: int, host: np.ndarray) -> None:
        """Count a copy to the device (0) or back (1), and whether the host's memory is pageable."""
        self._num_copied[way] += host.nbytes
        if not self._segments.on_device(address_of(host), host.nbytes):
            self._num_copied[2] += host.nbytes

    def take(self, array: Any, indices: np.ndarray) -> Any:
        return array.take(self.from_host(np.ascontiguousarray(indices)), axis=0)

    # -- ahead of a call ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def beside(self) -> Iterator[Any]:
        event = self.xp.cuda.Event(disable_timing=True)
        self._input_stream, sources, has_failed = self._copy_stream, self._sources, True
        self._sources = []
        try:
            with self._copy_stream:
                yield event
            has_failed = False
        finally:
            # Views of segments stay valid. They are not kept, because references to inputs are counted.
            self._ahead = event, [each for each in self._sources if each.flags.owndata]
            self._input_stream, self._sources = self.stream, sources
            event.record(self._copy_stream)
            if has_failed:  # nobody else will wait for what has begun
                self.join(event)

    def join(self, event: Any) -> None:
        self.stream.wait_event(event)
        if event is self._ahead[0]:  # from here on, ``synchronize`` waits for these copies, too
            self._sources += self._ahead[1]
            self._ahead = None, []

    # -- communication beside a function ------------------------------------------------------------------------------

    def enter_thread(self) -> None:
        # Each thread has a current stream of its own. A thread of autograd would queue on the legacy default stream,
        # which the streams for copies and communication do not wait for.
        if not getattr(self._entered, "is_here", False):
            self._entered.is_here = True
            self._cuda_device.use()
            self.stream.use()

    def mark(self) -> Any:
        event = self.xp.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return event

    def is_done(self, event: Any) -> bool:
        """Whether the device has come to an event. ``event.done`` would be False for ever if the device has failed."""
        status = self._runtime.eventQuery(event.ptr)
        if status not in (0, _NOT_READY):
            raise self._runtime.CUDARuntimeError(status)
        return bool(status == 0)

    def communicate(self, after: Any, launch: Callable[[int], Any]) -> Any:
        stream = self._communication_stream
        stream.wait_event(after)
        event = self.xp.cuda.Event(disable_timing=True)
        # Recorded even if the launch fails: a part of it may have been queued, and the first stream must not run past
        # it.
        try:
            launch(stream.ptr)
        finally:
            event.record(stream)
            self._communicated = event
        return event

    def join_communication(self) -> None:
        if self._communicated is not None:
            self.join(self._communicated)
            self._communicated = None

    def is_pinned(self, host: np.ndarray) -> bool:
        return super().is_pinned(host) and self._segments.is_pinned(address_of(host), host.nbytes)

    # -- its time -----------------------------------------------------------------------------------------------------

    def note_begin(self) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._begin.record(self.stream)

    def note_end(self) -> None:
        self._end.record(self.stream)

    def take_work_ns(self) -> int:
        has_begun, self._has_begun = self._has_begun, False
        try:
            return int(1e6 * self.xp.cuda.get_elapsed_time(self._begin, self._end)) if has_begun else 0
        except self._runtime.CUDARuntimeError:  # the call has failed
            return 0

    # -- from the device ----------------------------------------------------------------------------------------------

    def as_output(self, value: Any) -> Any:
        if type(value).__module__.partition(".")[0] == "torch":
            value = device_converters("torch")[1](value)
        elif not isinstance(value, self.xp.ndarray) and hasattr(value, "__cuda_array_interface__"):  # as of Numba
            return self.xp.asarray(value)
        return super().as_output(value)

    def to_host(self, array: Any, out: np.ndarray) -> None:
        if isinstance(array, np.ndarray):
            np.copyto(out, array)
            return
        array = self.xp.ascontiguousarray(array)
        if array.size == 0:
            return
        self._note_copy(1, out)
        # The pool reuses a block in the order of the stream, behind this copy, so the array need not be kept alive.
        kind = self._runtime.memcpyDeviceToHost
        self._runtime.memcpyAsync(address_of(out), array.data.ptr, out.nbytes, kind, self.stream.ptr)

    def host_copy(self, array: Any) -> np.ndarray:
        if isinstance(array, np.ndarray):
            return array
        out = np.empty(array.shape, array.dtype)
        self.to_host(array, out)
        self.stream.synchronize()
        return out

    # -- other libraries ----------------------------------------------------------------------------------------------

    def torch_device(self) -> str:
        return "cuda" if computes_on_gpus("torch") else "cpu"

    def converters(self, framework: str) -> tuple[Converter, Converter]:
        if not computes_on_gpus(framework):
            return super().converters(framework)
        if framework == "torch":
            import torch

            self._torch_stream = torch.cuda.ExternalStream(self.stream.ptr, device=self._ordinal)
            self._enter_torch()  # the call that has brought the function is running already
        return device_converters(framework)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._entered.is_here = True
        with self._cuda_device, self.stream, contextlib.ExitStack() as self._contexts:
            self._enter_torch()
            yield

    def _enter_torch(self) -> None:
        if self._torch_stream is not None:
            self._contexts.enter_context(sys.modules["torch"].cuda.stream(self._torch_stream))

    # -- state --------------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        # Only then is nothing read or written any more: the host arrays and the blocks of inputs can go.
        self.stream.synchronize()
        self._sources.clear()
        self._returned.clear()

    def explain(self, error: BaseException, what: str) -> BaseException:
        """Return the error to report. Out of device memory becomes a MemoryError that says what to do."""
        torch, cuda = sys.modules.get("torch"), self.xp.cuda
        is_full = isinstance(error, (cuda.memory.OutOfMemoryError, getattr(torch, "OutOfMemoryError", ())))
        # Libraries that allocate beside the pools report it by an error for everything.
        others = (cuda.runtime.CUDARuntimeError, cuda.driver.CUDADriverError, getattr(torch, "AcceleratorError", ()))
        if not is_full and not (isinstance(error, others) and "out of memory" in str(error)):
            return error
        free, total = self._runtime.memGetInfo()
        return self.out_of_memory(error, what, f", {free} of {total} bytes are free")

    def recover(self) -> bool:
        """After an exception, give back cached memory. Return whether the device still works.

        An error while the device works (an illegal address, a launch failure) stays with the process: every later CUDA
        call reports it again, and the worker must be replaced.
        """
        try:
            self._copy_stream.synchronize()
            self._communication_stream.synchronize()
            self._communicated = None
            self.synchronize()
            self.give_back()
        except RuntimeError:  # of the runtime, or torch's own
            return False
        return True

    def give_back(self) -> None:
        """Give back the memory that CuPy and torch keep for later. No library can use what another one keeps."""
        self.xp.get_default_memory_pool().free_all_blocks()
        torch = sys.modules.get("torch")
        if torch is not None and torch.cuda.is_initialized():
            torch.cuda.empty_cache()

    def describe(self) -> str:
        properties = self._runtime.getDeviceProperties(self._ordinal)
        name = properties["name"]
        name = name.decode() if isinstance(name, bytes) else name
        driver, cuda = self._runtime.driverGetVersion(), self._runtime.runtimeGetVersion()
        return (
            f"cupy {self.xp.__version__}, CUDA {_version(cuda)} (driver runs {_version(driver)}), {name}, "
            f"{properties['totalGlobalMem'] / 2**30:.1f} GiB"
        )

    def close(self) -> None:
        self._segments.close()


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"
