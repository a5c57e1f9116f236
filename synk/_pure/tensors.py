"""torch's tensors and the arrays in whose memory they lie.

torch is imported where there is a tensor or one is to be made, never in order to look for one.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from synk._pure.dtypes import dtype_name, foreign, foreign_name, storage

_SHARED_DTYPES = frozenset(
    (
        "bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64",
        "float16", "float32", "float64", "complex64", "complex128",
    )
)  # fmt: skip
"""Those that NumPy and torch call alike."""


def is_tensor(value: Any) -> bool:
    """Whether ``value`` is torch's; without importing torch: where it was never imported nothing is."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, getattr(torch, "Tensor", ()))


def has_torch_dtype(array: Any) -> bool:
    """Whether torch has a tensor for an array: none for text, dates and records."""
    name = dtype_name(array.dtype)
    return name in _SHARED_DTYPES or name == "bfloat16" or bool(foreign_name(array.dtype))


def dtype_of(tensor: Any) -> str:
    """Return the name of a tensor's dtype, as ``"bfloat16"``."""
    return _name_of(tensor.dtype)


@functools.cache
def _name_of(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def is_plain(tensor: Any) -> bool:
    """Whether the elements of a tensor lie in memory as those of an array."""
    import torch

    return tensor.layout is torch.strided and not tensor.is_quantized and not tensor.is_nested


def array_of(tensor: Any) -> np.ndarray:
    """Return the memory of a plain tensor of the host as an array; for dtypes that NumPy lacks see ``dtypes``."""
    import torch

    tensor = tensor.detach().resolve_conj().resolve_neg()
    name = dtype_of(tensor)
    if name in _SHARED_DTYPES:
        return tensor.numpy()
    plain = storage(tensor.element_size())
    return tensor.view(getattr(torch, plain.name)).numpy().view(foreign(name, plain.itemsize))


def torch_dtypes(name: str, plain: str) -> tuple[Any, Any]:
    """Return torch's dtype ``name``, and the one of the same size that NumPy has too; None where it has the first."""
    import torch

    return getattr(torch, name), None if name == plain else getattr(torch, plain)


def memory_of(tensor: Any, dtype: Any, plain: Any) -> np.ndarray | None:
    """Return the memory of a tensor as an array, if it is one of ``dtype`` that NumPy can look at as it is, else None.

    For whoever has asked ``torch_dtypes`` before; ``array_of`` and ``check_tensor`` take all others and say what is
    wrong.
    """
    if type(tensor) is not sys.modules["torch"].Tensor or tensor.dtype is not dtype or tensor.requires_grad:
        return None
    try:
        array: np.ndarray = (tensor if plain is None else tensor.view(plain)).numpy()
    except (TypeError, RuntimeError):  # on a device, sparse, conjugated, of a transformation
        return None
    return array


def tensor_of(array: np.ndarray) -> Any:
    """Return a tensor on the memory of an array that torch has a dtype for."""
    import torch

    if array.ndim and min(array.strides) < 0:  # torch has none of these
        array = array.copy()
    name = dtype_name(array.dtype)
    if name in _SHARED_DTYPES:
        return torch.from_numpy(array)
    return torch.from_numpy(array.view(storage(array.dtype.itemsize))).view(getattr(torch, name))


def as_dtype(tensor: Any, name: str) -> Any:
    """Return a tensor on the same memory whose elements are of the dtype ``name``, which are as large."""
    import torch

    return tensor.view(getattr(torch, name))


def is_ordinary(tensor: Any) -> bool:
    """Whether a tensor is what its elements are, and nothing more: no subclass, no gradient, no attributes."""
    import torch

    is_bare = type(tensor) is torch.Tensor and not tensor.requires_grad and not vars(tensor)
    return is_bare and tensor.device.type == "cpu" and is_plain(tensor)


def copied_tensor(buffer: Any, dtype: str, shape: tuple[int, ...]) -> Any:
    """Return a tensor with a copy of the bytes in ``buffer``: it may be written into and kept."""
    import torch

    if not len(buffer):
        return torch.empty(shape, dtype=getattr(torch, dtype))
    return as_dtype(torch.from_numpy(np.array(buffer, np.uint8)), dtype).reshape(shape)


def check_tensor(tensor: Any, what: str) -> np.ndarray:
    """Return the memory of a tensor that is an argument; see ``array_of``.

    Raises
    ------
    TypeError
        If it requires grad, for calls carry no gradients; if it has no plain memory here (sparse, quantized, nested, on
        a device or nowhere).
    """
    check_no_grad(tensor, what)
    problem = _problem(tensor)
    if problem:
        raise TypeError(f"cannot share {what}: got {problem}.")
    try:
        return array_of(tensor)
    except Exception as error:  # a subclass of the user's, or of a transformation of torch's
        raise TypeError(
            f"cannot share {what}: got a {type(tensor).__name__} whose memory cannot be read ({error})."
        ) from error


def check_no_grad(tensor: Any, what: str) -> None:
    """Refuse a tensor that requires grad: autograd would take what comes back for a constant, without a word."""
    if tensor.requires_grad:
        raise TypeError(
            f"cannot share {what}: got a tensor that requires grad, and calls carry no gradients back. "
            "Pass tensor.detach(), or use synk.torch.DataParallel, which does carry them."
        )


def _problem(tensor: Any) -> str:
    """Return what is wrong with a tensor, and the next step; nothing where its memory can be read."""
    import torch

    if tensor.is_quantized:
        return "a quantized tensor, expected plain numbers. Pass tensor.dequantize(), or tensor.int_repr()"
    if tensor.is_nested:
        return "a nested tensor, expected one with rows. Pass torch.nested.to_padded_tensor(tensor, 0.0)"
    if tensor.layout is not torch.strided:
        return f"a tensor of layout {tensor.layout}, expected a dense one. Pass tensor.to_dense()"
    if tensor.device.type == "meta":
        return "a tensor on device meta, which has no values"
    if tensor.device.type != "cpu":
        return (
            f"a tensor on {tensor.device}, expected one on the CPU: workers bring their rows to their own devices. "
            "Pass tensor.cpu()"
        )
    return ""


def is_torch_module(obj: Any) -> bool:
    """Whether ``obj`` is a module of torch, a model or a part of one."""
    torch = sys.modules.get("torch")
    return isinstance(obj, getattr(getattr(torch, "nn", None), "Module", ()))


def is_torch_optimizer(obj: Any) -> bool:
    """Whether ``obj`` is an optimizer of torch."""
    torch = sys.modules.get("torch")
    return isinstance(obj, getattr(getattr(torch, "optim", None), "Optimizer", ()))


def num_torch_threads() -> int:
    """Return with how many threads torch computes in this process; 1 where it was never imported."""
    torch = sys.modules.get("torch")
    return 1 if torch is None else int(torch.get_num_threads())
