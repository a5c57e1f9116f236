"""The backend ``"torch"``: workers whose functions get tensors, on any device that torch has.

The same code serves the CPU, CUDA, ROCm (which torch calls ``"cuda"``) and Intel's GPUs (``"xpu"``). Only the CPU has
been tried; nothing here has ever run on the others. Reductions and ``synk.comm`` go through host memory on all of them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from synk._pure.cores import num_cores
from synk._pure.tensors import array_of, has_torch_dtype, is_plain, tensor_of
from synk._wire.memory import Segment
from synk.backends._assignment import DeviceAssignment, check_names, choose_named
from synk.backends._device_arrays import DeviceArrays
from synk.backends._frameworks import Converter
from synk.backends._frameworks import on_host as on_host
from synk.backends._listing import list_devices, version_line
from synk.errors import UnsupportedError

if TYPE_CHECKING:
    from synk.backends._torch_arrays import TorchArray

_LIST = """
import json, torch
kinds = {kind: getattr(torch, kind) for kind in ("cuda", "xpu") if hasattr(torch, kind)}
print(json.dumps([f"{kind}:{index}" for kind, module in kinds.items() if module.is_available()
                  for index in range(module.device_count())]))
"""


def is_usable() -> bool:
    return importlib.util.find_spec("torch") is not None


def place(num_workers: int | None, devices: Sequence[Any] | None) -> DeviceAssignment:
    """Choose accelerators, or the CPU where there are none. A child process asks torch for the devices."""
    if not is_usable():
        raise UnsupportedError(
            "cannot fork with backend 'torch': torch is not installed. Run pip install \"synkhronos[torch]\"."
        )
    check_names(devices)
    is_all_cpu = devices is not None and all(device == "cpu" for device in devices)
    found = [] if is_all_cpu else list_devices(_LIST, "torch", os.environ)
    if not found and devices is None:
        chosen = ["cpu"] * (num_workers or num_cores())
    else:
        chosen = choose_named(found or ["cpu"], num_workers, devices)
    kinds = {name.partition(":")[0] for name in chosen}
    if len(kinds) > 1:
        raise ValueError(f"cannot fork: got devices={chosen}, expected all of one kind. Use one runtime for each kind.")
    return DeviceAssignment(tuple(chosen), has_devices=True, torch_device=kinds.pop(), framework=TorchBackend.framework)


def open_device(device: str) -> TorchBackend:
    return TorchBackend(device)


def report() -> list[str]:
    return version_line("torch")


class TorchBackend(DeviceArrays):
    """The tensors of one worker on a device of torch, for instance ``"cpu"``, ``"cuda:1"`` or ``"xpu:0"``.

    Raises
    ------
    ImportError
        If torch is missing.
    """

    name = "torch"
    framework = "torch"

    def __init__(self, device: str) -> None:
        import torch

        from synk.backends._torch_arrays import Namespace

        super().__init__(device, Namespace(torch.device(device)))
        self._torch = torch
        self._device = torch.device(device)
        # torch's module for this kind of device: streams, memory, waiting. None for the CPU.
        self._module: Any = None if self._device.type == "cpu" else getattr(torch, self._device.type)
        self._stream: Any = None
        self._copy_stream: Any = None
        if self._module is not None:
            self._module.set_device(self._device)
            self._stream, self._copy_stream = self._module.current_stream(), self._module.Stream()

    def forget_segment(self, segment: Segment) -> None:
        """Do nothing: copies from host memory have ended when ``from_host`` returns."""

    # -- to the device ------------------------------------------------------------------------------------------------

    def has_dtype(self, array: np.ndarray) -> bool:
        return has_torch_dtype(array)

    def from_host(self, host: np.ndarray) -> TorchArray:
        self.check_dtype(host)
        self._num_copied[0] += host.nbytes
        tensor = tensor_of(host.copy())
        if self._module is not None:
            tensor = tensor.to(self._device)
            # A tensor that is made on the second stream is read on the first. torch must not reuse its memory before
            # the first stream has passed.
            tensor.record_stream(self._stream)
        array: TorchArray = self.xp.ndarray(tensor)
        return array

    def take(self, array: Any, indices: np.ndarray) -> TorchArray:
        rows: TorchArray = array[self._torch.from_numpy(np.array(indices)).to(self._device)]
        return rows

    # -- ahead of a call ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def beside(self) -> Iterator[Any]:
        if self._module is None:
            yield None
            return
        event = self._module.Event()
        with self._module.stream(self._copy_stream):
            yield event
            event.record(self._copy_stream)

    def join(self, event: Any) -> None:
        if event is not None:
            self._module.current_stream().wait_event(event)

    def is_pinned(self, host: np.ndarray) -> bool:
        return False

    # -- from the device ----------------------------------------------------------------------------------------------

    def as_output(self, value: Any) -> Any:
        return super().as_output(self._from_tensor(value))

    def as_array(self, value: Any, what: str) -> Any:
        return self.xp.asarray(super().as_array(value, what))  # a tensor may lie on another device

    def to_host(self, array: Any, out: np.ndarray) -> None:
        if not isinstance(array, np.ndarray):
            self._num_copied[1] += out.nbytes
        np.copyto(out, self.host_copy(array))

    def host_copy(self, array: Any) -> np.ndarray:
        return array if isinstance(array, np.ndarray) else array_of(array.tensor.cpu())

    # -- other libraries ----------------------------------------------------------------------------------------------

    def torch_device(self) -> str:
        return self._device.type

    def converters(self, framework: str) -> tuple[Converter, Converter]:
        if framework == "numpy":
            return self._to_numpys_tensor, self._from_tensor
        if framework != "torch":
            raise UnsupportedError(f"cannot convert tensors to arrays of {framework} with backend 'torch'.")
        return self._to_tensor, self._from_tensor

    def _to_tensor(self, array: Any) -> Any:
        if isinstance(array, self.xp.ndarray):
            return array.tensor
        return self.from_host(array).tensor if has_torch_dtype(array) else array

    def _to_numpys_tensor(self, array: Any) -> Any:
        from synk.backends._torch_arrays import NumpysTensor

        tensor = self._to_tensor(array)
        return tensor.as_subclass(NumpysTensor) if isinstance(tensor, self._torch.Tensor) else tensor

    def _from_tensor(self, value: Any) -> Any:
        if not isinstance(value, self._torch.Tensor) or not is_plain(value):
            return value
        return self.xp.ndarray(value.detach().resolve_conj().resolve_neg())

    # -- state --------------------------------------------------------------------------------------------------------

    def synchronize(self) -> None:
        if self._module is not None:
            self._module.synchronize()

    def explain(self, error: BaseException, what: str) -> BaseException:
        """Return the error to report. Out of device memory becomes a MemoryError that says what to do."""
        is_full = isinstance(error, self._torch.cuda.OutOfMemoryError)
        return self.out_of_memory(error, what) if is_full else self._host.explain(error, what)

    def recover(self) -> bool:
        if self._module is None:
            return True
        try:
            self._module.synchronize()
            self._module.empty_cache()
        except RuntimeError:  # an error of the device stays with the process
            return False
        return True

    def describe(self) -> str:
        model = f"{self._torch.get_num_threads()} threads"
        if self._module is not None:
            model = self._module.get_device_name(self._device)
        return f"torch {self._torch.__version__}, {model}"

    def close(self) -> None:
        """Do nothing: the memory is freed with the process."""
