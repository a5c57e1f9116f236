"""Converts arrays for functions to arrays of torch or JAX, and back, without a copy where that is possible."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from synk._pure.tensors import array_of, dtype_of, has_torch_dtype, is_plain, tensor_of
from synk._wire.messages import DEVICE_DTYPES

Converter = Callable[[Any], Any]


def host_converters(framework: str) -> tuple[Converter, Converter]:
    """Return ``(to_framework, from_framework)`` between NumPy arrays and arrays of ``framework``.

    Arrays of dtypes that the library lacks (text, dates) are not converted. What is made of a read-only array
    is a copy, so a function may write into a tensor (``x += 1``, ``x.relu_()``); what is made of another is a view.

    Raises
    ------
    ImportError
        If the library is not installed.
    """
    return _torch_converters() if framework == "torch" else _jax_converters()


def computes_on_gpus(framework: str) -> bool:
    """Whether ``framework`` can use CUDA here. One without CUDA, or too new for the driver, computes on the host."""
    if framework == "torch":
        import torch

        return torch.cuda.is_available()
    import jax

    return bool(jax.default_backend() == "gpu")


def on_host(obj: Any) -> Any:
    """Return a tensor of torch or an array of JAX that lies on a device on the host; any other object unchanged."""
    torch, jax = sys.modules.get("torch"), sys.modules.get("jax")
    if torch is not None and isinstance(obj, torch.Tensor):
        return obj if obj.device.type in ("cpu", "meta") else obj.detach().cpu()
    if jax is not None and isinstance(obj, jax.Array):
        return obj if all(device.platform == "cpu" for device in obj.devices()) else np.asarray(obj)
    return obj


def bfloat16() -> np.dtype:
    """Return the dtype bfloat16 of ml_dtypes.

    Raises
    ------
    TypeError
        If ml_dtypes is not installed.
    """
    try:
        import ml_dtypes
    except ImportError as error:
        raise TypeError(
            "cannot return values of dtype bfloat16: NumPy has none. Install ml_dtypes, or cast to float32."
        ) from error
    return np.dtype(ml_dtypes.bfloat16)


def _torch_converters() -> tuple[Converter, Converter]:
    import torch

    def to_torch(array: Any) -> Any:
        return tensor_of(array) if has_torch_dtype(array) else array

    def from_torch(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not is_plain(value):
            return value
        return array_of(value.detach().cpu())

    return to_torch, from_torch


def _jax_converters() -> tuple[Converter, Converter]:
    import jax

    def from_jax(value: Any) -> Any:
        return np.asarray(value) if isinstance(value, jax.Array) else value

    def to_jax(array: Any) -> Any:
        if array.dtype.kind in "USMm":
            return array
        return jax.device_put(array if array.flags.writeable else array.copy())  # or it may share the memory

    return to_jax, from_jax


@functools.cache
def device_converters(framework: str) -> tuple[Converter, Converter]:
    """Return ``(to_framework, from_framework)`` between CuPy arrays and arrays of ``framework``, by DLPack.

    Each side tells the other its current stream, so the work stays in order on any streams. Values on the host, such as
    CPU tensors, come back as NumPy arrays.

    Raises
    ------
    ImportError
        If the library is not installed.
    """
    return _torch_device_converters() if framework == "torch" else _jax_device_converters()


def _torch_device_converters() -> tuple[Converter, Converter]:
    import cupy
    import torch

    from_host_tensor = _torch_converters()[1]

    def to_torch(array: Any) -> Any:
        if any(stride < 0 for stride in array.strides):  # torch has no negative strides
            array = array.copy()
        if array.dtype.name == "bfloat16":
            return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype.kind == "b":
            return torch.from_dlpack(array.view(np.uint8)).view(torch.bool)
        return torch.from_dlpack(array)

    def from_torch(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not is_plain(value):
            return value
        if not value.is_cuda or dtype_of(value) not in DEVICE_DTYPES:
            return from_host_tensor(value)
        value = value.detach().resolve_conj().resolve_neg()
        if value.dtype == torch.bfloat16:
            return cupy.from_dlpack(value.view(torch.int16)).view(bfloat16())
        if value.dtype == torch.bool:
            return cupy.from_dlpack(value.view(torch.uint8)).view(np.bool_)
        return cupy.from_dlpack(value)

    return to_torch, from_torch


def _jax_device_converters() -> tuple[Converter, Converter]:
    import cupy
    import jax
    import jax.dlpack

    def from_jax(value: Any) -> Any:
        if not isinstance(value, jax.Array):
            return value
        is_host = all(device.platform == "cpu" for device in value.devices())
        return np.asarray(value) if is_host or value.dtype.name not in DEVICE_DTYPES else cupy.from_dlpack(value)

    # XLA takes only compact arrays, and rows taken with a step are not compact.
    return lambda array: jax.dlpack.from_dlpack(cupy.asarray(array, order="C")), from_jax
