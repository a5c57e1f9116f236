"""A training loop of PyTorch on 1 and 2 workers: a small convolutional network for handwritten digits.

The loop stays as it is. Its body gets a name, so that it can run on every worker, and one line says what belongs to the
training. The numbers are those of plain PyTorch for every number of workers, also with a batch that is not divisible
and with a worker that is killed on the way.

Run: python demos/20_torch_digits.py
"""

from __future__ import annotations

import argparse
import os
import signal
import time
import warnings
from collections.abc import Callable
from typing import Any

os.environ.update(OMP_NUM_THREADS="1")  # one thread for each process, so that a speed-up is one of processes

import torch
from sklearn.datasets import load_digits

import synk

torch.set_num_threads(1)
F = torch.nn.functional

parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("--size", choices=("small", "full"), default="full", help="small: one epoch, for tests")
SIZE = parser.parse_args().size
NUM_EPOCHS, MIN_ACCURACY, NUMS_WORKERS = {"small": (1, 0.5, (2,)), "full": (15, 0.97, (1, 2))}[SIZE]
NUM_TRAIN, BATCH_ROWS = 1437, 99

pixels, labels = load_digits(return_X_y=True)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
images = torch.tensor(pixels, dtype=torch.float64).reshape(-1, 1, 8, 8)[order] / 16
labels = torch.tensor(labels)[order]


def make() -> tuple[Any, Any, Any]:
    """Return a model, its optimizer and its scheduler, the same at every call."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(512, 10),
    ).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_EPOCHS * 15)


def step(model: Any, optimizer: Any, scheduler: Any, x: Any, y: Any) -> Any:
    """The body of the loop: nothing in it knows how many workers there are."""
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()  # on workers: the gradients of all rows when this returns
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    scheduler.step()
    return loss


def train(take_step: Callable[[Any, Any], Any]) -> list[float]:
    """The loop, as one would write it without workers."""
    losses = []
    for epoch in range(NUM_EPOCHS):
        shuffled = torch.randperm(NUM_TRAIN, generator=torch.Generator().manual_seed(epoch))
        for rows in shuffled.split(BATCH_ROWS):  # the last batch has 51 rows
            losses.append(float(take_step(images[rows], labels[rows]).detach()))
    return losses


def accuracy(model: Any) -> float:
    with torch.no_grad():
        return float((model(images[NUM_TRAIN:]).argmax(1) == labels[NUM_TRAIN:]).double().mean())


model, optimizer, scheduler = make()
start = time.perf_counter()
expected = train(lambda x, y: step(model, optimizer, scheduler, x, y))
reference = {name: tensor.clone() for name, tensor in model.state_dict().items()}
print(f"plain torch: {time.perf_counter() - start:6.2f} s, accuracy {accuracy(model):.3f}")
assert accuracy(model) >= MIN_ACCURACY


def train_with_a_kill(runtime: synk.Runtime) -> list[float]:
    """Train as before; one worker is killed on the way, and its replacement takes over the state of the others."""
    parallel_step = synk.torch.replicate(*make()).function(step)
    pid_of_rank = runtime.function(lambda rank: os.getpid(), outputs=None)
    count = 0

    def take_step(x: Any, y: Any) -> Any:
        nonlocal count
        count += 1
        if count == 10:
            os.kill(pid_of_rank(torch.arange(2).numpy())[1], signal.SIGKILL)
        try:
            return parallel_step(x, y)
        except synk.errors.WorkerDied as error:
            assert not error.step_counted  # it was idle: no rank has taken the step
            return parallel_step(x, y)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # that a worker was started again
        return train(take_step)


for num_workers in NUMS_WORKERS:
    with synk.fork(num_workers, backend="numpy") as runtime:
        model, optimizer, scheduler = make()
        rep = synk.torch.replicate(model, optimizer, scheduler)  # the new line
        parallel_step = rep.function(step)
        start = time.perf_counter()
        losses = train(parallel_step)
        seconds = time.perf_counter() - start
        rep.pull()  # the model here is like those of the workers again
        difference = max(float((tensor - reference[name]).abs().max()) for name, tensor in model.state_dict().items())
        survived = train_with_a_kill(runtime) if num_workers == 2 else None
    apart = max(abs(a - b) for a, b in zip(losses, expected))
    print(
        f"{num_workers} worker{'s' if num_workers > 1 else ' '}:   {seconds:6.2f} s, accuracy {accuracy(model):.3f}, "
        f"losses differ by {apart:.0e}, parameters by {difference:.0e}"
    )
    assert apart < 1e-6
    assert difference < 1e-6
    assert accuracy(model) >= MIN_ACCURACY

assert survived == losses
print("with a worker killed after 9 steps: the same losses, bit for bit")
