"""The backend ``"dpnp"``: devices of OpenCL and SYCL, through dpnp's arrays. Tried on CPUs only.

dpnp queues work on the device and keeps it in order by events. The copies here take part in this order: each waits for
the work queued before it, and later work waits for it. Host memory is kept alive until its copy has ended. If the next
call is known before the current one has ended, a second queue copies its inputs.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from synk._wire.memory import Segment
from synk._wire.messages import DEVICE_DTYPES
from synk.backends._assignment import DeviceAssignment, choose
from synk.backends._device_arrays import DeviceArrays
from synk.backends._listing import list_devices
from synk.errors import UnsupportedError

_DTYPES = DEVICE_DTYPES - {"bfloat16"}
_SELECTOR = "ONEAPI_DEVICE_SELECTOR"

# The kind and the driver of each device, and the text that selects it alone. Each driver that knows a GPU lists it.
_LIST = """
import dpctl, json
print(json.dumps([[device.device_type.name, device.backend.name,
                   device.get_filter_string(include_backend=True, include_device_type=False)]
                  for device in dpctl.get_devices()]))
"""


def is_usable() -> bool:
    return importlib.util.find_spec("dpnp") is not None


def place(num_workers: int | None, devices: Sequence[Any] | None) -> DeviceAssignment:
    """Choose GPUs, or divide the CPU's cores where there are none. A child process asks dpctl for the devices."""
    if not is_usable():
        raise UnsupportedError(
            "cannot fork with backend 'dpnp': dpnp is not installed. Run pip install \"synkhronos[dpnp]\" (2.9 GB)."
        )
    environment = os.environ | _library_variables()
    selectors = _selectors(list_devices(_LIST, "dpctl", environment))
    if not selectors:
        raise UnsupportedError(
            f"cannot fork with backend 'dpnp': dpctl finds no device. Is {_SELECTOR} set, or the driver of the device "
            "missing? `python -m dpctl --full` says more."
        )
    gpus = [name for name in selectors if name != "cpu"]
    allowed = sorted(os.sched_getaffinity(0))
    if devices is not None:
        chosen = choose(list(selectors), num_workers, devices)
    else:
        chosen = choose(gpus, num_workers, None) if gpus else ["cpu"] * (num_workers or len(allowed))
    return DeviceAssignment(
        tuple(chosen),
        tuple(environment | {_SELECTOR: selectors[name]} for name in chosen),
        _divided(allowed, chosen),
        has_devices=True,
    )


def _selectors(listed: Sequence[Sequence[str]]) -> dict[str, str]:
    """Return the text that selects each device, by the device's name: ``"cpu"``, ``"gpu:0"``, ``"gpu:1"``, ..."""
    gpus = [(driver, selector) for kind, driver, selector in listed if kind == "gpu"]
    drivers = {driver for driver, _ in gpus}
    preferred = "level_zero" if "level_zero" in drivers else min(drivers, default="")
    found = [selector for driver, selector in gpus if driver == preferred]
    # OpenCL's CPU cannot be selected by its number.
    cpu = {"cpu": "*:cpu"} if any(kind == "cpu" for kind, _, _ in listed) else {}
    return {f"gpu:{index}": selector for index, selector in enumerate(found)} | cpu


