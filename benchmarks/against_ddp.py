"""``python -m benchmarks.against_ddp``: how far from serial training DistributedDataParallel and synk end.

The same steps by plain torch in one process, by DDP with gloo (a process for each rank), and by `synk.torch.replicate`.
On even batches the two must agree, on uneven ones synk must agree with serial training; else it exits with 1. Here and
not among the tests, because gloo listens on ports of the loopback interface.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import synk
from benchmarks._harness import ROOT
from benchmarks._report import table

WORLD_SIZE = 2
CASES = {
    "even": (torch.float32, (64, 32, 64, 16), 1e-6),
    "uneven": (torch.float64, (64, 33, 5, 64, 7), 1e-12),
}
"""Name to the dtype, the rows of the batches, and how far synk may end from DDP (even) or serial training (uneven)."""
NUM_ROUNDS = 4


def make(case: str) -> tuple[Any, Any, list[tuple[Any, Any]]]:
    """Return a model, its optimizer and the batches of a case, the same in every process."""
    dtype, sizes, _ = CASES[case]
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).to(dtype)
    batches = []
    for rows in sizes * NUM_ROUNDS:
        x = torch.randn(rows, 8, generator=generator, dtype=torch.float64)
        batches.append((x.to(dtype), torch.sin(x).sum(1, keepdim=True).to(dtype)))
    return model, torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), batches


def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss


def trained(case: str, run: Callable[..., Any] | None = None) -> list[Any]:
    """Return the parameters after a case, in plain torch or with ``run(model, optimizer, batches)``."""
    model, optimizer, batches = make(case)
    if run is not None:
        run(model, optimizer, batches)
    else:
        for x, y in batches:
            step(model, optimizer, x, y)
    return [parameter.detach().clone() for parameter in model.parameters()]


def by_synk(model: Any, optimizer: Any, batches: Any) -> None:
    rep = synk.torch.replicate(model, optimizer)
    take = rep.function(step)
    for x, y in batches:
        take(x, y)
    rep.pull()


def by_ddp(model: Any, optimizer: Any, batches: Any) -> None:
    """Train on the rows of this rank, as they are divided in synk; runs in a rank of DDP."""
    import torch.distributed as dist

    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    for x, y in batches:
        own = slice(rank * len(x) // world_size, (rank + 1) * len(x) // world_size)
        step(wrapped, optimizer, x[own], y[own])


def run_rank(rank: int, folder: Path) -> None:
    """Be one rank of DDP."""
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD_SIZE)
    ends = {case: trained(case, by_ddp) for case in CASES}
    if rank == 0:
        torch.save(ends, folder / "ends.pt")
    dist.destroy_process_group()


def ends_of_ddp() -> dict[str, list[Any]]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.against_ddp"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
        ranks = [
            subprocess.Popen([*command, str(rank), folder], cwd=ROOT, env=environment) for rank in range(WORLD_SIZE)
        ]
        codes = [each.wait(120) for each in ranks]
        if any(codes):
            raise RuntimeError("a rank of DDP has failed: see above")
        ends: dict[str, list[Any]] = torch.load(Path(folder) / "ends.pt")
        return ends


def distance(one: list[Any], other: list[Any]) -> float:
    return max(float((a.double() - b.double()).abs().max()) for a, b in zip(one, other, strict=True))


def main() -> int:
    """Print the table; return 1 if synk is too far from serial training."""
    torch.set_num_threads(1)
    if len(sys.argv) > 1:
        run_rank(int(sys.argv[1]), Path(sys.argv[2]))
        return 0
    of_ddp = ends_of_ddp()
    rows, is_exact = [], True
    with synk.fork(WORLD_SIZE, backend="numpy"):
        for case, (dtype, sizes, bound) in CASES.items():
            serial, of_synk = trained(case), trained(case, by_synk)
            apart = [distance(of_ddp[case], serial), distance(of_synk, serial), distance(of_synk, of_ddp[case])]
            is_exact = is_exact and apart[2 if case == "even" else 1] <= bound
            name = str(dtype).removeprefix("torch.")
            rows.append([", ".join(map(str, sizes)), name, *(f"{each:.1e}" for each in apart), f"{bound:.0e}"])
    header = ("rows of the batches", "dtype", "DDP from serial", "synk from serial", "synk from DDP", "allowed")
    print(table(header, rows))
    return 0 if is_exact else 1


if __name__ == "__main__":
    sys.exit(main())
