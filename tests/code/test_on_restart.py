"""Workers that are started again have what there is by then; which modules are the user's, and compared each call."""

from __future__ import annotations

import importlib
import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import harness

import synk
from synk._code.modules import is_users_module

X = np.arange(6.0)


def test_replacements_are_prepared_before_their_first_call(runtime: Callable[..., Any], tmp_path: Path) -> None:
    """An error of ``on_restart`` is told, and the next call runs it again."""
    saved, state = tmp_path / "state.npy", np.zeros(1)

    def prepare() -> None:
        state[:] = np.load(saved)

    def step(x: np.ndarray) -> float:
        state[0] += 1
        return state[0]

    rt = runtime(2, on_restart=prepare)
    f = rt.function(step, outputs=None)
    assert f(X) == [1.0, 1.0]
    harness.kill_and_wait(harness.pids(rt)[0])
    with (
        pytest.warns(RuntimeWarning),
        pytest.raises(synk.errors.StartupError, match=r"rank 0 of 2.*state\.npy") as info,
    ):
        f(X)
    assert isinstance(info.value.__cause__, FileNotFoundError)
    with pytest.raises(synk.errors.StartupError, match=r"state\.npy"):
        f(X)
    np.save(saved, np.full(1, 5.0))
    first, other = f(X)
    assert (first, f(X)) == (6.0, [7.0, other + 1])


def test_what_on_restart_cannot_do(subtests: Any, runtime: Callable[..., Any]) -> None:
    w: Any = None

    def assign() -> None:
        w.value = 3.0

    cases: dict[str, Callable[[], Any]] = {
        "cannot assign a shared variable": assign,
        "cannot communicate outside of a call": lambda: synk.comm.all_reduce(np.ones(2), "sum"),
    }
    for words, on_restart in cases.items():
        with subtests.test(words):
            rt = runtime(2, on_restart=on_restart)
            w = rt.shared(1.0)
            f = rt.function(lambda x: x.sum() * w.value, outputs="sum")  # noqa: B023
            assert f(X) == 15
            harness.kill_and_wait(harness.pids(rt)[1])
            with pytest.warns(RuntimeWarning), pytest.raises(synk.errors.StartupError, match=words):
                f(X)
            assert w.value == 1.0


def test_on_restart_is_checked_before_anything_starts(subtests: Any) -> None:
    cases: dict[str, Any] = {
        "of type int, expected a callable": 3,
        "needs arguments": lambda x: x,
        "cannot send 'on_restart'": (lambda gen: lambda: gen)(x for x in "a"),
    }
    for text, fn in cases.items():
        error = synk.errors.SerializationError if "send" in text else TypeError
        with subtests.test(text), pytest.raises(error, match=text):
            synk.Runtime(2, backend="numpy", on_restart=fn)


