"""The runtimes of the tests over nodes."""

from __future__ import annotations

import zlib
from typing import Any

import pytest

import synk


@pytest.fixture
def kind(request: pytest.FixtureRequest) -> str:
    """How four ranks are divided among two nodes: each test has one of two ways."""
    return ("1+3", "2+2")[zlib.crc32(request.node.name.encode()) % 2]


@pytest.fixture
def nodes(kind: str, reused: Any) -> synk.Runtime:
    """Return a runtime of four ranks on two nodes, which may have served other tests."""
    runtime: synk.Runtime = reused(kind)
    return runtime
