"""Training over two nodes, one of which is killed on the way: with the weights of a run that was left alone.

The nodes are processes of this machine. On a Ray cluster the same program takes two of its machines:

Run: python demos/40_two_nodes.py
     python demos/40_two_nodes.py --cluster auto
"""

from __future__ import annotations

import argparse
import os
import signal
import warnings

os.environ.update(OMP_NUM_THREADS="1")

import torch
from sklearn.datasets import load_digits

import synk
from synk.errors import WorkerDied

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--cluster", default="here", help='"auto", or the address of a Ray cluster')
parser.add_argument("--size", choices=("small", "full"), default="full", help="small: a few steps, for tests")
options = parser.parse_args()
NUM_STEPS = {"small": 6, "full": 150}[options.size]

torch.set_num_threads(1)
F = torch.nn.functional
pixels, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(pixels) / 16, torch.tensor(labels)


def train(kill_at: int | None) -> tuple[list[torch.Tensor], float]:
    """Train, and return the weights and the accuracy. ``kill_at``: the step in which the second node is killed."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 10)
    )
    optimizer = torch.optim.AdamW(model.double().parameters(), lr=0.005)
    rep = synk.torch.replicate(model, optimizer)

    @rep.function(bcast_inputs="is_last")
    def step(
        model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, y: torch.Tensor, is_last: bool
    ) -> torch.Tensor:
        if is_last and synk.comm.rank == 1:
            os.kill(os.getppid(), signal.SIGKILL)  # the node's agent, with which its workers end
            signal.pause()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    while rep.num_steps < NUM_STEPS:
        number = rep.num_steps
        rows = torch.randint(len(images), (99,), generator=torch.Generator().manual_seed(number))
        try:
            step(images[rows], labels[rows], number == kill_at)
        except WorkerDied as error:
            counted = "counted" if error.step_counted else "not counted"
            print(f"step {number}: node {error.nodes[0]} was lost; the step was {counted}")
            kill_at = None
    rep.pull()
    model.eval()
    with torch.no_grad():
        accuracy = float((model(images).argmax(1) == labels).double().mean())
    return [parameter.detach().clone() for parameter in model.parameters()], accuracy


warnings.simplefilter("ignore", RuntimeWarning)  # that a node was started again
with synk.fork(1, cluster=options.cluster, nodes=2) as runtime:
    print(f"{runtime.world_size} workers: {', '.join(runtime.devices)}")
    expected, accuracy = train(kill_at=None)
    found, _ = train(kill_at=NUM_STEPS // 2)

print(f"accuracy {accuracy:.3f} after {NUM_STEPS} steps")
assert all(map(torch.equal, found, expected))
print("the same weights with and without the loss of a node, bit for bit")
assert accuracy > {"small": 0.2, "full": 0.97}[options.size]
