"""What does not work over nodes yet is refused at once, in the program, with a text that says what to do instead."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import PACKAGE_FOLDER, script

import synk
import synk.profiler
from synk.cluster.split import counts_of
from synk.errors import StartupError, UnsupportedError

OPTIONS = {"backend": "torch", "devices": [0]}


ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"cluster": "nowhere", "nodes": 2}, "got cluster='nowhere', expected None, 'here'"),
    ({"cluster": "10.0.0.1:6379", "nodes": 0}, "got nodes=0"),
    ({"cluster": "here"}, "got nodes=None, expected how many nodes"),
    ({"cluster": "here", "nodes": (2, 1)}, r"got nodes=\(2, 1\)"),
    ({"cluster": "here", "nodes": (1, 2.5)}, r"got nodes=\(1, 2.5\).*such as \(2, 4\)"),
    ({"nodes": 2}, "got nodes=2 and no cluster="),
]


def test_arguments_and_options_of_fork(subtests: Any) -> None:
    for options, text in ARGUMENTS:
        with subtests.test(case=text), pytest.raises(ValueError, match=text):
            synk.Runtime(1, **options)
    for name, value in OPTIONS.items():
        text = f"cannot fork with cluster='here': got {name}="
        with subtests.test(case=text), pytest.raises(UnsupportedError, match=text):
            synk.Runtime(1, cluster="here", nodes=2, **{name: value})
    with pytest.raises(TypeError, match=r"got num_workers=\(1, 3\), expected an integer or None"):
        synk.Runtime((1, 3))


def test_the_number_of_workers() -> None:
    assert [counts_of(2, 3), counts_of((1, 3), 2), counts_of(np.int64(1), 2)] == [(2, 2, 2), (1, 3), (1, 1)]
    wrong: list[tuple[Any, type[Exception]]] = [
        *(((1, 2, 3), ValueError), (0, ValueError), ((2, 0), ValueError), (1.5, TypeError), ("22", TypeError))
    ]
    for num_workers, error in wrong:
        with pytest.raises(error, match="cannot fork: got num_workers="):
            counts_of(num_workers, 2)


MACHINES: list[tuple[Any, Any]] = [
    *((None, (4, 2, 1)), (2, (4, 2)), ((1, 2), (4, 2)), ((2, 9), (4, 2, 1)), ((4, 9), None), (4, None)),
]
"""How many nodes are asked for, and the ranks of those that are used; None: too few."""


def test_how_many_machines_of_a_cluster_are_used(monkeypatch: pytest.MonkeyPatch, subtests: Any) -> None:
    class Opened(Exception):
        pass

    def opened(placement: Any, **options: Any) -> None:
        raise Opened(placement.topology.counts)

    monkeypatch.setattr("synk.cluster.forking.machines_of", lambda address: [4, 2, 1])
    monkeypatch.setattr("synk.cluster.forking.NodeSession", opened)
    for nodes, counts in MACHINES:
        with subtests.test(case=f"nodes={nodes}"):
            with pytest.raises(StartupError if counts is None else Opened) as caught:
                synk.Runtime(cluster="10.0.0.1:6379", nodes=nodes)
            if counts is None:
                assert str(caught.value).startswith("cannot fork on 4 nodes: ")
            else:
                assert caught.value.args == (counts,)


def test_a_cluster_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    done = subprocess.CompletedProcess([], 1, "", "ModuleNotFoundError: No module named 'ray'")
    monkeypatch.setattr(subprocess, "run", lambda *args, **kwargs: done)
    with pytest.raises(StartupError, match=r"got no Ray in this environment.*synkhronos\[ray\]"):
        synk.Runtime(1, cluster="10.0.0.1:6379")


def test_process_groups_and_data_parallel_modules_of_torch(nodes: synk.Runtime) -> None:
    torch = pytest.importorskip("torch")
    import synk.torch

    f = nodes.function(lambda: synk.torch.process_group(), outputs=None, per_rank=True)
    with pytest.raises(UnsupportedError, match="cannot make a process group over several nodes"):
        f()
    with pytest.raises(UnsupportedError, match=r"wrap a Linear in DataParallel over nodes.*synk\.torch\.replicate"):
        synk.torch.DataParallel(torch.nn.Linear(2, 1), runtime=nodes)


def test_traces() -> None:
    """They act on the current runtime."""
    with synk.fork(1, cluster="here", nodes=2), pytest.raises(UnsupportedError, match="over nodes"):
        synk.profiler.trace("run.json").__enter__()


def test_the_page_lists_what_is_refused() -> None:
    page = (Path(PACKAGE_FOLDER) / "docs" / "cluster.md").read_text(encoding="utf-8")
    table = page.split("## What does not work yet")[1]
    verbs = ("synk.torch.DataParallel", "synk.profiler.trace")
    missing = [name for name in (*verbs, *OPTIONS) if not re.search(rf"`[^`]*{re.escape(name)}\b", table)]
    assert not missing, f"add to the table of docs/cluster.md: {missing}"


def test_a_fork_without_cluster_imports_none_of_it() -> None:
    script(
        """
        rt = synk.fork(2)
        f = synk.function(lambda x: (x.sum(), os.getpid()), outputs=("sum", None))
        seen = synk.function(
            lambda x: [name for name in sys.modules if name.startswith(("synk.cluster", "ray", "zmq"))], outputs="first"
        )
        assert f(np.arange(4.0))[0] == 6.0
        assert seen(np.arange(2)) == []
        assert not [name for name in sys.modules if name.startswith(("synk.cluster", "ray", "zmq"))]
        """
    ).check("")
