"""The backend of joblib: what loky gives, on the workers of a runtime. joblib knows it whichever of the two is imported
first, and how; synk alone imports nothing of joblib.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import joblib
import numpy as np
import pytest
from support.harness import PACKAGE_FOLDER, assert_right, ctrl_c_when, same_workers

import synk
from synk._wire.cell import cell
from synk.errors import CallTimeout, RemoteError, SerializationError, WorkerDied

X = np.random.default_rng(0).standard_normal((200, 700))  # more than 1 MB: it travels through shared memory
Y = X[:, :3].sum(1) > 0


@pytest.fixture(params=[2, "1+1"])
def rt(request: pytest.FixtureRequest, reused: Any) -> Iterator[synk.Runtime]:
    """The current runtime, which other tests have used: on one machine, and on two nodes."""
    runtime = reused(request.param)
    cell.runtime, cell.session = runtime, runtime._session
    yield runtime
    cell.runtime = cell.session = None


def parallel(calls: Any, **options: Any) -> Any:
    with joblib.parallel_config(backend="synk"):
        return joblib.Parallel(**options)(calls)


def test_results_are_those_of_the_calls(rt: synk.Runtime) -> None:
    for options in ({}, {"n_jobs": 2}, {"batch_size": 3}, {"pre_dispatch": 1}, {"pre_dispatch": "all"}, {"n_jobs": 1}):
        assert parallel((joblib.delayed(pow)(n, 2) for n in range(30)), **options) == [n**2 for n in range(30)]
    assert parallel([]) == []
    seen = set(parallel(joblib.delayed(lambda n: (n, os.getpid())[1])(n) for n in range(20)))
    assert os.getpid() not in seen and len(seen) <= 2
    x = np.zeros(1 << 18)
    for n in range(4):
        x[-1] = n
        assert parallel([joblib.delayed(np.sum)(x)] * 3) == [float(n)] * 3, "an array that is changed in between"
    assert_right(rt)
    with joblib.parallel_config(backend="synk"):
        assert [joblib.effective_n_jobs(n) for n in (-1, -2, 1, 2, 50)] == [2, 1, 1, 2, 2]
        with pytest.raises(ValueError, match="n_jobs=0"):
            joblib.Parallel(n_jobs=0)(joblib.delayed(abs)(n) for n in range(3))


def write(out: np.ndarray, n: int) -> None:
    out[n] = n


@pytest.mark.parametrize(("size", "step"), [(10, 1), (20, 2), (1 << 18, 1)])
def test_results_that_are_written_into_a_file(rt: synk.Runtime, tmp_path: Path, size: int, step: int) -> None:
    out = np.memmap(tmp_path / "out", float, "w+", shape=size)[::step]
    is_on_nodes = rt.devices[0].startswith("node")
    with pytest.raises(ValueError, match="read-only") if is_on_nodes else contextlib.nullcontext():
        parallel(joblib.delayed(write)(out, n) for n in range(10))
        assert out[:10].tolist() == list(range(10))


@pytest.mark.parametrize("rt", [2], indirect=True)  # each worker imports sklearn
def test_scores_are_those_of_loky(rt: synk.Runtime) -> None:
    from sklearn.linear_model import LogisticRegression  # here, because it takes longer than to collect all tests
    from sklearn.model_selection import GridSearchCV

    search = GridSearchCV(LogisticRegression(max_iter=20), {"C": [0.1, 1.0]}, cv=2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = search.fit(X, Y).cv_results_["mean_test_score"]
        with joblib.parallel_config(backend="synk"):
            before = rt.counters["bytes_down"]
            np.testing.assert_array_equal(search.fit(X, Y).cv_results_["mean_test_score"], alone)
            assert rt.counters["bytes_down"] - before < X.nbytes / 2, "X is mapped, and not sent with each task"


def test_exceptions_come_out(rt: synk.Runtime) -> None:
    with same_workers(rt):
        with pytest.raises(ZeroDivisionError) as raised:
            parallel(joblib.delayed(lambda n: 1 // (n - 7))(n) for n in range(40))
        assert isinstance(raised.value.__cause__, RemoteError)
        folder = Path(synk.__file__).parent
        files = [Path(frame.f_code.co_filename) for frame, _ in traceback.walk_tb(raised.tb)]
        assert sum(folder in file.parents for file in files) <= (sys.version_info < (3, 11))
        with pytest.raises(SerializationError, match=r"cannot send a task to a worker: .*lock"):
            parallel(joblib.delayed(lambda lock: 1)(threading.Lock()) for _ in range(3))
        with pytest.raises(SerializationError, match=r"cannot send what .* returned"):
            parallel(joblib.delayed(lambda n: threading.Lock())(n) for n in range(3))
        assert parallel(joblib.delayed(abs)(-n) for n in range(5)) == list(range(5))
        assert_right(rt)


def test_deaths_ctrl_c_and_time_limits(rt: synk.Runtime, tmp_path: Path) -> None:
    def stay(n: int) -> None:
        (tmp_path / str(n)).touch()
        signal.pause()

    with pytest.raises(WorkerDied, match="ended with SIGKILL"):
        parallel(joblib.delayed(lambda n: os.kill(os.getpid(), signal.SIGKILL) if n == 3 else n)(n) for n in range(9))
    assert parallel(joblib.delayed(abs)(-n) for n in range(5)) == list(range(5))
    with same_workers(rt):
        with pytest.raises(KeyboardInterrupt), ctrl_c_when(lambda: len(list(tmp_path.iterdir())) == 2):
            parallel(joblib.delayed(stay)(n) for n in range(8))
        with pytest.raises(TimeoutError, match="cannot wait for a task"):
            parallel((joblib.delayed(stay)(n) for n in range(8)), timeout=0.1)
        assert_right(rt)


def test_numbers_of_tasks() -> None:
    """The same for any number of workers, and in whatever batches joblib sends the tasks."""
    expected = [np.random.default_rng(np.random.SeedSequence(7, spawn_key=(0, n))).random() for n in range(20)]
    for num_workers, batch_size in ((2, 1), (3, "auto"), (2, 7)):
        with synk.fork(num_workers, seed=7):
            drawn = [joblib.delayed(lambda: synk.comm.rng.random())() for _ in range(20)]
            assert parallel(drawn, batch_size=batch_size) == expected


@pytest.mark.parametrize("rt", [2], indirect=True)
def test_limits_of_tasks_and_workers(rt: synk.Runtime) -> None:
    """They stay after a failure. What does not fit joblib is refused."""
    options: dict[str, Any] = {"item_timeout": 1.0, "max_tasks_per_worker": 4}
    # joblib keeps the batches that it has cut and not submitted for the next run, with every backend
    with joblib.parallel_config(backend="synk", **options), joblib.Parallel(batch_size=2, pre_dispatch="all") as run:
        for _ in range(2):
            with pytest.raises(CallTimeout, match="item 5 of "):
                run(joblib.delayed(signal.pause if n == 5 else os.getpid)() for n in range(12))
        served = Counter(run(joblib.delayed(os.getpid)() for _ in range(20)))
        assert max(served.values()) <= 4 and sum(served.values()) == 20
    with pytest.raises(ValueError, match="cannot run jobs: got max_worker_memory=0"):
        joblib.parallel_config(backend="synk", max_worker_memory=0)
    with pytest.raises(TypeError, match="on_error"):
        joblib.parallel_config(backend="synk", on_error="return")


def test_tasks_in_tasks_and_calls_beside_them(rt: synk.Runtime) -> None:
    def outer(n: int) -> list[int]:
        return joblib.Parallel(n_jobs=2)(joblib.delayed(pow)(k, 2) for k in range(n))

    assert parallel(joblib.delayed(outer)(n) for n in range(4)) == [[k**2 for k in range(n)] for n in range(4)]
    total = rt.function(lambda x: x.sum(), outputs="sum")

    def calls() -> Iterator[Any]:
        for n in range(6):
            assert total(np.full(3, float(n))) == 3.0 * n
            yield joblib.delayed(abs)(-n)

    assert parallel(calls(), batch_size=1) == list(range(6))

    def powers(x: np.ndarray) -> np.ndarray:  # in a worker the backend has one job
        with joblib.parallel_config(backend="synk"):
            return np.array(joblib.Parallel()(joblib.delayed(pow)(int(n), 2) for n in x))

    assert rt.function(powers, outputs="gather")(np.arange(4)).tolist() == [0, 1, 4, 9]


# ----- imports

ORDERS = {
    "joblib first": "import joblib, synk",
    "synk first": "import synk, joblib",
    "only its backends first": "import joblib._parallel_backends; import synk",
    "reloaded": "import synk, joblib, importlib; importlib.reload(joblib.parallel); importlib.reload(joblib)",
    "imported a second time": "import synk, joblib; forget('joblib'); import joblib",
    "synk imported a second time": "import synk; forget('synk'); import synk, joblib",
    "both a second time": "import synk, joblib; forget('synk'); forget('joblib'); import joblib, synk",
    "both in threads": "in_threads('joblib', 'synk', 'joblib', 'synk')",
    "the module of the backend": "import synk.extensions.joblib",
}

PROGRAM = f"""
import importlib, os, sys, threading, traceback

