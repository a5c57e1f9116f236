"""The CUDA backend: one GPU, CuPy arrays, one non-blocking stream on which everything of a call happens in order.

Copies in are queued before the user's function runs and copies out after it; the host waits once, at the end of a call.
The user's arrays, the copies and the collectives share the stream, so none of them needs an event to follow another.
The exception are the inputs of a call that is known before the one before it has ended: a second stream brings them
while the first computes, and an event says when they are there. Sums that a function has started into arrays of its own
run on a third one, behind an event of the first, which waits for theirs when the function does.
"""

from __future__ import annotations

import contextlib
import importlib.util
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from synk._pure.arrays import as_plain_array
from synk._pure.trees import flatten, unflatten
from synk._wire.memory import Segment
from synk._wire.messages import DEVICE_DTYPES
from synk.backends._frameworks import Converter, device_converters
from synk.backends._numpy import NumpyBackend
from synk.backends._places import Places
from synk.cuda import _nvml
from synk.cuda._devices import (
    choose_devices,
    cpu_mask,
    explain_absence,
    ranks_per_device,
    visible_devices,
    worker_environment,
)
from synk.cuda._pinned import PinnedRing, PinnedSegments, address
from synk.errors import UnsupportedError

_JAX_VARIABLE = "XLA_PYTHON_CLIENT_PREALLOCATE"


def has_cupy() -> bool:
    """Whether CuPy is installed; does not import it."""
    return importlib.util.find_spec("cupy") is not None


def is_usable() -> bool:
    return has_cupy() and not explain_absence(_nvml.discover(os.environ), os.environ, has_cupy=True)


def place(num_workers: int | None, devices: Sequence[Any] | None) -> Places:
    """Choose GPUs by NVML; imports neither CuPy nor CUDA."""
    snapshot = _nvml.discover(os.environ)
    problem = explain_absence(snapshot, os.environ, has_cupy=has_cupy())
    if problem:
        raise UnsupportedError(f"cannot fork with backend 'cupy': {problem}")
    chosen = choose_devices(visible_devices(snapshot, os.environ), num_workers, devices)
    # JAX would take three quarters of the memory at its start, from CuPy and from its neighbours.
    shared = {} if _JAX_VARIABLE in os.environ else {_JAX_VARIABLE: "false"}
    allowed = os.sched_getaffinity(0)
    return Places(
        tuple(str(device) for device in chosen),
        tuple(shared | worker_environment(device) for device in chosen),
        tuple(tuple(sorted(cpu_mask(device, allowed))) for device in chosen),
        ranks_per_device(chosen),
    )


def open_device(device: str) -> CupyBackend:
    return CupyBackend(device)


class _Borrowed:
    """Owns a block of device memory for an array, and gives it to ``returned`` when the array is gone."""

    def __init__(self, memory: Any, returned: list[Any]) -> None:
        self._memory = memory
        self._returned = returned

    def __del__(self) -> None:
        self._returned.append(self._memory)


