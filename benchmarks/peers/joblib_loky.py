"""joblib with its default backend, loky; arrays beyond 1 MB reach the workers as memory maps."""

from __future__ import annotations

import time

import joblib
import numpy as np

from benchmarks import _work
from benchmarks._serve import WORLD_SIZE, Call, serve


def main() -> None:
    """Serve with one ``Parallel`` kept open, as joblib's manual advises for repeated calls."""
    start = time.perf_counter()
    with joblib.Parallel(n_jobs=WORLD_SIZE) as parallel:
        parallel(joblib.delayed(abs)(rank) for rank in range(WORLD_SIZE))

        def prepare(job: str, **params: int) -> Call:
            function = joblib.delayed(_work.function_of(job, **params))
            x, y = _work.inputs(_work.rows_of(job))
            xs, ys = np.array_split(x, WORLD_SIZE), np.array_split(y, WORLD_SIZE)

            def call(number: int) -> float | None:
                w = _work.fresh_weights(number)
                return _work.combine(parallel(function(w, *part) for part in zip(xs, ys, strict=True)))

            return call

        serve({"call": prepare}, start_s=time.perf_counter() - start, version=joblib.__version__)


if __name__ == "__main__":
    main()
