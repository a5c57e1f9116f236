"""Which modules are the user's, and are compared at each call: none that was installed, in whatever folder."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from synk._code.modules import is_users_module

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
