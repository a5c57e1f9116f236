"""Where the tests of ``synk.comm`` run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.places import made

import synk


@pytest.fixture
def at(shared_runtimes: Any, reuse: Any) -> Callable[[Any], synk.Runtime]:
    """Return ``at(place)``: a runtime whose ranks talk by that communicator, see ``support.places``."""

    def find(place: Any) -> synk.Runtime:
        runtime: synk.Runtime = (
            reuse(place, lambda: made(place)) if place in ("little memory", "blind") else shared_runtimes[place]
        )
        return runtime

    return find
