"""How many cores a process may use, in control groups as the kernel shows them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from synk._pure.environment import num_cores


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
