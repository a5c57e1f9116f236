"""Batch norm over the rows of all ranks.

The statistics are summed over the ranks, and so are the two sums that the backward pass needs. Each rank's loss is the
mean over its own rows, and gradients are weighted by rows when they are reduced. In between, the cotangents must carry
that weight, or a rank with few rows would count as much as one with many.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from synk._worker.comm.comm import comm


def synchronize(module: torch.nn.Module) -> None:
    """Make all batch norms of a module normalise over the rows of all ranks while they train."""
    for each in module.modules():
        if isinstance(each, _BatchNorm):
            each.__dict__["forward"] = types.MethodType(_forward, each)


def _forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    is_batch = self.training or self.running_mean is None
    # This condition must be the same on all ranks, which run the module in the same mode: a rank that skipped the sums
    # would make the collectives of the others mismatch.
    if not is_batch or comm.world_size == 1:
        return type(self).forward(self, x)
    self._check_input_dim(x)
    out, mean, var, count = _SyncBatchNorm.apply(x, self.weight, self.bias, self.eps)
    if self.training and self.track_running_stats and self.running_mean is not None:
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
            n = float(count)
            self.running_mean.mul_(1 - factor).add_(mean.to(self.running_mean.dtype), alpha=factor)
            self.running_var.mul_(1 - factor).add_(var.to(self.running_var.dtype), alpha=factor * n / max(n - 1, 1))
    return out


def _summed(*values: torch.Tensor) -> list[torch.Tensor]:
    """Return the sums of tensors over all ranks. The tensors must have one dtype."""
    flat = torch.cat([value.reshape(-1) for value in values])
    flat = comm.all_reduce(flat, "sum", out=flat)
    parts = flat.split([value.numel() for value in values])
    return [part.view(value.shape) for part, value in zip(parts, values)]


class _SyncBatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any, bias: Any, eps: float) -> Any:
        dtype = torch.promote_types(x.dtype, torch.float32)
        wide = x.to(dtype)
        dims = [0, *range(2, x.ndim)]
        shape = [1, -1] + [1] * (x.ndim - 2)
        own = torch.tensor([x.numel() / x.shape[1]], dtype=dtype, device=x.device)
        total, count = _summed(wide.sum(dims), own)
        mean = total / count
        centred = wide - mean.view(shape)
        (squares,) = _summed((centred * centred).sum(dims))
        var = squares / count
        inverse = torch.rsqrt(var + eps)
        normal = centred * inverse.view(shape)
        out = normal
        if weight is not None:
            out = out * weight.to(dtype).view(shape)
        if bias is not None:
            out = out + bias.to(dtype).view(shape)
        ctx.save_for_backward(normal, inverse, weight, count)
        ctx.dims, ctx.shape, ctx.has_bias = dims, shape, bias is not None
        ctx.share = comm.rows / comm.total_rows
        ctx.mark_non_differentiable(mean, var, count)
        return out.to(x.dtype), mean, var, count

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        normal, inverse, weight, count = ctx.saved_tensors
        gradient = gradients[0].to(normal.dtype)
        over_rows, along_rows = gradient.sum(ctx.dims), (gradient * normal).sum(ctx.dims)
        # The statistics are shared, so every rank's loss depends on this rank's rows through them. Each rank's term is
        # weighted by its share here; the division by this rank's share below makes up for the weight that the reduction
        # of the gradients will add.
        first, second = _summed(ctx.share * over_rows, ctx.share * along_rows)
        scale = inverse if weight is None else inverse * weight.to(normal.dtype)
        correction = first.view(ctx.shape) + normal * second.view(ctx.shape)
        own = (gradient - correction / (count * ctx.share)) * scale.view(ctx.shape)
        return (
            own.to(gradients[0].dtype),
            None if weight is None else along_rows.to(weight.dtype),
            over_rows.to(gradients[0].dtype) if ctx.has_bias else None,
            None,
        )