def _divided(allowed: Sequence[int], devices: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """Return the CPUs for each rank. Ranks on the CPU divide the CPUs, because OpenCL uses all that it may."""
    on_cpu = [rank for rank, name in enumerate(devices) if name == "cpu"]
    parts = [tuple(map(int, part)) for part in np.array_split(allowed, min(len(on_cpu), len(allowed)) or 1)]
    own = {rank: parts[place % len(parts)] for place, rank in enumerate(on_cpu)}
    return tuple(own.get(rank, tuple(allowed)) for rank in range(len(devices)))


def _library_variables() -> dict[str, str]:
    """Return the variable by which OpenCL's loader finds the CPU. The wheel's own file names a missing folder."""
    library = os.path.join(sys.prefix, "lib", "libintelocl.so")
    return {} if "OCL_ICD_FILENAMES" in os.environ or not os.path.exists(library) else {"OCL_ICD_FILENAMES": library}


def open_device(device: str) -> DpnpBackend:
    os.environ.update(_library_variables())  # for an inline rank; a worker has them already
    return DpnpBackend(device)


def on_host(obj: Any) -> Any:
    return obj.asnumpy() if isinstance(obj, sys.modules["dpnp"].ndarray) else obj


def report() -> list[str]:
    return ["backend 'dpnp': installed"] if is_usable() else []


class DpnpBackend(DeviceArrays):
    """The arrays of one worker on dpnp's default device.

    Raises
    ------
    ImportError
        If dpnp is missing.
    """

    name = "dpnp"

    def __init__(self, device: str) -> None:
        import dpctl
        import dpctl.memory
        import dpctl.utils
        import dpnp

        super().__init__(device, dpnp)
        self._dpctl: Any = dpctl
        self._queue: Any = dpnp.empty(0).sycl_queue  # the queue of all arrays that functions make
        self._copy_queue: Any = dpctl.SyclQueue(self._queue.sycl_context, self._queue.sycl_device)
        self._copied: list[Any] | None = None  # inside of ``beside``, the events of its copies
        # Copies that may not have ended: each has an event (None before it is queued) and the memory that it reads and
        # writes, which this list keeps alive.
        self._in_flight: list[list[Any]] = []

    @property
    def _order(self) -> Any:
        """dpnp's record of the work in its queue."""
        return self._dpctl.utils.SequentialOrderManager[self._queue]

    def forget_segment(self, segment: Segment) -> None:
        """Wait for all copies, which may read or write the segment."""
        self._copy_queue.wait()
        self.synchronize()

    # -- to the device ------------------------------------------------------------------------------------------------

    def has_dtype(self, array: np.ndarray) -> bool:
        return array.dtype.name in _DTYPES

    def from_host(self, host: np.ndarray) -> Any:
        host = self.checked(host)
        try:
            array = self.xp.empty(host.shape, dtype=host.dtype)
        except self._dpctl.memory.USMAllocationError as error:
            raise MemoryError(f"cannot copy {host.nbytes} bytes to {self.device}: {error}.") from error
        self._num_copied[0] += host.nbytes
        if host.size:
            source = np.ascontiguousarray(host)
            queue = self._queue if self._copied is None else self._copy_queue
            event = self._copy(queue, array.get_array().usm_data, _bytes_of(source), [])
            if self._copied is None:
                self._order.add_event_pair(event, event)
            else:
                self._copied.append(event)
        return array

    def take(self, array: Any, indices: np.ndarray) -> Any:
        return self.xp.take(array, self.from_host(indices), axis=0)

    # -- ahead of a call ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def beside(self) -> Iterator[Any]:
        copied: list[Any] = []
        self._copied = copied
        try:
            yield copied
        finally:
            self._copied = None

    def join(self, event: Any) -> None:
        for each in event:
            self._order.add_event_pair(each, each)

    # -- from the device ----------------------------------------------------------------------------------------------

    def to_host(self, array: Any, out: np.ndarray) -> None:
        if isinstance(array, np.ndarray):
            np.copyto(out, array)
        elif array.size:
            self._num_copied[1] += out.nbytes
            array = self.xp.ascontiguousarray(array)
            memory = self._dpctl.memory.as_usm_memory(array.get_array())
            event = self._copy(self._queue, _bytes_of(out), memory, self._order.submitted_events)
            self._order.add_event_pair(event, event)

    def _copy(self, queue: Any, destination: Any, source: Any, after: Sequence[Any]) -> Any:
        """Queue a copy of ``source`` behind the events ``after``. Return the event of its end."""
        copy = [None, destination, source]
        # Noted before it begins: an interrupt may come between any two lines, and a running copy needs its memory.
        self._in_flight.append(copy)
        copy[0] = queue.memcpy_async(destination, source, source.nbytes, after)
        return copy[0]

    def host_copy(self, array: Any) -> np.ndarray:
        return array if isinstance(array, np.ndarray) else array.asnumpy()

    # -- state --------------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        self._order.wait()
        complete = self._dpctl.event_status_type.complete
        self._in_flight = [each for each in self._in_flight if each[0] is None or each[0].execution_status != complete]

    def explain(self, error: BaseException, what: str) -> BaseException:
        """Return the error to report. Out of device memory becomes a MemoryError that says what to do."""
        if not isinstance(error, (self._dpctl.memory.USMAllocationError, MemoryError)):
            return error
        return self.out_of_memory(error, what)

    def recover(self) -> bool:
        """Wait for work that an exception left on the device. Return whether the device still works.

        After the waits no copy runs, so the memory of copies whose event was never noted can go, too.
        """
        try:
            self._copy_queue.wait()
            self._queue.wait()
            self.synchronize()
        except RuntimeError:  # an error of the device stays with the process
            return False
        self._in_flight.clear()
        return True

    def describe(self) -> str:
        device = self._queue.sycl_device
        model = f"{device.backend.name} {device.name.strip()}"
        return f"dpnp {self.xp.__version__}, {model}, {device.max_compute_units} compute units"

    def close(self) -> None:
        self._copy_queue.wait()
        self.synchronize()


def _bytes_of(array: np.ndarray) -> np.ndarray:
    """Return the memory of a C-contiguous array as bytes."""
    assert array.flags.c_contiguous
    return array.reshape(-1).view(np.uint8)
