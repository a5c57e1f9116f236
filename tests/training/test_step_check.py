"""A loss that is no mean over rows is told of at the first step, and ``verify`` of a step says yes or NO.

The oracle is plain torch: the gradient of the loss of all rows, and the average of those of two parts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import synk
from synk.errors import OpMismatch

torch = pytest.importorskip("torch")
F, nn = torch.nn.functional, torch.nn

WEIGHTS = torch.tensor([1.0, 6.0, 0.1], dtype=torch.float64)
torch.manual_seed(3)
X = torch.randn(13, 5, dtype=torch.float64)
Y = torch.randn(13, 3, dtype=torch.float64)
LABELS = torch.tensor([0, 1, 2, 0, 1, 1, 2, 2, 0, 0, 1, 2, 1])
IGNORED = torch.where(torch.arange(13) % 5 < 2, -100, LABELS)

Loss = Callable[[Any, Any, Any], Any]

LOSSES: dict[str, tuple[Loss, Any]] = {
    "mean": (lambda m, x, y: F.mse_loss(m(x), y), Y),
    "sum": (lambda m, x, y: F.mse_loss(m(x), y, reduction="sum"), Y),
    "sum by rows": (lambda m, x, y: F.mse_loss(m(x), y, reduction="sum") / len(x), Y),
    "smooth": (lambda m, x, y: F.smooth_l1_loss(m(x), y), Y),
    "root": (lambda m, x, y: F.mse_loss(m(x), y).sqrt(), Y),
    "largest": (lambda m, x, y: (m(x) - y).abs().max(), Y),
    "with a penalty": (lambda m, x, y: F.mse_loss(m(x), y) + sum((p**2).sum() for p in m.parameters()), Y),
    "entropy": (lambda m, x, y: F.cross_entropy(m(x), y), LABELS),
    "entropy, sum": (lambda m, x, y: F.cross_entropy(m(x), y, reduction="sum"), LABELS),
    "class weights": (lambda m, x, y: F.cross_entropy(m(x), y, weight=WEIGHTS), LABELS),
    "labels of -100": (lambda m, x, y: F.cross_entropy(m(x), y), IGNORED),
}

CURED: dict[str, tuple[Loss, Any]] = {
    "sum": (lambda m, x, y: synk.torch.total(F.mse_loss(m(x), y, reduction="sum")), Y),
    "class weights": (
        lambda m, x, y: synk.torch.mean(F.cross_entropy(m(x), y, weight=WEIGHTS, reduction="sum"), WEIGHTS[y].sum()),
        LABELS,
    ),
    "labels of -100": (
        lambda m, x, y: synk.torch.mean(F.cross_entropy(m(x), y, reduction="sum"), (y != -100).sum()),
        IGNORED,
    ),
}


def model_of(*parts: Any) -> Any:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), *parts, nn.Tanh(), nn.Linear(8, 3)).double()


def gradient(model: Any, loss: Loss, x: Any, y: Any) -> Any:
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss(model, x, y), list(model.parameters()))])


def is_mean(loss: Loss, y: Any) -> bool:
    """Whether plain torch says that the gradient of all rows is the average of those of parts."""
    model = model_of()
    whole = gradient(model, loss, X, y)
    means = [
        (cut * gradient(model, loss, X[:cut], y[:cut]) + (13 - cut) * gradient(model, loss, X[cut:], y[cut:])) / 13
        for cut in (3, 7)
    ]
    return all(torch.allclose(mean, whole) for mean in means)


def new_step(rt: Any, model: Any, loss: Loss, **options: Any) -> Any:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        value = loss(model, x, y)
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of all rows on every rank
        optimizer.step()
        return value, norm

    return synk.torch.replicate(model, optimizer, runtime=rt).function(step, **options)


def told(call: Callable[[], Any]) -> list[str]:
    """Return what a call is refused with, if it is."""
    try:
        call()
    except OpMismatch as error:
        return [str(error)]
    return []


@pytest.mark.sampled(20)
@pytest.mark.parametrize("num_workers", [1, 2, 3])
@pytest.mark.parametrize("name", LOSSES)
def test_told_and_verified_as_plain_torch_demands(shared_runtimes: Any, name: str, num_workers: int) -> None:
    loss, y = LOSSES[name]
    step = new_step((shared_runtimes[num_workers]), model_of(), loss)
    texts = told(lambda: step(X, y))
    assert len(texts) == (num_workers > 1 and not is_mean(loss, y))
    for later in (lambda: step(X, y), lambda: step.submit(X, y).result()):
        assert told(later) == texts
    for text in texts:
        assert "cannot take the step 'step' on several workers: on 13 rows it differs from that on one worker" in text
        assert "synk.torch.total(loss)" in text
        assert "synk.torch.mean(sum, count)" in text
    if num_workers > 1:
        report = step.verify(X, y)
        assert bool(report) == is_mean(loss, y)
        assert {output.verdict for output in report.outputs} <= {"equal", "different"}


@pytest.mark.parametrize("name", CURED)
def test_what_the_text_names_cures_it(shared_runtimes: Any, name: str) -> None:
    loss, y = CURED[name]
    plain, (plain_loss, _) = model_of(), LOSSES[name]
    model = model_of()
    step = new_step((shared_runtimes[2]), model, loss)
    values: list[Any] = []
    assert told(lambda: values.append(step(X, y))) == []
    assert float(values[0][0]) == pytest.approx(float(plain_loss(plain, X, y).detach()))
    assert step.verify(X, y)
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    plain_loss(plain, X, y).backward()
    nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    optimizer.step()
    for one, other in zip(model.parameters(), plain.parameters()):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("part", [nn.Dropout(0.5), nn.BatchNorm1d(8)], ids=["dropout", "batch norm"])
@pytest.mark.parametrize("sync", [False, True])
def test_dropout_and_batch_norms_are_switched_off(shared_runtimes: Any, part: Any, sync: bool) -> None:
    rt = shared_runtimes[2]

    def new(loss: Loss) -> Any:
        model = model_of(part)
        rep = synk.torch.replicate(model, sync_batchnorm=sync, runtime=rt)

        @rep.function
        def step(model: Any, x: Any, y: Any) -> Any:
            value = loss(model, x, y)
            value.backward()
            return value

        return step

    mean, total = LOSSES["mean"][0], LOSSES["sum"][0]
    assert told(lambda: new(mean)(X, Y)) == []
    assert len(told(lambda: new(total)(X, Y))) == 1
    assert len(told(lambda: new(lambda m, x, y: total(m.train(), x, y))(X, Y))) == 1
    assert told(lambda: new(lambda m, x, y: mean(m.train(), x, y))(X, Y)) == []
    if isinstance(part, nn.Dropout):
        for loss in (mean, lambda m, x, y: mean(m.train(), x, y)):
            report = new(loss).verify(X, Y)
            assert report
            assert "with all modules but batch norms in eval()" in repr(report)
        assert new(total).verify(X, Y).outputs[0].verdict == "different"
    else:
        report = new(mean).verify(X, Y)
        assert report.outputs[0].verdict == ("equal" if sync else "different")  # each rank's own rows


def test_the_check_leaves_no_trace(shared_runtimes: Any) -> None:
    finals = []
    for options in ({}, {"outputs": "avg"}):  # of these one is checked
        model = model_of(nn.Dropout(0.5), nn.BatchNorm1d(8))
        step = new_step((shared_runtimes[2]), model, LOSSES["mean"][0], **options)
        losses = [float(step(X, Y)[0]) for _ in range(3)]
        finals.append([*losses, *(each.detach().numpy().copy() for each in (*model.parameters(), *model.buffers()))])
        assert step._replicated.num_steps == 3
    for one, other in zip(*finals):
        np.testing.assert_array_equal(one, other)


def test_a_body_that_returns_nothing_is_judged_by_its_gradients(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]

    def new(reduction: str) -> Any:
        def step(model: Any, x: Any, y: Any) -> None:
            F.mse_loss(model(x), y, reduction=reduction).backward()

        return synk.torch.replicate(model_of(), runtime=rt).function(step)

    assert told(lambda: new("mean")(X, Y)) == []
    (text,) = told(lambda: new("sum")(X, Y))
    assert "it differs from that on one worker, in its gradients" in text


def test_several_passes_and_closures_go_on_with_the_gradients_of_all_rows(shared_runtimes: Any) -> None:
    """A second loss is of what the first step has made of the parameters."""
    rt = shared_runtimes[2]

    def new(reduction: str) -> Any:
        def step(one: Any, other: Any, first: Any, second: Any, x: Any, y: Any) -> Any:
            first.zero_grad()
            loss = F.mse_loss(one(x), y)
            loss.backward()
            first.step()

            def closure() -> Any:
                second.zero_grad()
                loss = F.mse_loss(other(x), one(x).detach(), reduction=reduction)
                loss.backward()
                return loss

            return loss, second.step(closure)

        one, other = model_of(), model_of()
        first = torch.optim.SGD(one.parameters(), lr=0.5)
        second = torch.optim.LBFGS(other.parameters(), max_iter=3)
        return synk.torch.replicate(one, other, first, second, runtime=rt).function(step)

    assert told(lambda: new("mean")(X, Y)) == []
    assert len(told(lambda: new("sum")(X, Y))) == 1
    assert new("mean").verify(X, Y)


def test_evaluation_a_named_op_and_a_body_that_talks(shared_runtimes: Any) -> None:
    rt = shared_runtimes[2]
    rep = synk.torch.replicate(model_of(), runtime=rt)
    total = LOSSES["sum"][0]
    (text,) = told(lambda: rep.function(total, trains=False, name="total")(X, Y))
    assert 'Use outputs="sum".' in text
    assert told(lambda: rep.function(LOSSES["mean"][0], trains=False, name="mean")(X, Y)) == []
    assert told(lambda: new_step(rt, model_of(), total, outputs="avg")(X, Y)) == []

    def talking(model: Any, x: Any, y: Any) -> Any:
        return synk.comm.all_reduce(total(model, x, y).detach(), "sum")

    assert told(lambda: rep.function(talking, trains=False)(X, Y)) == []
