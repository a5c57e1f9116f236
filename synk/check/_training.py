"""The line about training: a step of ``replicate`` against DDP, on the same workers, with gloo or with NCCL."""

from __future__ import annotations

import time
from typing import Any

import numpy as np

import synk
from synk.check._found import Broken, Figure, Found
from synk.cuda._placement import is_usable

# So much that a step takes some ten milliseconds on a core, beside which the cost of a call is small.
_ROWS, _WIDTH, _DEPTH = 1024, 256, 4
_NUM_STEPS = 30
"""The quickest counts: other work on the machine then does not."""


def _made(device: str) -> tuple[Any, Any, Any]:
    """Return a model, an optimizer and a batch that are alike everywhere."""
    import torch

    torch.manual_seed(0)
    layers = [each for _ in range(_DEPTH) for each in (torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.Tanh())]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(_WIDTH, 1)).to(device)
    return model, torch.optim.SGD(model.parameters(), 0.1), torch.randn(_ROWS, _WIDTH)


def _flat(model: Any) -> Any:
    import torch

    return torch.cat([each.detach().reshape(-1) for each in model.parameters()]).cpu()


def _by_ddp(rows: Any) -> Any:
    """Take steps by DDP on this rank's rows. Return the seconds of the quickest and the parameters, in one array."""
    import torch
    from torch.nn.parallel import DistributedDataParallel

    group = synk.torch.process_group()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, optimizer, x = _made(device)
    wrapped = DistributedDataParallel(model, process_group=group)
    x = x.chunk(group.size())[group.rank()].to(device)
    times = []
    for _ in range(_NUM_STEPS):
        began = time.perf_counter()
        optimizer.zero_grad()
        wrapped(x).mean().backward()
        optimizer.step()
        parameters = _flat(model)  # waits for the device
        times.append(time.perf_counter() - began)
    return np.concatenate([[min(times)], parameters.numpy()])


def _step(model: Any, optimizer: Any, x: Any) -> Any:
    optimizer.zero_grad()
    loss = model(x).mean()
    loss.backward()
    optimizer.step()
    return loss.detach(), _flat(model)


def step_against_ddp() -> Found:
    num_workers = None if is_usable() else 2
    with synk.Runtime(num_workers) as rt:
        if rt.world_size == 1:
            return Found("one GPU needs no DDP")
        ddp = rt.function(_by_ddp, outputs=None, framework="torch")(np.zeros(rt.world_size))
        model, optimizer, x = _made("cpu")
        rep = synk.torch.replicate(model, optimizer, runtime=rt)
        step = rep.function(_step, outputs=("avg", "first"))
        times = []
        for _ in range(_NUM_STEPS):
            began = time.perf_counter()
            _, parameters = step(x)
            times.append(time.perf_counter() - began)
    error = float(np.abs(np.asarray(parameters) - ddp[0][1:]).max())
    if not error < 1e-4:
        raise Broken(f"after {_NUM_STEPS} steps the parameters of replicate and DDP differ by {error:.2g}")
    figure = Figure(
        "a step of replicate takes as long as", min(times) / max(float(found[0]) for found in ddp), "of DDP", 3.0
    )
    return Found(f"replicate and DDP train alike on {rt.world_size} workers", (figure,))
