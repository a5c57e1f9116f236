"""Arrays of other libraries on the host: handed to functions without a copy, and taken back so."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

Converter = Callable[[Any], Any]


def host_converters(framework: str) -> tuple[Converter, Converter]:
    """Return ``(to_framework, from_framework)`` between NumPy arrays and those of ``framework``.

    The tensors are views of read-only memory. torch has no read-only tensors: a function that writes into its input in
    place (``x += 1``, ``x.relu_()``) ends its worker with SIGSEGV; it must copy first (``x.clone()``).

    Raises
    ------
    ImportError
        If the library is not installed.
    """
    return _torch_converters() if framework == "torch" else _jax_converters()


def _torch_converters() -> tuple[Converter, Converter]:
    import torch

    with warnings.catch_warnings():
        # torch says once per process that it cannot protect read-only memory; said in the docstring above.
        warnings.simplefilter("ignore")
        read_only = np.zeros(1)
        read_only.flags.writeable = False
        torch.from_numpy(read_only)

    def to_torch(array: Any) -> Any:
        if any(stride < 0 for stride in array.strides):  # torch has no negative strides
            array = np.ascontiguousarray(array)
        if array.dtype.name == "bfloat16":
            return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        return torch.from_numpy(array)

    def from_torch(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        value = value.detach().cpu().resolve_conj().resolve_neg()
        if value.dtype == torch.bfloat16:
            import ml_dtypes

            return value.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
        return value.numpy()

    return to_torch, from_torch


def _jax_converters() -> tuple[Converter, Converter]:
    import jax

    def from_jax(value: Any) -> Any:
        return np.asarray(value) if isinstance(value, jax.Array) else value

    return jax.device_put, from_jax
