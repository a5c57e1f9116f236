"""``DataParallel`` with workers on devices: the tests of CPU workers, on stand-ins for GPUs and on a GPU where it is.

The stand-in's arrays lie in the worker's own memory, so whatever is not sent does not arrive.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
from support import fake_gpus
from test_data_parallel import (  # noqa: F401
    test_nested_inputs_and_outputs_with_gradients_for_all_that_want_them,
    test_training_is_that_of_plain_torch,
    test_workers_killed_between_forward_and_backward_are_not_missed,
)
from trainings import Kept, batches, mlp

import synk

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings(
    "ignore:rank . .pid:RuntimeWarning",
    # torch, in the first backward() of any program whose context another library has made
    "ignore:Attempting to run cuBLAS, but there was no current CUDA context",
)


@pytest.fixture(scope="module", params=["nccl", pytest.param("gpu", marks=pytest.mark.gpu)])
def kind(request: pytest.FixtureRequest) -> str:
    """Of the module, so that the tests of one kind come one after the other and share its runtimes."""
    return request.param


@pytest.fixture
def shared_runtimes(kind: str, monkeypatch: pytest.MonkeyPatch, reuse: Any) -> Kept:
    """Take the place of the fixture of CPU workers; reductions go by a stand-in for NCCL, or share the first GPU."""
    if kind == "gpu":
        return Kept(reuse, "gpu", lambda count, **options: synk.Runtime(devices=[0] * count, backend="cupy", **options))
    fake_gpus.install(monkeypatch, 3, has_nccl=True)
    return Kept(reuse, "nccl", functools.partial(synk.Runtime, backend="cupy"))


@pytest.fixture
def reused(shared_runtimes: Kept) -> Callable[[int], synk.Runtime]:
    return shared_runtimes.__getitem__


def test_autocast_is_that_of_the_devices(shared_runtimes: Any) -> None:
    model = synk.torch.DataParallel(mlp().float(), runtime=shared_runtimes[2])
    x = batches(1)[0][0].float()
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype == torch.float32
    torch.set_autocast_enabled("cuda", True)
    torch.set_autocast_dtype("cuda", torch.bfloat16)
    try:
        assert model(x).dtype == torch.bfloat16
    finally:
        torch.set_autocast_enabled("cuda", False)
        torch.set_autocast_dtype("cuda", torch.float16)
