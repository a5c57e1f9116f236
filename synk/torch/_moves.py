"""What a training step did to the tensors of its objects, so that two steps can be compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from synk.torch import _state as states


def tensors_of(objects: Sequence[Any]) -> list[torch.Tensor]:
    """Return the parameters and buffers of modules."""
    return [tensor for obj in objects if states.is_module(obj) for _, tensor in states.tensors_of(obj)]


def moves_of(objects: Sequence[Any], before: Sequence[torch.Tensor]) -> list[np.ndarray]:
    """Return what a step has left of the gradients: themselves, what optimizers keep, else how far tensors have moved.

    How far Adam moves a parameter says nothing about a gradient that is rounding alone.
    """
    gradients = [each.grad for each in states.parameters_of(objects) if each.grad is not None]
    slots = [slot for obj in objects if states.is_optimizer(obj) for slot in obj.__dict__["state"].values()]
    kept = [value for slot in slots for value in slot.values() if isinstance(value, torch.Tensor)]
    if gradients or kept:
        return [_numbers(gradients), _numbers(kept)]
    return [_numbers([now - old for now, old in zip(tensors_of(objects), before)])]


def _numbers(tensors: Sequence[torch.Tensor]) -> np.ndarray:
    parts = [each.detach().to("cpu", torch.float64).reshape(-1).numpy() for each in tensors]
    return np.concatenate(parts) if parts else np.zeros(0)
