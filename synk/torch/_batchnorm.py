"""Batch norm over the rows of all ranks: its sums are collectives that torch differentiates through."""

from __future__ import annotations

import types
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from synk.communicators._comm import comm
from synk.torch._collectives import all_reduce


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
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    dims, shape = [0, *range(2, x.ndim)], [1, -1] + [1] * (x.ndim - 2)
    own = wide.new_tensor([x.numel() / x.shape[1]])
    total, count = all_reduce(torch.cat([wide.sum(dims), own]), "sum").split([x.shape[1], 1])
    mean = total / count.detach()
    centred = wide - mean.view(shape)
    var = all_reduce(centred.square().sum(dims), "sum") / count.detach()
    out = centred * torch.rsqrt(var + self.eps).view(shape)
    if self.weight is not None:
        out = out * self.weight.to(wide.dtype).view(shape)
    if self.bias is not None:
        out = out + self.bias.to(wide.dtype).view(shape)
    if self.training and self.track_running_stats and self.running_mean is not None:
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
            n = float(count)
            self.running_mean.mul_(1 - factor).add_(mean.to(self.running_mean.dtype), alpha=factor)
            self.running_var.mul_(1 - factor).add_(var.to(self.running_var.dtype), alpha=factor * n / max(n - 1, 1))
    return out.to(x.dtype)
