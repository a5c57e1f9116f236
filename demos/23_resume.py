"""A training that is killed while it writes its checkpoint, and goes on: with the losses of one that was left alone.

The program starts itself as a child, kills it at a random moment, and starts it again, until the training has come to
its end. Each child begins with the checkpoint that the one before has left.

Run: python demos/23_resume.py
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile

os.environ.update(OMP_NUM_THREADS="1")

import torch

import synk

parser = argparse.ArgumentParser()
parser.add_argument("--size", choices=("small", "full"), default="full", help="small: one kill, for tests")
parser.add_argument("path", nargs="?", help="the checkpoint of a child")
options = parser.parse_args()
NUM_STEPS, NUM_KILLS = 60, {"small": 1, "full": 2}[options.size]

torch.set_num_threads(1)
F = torch.nn.functional


def train(path: str) -> None:
    """Train to the end from what is in the file, and print the loss of each step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Dropout(0.5), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with synk.fork(2, backend="numpy"):
        rep = synk.torch.replicate(model, optimizer)

        @rep.function
        def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x.square().sum(1, keepdim=True))
            loss.backward()
            optimizer.step()
            return loss

        if os.path.exists(path):
            rep.load(path)
        while rep.num_steps < NUM_STEPS:
            number = rep.num_steps
            x = torch.randn(33, 8, generator=torch.Generator().manual_seed(number))  # a number that is odd
            print(number, float(step(x)).hex(), flush=True)
            rep.save(path, wait=False)  # written while the next step runs


def child(path: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, __file__, path], stdout=subprocess.PIPE, text=True)


def losses_of(text: str) -> dict[str, str]:
    """Return the losses by step; the line that a killed program was writing is left out."""
    return dict(line.split() for line in text.splitlines(keepends=True) if line.endswith("\n"))


if options.path:
    train(options.path)
    sys.exit()

with tempfile.TemporaryDirectory() as folder:
    expected = losses_of(child(os.path.join(folder, "alone.pt")).communicate()[0])
    losses: dict[str, str] = {}
    for kill in range(NUM_KILLS + 1):
        program = child(os.path.join(folder, "killed.pt"))
        assert program.stdout is not None
        first = program.stdout.readline()
        print(f"started at step {first.split()[0]}")
        if kill < NUM_KILLS:
            try:
                program.wait(random.random() * 0.2)
            except subprocess.TimeoutExpired:
                program.send_signal(signal.SIGKILL)
        losses |= losses_of(first + program.communicate()[0])
    left = sorted(os.listdir(folder))

assert len(expected) == NUM_STEPS
assert losses == expected
assert left == ["alone.pt", "killed.pt"]
print(f"kills: {NUM_KILLS}; the same {NUM_STEPS} losses, bit for bit")
