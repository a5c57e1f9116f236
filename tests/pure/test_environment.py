"""Modules that are imported late, while the program may import others."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from synk._pure.environment import imported_late

LATE = """
import sys, threading

def import_another():
    import of_the_current_folder

thread = threading.Thread(target=import_another)
thread.start()
thread.join()
search_path = list(sys.path)
import needed_by_it
"""


def test_a_late_import_does_not_disturb_those_of_other_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed, current = tmp_path / "installed", tmp_path / "current"
    for folder, files in {
        installed: {"imported_by_us": LATE, "needed_by_it": "is_ours = True"},
        current: {"imported_by_us": "", "needed_by_it": "is_ours = False", "of_the_current_folder": ""},
    }.items():
        folder.mkdir()
        for name, text in files.items():
            (folder / f"{name}.py").write_text(text, encoding="utf-8")
    monkeypatch.chdir(current)
    monkeypatch.setattr(sys, "path", ["", *sys.path, str(installed)])
    failed: list[object] = []
    monkeypatch.setattr(threading, "excepthook", failed.append)
    names = ("imported_by_us", "needed_by_it", "of_the_current_folder")
    before = [*sys.meta_path]
    try:
        found = imported_late("imported_by_us")
        assert not failed and "of_the_current_folder" in sys.modules
        assert found.search_path == sys.path and found.needed_by_it.is_ours
        assert sys.meta_path == before
    finally:
        for name in names:
            sys.modules.pop(name, None)
