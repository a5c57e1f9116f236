"""Metrics over shards of unequal length, against scikit-learn and torch on all rows in one process."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import synk.torch  # noqa: E402

F = torch.nn.functional


def classes_of(num_rows: int, num_classes: int) -> tuple[Any, Any, Any]:
    """Return a model, rows and labels; with few rows some classes are missing on some workers."""
    torch.manual_seed(num_rows)
    model = torch.nn.Linear(4, num_classes).double()
    return model, torch.randn(num_rows, 4, dtype=torch.float64), torch.arange(num_rows) % num_classes


@pytest.mark.sampled(20)
@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("num_rows", [2, 5, 32, 101])
def test_accuracy_counts_and_ranks_are_those_of_one_process(shared_runtimes: Any, workers: int, num_rows: int) -> None:
    metrics = pytest.importorskip("sklearn.metrics")  # here: 2 s, and the workers of other tests import this module
    model, x, y = classes_of(num_rows, 2)
    rep = synk.torch.replicate(model, runtime=shared_runtimes[workers])

    def body(model: Any, x: Any, y: Any) -> Any:
        logits = model(x)
        chosen = logits.argmax(1)
        confusion = torch.bincount(2 * y + chosen, minlength=4).reshape(2, 2)
        return (chosen == y).double().mean(), confusion, logits.softmax(1)[:, 1], F.cross_entropy(logits, y)

    evaluate = rep.function(body, trains=False, outputs=("avg", "sum", "gather", "avg"))
    for data in ((x, y), (x[1:], y[1:])) if num_rows > 2 else ((x, y),):
        accuracy, confusion, scores, loss = evaluate(*data)
        with torch.no_grad():
            probabilities = model(data[0]).softmax(1)
        chosen = probabilities.argmax(1)
        labels = data[1]
        assert float(accuracy) == pytest.approx(metrics.accuracy_score(labels, chosen), abs=1e-12)
        assert np.array_equal(confusion, metrics.confusion_matrix(labels, chosen, labels=[0, 1]))
        assert np.allclose(scores, probabilities[:, 1], rtol=0, atol=1e-14)
        assert float(loss) == pytest.approx(metrics.log_loss(labels, probabilities, labels=[0, 1]), abs=1e-12)
        expected = metrics.roc_auc_score(labels, probabilities[:, 1])
        assert metrics.roc_auc_score(labels, scores) == pytest.approx(expected, abs=1e-12)
        expected = metrics.average_precision_score(labels, probabilities[:, 1])
        assert metrics.average_precision_score(labels, scores) == pytest.approx(expected, abs=1e-12)
    assert rep.num_steps == 0


def test_the_average_of_a_metric_that_is_no_mean_over_rows_is_told(shared_runtimes: Any) -> None:
    model, x, _ = classes_of(64, 2)
    with torch.no_grad():
        model.bias.zero_()
    y = (torch.rand(64, generator=torch.Generator().manual_seed(0)) < torch.linspace(0, 1, 64)).long()
    rep = synk.torch.replicate(model, runtime=shared_runtimes[2])

    def precision(model: Any, x: Any, y: Any) -> Any:
        chosen = model(x).argmax(1)
        return (chosen * y).sum().double() / chosen.sum()

    with pytest.raises(synk.errors.OpMismatch):
        rep.function(precision, trains=False)(x, y)
    assert not rep.function(precision, trains=False, outputs="avg").verify(x, y)


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_perplexity_over_tokens_of_rows_of_unequal_length(shared_runtimes: Any, workers: int) -> None:
    """Also where a worker's rows have no tokens at all."""
    generator = torch.Generator().manual_seed(5)
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 6), torch.nn.Tanh(), torch.nn.Linear(6, 9)).double()
    rep = synk.torch.replicate(model, runtime=shared_runtimes[workers])

    def body(model: Any, tokens: Any, targets: Any) -> Any:
        logits = model(tokens).transpose(1, 2)
        total = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        count = (targets != -100).sum()
        return synk.torch.mean(total, count), total, count

    evaluate = rep.function(body, trains=False, outputs=("avg", "sum", "sum"))
    sums = np.zeros(2)
    everything: list[Any] = []
    for rows in (7, 5, 1, 6):
        tokens = torch.randint(0, 9, (rows, 8), generator=generator)
        lengths = torch.randint(1, 9, (rows,), generator=generator)
        if rows == 6:
            lengths[:3] = 0
        targets = torch.where(torch.arange(8) < lengths[:, None], tokens.roll(-1, 1), -100)
        mean, total, count = evaluate(tokens, targets)
        with torch.no_grad():
            serial = F.cross_entropy(model(tokens).transpose(1, 2), targets)
        assert math.exp(float(mean)) == pytest.approx(math.exp(float(serial)), rel=1e-12)
        sums += float(total), float(count)
        everything.append((tokens, targets))
    with torch.no_grad():
        tokens, targets = map(torch.cat, zip(*everything))
        serial = F.cross_entropy(model(tokens).transpose(1, 2), targets)
    assert sums[0] / sums[1] == pytest.approx(float(serial), rel=1e-12)
