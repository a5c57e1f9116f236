"""Tests for ``test_makefile.py``: one that fails once, and one that always does."""

from __future__ import annotations

import os
from pathlib import Path


def test_luck() -> None:
    mark = Path(os.environ["SYNK_TEST_LUCK"])
    assert mark.exists() or mark.touch()


def test_never() -> None:
    raise AssertionError
