"""A program that computes with torch on CPU workers, beside GPUs that are not used, is told so once."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from support import fake_gpus

import synk
from synk.cuda import _placement
from synk.cuda._devices import Device, Gpus

torch = pytest.importorskip("torch")

MACHINES = {
    "no CuPy": (Gpus((Device(0, "0", "GPU-0", "A GPU", "0", 1),), (13, 0)), 'CuPy is not installed. pip install "synk'),
    "no answer": (Gpus(failure="cannot list the devices of CUDA"), "cannot list the devices of CUDA"),
    "hidden": (Gpus((), (13, 0)), ""),
    "no driver": (Gpus(), ""),
}


def framework(rt: synk.Runtime) -> None:
    rt.function(lambda x: x.sum(0), framework="torch", outputs="sum")(np.ones((4, 2)))


def tensors(rt: synk.Runtime) -> None:
    rt.function(lambda x: x.sum(0), outputs="sum").submit(torch.ones(4, 2)).result()


def training(rt: synk.Runtime) -> None:
    model = torch.nn.Linear(2, 1)
    rep = synk.torch.replicate(model, torch.optim.SGD(model.parameters(), 0.1), runtime=rt)
    rep.function(lambda model, optimizer, x: model(x).mean(), trains=False, outputs="avg")(torch.ones(4, 2))


CASES = [(machine, framework) for machine in MACHINES] + [("no CuPy", use) for use in (tensors, training)]


def test_who_computes_with_torch_is_told_why_on_the_cpu(
    subtests: pytest.Subtests, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_placement, "has_cupy", lambda: False)
    for machine, use in CASES:
        gpus, expected = MACHINES[machine]
        monkeypatch.setattr(_placement, "visible_gpus", lambda gpus=gpus: gpus)
        with (
            subtests.test(machine=machine, use=use.__name__),
            synk.Runtime(1) as rt,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            rt.function(lambda x: x.sum(), outputs="sum")(np.ones(3))  # nothing of torch
            assert not caught
            for _ in range(2):
                use(rt)
            assert len(caught) == bool(expected)
            for each in caught:
                assert "torch on CPU workers" in str(each.message) and expected in str(each.message)
                assert each.filename == __file__


def test_who_has_chosen_the_cpu_is_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_gpus.install_driver(monkeypatch, 2)
    with synk.Runtime(1, backend="numpy") as rt:
        framework(rt)
