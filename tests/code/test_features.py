"""Functions and classes travel with whatever this version of Python lets them have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import features


def test_of_functions_and_classes(reused: Callable[..., Any]) -> None:
    found = list(features.differences(reused(2)))
    assert not found, "\n".join(found)
