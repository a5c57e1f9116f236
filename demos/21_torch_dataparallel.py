"""A training loop of PyTorch on all CPU workers by one more line; loss, optimizer and checkpoint stay where they are.

Two cores do not promise speed: two threads of one process are as fast there. What is shown is that the loop is the same
and so are the numbers, for a loss over pairs of rows too, which no average over workers would give.

Run: python demos/21_torch_dataparallel.py
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits

import synk

pixels, labels = (torch.tensor(each) for each in load_digits(return_X_y=True))
pixels = pixels[:512] / 16.0
labels = labels[:512]


def train(*, is_parallel: bool) -> tuple[torch.nn.Module, float]:
    """Return the model after 60 steps, and its last loss: rows of one digit are to be more alike than others."""
    torch.manual_seed(0)
    model: torch.nn.Module = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 8))
    model = model.double()
    if is_parallel:
        model = synk.torch.DataParallel(model)  # the new line
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(60):
        rows = torch.arange(step % 4, 512, 4)
        optimizer.zero_grad()
        codes = torch.nn.functional.normalize(model(pixels[rows]), dim=1)
        is_same = (labels[rows][:, None] == labels[rows][None, :]).double()
        loss = torch.nn.functional.binary_cross_entropy_with_logits(5.0 * codes @ codes.T, is_same)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model, loss.item()


plain, expected = train(is_parallel=False)
synk.fork(2, backend="numpy")  # CPU workers, also on a machine with GPUs
parallel, loss = train(is_parallel=True)
difference = max(float((a - b).detach().abs().max()) for a, b in zip(plain.parameters(), parallel.parameters()))
assert list(parallel.state_dict()) == list(plain.state_dict())
assert abs(loss - expected) < 1e-10
assert difference < 1e-10
print(f"loss after 60 steps: {expected:.6f} in plain torch, {loss:.6f} on {synk.current().world_size} workers")
print(f"largest difference of the parameters: {difference:.1e}")
synk.close()
plain.load_state_dict(parallel.state_dict())  # a checkpoint without prefixes; the model works on without workers
assert torch.equal(plain(pixels), parallel(pixels))
