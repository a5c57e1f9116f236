"""What pickles leave out: hooks, and attributes of optimizers other than groups and state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch


def gradient_hooks(parameters: Sequence[torch.Tensor]) -> dict[int, tuple[list[Any], list[Any]]]:
    """Return the hooks of parameters by position: those before and those after their gradients are accumulated."""
    hooks: dict[int, tuple[list[Any], list[Any]]] = {}
    for index, parameter in enumerate(parameters):
        before = list((parameter._backward_hooks or {}).values())
        after = list((parameter._post_accumulate_grad_hooks or {}).values())
        if before or after:
            hooks[index] = before, after
    return hooks


def hook_gradients(parameters: Sequence[torch.Tensor], hooks: dict[int, tuple[list[Any], list[Any]]]) -> None:
    """Register hooks that ``gradient_hooks`` returned."""
    for index, (before, after) in hooks.items():
        parameter = parameters[index]
        is_trained = parameter.requires_grad
        parameter.requires_grad_()  # torch accepts hooks only then
        for hook in before:
            parameter.register_hook(hook)
        for hook in after:
            parameter.register_post_accumulate_grad_hook(hook)
        parameter.requires_grad_(is_trained)


def other_attributes(optimizer: Any) -> dict[str, Any]:
    """Return an optimizer's attributes other than its groups and state, including hooks that the program registered."""
    return {
        name: value
        for name, value in optimizer.__dict__.items()
        if name not in ("defaults", "state", "param_groups", "_opt_called")  # the last one is set before each call
        and not callable(value)
        and (value or not name.endswith("_hooks"))
    }
