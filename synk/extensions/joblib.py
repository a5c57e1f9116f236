"""A joblib backend: code with ``n_jobs`` (scikit-learn's searches and validations) runs on the current runtime.

joblib knows the backend as soon as both are imported, in any order. Arrays of 1 MB and more are sent to the workers
once, as long as their contents stay the same; they are recognised by identity. They arrive read-only, as with loky.
A writable map of a file (``np.memmap``) arrives as a map of the same file, into which tasks may write their results.

Examples
--------
>>> import joblib, synk
>>> with synk.fork(2), joblib.parallel_config(backend="synk"):
...     joblib.Parallel()(joblib.delayed(pow)(n, 2) for n in range(5))
[0, 1, 4, 9, 16]
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

from joblib import register_parallel_backend
from joblib._parallel_backends import AutoBatchingMixin, FallbackToBackend, ParallelBackendBase, SequentialBackend

from synk._api.current import current
from synk._api.mapping import rules_of
from synk._pure.tracebacks import outlined
from synk.errors import ReentrancyError


class SynkBackend(AutoBatchingMixin, ParallelBackendBase):
    """Runs the tasks of ``joblib.Parallel`` on the workers of the current runtime. joblib makes the instances.

    Without a number of jobs it uses all workers, and never more than there are. ``timeout=`` works.
    ``return_as="generator"`` does not, because the thread that waits for tasks also sends them.

    Parameters
    ----------
    item_timeout, max_tasks_per_worker, max_worker_memory
        As for :func:`synk.map`, for each task: ``joblib.parallel_config(backend="synk", item_timeout=60)``. With one
        job joblib runs the tasks in the program, without limits.
    nesting_level
        joblib's own.
    """

    default_n_jobs = -1
    supports_timeout = True
    supports_retrieve_callback = False  # callbacks while nobody waits would need a thread

    _tasks: Any = None

    def __init__(
        self,
        nesting_level: int | None = None,
        *,
        item_timeout: float | None = None,
        max_tasks_per_worker: int | None = None,
        max_worker_memory: int | None = None,
    ) -> None:
        super().__init__(nesting_level=nesting_level)
        self._rules = rules_of(
            "run jobs",
            item_timeout=item_timeout,
            max_tasks_per_worker=max_tasks_per_worker,
            max_worker_memory=max_worker_memory,
        )

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """Return the number of workers for a number of jobs: -1 means all workers, -2 all but one, and so on.

        Raises
        ------
        ValueError
            If ``n_jobs`` is 0.
        """
        if n_jobs == 0:
            raise ValueError("cannot run jobs: got n_jobs=0, expected a number above 0, -1 for all workers, or None.")
        try:
            world_size = current().world_size
        except ReentrancyError:  # on a worker, for a task that has tasks of its own
            return 1
        if n_jobs is None:
            return 1
        return max(world_size + 1 + n_jobs, 1) if n_jobs < 0 else min(n_jobs, world_size)

    def configure(
        self, n_jobs: int = 1, parallel: Any = None, prefer: Any = None, require: Any = None, **options: Any
    ) -> int:
        """Begin with the tasks of one ``Parallel``. Return the number of workers."""
        n_jobs = self.effective_n_jobs(n_jobs)
        if n_jobs == 1:
            raise FallbackToBackend(SequentialBackend(nesting_level=self.nesting_level))
        self.parallel = parallel
        self._tasks = current()._tasks(n_jobs, self._rules)
        return n_jobs

    @outlined
    def submit(self, func: Callable[[], Any], callback: Any = None) -> Any:
        """Submit a batch of tasks. Return its future."""
        return self._tasks.submit(_each(func), callback)

    @outlined
    def retrieve_result(self, out: Any, timeout: float | None = None) -> Any:
        """Wait for a batch of tasks. Batches that end in the meantime make room for others."""
        found = self._tasks.result(out, timeout)
        return [value for values in found for value in values]

    def abort_everything(self, ensure_ready: bool = True) -> None:
        """End the tasks in flight, after a failure or Ctrl-C. With ``ensure_ready`` the backend can be used again."""
        self._tasks.cancel()
        if ensure_ready:
            with contextlib.suppress(FallbackToBackend):
                self.configure(n_jobs=self.parallel.n_jobs, parallel=self.parallel)

    def terminate(self) -> None:
        """End tasks for which nobody waits any more. The workers stay."""
        if self._tasks is not None:
            self._tasks.cancel()
            self._tasks = None
        self.reset_batch_stats()


def _each(batch: Any) -> list[Callable[[], Any]]:
    """Return the calls of a batch, each as a batch of its own: the number of a call seeds its random numbers."""
    parts = [copy.copy(batch) for _ in batch.items]
    for part, item in zip(parts, batch.items):
        part.items, part._size = [item], 1
    return parts


register_parallel_backend("synk", SynkBackend)
