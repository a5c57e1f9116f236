"""When an interrupt waits for the end of an import; no process is started."""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from synk._worker.loop.calls import guarded
from synk._worker.loop.serve import _is_importing


def inside_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> Any:
    """Return what ``call`` returns while a module is imported."""
    (tmp_path / "calls_back.py").write_text("import sys\nfound = sys.call_back()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "call_back", call, raising=False)
    monkeypatch.delitem(sys.modules, "calls_back", raising=False)
    return importlib.import_module("calls_back").found


def in_an_action(call: Callable[[], Any]) -> Any:
    """Return what ``call`` returns where a worker runs the user's code."""
    backend = types.SimpleNamespace(is_device=False)
    worker: Any = types.SimpleNamespace(own_down=[-1] * 24, sequence=1, backend=backend, is_interruptible=False)
    reply: Any = guarded(worker, lambda worker, value, body: (None, 0, call()), None, None)
    return reply[2]


def is_importing() -> bool:
    return _is_importing(sys._getframe())


def test_an_import_by_the_users_code_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert in_an_action(lambda: inside_import(tmp_path, monkeypatch, is_importing))
    assert not in_an_action(is_importing)


def test_an_import_in_which_the_worker_itself_runs_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a frozen program becomes a worker in a module of its own: interrupts would never be raised."""
    assert not inside_import(tmp_path, monkeypatch, lambda: in_an_action(is_importing))
