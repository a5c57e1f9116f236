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


def in_an_action(call: Callable[[], Any]) -> Any:
    """Return what ``call`` returns where a worker runs the user's code."""
    backend = types.SimpleNamespace(is_device=False)
    worker: Any = types.SimpleNamespace(own_down=[-1] * 24, sequence=1, backend=backend, is_interruptible=False)
    reply: Any = guarded(worker, lambda worker, value, body: (None, 0, call()), None, None)
    return reply[2]


def test_only_an_import_by_the_users_code_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one in which the worker itself runs, as in a frozen program: interrupts would never be raised."""
    (tmp_path / "calls_back.py").write_text("import sys\nfound = sys.call_back()\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def inside_import(call: Callable[[], Any]) -> Any:
        monkeypatch.setattr(sys, "call_back", call, raising=False)
        monkeypatch.delitem(sys.modules, "calls_back", raising=False)
        return importlib.import_module("calls_back").found

    def is_importing() -> bool:
        return _is_importing(sys._getframe())

    assert in_an_action(lambda: inside_import(is_importing))
    assert not in_an_action(is_importing)
    assert not inside_import(lambda: in_an_action(is_importing))
