"""ResNet-50 on 1, 2, ... GPUs: images per second of a training loop with synthetic uint8 images.

The loop is that of one GPU; `synk.torch.replicate` has it run on all of them, with whole batches given by the master.
bfloat16 autocast, channels last, SGD with momentum. Each batch travels from the host at every step, while the step
before it computes. Needs at least one NVIDIA GPU, CuPy and torch with CUDA.

Run: python demos/gpu/resnet50.py [--gpus 8] [--batch 256] [--steps 100]
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import nn

import synk

NUM_BATCHES = 2  # that the loop goes through again and again: synthetic images need not be many


class Bottleneck(nn.Module):
    """1 x 1 down, 3 x 3, 1 x 1 up, and the sum with what came in."""

    def __init__(self, num_in: int, width: int, stride: int) -> None:
        super().__init__()
        num_out = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(num_in, width, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride, 1, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.Conv2d(width, num_out, 1, bias=False),
            nn.BatchNorm2d(num_out),
        )
        self.skip: nn.Module = nn.Identity()
        if stride > 1 or num_in != num_out:
            self.skip = nn.Sequential(nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(x) + self.skip(x))


def resnet50(num_classes: int = 1000) -> nn.Sequential:
    """Return ResNet-50 (He et al., CVPR 2016), with the stride in the 3 x 3 convolution as torchvision has it."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    num_in = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for position in range(count):
            layers.append(Bottleneck(num_in, width, 1 if position else stride))
            num_in = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(num_in, num_classes))


def step(model: Any, optimizer: Any, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The body of the loop; images are (rows, height, width, 3), which as NCHW is channels last."""
    optimizer.zero_grad()
    with torch.autocast(images.device.type, torch.bfloat16):
        loss = nn.functional.cross_entropy(model(images.permute(0, 3, 1, 2) / 255), labels)
    loss.backward()
    optimizer.step()
    return loss


def train(num_gpus: int, batch: int, num_steps: int) -> float:
    """Return images per second over all GPUs."""
    torch.manual_seed(0)
    model = resnet50().to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    rng = np.random.default_rng(0)
    num_rows = num_gpus * batch
    with synk.fork(num_gpus, backend="cupy"):
        images = synk.data(rng.integers(0, 256, (NUM_BATCHES * num_rows, 224, 224, 3), np.uint8), name="images")
        labels = synk.data(rng.integers(0, 1000, NUM_BATCHES * num_rows), name="labels")
        rep = synk.torch.replicate(model, optimizer)
        run = rep.function(step)

        def run_steps(count: int) -> list[float]:
            in_flight: deque[synk.PendingCall] = deque()
            losses = []
            for number in range(count):
                first = number % NUM_BATCHES * num_rows
                in_flight.append(run.submit(images, labels, batch=slice(first, first + num_rows)))
                if len(in_flight) == 3:
                    losses.append(float(in_flight.popleft().result()))
            return [*losses, *(float(call.result()) for call in in_flight)]

        first_losses = run_steps(10)  # cuDNN chooses its kernels, and buffers are made
        start = time.perf_counter()
        losses = run_steps(num_steps)
        seconds = time.perf_counter() - start
        assert rep.num_steps == 10 + num_steps
    assert all(map(math.isfinite, losses))
    assert min(losses) < max(first_losses)  # it learns the few images by heart
    return num_rows * num_steps / seconds


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpus", type=int, help="measure 1, 2, 4, ... up to this many; all where not given")
    parser.add_argument("--batch", type=int, default=256, help="images on each GPU")
    parser.add_argument("--steps", type=int, default=100)
    options = parser.parse_args()
    try:
        with synk.fork(backend="cupy") as runtime:
            num_gpus = runtime.world_size
    except (synk.errors.UnsupportedError, synk.errors.StartupError) as error:
        print(f"resnet50: this demo needs an NVIDIA GPU. {error}", file=sys.stderr)
        return 2
    most = min(options.gpus or num_gpus, num_gpus)
    alone = 0.0
    for count in sorted({*(2**k for k in range(most.bit_length())), most}):
        speed = train(count, options.batch, options.steps)
        alone = alone or speed
        print(f"{count} GPU{'s' if count > 1 else ' '}: {speed:8.0f} images/s, {speed / alone:.2f} times one GPU")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
