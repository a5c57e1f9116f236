"""A training step of ResNet-50 in torch: plain, and inside a synk function, with the same batches.

bfloat16 autocast, channels last, synthetic uint8 images. Plain torch copies each batch from page-locked memory without
waiting; synk brings it as the rows of a ``Data``, and in submitted calls while the step before it computes.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any

import numpy as np

import synk

HEADER = ("batch", "calls are", "plain torch, images/s", "synk, images/s", "synk / plain", "must reach")
NOTE = "ResNet-50, 224 x 224, SGD with momentum, bfloat16 autocast, channels last, uint8 images from the host."


def make_trainer(batch: int) -> Any:
    """Return ``step(images, labels) -> loss`` of a new model on the device; runs in the worker."""
    import torch
    from torch import nn

    def block(width_in: int, width: int, stride: int) -> nn.Module:
        class Bottleneck(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.body = nn.Sequential(
                    nn.Conv2d(width_in, width, 1, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(width, width, 3, stride, 1, bias=False),
                    nn.BatchNorm2d(width),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(width, 4 * width, 1, bias=False),
                    nn.BatchNorm2d(4 * width),
                )
                is_same = stride == 1 and width_in == 4 * width
                self.skip = (
                    nn.Identity()
                    if is_same
                    else nn.Sequential(nn.Conv2d(width_in, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width))
                )

            def forward(self, x: Any) -> Any:
                return torch.relu(self.body(x) + self.skip(x))

        return Bottleneck()

    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    width_in = 64
    for width, count, first_stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for position in range(count):
            layers.append(block(width_in, width, first_stride if position == 0 else 1))
            width_in = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000)]
    torch.manual_seed(0)
    model = nn.Sequential(*layers).cuda().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)

    def step(images: Any, labels: Any) -> Any:
        images = images.permute(0, 3, 1, 2).contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images.float().div(255)), labels)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.detach().float()

    return step


_trainers: dict[str, Any] = {}


def trainer(name: str, batch: int) -> Any:
    """Return the worker's own trainer of that name."""
    if name not in _trainers:
        _trainers[name] = make_trainer(batch)
    return _trainers[name]


def plain(size: int, num_steps: int) -> float:
    """Return images per second of a plain loop; runs in the worker."""
    import torch

    step = trainer("plain", size)
    images = torch.randint(0, 256, (4, size, 224, 224, 3), dtype=torch.uint8).pin_memory()
    labels = torch.randint(0, 1000, (4, size)).pin_memory()

    def run_steps(count: int) -> None:
        for k in range(count):
            loss = step(images[k % 4].cuda(non_blocking=True), labels[k % 4].cuda(non_blocking=True))
            loss.item()  # as a call of synk returns it
        torch.cuda.synchronize()

    run_steps(10)
    start = time.perf_counter()
    run_steps(num_steps)
    return size * num_steps / (time.perf_counter() - start)


def run(runtime: synk.Runtime, quick: bool) -> list[list[str]]:
    """Return the rows of the table."""
    from benchmarks.gpu import resnet  # by its own name, so that the worker imports it

    batch, num_steps = (32, 10) if quick else (256, 100)
    rng = np.random.default_rng(0)
    images = runtime.data(rng.integers(0, 256, (4 * batch, 224, 224, 3), np.uint8), name="images")
    labels = runtime.data(rng.integers(0, 1000, 4 * batch), name="labels")

    def train(images: Any, labels: Any, size: int) -> Any:
        return resnet.trainer("synk", size)(images, labels)

    f = runtime.function(train, bcast_inputs="size", framework="torch")
    baseline = runtime.function(resnet.plain, bcast_inputs=("size", "num_steps"), outputs="first")

    def rows_of(k: int) -> slice:
        start = k % 4 * batch
        return slice(start, start + batch)

    def wait(count: int) -> None:
        for k in range(count):
            f(images, labels, batch, batch=rows_of(k))

    def submit(count: int) -> None:
        held: deque[synk.PendingCall] = deque()
        for k in range(count):
            held.append(f.submit(images, labels, batch, batch=rows_of(k)))
            if len(held) == 3:
                held.popleft().result()
        for call in held:
            call.result()

    of_plain = float(baseline(batch, num_steps))
    rows = []
    for how, run_steps in (("waited for", wait), ("submitted", submit)):
        run_steps(10)
        start = time.perf_counter()
        run_steps(num_steps)
        of_synk = batch * num_steps / (time.perf_counter() - start)
        rows.append([str(batch), how, f"{of_plain:.0f}", f"{of_synk:.0f}", f"{of_synk / of_plain:.3f}", "0.970"])
    return rows
