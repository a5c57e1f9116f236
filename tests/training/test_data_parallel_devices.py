"""``DataParallel`` with workers on devices: the tests of CPU workers, on stand-ins for GPUs and on a GPU where it is.

The stand-in's arrays lie in the worker's own memory, so whatever is not sent does not arrive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from support import fake_gpus
from test_data_parallel import (  # noqa: F401
    test_nested_inputs_and_outputs_with_gradients_for_all_that_want_them,
    test_training_is_that_of_plain_torch,
    test_workers_killed_between_forward_and_backward_are_not_missed,
)
from trainings import batches, mlp

import synk

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.filterwarnings(
    "ignore:rank . .pid:RuntimeWarning",
    # torch, in the first backward() of any program whose context another library has made
    "ignore:Attempting to run cuBLAS, but there was no current CUDA context",
)


class Devices:
    """Runtimes on devices, kept by ``reuse``: stand-ins, or the first GPU, which all ranks share."""

    def __init__(self, kind: str, reuse: Callable[..., synk.Runtime]) -> None:
        self._kind, self._reuse = kind, reuse
        self._taken: dict[int, synk.Runtime] = {}

    def __getitem__(self, num_workers: int) -> synk.Runtime:
        if num_workers not in self._taken:
            options: dict[str, Any] = {"max_restarts": 10**9, "backend": "cupy"}
            if self._kind == "gpu":
                make = lambda: synk.Runtime(devices=[0] * num_workers, **options)  # noqa: E731
            else:
                make = lambda: synk.Runtime(num_workers, **options)  # noqa: E731
            self._taken[num_workers] = self._reuse((self._kind, "torch", num_workers), make)
        return self._taken[num_workers]

    def __call__(self, num_workers: int = 2) -> synk.Runtime:
        return self[num_workers]


@pytest.fixture(scope="module", params=["nccl", pytest.param("gpu", marks=pytest.mark.gpu)])
def kind(request: pytest.FixtureRequest) -> str:
    """Of the module, so that the tests of one kind come one after the other and share its runtimes."""
    return request.param


@pytest.fixture
def shared_runtimes(kind: str, monkeypatch: pytest.MonkeyPatch, reuse: Any) -> Iterator[Devices]:
    """Take the place of the fixture of CPU workers; reductions go by a stand-in for NCCL."""
    if kind != "gpu":
        fake_gpus.install(monkeypatch, 3, has_nccl=True)
    yield Devices(kind, reuse)


@pytest.fixture
def reused(shared_runtimes: Devices) -> Devices:
    return shared_runtimes


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
