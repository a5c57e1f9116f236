"""Metrics over shards of unequal length, against scikit-learn and torch on all rows in one process."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

import synk.torch  # noqa: E402

F = torch.nn.functional


def test_metrics_are_those_of_one_process(subtests: Any, shared_runtimes: Any) -> None:
    """With few rows some classes are missing on some workers."""
    metrics = pytest.importorskip("sklearn.metrics")  # here: 2 s, and the workers of other tests import this module

    def body(model: Any, x: Any, y: Any) -> Any:
        logits = model(x)
        chosen = logits.argmax(1)
        confusion = torch.bincount(2 * y + chosen, minlength=4).reshape(2, 2)
        return (chosen == y).double().mean(), confusion, logits.softmax(1)[:, 1], F.cross_entropy(logits, y)

    for workers, num_rows in product((1, 2, 3), (2, 5, 101)):
        with subtests.test(workers=workers, num_rows=num_rows):
            model = torch.nn.Linear(4, 2).double()
            x, y = torch.randn(num_rows, 4, dtype=torch.float64), torch.arange(num_rows) % 2
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
