"""How torch differentiates through what moves values between ranks: the backward pass moves gradients back.

The gradient is that of the sum of all ranks' losses. Results of ``synk.comm`` become tensors by ``torch.as_tensor``:
in a function that is built without a framework they are arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from synk.communicators._comm import comm


class Losses:
    """The weight with which a rank's loss enters the sum of all losses.

    Attributes
    ----------
    weight : float or None
        The number of this rank's rows while a step of ``replicate`` runs; None otherwise, when all losses weigh the
        same. One value for all threads, because autograd has its own threads on devices.
    """

    weight: float | None = None


losses = Losses()


def moved(x: torch.Tensor | None, move: Callable[[Any], Any], adjoint: Callable[[Any], Any]) -> torch.Tensor:
    """Return ``move(x)``, which takes values to other ranks. ``adjoint`` brings the gradient back, by ``moved`` again.

    In a step of ``replicate`` a rank's loss is the mean over its rows, and its gradients are multiplied by its share of
    the rows when they are reduced. A gradient that comes from another rank must carry that rank's weight instead. So it
    is multiplied by its sender's number of rows on the way out and divided by the receiver's on the way in.
    """
    result: torch.Tensor = _Moved.apply(x, move, adjoint)
    return result


class _Moved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor | None, move: Any, adjoint: Any) -> torch.Tensor:
        ctx.adjoint, ctx.weight = adjoint, losses.weight
        return torch.as_tensor(move(None if x is None else x.detach()))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        if ctx.weight is None:
            return ctx.adjoint(gradient), None, None
        return ctx.adjoint(gradient * ctx.weight) / ctx.weight, None, None


def check_tensor(verb: str, x: Any) -> None:
    """Raise TypeError unless ``x`` is a tensor. A function that is built without a framework gets arrays."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"cannot {verb} by synk.torch: got a value of type {type(x).__name__}, expected a tensor. Build the "
            "function with framework='torch', or pass torch.as_tensor(value)."
        )


def gradient_of(verb: str, op: str, total: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return the adjoint of a reduction; ``total`` is that of a sum. An average has this rank's share of it.

    If the op has no gradient the adjoint raises RuntimeError. All ranks gave the same op, so none waits for another.
    """
    share = 1.0
    if op == "avg":
        share = comm.rows / comm.total_rows if comm.total_rows else 1 / comm.world_size

    def adjoint(gradient: torch.Tensor) -> torch.Tensor:
        if op not in ("sum", "avg"):
            raise RuntimeError(
                f"cannot differentiate {verb}: got op {op!r}, expected 'sum' or 'avg'. Pass it tensor.detach(), and no "
                "gradient comes back."
            )
        return total(gradient) if op == "sum" else total(gradient) * share

    return adjoint
