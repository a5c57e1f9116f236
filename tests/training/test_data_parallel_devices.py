"""``DataParallel`` with workers on devices: the tests of CPU workers, on stand-ins for GPUs and on a GPU where it is.

The stand-in's arrays lie in the worker's own memory, so whatever is not sent does not arrive.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from support import fake_gpus
from support.harness import kill_and_wait, pids
from support.models import batches, mlp
from test_data_parallel import (  # noqa: F401
    F,
    descend,
    distance,
    test_a_generator_and_a_discriminator,
    test_a_worker_killed_between_forward_and_backward,
    test_an_exception_in_a_forward_pass_is_the_users_and_leaves_nothing,
    test_buffers_that_a_forward_pass_changes_come_back,
    test_checkpoints_go_both_ways_and_are_no_larger_than_plain_ones,
    test_clipping_a_scheduler_and_accumulation,
    test_lbfgs_with_its_closure,
    test_modes_and_flags_hold_from_the_next_call_on,
    test_nested_inputs_and_outputs_with_gradients_for_all_that_want_them,
    test_new_dtypes_parameters_attributes_and_hooks_are_seen,
    test_outputs_without_rows_and_unequal_inputs,
    test_several_forward_passes_a_kept_graph_and_a_loss_over_pairs_of_rows,
    test_shared_frozen_unused_and_rarely_used_parameters,
    test_torchs_own_errors_about_graphs_are_raised,
    test_what_is_dropped_is_freed,
    test_workers_keep_only_graphs_that_can_be_asked_for,
)

import synk

torch = pytest.importorskip("torch")


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


pytestmark = pytest.mark.sampled(12, in_order=True)  # all numbers of workers are those of CPU workers
KINDS = ["nccl", "host", pytest.param("gpu", marks=pytest.mark.gpu)]


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    """Of the module, so that the tests of one kind come one after the other and share its runtimes."""
    return request.param


@pytest.fixture
def shared_runtimes(kind: str, monkeypatch: pytest.MonkeyPatch, reuse: Any) -> Iterator[Devices]:
    """Take the place of the fixture of CPU workers; reductions go by a stand-in for NCCL, or through the host."""
    if kind != "gpu":
        fake_gpus.install(monkeypatch, 3, has_nccl=kind == "nccl")
        if kind == "host":
            monkeypatch.setenv("SYNK_FAKE_NCCL", "refuse")
    yield Devices(kind, reuse)


@pytest.fixture
def reused(shared_runtimes: Devices) -> Devices:
    return shared_runtimes


def passes(model: Any) -> Any:
    return model._synk_passes._placed


def test_parameters_are_sent_once_for_each_change(shared_runtimes: Any) -> None:
    plain = mlp()
    model = synk.torch.DataParallel(copy.deepcopy(plain), runtime=shared_runtimes[2])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    of_plain = torch.optim.SGD(plain.parameters(), lr=0.1)
    x, y = batches(1)[0]

    def sent(change: Callable[[Any, Any], None]) -> int:
        before = passes(model)._num_sent
        change(model, optimizer)
        change(plain, of_plain)
        for _ in range(2):
            with torch.no_grad():
                assert torch.allclose(model(x), plain(x), rtol=0, atol=1e-12)
        return int(passes(model)._num_sent - before)

    def by_data(model: Any, optimizer: Any) -> None:
        for parameter in model.parameters():
            parameter.data -= 0.1  # leaves no trace but the values

    assert sent(lambda model, optimizer: None) == 1
    assert sent(lambda model, optimizer: None) == 0
    assert sent(by_data) == 1
    assert sent(lambda model, optimizer: descend(model, optimizer, x, y)) == 1
    assert sent(lambda model, optimizer: model.load_state_dict(mlp(7).state_dict())) == 1


def test_a_worker_that_had_no_rows_when_they_came_gets_them_later(shared_runtimes: Any) -> None:
    plain = mlp()
    model = synk.torch.DataParallel(copy.deepcopy(plain), runtime=shared_runtimes[3])
    x = batches(1)[0][0]
    for number in range(3):
        with torch.no_grad():
            for each in (model, plain):
                each[0].weight.add_(0.5)
        for rows in (x[:1], x[:2], x):  # of 1, 2 and 3 workers
            assert torch.allclose(model(rows), plain(rows), rtol=0, atol=1e-12), number


@pytest.mark.parametrize("kind", [KINDS[0], pytest.param("host", marks=pytest.mark.storm), KINDS[2]], indirect=True)
@pytest.mark.filterwarnings("ignore:rank . .pid:RuntimeWarning")
def test_a_worker_that_was_started_anew_gets_them_again(shared_runtimes: Any) -> None:
    plain = mlp()
    rt = shared_runtimes[2]
    model = synk.torch.DataParallel(copy.deepcopy(plain), runtime=rt)
    x = batches(1)[0][0]
    for rank in (0, 1):
        assert torch.allclose(model(x), plain(x), rtol=0, atol=1e-12)
        kill_and_wait(pids(rt)[rank])
    assert torch.allclose(model(x), plain(x), rtol=0, atol=1e-12)


def test_gradients_come_back_once_and_the_workers_tensors_are_on_their_device(shared_runtimes: Any) -> None:
    """The sum over the ranks is the only thing that crosses of them: one array for each dtype."""
    rt = shared_runtimes[2]
    model = synk.torch.DataParallel(mlp(), runtime=rt)
    model(batches(1)[0][0]).sum().backward()
    resident = passes(model)._resident
    look = rt.function(
        lambda: (resident.value._memory.device.type, resident.value._flat[torch.float64].flat.numel()),
        per_rank=True, outputs=None,
    )  # fmt: skip
    kind = "cuda" if torch.cuda.is_available() else "cpu"  # the stand-in's tensors are torch's on the host
    assert look() == [(kind, sum(parameter.numel() for parameter in model.parameters()))] * 2


def test_modules_on_a_device_are_refused(shared_runtimes: Any) -> None:
    with pytest.raises(synk.errors.UnsupportedError, match="got tensors on meta, expected a module on the CPU"):
        synk.torch.DataParallel(mlp().to("meta"), runtime=shared_runtimes[2])


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


def test_training_of_an_average_over_rows(shared_runtimes: Any) -> None:
    plain = mlp()
    model = synk.torch.DataParallel(copy.deepcopy(plain), runtime=shared_runtimes[3])
    losses = []
    for each in (plain, model):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.01)
        losses.append([descend(each, optimizer, *rows) for rows in batches(20)])
    assert np.allclose(*losses, rtol=0, atol=1e-12)
    assert distance(plain, model) <= 1e-12