class CupyBackend:
    """One worker's GPU.

    Parameters
    ----------
    device : str
        As ``"cuda:1"``: the number among the devices that the master sees. A worker process sees one device only,
        number 0; inline the number counts.

    Raises
    ------
    ImportError
        If CuPy is missing.
    """

    name = "cupy"
    is_device = True

    def __init__(self, device: str) -> None:
        import cupy

        self.device = device
        self.xp = cupy
        self._runtime = runtime = cupy.cuda.runtime
        ordinal = 0 if runtime.getDeviceCount() == 1 else int(device.partition(":")[2])
        self._cuda_device = cupy.cuda.Device(ordinal)
        self._cuda_device.use()
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream_handle = int(self.stream.ptr)
        self._copy_stream = cupy.cuda.Stream(non_blocking=True)
        # Sums of gradients beside the backward pass. What is launched there uses no memory of the pool.
        self._communication_stream = cupy.cuda.Stream(non_blocking=True)
        self._communicated: Any = None  # the last event there that the first stream has not waited for
        self._input_stream = self.stream  # on which inputs are brought at this moment
        # Memory of inputs that were brought ahead and are gone. It belongs to the second stream, where it would be used
        # again at once, while the first may still read it: it goes back to the pool when the first one is done.
        self._returned: list[Any] = []
        # Host arrays that copies may still read: where a device reads pageable memory itself (Grace Hopper), a copy
        # from it is under way when its call returns.
        self._sources: list[np.ndarray] = []
        self._scratch: Any = None
        has_read_only = bool(runtime.deviceGetAttribute(runtime.cudaDevAttrHostRegisterReadOnlySupported, ordinal))
        self._segments = PinnedSegments(runtime, ordinal, has_read_only)
        self._ring = PinnedRing(cupy.cuda)
        self._entered = threading.local()
        self._ordinal = ordinal
        self._torch_stream: Any = None
        # Numbers that a function returns stay on the host.
        self._host = NumpyBackend(device)

    # -- segments -----------------------------------------------------------------------------------------------------

    def note_segment(self, segment: Segment) -> None:
        self._segments.add(segment)

    def forget_segment(self, segment: Segment) -> None:
        self._segments.forget(segment)

    # -- arrays -------------------------------------------------------------------------------------------------------

    def is_array(self, value: Any) -> bool:
        return isinstance(value, (np.ndarray, self.xp.ndarray))

    def address(self, array: Any) -> int:
        return int(array.data.ptr)

    def own_copy(self, array: Any) -> Any:
        return (np if isinstance(array, np.ndarray) else self.xp).array(array)

    # -- to the device ------------------------------------------------------------------------------------------------

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return an array of ``shape`` on the device, contents undefined."""
        if dtype.name not in DEVICE_DTYPES:
            raise TypeError(
                f"cannot bring an array of dtype {dtype} to {self.device}: expected bools, integers, floats or complex "
                "numbers. Pass it inside a broadcast tuple, or encode it as integers."
            )
        nbytes = math.prod(shape) * dtype.itemsize
        if self._input_stream is self.stream or nbytes == 0:
            return self.xp.empty(shape, dtype)
        cuda = self.xp.cuda
        memory = cuda.alloc(nbytes)
        borrowed = cuda.UnownedMemory(memory.ptr, nbytes, _Borrowed(memory, self._returned), self._ordinal)
        return self.xp.ndarray(shape, dtype, cuda.MemoryPointer(borrowed, 0))

    def from_host(self, host: np.ndarray) -> Any:
        array = self.empty(host.shape, host.dtype)
        if host.size == 0:
            return array
        if host.flags.c_contiguous:
            self._sources.append(host)
            kind = self._runtime.memcpyHostToDevice
            start, target = address(host), array.data.ptr
            for offset, nbytes in self._segments.pieces(start, host.nbytes):
                self._runtime.memcpyAsync(target + offset, start + offset, nbytes, kind, self._input_stream.ptr)
        else:
            self._ring.copy_rows(
                host.shape, host.dtype, array.data.ptr, self._input_stream,
                lambda start, stop, out: np.copyto(out, host[start:stop]),
            )  # fmt: skip
        return array

    def take_rows(self, host: np.ndarray, indices: np.ndarray) -> Any:
        shape = (len(indices), *host.shape[1:])
        array = self.empty(shape, host.dtype)
        if array.size:
            # The master has checked the range; mode "raise" would go through a buffer of NumPy's own.
            self._ring.copy_rows(
                shape, host.dtype, array.data.ptr, self._input_stream,
                lambda start, stop, out: np.take(host, indices[start:stop], axis=0, out=out, mode="clip"),
            )  # fmt: skip
        return array

    def take(self, array: Any, indices: np.ndarray) -> Any:
        return array.take(self.from_host(np.ascontiguousarray(indices)), axis=0)

    def from_objects(self, value: Any) -> Any:
        """Return a broadcast object with the arrays in its nesting of tuples, lists and dicts on the device."""
        if not isinstance(value, (tuple, list, dict, np.ndarray)):
            return value
        leaves, structure = flatten(value)
        return unflatten(structure, [self._from_leaf(leaf) for leaf in leaves])

    def _from_leaf(self, leaf: Any) -> Any:
        if type(leaf) is np.ndarray and leaf.dtype.name in DEVICE_DTYPES and leaf.dtype.isnative:
            return self.from_host(leaf)
        return leaf

    # -- ahead of a call ----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def beside(self) -> Iterator[Any]:
        event = self.xp.cuda.Event(disable_timing=True)
        self._input_stream = self._copy_stream
        try:
            with self._copy_stream:
                yield event
        finally:
            self._input_stream = self.stream
            event.record(self._copy_stream)

    def join(self, event: Any) -> None:
        self.stream.wait_event(event)

    # -- communication beside a function ------------------------------------------------------------------------------

    def enter_thread(self) -> None:
        # A current stream is a thread's own: one of autograd's would queue on the legacy default stream.
        if not getattr(self._entered, "is_here", False):
            self._entered.is_here = True
            self._cuda_device.use()
            self.stream.use()

    def mark(self) -> Any:
        event = self.xp.cuda.Event(disable_timing=True)
        event.record(self.stream)
        return event

    def communicate(self, after: Any, launch: Callable[[int], Any]) -> Any:
        stream = self._communication_stream
        stream.wait_event(after)
        event = self.xp.cuda.Event(disable_timing=True)
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
        return bool(host.flags.c_contiguous) and self._segments.is_pinned(address(host), host.nbytes)

    # -- from the device ----------------------------------------------------------------------------------------------

    def as_output(self, value: Any) -> Any:
        if isinstance(value, self.xp.ndarray):
            return value
        if type(value).__module__.partition(".")[0] == "torch":
            value = device_converters("torch")[1](value)
            if isinstance(value, self.xp.ndarray):
                return value
        elif hasattr(value, "__cuda_array_interface__"):  # Numba and the like
            return self.xp.asarray(value)
        return self._host.as_output(value)

    def as_array(self, value: Any, what: str) -> Any:
        array = self.as_output(value)
        if array is None:
            array = as_plain_array(value, what)
        # Of an array of the user's a copy: it may be changed while it is still on its way.
        return self.from_host(np.array(array)) if isinstance(array, np.ndarray) else array

    def flat(self, array: Any) -> Any:
        xp = np if isinstance(array, np.ndarray) else self.xp
        return xp.ascontiguousarray(array).reshape(-1)

    def to_host(self, array: Any, out: np.ndarray) -> None:
        if isinstance(array, np.ndarray):
            np.copyto(out, array)
            return
        array = self.xp.ascontiguousarray(array)
        if array.size == 0:
            return
        # A block of the pool goes to its next user in the order of the stream: the array need not be kept.
        kind = self._runtime.memcpyDeviceToHost
        source, target = array.data.ptr, address(out)
        for offset, nbytes in self._segments.pieces(target, out.nbytes):
            self._runtime.memcpyAsync(target + offset, source + offset, nbytes, kind, self.stream.ptr)

    def host_copy(self, array: Any) -> np.ndarray:
        if isinstance(array, np.ndarray):
            return array
        out = np.empty(array.shape, array.dtype)
        self.to_host(array, out)
        self.stream.synchronize()
        return out

    # -- other libraries ----------------------------------------------------------------------------------------------

    def converters(self, framework: str) -> tuple[Converter, Converter]:
        if framework == "torch":
            import torch

            if torch.cuda.is_available():  # without CUDA torch computes on the host, as the function says
                self._torch_stream = torch.cuda.ExternalStream(self.stream.ptr, device=self._ordinal)
        return device_converters(framework)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._entered.is_here = True
        with self._cuda_device, self.stream:
            if self._torch_stream is None:
                yield
            else:
                with sys.modules["torch"].cuda.stream(self._torch_stream):
                    yield

    # -- state --------------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        self.stream.synchronize()
        self._sources.clear()
        self._returned.clear()

    def is_idle(self) -> bool:
        return bool(self.stream.done)

    def scratch_address(self) -> int:
        if self._scratch is None:
            self._scratch = self.xp.empty(8, np.uint8)
        return self.address(self._scratch)

    def copy(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        self._runtime.memcpyAsync(destination, source, nbytes, self._runtime.memcpyDefault, stream)

    def explain(self, error: BaseException, what: str) -> BaseException:
        """Return the error to report: out of device memory becomes a MemoryError that says what to do."""
        torch = sys.modules.get("torch")
        kinds: tuple[type[BaseException], ...] = (self.xp.cuda.memory.OutOfMemoryError,)
        if torch is not None:
            kinds = (*kinds, torch.cuda.OutOfMemoryError)
        if not isinstance(error, kinds):
            return error
        free, total = self._runtime.memGetInfo()
        explained = MemoryError(
            f"cannot run {what} on {self.device}: out of device memory, {free} of {total} bytes are free "
            f"({error}). Pass num_slices=2 or more, or use fewer rows per call."
        )
        explained.__cause__ = error
        return explained

    def recover(self) -> bool:
        """After an exception: give back cached memory; return whether the device still works.

        An error that the device met while it ran (an illegal address, a launch failure) stays with the process: every
        later call of CUDA reports it again.
        """
        try:
            self._copy_stream.synchronize()
            self._communication_stream.synchronize()
            self._communicated = None
            self.synchronize()
            self.xp.get_default_memory_pool().free_all_blocks()
        except self._runtime.CUDARuntimeError:
            return False
        return True

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