def forget(package):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]

def in_threads(*names):
    threads = [threading.Thread(target=importlib.import_module, args=[name]) for name in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

def check(order):
    exec(order, dict(globals()))
    import joblib.parallel
    with joblib.parallel_config(backend="synk"):
        backend, _ = joblib.parallel.get_active_backend()
    assert type(backend).__module__ == "synk.extensions.joblib", backend
    joblib.parallel_config(backend="threading").unregister()

def nothing_else():
    import synk
    assert "joblib" not in sys.modules and "synk.extensions" not in sys.modules

import asyncio, multiprocessing.pool, cloudpickle, numpy, optree  # for all forks
assert "synk" not in sys.modules and "joblib" not in sys.modules
cases = {{name: lambda order=order: check(order) for name, order in {ORDERS!r}.items()}}
for name, case in {{**cases, "synk alone": nothing_else}}.items():
    if (pid := os.fork()) == 0:
        try:
            case()
        except BaseException:
            print(name, traceback.format_exc())
        sys.stdout.flush()
        os._exit(0)
    if os.waitpid(pid, 0)[1]:
        print(name, "did not end")
"""


def test_the_backend_is_known_in_any_order_of_imports() -> None:
    """Each case is a fork of a process that has imported neither."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=PACKAGE_FOLDER, capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == ("", "")
