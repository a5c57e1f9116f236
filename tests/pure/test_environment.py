"""Cores of a process, modules that are imported late, time limits, and short texts of the user's objects.

Control groups are as the kernel shows them. No process.
"""

from __future__ import annotations

import decimal
import fractions
import math
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from synk._pure.environment import imported_late, num_cores
from synk._pure.limits import as_seconds, check_timeout, lock_s, poll_ms
from synk._pure.words import short_repr


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))


def groups(root: Path, membership: str, files: dict[str, str]) -> tuple[Path, Path]:
    """Write control groups; return what tells of the membership, and where they are mounted."""
    mount = root / "mount"
    mount.mkdir()
    for name, text in files.items():
        (mount / name).parent.mkdir(parents=True, exist_ok=True)
        (mount / name).write_text(text)
    (root / "cgroup").write_text(membership)
    return root / "cgroup", mount


QUOTAS: tuple[tuple[str, dict[str, str], int], ...] = (
    ("0::/\n", {}, 8),
    ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
    ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
    ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
    ("0::/\n", {"cpu.max": "20000 100000\n"}, 1),
    ("0::/\n", {"cpu.max": "1600000 100000\n"}, 8),
    ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "300000 100000\n"}, 3),
    ("0::/a/b\n", {"a/b/cpu.max": "400000 100000\n", "a/cpu.max": "max 100000\n", "cpu.max": "max 5\n"}, 4),
    ("0::/../elsewhere\n", {"cpu.max": "200000 100000\n"}, 8),
    ("7:memory:/a\n3:cpu,cpuacct:/a\n", {"cpu,cpuacct/a/cpu.cfs_quota_us": "-1\n"}, 8),
    (
        "7:memory:/a\n3:cpu,cpuacct:/a\n",
        {"cpu,cpuacct/a/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/a/cpu.cfs_period_us": "50000\n"},
        5,
    ),
    ("0::/\n", {"cpu.max": "nonsense\n"}, 8),
)


def test_the_quota_of_the_group_and_of_those_around_it(tmp_path: Path, subtests: Any) -> None:
    for number, (membership, files, expected) in enumerate(QUOTAS):
        (tmp_path / str(number)).mkdir()
        with subtests.test(membership=membership, files=str(files)):
            assert num_cores(*groups(tmp_path / str(number), membership, files)) == expected


def test_without_control_groups_the_cores_count_that_the_process_may_run_on(tmp_path: Path) -> None:
    assert num_cores(tmp_path / "none", tmp_path) == 8


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


def test_what_is_a_time_limit_and_what_is_not(subtests: Any) -> None:
    numbers = (1, 0.001, math.inf, np.float32(2), np.int64(3), decimal.Decimal("0.5"), fractions.Fraction(1, 3))
    for number in numbers:
        with subtests.test(number=str(number)):
            assert check_timeout(number) == as_seconds(number) == float(number)
    assert check_timeout(10**400) == math.inf and check_timeout(None) is None
    for value in (0, -1, -math.inf, math.nan, "1", b"1", True, [1], object(), -(10**400), 1j):
        with (
            subtests.test(value=str(value)),
            pytest.raises(ValueError, match=r"cannot set a timeout: got .*, expected seconds above 0, or None"),
        ):
            check_timeout(value)


def test_waits_are_never_shorter_and_never_more_than_the_system_takes(subtests: Any) -> None:
    for seconds in (-math.inf, -1.0, 0.0, 1e-9, 0.0005, 0.001, 1.0, 12.3456, 1e10, math.inf):
        with subtests.test(seconds=seconds):
            waited = poll_ms(seconds)
            assert 0 <= waited < 1 << 31
            assert waited == (1 << 31) - 1 or waited / 1000 >= max(seconds, 0) > waited / 1000 - 0.001 - 1e-9
            assert lock_s(seconds) == min(max(seconds, 0.0), threading.TIMEOUT_MAX)


class Raises:
    def __repr__(self) -> str:
        raise KeyError("no")


def test_a_text_of_any_object_is_one_short_line(subtests: Any) -> None:
    for value in ("x" * 1000, list(range(1000)), {"a": "line\nline"}, Raises(), [Raises()], np.ones(10**4)):
        with subtests.test(kind=type(value).__name__):
            text = short_repr(value)
            assert 0 < len(text) <= 80
            assert "\n" not in text
    for value in (1, None, "text", [1, 2], {"a": (1, 2)}, 2.5, int):
        assert short_repr(value) == repr(value)
