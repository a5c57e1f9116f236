"""A model that no worker holds whole: FSDP2 over the workers, without torchrun, equal to training in one process.

Every worker holds a part of each parameter and of the optimizer's state. The batch has an odd number of rows, so each
worker weights its loss by its rows. The parts are saved by three workers and loaded by two, which go on.

Run: python demos/22_fsdp.py
"""

from __future__ import annotations

import os
import tempfile
import types
from typing import Any

os.environ.update(OMP_NUM_THREADS="1")

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import synk

torch.set_num_threads(1)
F = torch.nn.functional
NUM_STEPS, NUM_ROWS = 6, 35
x = torch.randn(NUM_STEPS, NUM_ROWS, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def make() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
    ).double()


def model_and_optimizer() -> tuple[Any, Any]:
    """Return this worker's parts, made anew where the group is: at first, and after a worker has died."""
    group, own = synk.torch.process_group(), held.value
    if own.group is not group:
        mesh = torch.distributed.init_device_mesh("cpu", (group.size(),))
        own.group, own.model = group, make()
        for layer in own.model:
            fully_shard(layer, mesh=mesh)
        fully_shard(own.model, mesh=mesh)
        own.optimizer = torch.optim.AdamW(own.model.parameters(), lr=0.01)
    return own.model, own.optimizer


def step(x: torch.Tensor) -> torch.Tensor:
    model, optimizer = model_and_optimizer()
    loss = F.mse_loss(model(x), x.square().sum(1, keepdim=True))
    optimizer.zero_grad()
    weight = synk.comm.rows * synk.comm.world_size / synk.comm.total_rows  # FSDP averages over workers, not over rows
    (loss * weight).backward()
    optimizer.step()
    return loss.detach()


def parts() -> int:
    model, _ = model_and_optimizer()
    return sum(parameter.to_local().numel() for parameter in model.parameters())


def save(folder: str) -> None:
    state = get_state_dict(*model_and_optimizer())
    dcp.save({"model": state[0], "optimizer": state[1]}, checkpoint_id=folder)


def load(folder: str) -> None:
    model, optimizer = model_and_optimizer()
    state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


model = make()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
expected = []
for rows in x:
    loss = F.mse_loss(model(rows), rows.square().sum(1, keepdim=True))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    expected.append(float(loss.detach()))
num_parameters = sum(parameter.numel() for parameter in model.parameters())

losses = []
with tempfile.TemporaryDirectory() as folder:
    for num_workers, batches in ((3, x[:3]), (2, x[3:])):
        with synk.fork(num_workers, backend="numpy"):
            held = synk.resident(types.SimpleNamespace(group=None))  # what each worker keeps between calls
            take_step = synk.function(step, framework="torch", outputs="avg")
            if losses:
                synk.function(load, per_rank=True, outputs=None, bcast_inputs="folder")(folder)
            losses += [float(take_step(rows)) for rows in batches]
            sizes = synk.function(parts, per_rank=True, outputs=None)()
            if len(losses) < NUM_STEPS:
                synk.function(save, per_rank=True, outputs=None, bcast_inputs="folder")(folder)
        print(f"{num_workers} workers hold {' + '.join(map(str, sizes))} of {num_parameters} parameters")
        assert sum(sizes) == num_parameters
        assert max(sizes) < 0.7 * num_parameters

apart = max(abs(a - b) for a, b in zip(losses, expected))
print(f"{len(losses)} losses, the first 3 on 3 workers and the rest on 2: {apart:.0e} from one process")
assert len(losses) == NUM_STEPS
assert apart < 1e-12
