"""A loss that is no mean over rows is told of at the first step, and ``verify`` of a step says yes or NO.

The oracle is plain torch: the gradient of the loss of all rows, and the average of those of two parts.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
from support.tables import named
from trainings import differences, rank_states

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
    "root": (lambda m, x, y: F.mse_loss(m(x), y).sqrt(), Y),
    "with a penalty": (lambda m, x, y: F.mse_loss(m(x), y) + sum((p**2).sum() for p in m.parameters()), Y),
    "entropy": (lambda m, x, y: F.cross_entropy(m(x), y), LABELS),
    "class weights": (lambda m, x, y: F.cross_entropy(m(x), y, weight=WEIGHTS), LABELS),
    "labels of -100": (lambda m, x, y: F.cross_entropy(m(x), y), IGNORED),
}
MEAN, SUM = LOSSES["mean"][0], LOSSES["sum"][0]


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


def clipped_step(loss: Loss) -> Callable[..., Any]:
    def step(model: Any, optimizer: Any, x: Any, y: Any) -> Any:
        optimizer.zero_grad()
        value = loss(model, x, y)
        value.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # of all rows on every rank
        optimizer.step()
        return value, norm

    return step


def replicated(rt: Any, model: Any) -> Any:
    return synk.torch.replicate(model, torch.optim.Adam(model.parameters(), lr=0.01), runtime=rt)


def told(call: Callable[[], Any]) -> list[str]:
    """Return what a call is refused with, if it is."""
    try:
        call()
    except OpMismatch as error:
        return [str(error)]
    return []


def test_told_and_verified_as_plain_torch_demands(subtests: Any, shared_runtimes: Any) -> None:
    for (name, (loss, y)), workers in product(LOSSES.items(), (1, 2, 3)):
        if workers == 2 or name in ("mean", "labels of -100"):
            with subtests.test(loss=name, workers=workers):
                step = replicated(shared_runtimes[workers], model_of()).function(clipped_step(loss))
                texts = told(lambda step=step, y=y: step(X, y))  # type: ignore[misc]
                assert len(texts) == (workers > 1 and not is_mean(loss, y))
                assert told(lambda step=step, y=y: step.submit(X, y).result()) == texts  # type: ignore[misc]
                for text in texts:
                    assert "cannot take the step 'step' on several workers: on 13 rows it differs from that on" in text
                    assert "synk.torch.total(loss)" in text and "synk.torch.mean(sum, count)" in text
                if workers > 1:
                    report = step.verify(X, y)
                    assert bool(report) == is_mean(loss, y)
                    assert {output.verdict for output in report.outputs} <= {"equal", "different"}


def test_dropout_and_batch_norms_are_switched_off(subtests: Any, shared_runtimes: Any) -> None:
    """Also where the body calls ``train()`` itself."""
    for make, sync in (
        (lambda: nn.Dropout(0.5), False),
        *((lambda: nn.BatchNorm1d(8), sync) for sync in (False, True)),
    ):

        def new(loss: Loss, make: Any = make, sync: bool = sync) -> Any:
            def step(model: Any, x: Any, y: Any) -> Any:
                value = loss(model, x, y)
                value.backward()
                return value

            return synk.torch.replicate(model_of(make()), sync_batchnorm=sync, runtime=shared_runtimes[2]).function(
                step
            )

        part = make()
        with subtests.test(part=str(part), sync=sync):
            in_training: list[Loss] = [lambda m, x, y: MEAN(m.train(), x, y), lambda m, x, y: SUM(m.train(), x, y)]
            for loss, count in ((MEAN, 0), (SUM, 1), (in_training[0], 0), (in_training[1], 1)):
                assert len(told(lambda loss=loss: new(loss)(X, Y))) == count  # type: ignore[misc]
            report = new(MEAN).verify(X, Y)
            if isinstance(part, nn.Dropout):
                assert report.outputs[0].verdict == "random"
            else:
                assert report.outputs[0].verdict == ("equal" if sync else "different")  # each rank's own rows


def test_the_check_leaves_no_trace(shared_runtimes: Any) -> None:
    finals = []
    for options in ({}, {"outputs": "avg"}):  # of these one is checked
        rep = replicated(shared_runtimes[2], model_of(nn.Dropout(0.5), nn.BatchNorm1d(8)))
        step = rep.function(clipped_step(MEAN), **options)
        finals.append(([float(step(X, Y)[0]) for _ in range(3)], rank_states(rep), rep.num_steps))
    assert differences(*finals) == [] and finals[0][2] == 3


def test_other_bodies(rt: Any) -> None:
    """By gradients alone, by torch.func, in evaluation, with a named op."""

    def silent(loss: Loss) -> Any:
        return synk.torch.replicate(model_of(), runtime=rt).function(
            named("silent", lambda model, x, y: loss(model, x, y).backward())
        )

    def by_func(model: Any, x: Any, y: Any) -> Any:
        call = lambda parameters: F.mse_loss(torch.func.functional_call(model, parameters, (x,)), y)  # noqa: E731
        found = torch.func.grad(call)(dict(model.named_parameters()))
        for parameter, each in zip(model.parameters(), found.values()):
            parameter.grad = synk.comm.all_reduce(each.detach(), "avg")
        return MEAN(model, x, y)

    cured: list[Loss] = [
        lambda m, x, y: synk.torch.total(F.mse_loss(m(x), y, reduction="sum")),
        lambda m, x, y: synk.torch.mean(((m(x) - y).square() * (y > 0)).sum(), (y > 0).sum()),
    ]
    for loss in cured:  # which the text about a wrong one names
        assert replicated(rt, model_of()).function(clipped_step(loss)).verify(X, Y)
    rep = synk.torch.replicate(model_of(), runtime=rt)
    right = (
        *(silent(loss) for loss in cured),
        silent(MEAN), synk.torch.replicate(model_of(), runtime=rt).function(by_func),
        rep.function(MEAN, trains=False), replicated(rt, model_of()).function(clipped_step(SUM), outputs="avg"),
    )  # fmt: skip
    for step in right:
        assert told(lambda step=step: step(X, Y)) == []  # type: ignore[misc]
    wrong = {"in its gradients": silent(SUM), 'Use outputs="sum".': rep.function(SUM, trains=False)}
    for text, step in wrong.items():
        (found,) = told(lambda step=step: step(X, Y))  # type: ignore[misc]
        assert text in found
