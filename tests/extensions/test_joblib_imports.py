"""joblib knows the backend whichever of the two is imported first, and how; synk alone imports nothing of it."""

from __future__ import annotations

import subprocess
import sys

from support.harness import PACKAGE_FOLDER

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

import asyncio, multiprocessing.pool, cloudpickle, numpy, optree, scipy.sparse, scipy.stats  # for all forks
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
