"""Metrics over shards of unequal length, against scikit-learn and torch on all rows in one process."""

from __future__ import annotations

from itertools import product
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


def test_metrics_are_those_of_one_process(subtests: Any, shared_runtimes: Any) -> None:
    metrics = pytest.importorskip("sklearn.metrics")  # here: 2 s, and the workers of other tests import this module

    def body(model: Any, x: Any, y: Any) -> Any:
        logits = model(x)
        chosen = logits.argmax(1)
        confusion = torch.bincount(2 * y + chosen, minlength=4).reshape(2, 2)
        return (chosen == y).double().mean(), confusion, logits.softmax(1)[:, 1], F.cross_entropy(logits, y)

    for workers, num_rows in product((1, 2, 3), (2, 5, 101)):
        with subtests.test(workers=workers, num_rows=num_rows):
            model, x, y = classes_of(num_rows, 2)
            rep = synk.torch.replicate(model, runtime=shared_runtimes[workers])
            evaluate = rep.function(body, trains=False, outputs=("avg", "sum", "gather", "avg"))
            accuracy, confusion, scores, loss = evaluate(x, y)
            with torch.no_grad():
                expected = model(x).softmax(1)
            assert float(accuracy) == pytest.approx(metrics.accuracy_score(y, expected.argmax(1)), abs=1e-12)
            assert np.array_equal(confusion, metrics.confusion_matrix(y, expected.argmax(1), labels=[0, 1]))
            assert np.allclose(scores, expected[:, 1], rtol=0, atol=1e-14)
            assert float(loss) == pytest.approx(metrics.log_loss(y, expected, labels=[0, 1]), abs=1e-12)
            assert rep.num_steps == 0


def test_the_average_of_a_metric_that_is_no_mean_over_rows_is_told(shared_runtimes: Any) -> None:
    model, x, _ = classes_of(64, 2)
    torch.nn.init.zeros_(model.bias)
    y = (torch.rand(64, generator=torch.Generator().manual_seed(0)) < torch.linspace(0, 1, 64)).long()
    rep = synk.torch.replicate(model, runtime=shared_runtimes[2])

    def precision(model: Any, x: Any, y: Any) -> Any:
        chosen = model(x).argmax(1)
        return (chosen * y).sum().double() / chosen.sum()

    with pytest.raises(synk.errors.OpMismatch):
        rep.function(precision, trains=False)(x, y)
    assert not rep.function(precision, trains=False, outputs="avg").verify(x, y)


def test_a_mean_over_tokens_of_rows_of_unequal_length(subtests: Any, shared_runtimes: Any) -> None:
    """Also where a worker's rows have no tokens at all."""
    torch.manual_seed(2)
    model = torch.nn.Sequential(torch.nn.Embedding(9, 6), torch.nn.Tanh(), torch.nn.Linear(6, 9)).double()

    def body(model: Any, tokens: Any, targets: Any) -> Any:
        total = F.cross_entropy(model(tokens).transpose(1, 2), targets, ignore_index=-100, reduction="sum")
        return synk.torch.mean(total, (targets != -100).sum())

    for workers, rows in product((1, 2, 3), (7, 1, 6)):
        with subtests.test(workers=workers, rows=rows):
            evaluate = synk.torch.replicate(model, runtime=shared_runtimes[workers]).function(body, trains=False)
            tokens, lengths = torch.randint(0, 9, (rows, 8)), torch.randint(1, 9, (rows,))
            if rows == 6:
                lengths[:3] = 0
            targets = torch.where(torch.arange(8) < lengths[:, None], tokens.roll(-1, 1), -100)
            with torch.no_grad():
                expected = F.cross_entropy(model(tokens).transpose(1, 2), targets)
            assert float(evaluate(tokens, targets)) == pytest.approx(float(expected), rel=1e-12)
