"""Results with many leaves: the work of a call grows with their number, and not with its square."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import synk

FOLDER = os.path.dirname(synk.__file__)


def frames_entered(act: Callable[[], Any]) -> int:
    """Return how many functions of the package begin in ``act``."""
    count = 0

    def look(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and frame.f_code.co_filename.startswith(FOLDER)

    sys.setprofile(look)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def texts(n: int) -> Any:
    return [str(number) for number in range(n)]


def nested_texts(n: int) -> Any:
    return {str(number): ("a", ["b"]) for number in range(n)}


def arrays(n: int) -> Any:
    return [np.full(2, number) for number in range(n)]


@pytest.mark.parametrize("num_slices", [1, 2])
@pytest.mark.parametrize("make", [texts, nested_texts, arrays])
def test_the_work_of_a_call_grows_with_its_outputs(shared_runtimes: Any, make: Any, num_slices: int) -> None:
    rt = shared_runtimes["inline"]
    work = []
    for count in (30, 120):
        f = rt.function(lambda x, count=count: make(count), outputs=None)
        (found,) = f(np.zeros(2), num_slices=num_slices)
        assert len(found if num_slices == 1 else found[0]) == count
        work.append(frames_entered(lambda f=f: f(np.zeros(2), num_slices=num_slices)))
    assert work[1] < 6 * work[0]
