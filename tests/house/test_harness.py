"""The harness itself: it finds whatever a process of ours leaves behind, and counts nothing of another program's."""

from __future__ import annotations

import contextlib
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import harness
from support.harness import (
    PACKAGE_FOLDER,
    TESTS_FOLDER,
    census,
    children,
    settled_census,
    wait_for,
)

import synk

# ----- what is ours is found


def test_the_census_sees_what_it_should() -> None:
    """Each kind of leftover is found, and gone when it is gone."""
    before = census()
    child = subprocess.Popen(["sleep", "60"])
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="a left thread")
    thread.start()
    fd = os.memfd_create("synk-test")
    try:
        left = "\n".join(census().leftovers(before))
        assert f"process {child.pid} (sleep)" in left
        assert "thread a left thread" in left
        assert "memfd:synk-test" in left
    finally:
        os.close(fd)
        stop.set()
        thread.join()
        child.kill()
        child.wait()
    assert settled_census(before).leftovers(before) == []


# ----- a folder of shared memory that nobody else has

ALONE = """
    mount -t tmpfs tmpfs /dev/shm || exit
    "$@"
    echo "status $?"
    ls -A /dev/shm
"""
KILLS = """
    import os, warnings
    import numpy as np, synk
    from support.harness import kill_and_wait, pids
    warnings.simplefilter("ignore")  # the deaths
    before = os.stat("/dev/shm").st_mtime_ns  # it would change with each name, however short its life
    rt = synk.fork(2, backend="numpy")
    data, w = rt.data(np.arange(1000.0)), rt.shared(np.zeros(1 << 17))
    large = rt.function(lambda x: np.full(1 << 17, x.sum()), outputs="sum")
    large(data)
    kill_and_wait(*pids(rt))
    large(data)
    both = rt.function(lambda x: synk.comm.all_reduce(np.ones(1 << 17)) + w.value, outputs="first")
    assert both.submit(data).result()[0] == 1.0
    assert sum(synk.map(np.sum, [np.ones(1 << 17)] * 4)) == 1 << 19
    rt.close()
    print(os.stat("/dev/shm").st_mtime_ns == before)
    open("/dev/shm/left", "w").close()
"""


def test_where_nobody_else_can_make_a_name_there_is_none() -> None:
    """In a mount of its own every name is the program's, however short its life was and whoever has died since."""
    own_mount = ["unshare", "--mount"] if os.geteuid() == 0 else ["unshare", "--mount", "--user", "--map-root-user"]
    program = [sys.executable, "-c", textwrap.dedent(KILLS)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(PACKAGE_FOLDER), str(TESTS_FOLDER)])}
    if shutil.which("unshare") is None or subprocess.run([*own_mount, "true"], capture_output=True).returncode:
        pytest.skip("this system grants no mount of one's own")
    run = subprocess.run(
        [*own_mount, "sh", "-c", ALONE, "sh", *program], env=environment, capture_output=True, text=True
    )
    assert run.stdout.splitlines() == ["True", "status 0", "left"], run.stderr


# ----- workers that a nursery has forked


def surroundings() -> dict[str, object]:
    """Return what a worker finds around it, without what differs between any two of them or of their runtimes."""
    numbers = dict.fromkeys(os.listdir("/proc/self/fd"))
    for number in numbers:
        with contextlib.suppress(OSError):  # that of the listing itself
            numbers[number] = re.sub(r"\d+", "", os.readlink(f"/proc/self/fd/{number}"))
    # Its lifeline has no watch once the user's processes have as many of them as the system allows.
    named = sorted(name for name in numbers.values() if name and "inotify" not in name)
    with open("/proc/self/status", encoding="ascii") as file:
        status = dict(line.rstrip("\n").split(":\t") for line in file)
    return {
        "descriptors": named,
        "parent": os.getppid(),
        "leads": (os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()),
        "folder": os.getcwd(),
        "path": sys.path,
        "argv": sys.argv,
        "environment": {name: text for name, text in os.environ.items() if name != "PYTHONHASHSEED"},
        "masks": {name: status[name] for name in ("SigBlk", "SigIgn", "Umask", "Seccomp")},
        "caught": int(status["SigCgt"], 16) & 0x7FFFFFFF,  # 32 and 33 are the C library's own, from its first thread on
        "limits": [resource.getrlimit(number) for number in range(16)],
        "oom": Path("/proc/self/oom_score_adj").read_text(),
        "cores": os.sched_getaffinity(0),
        "threads": os.listdir("/proc/self/task") == [str(os.getpid())],
        "streams": [
            (each.encoding, each.errors, each.line_buffering, each.isatty()) for each in (sys.stdout, sys.stderr)
        ],
        "hooks": (
            sys.breakpointhook.__qualname__,
            sys.excepthook.__qualname__,
            signal.getsignal(signal.SIGINT).__name__,
        ),
        "flags": repr(sys.flags),
        "master's half": sorted(name for name in sys.modules if name.startswith(("synk._engine", "synk._api"))),
    }


def test_a_forked_worker_is_like_one_that_was_started(nurseries: Any, runtime: Any) -> None:
    found = []
    for choice in (None, False):
        nurseries.choose(choice)
        rt = runtime(2)
        drawn = rt.function(lambda: (random.random(), np.random.rand()), per_rank=True, outputs=None)()
        assert len({number for each in drawn for number in each}) == 4
        found.append(rt.function(surroundings, per_rank=True, outputs=None)())
        with pytest.raises(synk.errors.WorkerDied, match="exit 3"):
            rt.function(lambda: os._exit(3), per_rank=True, outputs=None)()
        rt.close()
    assert found[1] == found[0]


def test_a_forked_worker_of_a_node_is_like_one_that_was_started(nurseries: Any, tmp_path: Path) -> None:
    """It has imported more: its nursery is a copy of the agent."""

    def look(folder: Path) -> dict[str, object]:
        """A rank that has returned tells the others by wire, which opens sockets there. So none returns too early."""
        seen = surroundings()
        (folder / str(synk.comm.rank)).touch()
        assert wait_for(lambda: len(os.listdir(folder)) == 2)
        return seen

    found = []
    for choice in (None, False):
        nurseries.choose(choice)
        before = set(children(os.getpid()))
        with synk.Runtime(1, cluster="here", nodes=2) as rt:
            folder = tmp_path / str(choice)
            folder.mkdir()
            ranks = rt.function(look, bcast_inputs="folder", per_rank=True, outputs=None)(folder)
            agents = set(children(os.getpid())) - harness.lasting_processes - before
            assert {rank.pop("parent") for rank in ranks} == agents
            for rank in ranks:
                rank.pop("master's half")
            found.append(ranks)
    assert found[1] == found[0]