def test_restart_brings_everything_up_to_date(
    runtime: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepared = []
    rt = runtime(2, on_restart=lambda: prepared.append(1), max_restarts=0)
    table, w, data = np.zeros(1), rt.shared(np.ones(2)), rt.data(X)
    parts = rt.shared(X, sharded=True)
    w.value = 2 * w.value

    def f(x: np.ndarray, part: np.ndarray) -> tuple[Any, ...]:
        settings = os.environ.get("SYNK_TEST_CAPTURED"), os.getcwd(), np.geterr()["divide"]
        return table[0], *settings, len(prepared), part.sum()

    look = rt.function(f, outputs=None)
    look(data, parts)
    pids = harness.pids(rt)
    table[0] = 5.0
    monkeypatch.setenv("SYNK_TEST_CAPTURED", "yes")
    monkeypatch.chdir(tmp_path)
    rt.restart()
    with np.errstate(divide="raise"):
        got = look(data, parts)
    assert [values[:5] for values in got] == [(5.0, "yes", str(tmp_path), "raise", 1)] * 2
    assert sum(values[5] for values in got) == 15
    assert w.value.tolist() == [2.0, 2.0]
    assert not set(pids) & set(harness.pids(rt))
    rt.restart()
    assert [values[4] for values in look(data, parts)] == [1, 1]


def test_restart_of_an_inline_runtime() -> None:
    with synk.Runtime(0, backend="numpy") as rt:
        table = np.zeros(1)
        f = rt.function(lambda x: x + table[0], outputs="gather")
        np.testing.assert_array_equal(f(X), X)
        table[0] = 1.0
        rt.restart()
        np.testing.assert_array_equal(f(X), X + 1)


_numbers = itertools.count()

LAYOUTS = {
    "a module": ("{0}.py",),
    "a package": ("{0}/__init__.py",),
    "a module of a package": ("{0}/__init__.py", "{0}/part.py"),
    "a package in a package": ("{0}/__init__.py", "{0}/part/__init__.py", "{0}/part/leaf.py"),
    "of a namespace": ("{0}/part/__init__.py", "{0}/part/leaf.py"),
}
"""The files; the last one is asked about."""


def records(name: str, files: list[str]) -> str:
    return "".join(f"{file},sha256=abc,12\n" for file in (f"{name}-1.0.dist-info/METADATA", *files, "../../bin/tool"))


METADATA: dict[str, tuple[bool, Callable[[str, list[str]], dict[str, str]]]] = {
    "none": (True, lambda name, files: {}),
    "a wheel's": (False, lambda name, files: {"other_name-1.0.dist-info/RECORD": records(name, files)}),
    "without a list": (False, lambda name, files: {f"{name}-1.0.dist-info/METADATA": "Metadata-Version: 2.1\n"}),
    "an egg's": (False, lambda name, files: {"other_name-1.0-py3.11.egg-info/top_level.txt": f"{name}\n"}),
    "another package's": (True, lambda name, files: {"other-1.0.dist-info/RECORD": records("other", ["other.py"])}),
    "of a source folder": (True, lambda name, files: {f"{name}.egg-info/top_level.txt": f"{name}\n"}),
    "a project's": (True, lambda name, files: {"pyproject.toml": f'[project]\nname = "{name}"\n'}),
}


def write(folder: Path, files: dict[str, str]) -> None:
    for file, text in files.items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text(text, encoding="utf-8")


def dotted(file: str) -> str:
    return file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_installed_or_not(subtests: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for layout, metadata in itertools.product(LAYOUTS, METADATA):
        is_users, make = METADATA[metadata]
        for place, expected in (("plain", is_users), ("lib/site-packages", False), ("lib/dist-packages", False)):
            with subtests.test(layout=layout, metadata=metadata, place=place), monkeypatch.context() as patch:
                name = f"found_{next(_numbers)}"
                folder, files = tmp_path / name / place, [file.format(name) for file in LAYOUTS[layout]]
                write(folder, {**dict.fromkeys(files, "value = 1\n"), **make(name, files)})
                patch.syspath_prepend(folder)
                module = importlib.import_module(dotted(files[-1]))
                assert str(folder) in module.__file__  # type: ignore[operator]
                assert is_users_module(module.__name__) == expected


def test_what_is_never_the_users() -> None:
    for name in ("json", "json.decoder", "numpy", "numpy.linalg", "synk", "synk.torch", "builtins", "sys", "absent"):
        assert not is_users_module(name)
    assert is_users_module(__name__)


LIBRARY = """
import threading
lock = threading.Lock()
calls, handlers = [], {}

def register(handler):
    handlers[handler] = lock
    return handler

@register
def total(x):
    with lock:
        calls.append(len(x))
        return x.sum() * len(handlers)
"""


def test_an_installed_package_is_its_own_on_each_worker(
    shared_runtimes: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not compared or sent: neither what the program changes there nor what has no pickle."""
    name = f"found_{next(_numbers)}"
    write(tmp_path, {f"{name}.py": LIBRARY, **METADATA["a wheel's"][1](name, [f"{name}.py"])})
    monkeypatch.syspath_prepend(tmp_path)
    library: Any = importlib.import_module(name)
    assert not is_users_module(name)
    rt, x = shared_runtimes[2], np.arange(6.0)
    f = rt.function(lambda x: (library.total(x), len(library.calls)), outputs="sum")
    for call in range(1, 4):
        library.calls.append("of the program")
        assert f(x) == (x.sum(), 2 * call)
    library.handlers["more"] = (each for each in [])
    assert f(x) == (x.sum(), 8)
