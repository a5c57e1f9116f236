"""Serial NumPy: the whole input in one process."""

from __future__ import annotations

import numpy as np

from benchmarks import _work
from benchmarks._serve import Call, serve


def prepare(job: str, **params: int) -> Call:
    """Run the function of ``job`` on all rows."""
    function = _work.function_of(job, **params)
    x, y = _work.inputs(_work.rows_of(job))

    def call(number: int) -> float | None:
        result = function(_work.fresh_weights(number), x, y)
        return result[2] if isinstance(result, tuple) else None

    return call


if __name__ == "__main__":
    serve({"call": prepare}, version=np.__version__)
