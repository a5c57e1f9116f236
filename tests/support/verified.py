"""Run a program as ``python`` would, and verify each synk function at its first call: serial and plain equal parallel.

Usage: python -m support.verified <path> [arguments]. A function that communicates or is built with ``per_rank=True``
stands outside of that promise; one that communicates has to run serially and with one row as well.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import runpy
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from support.nursery_process import raise_own_workers

if __name__ == "__main__" and os.environ.get("SYNK_TEST_FORKS_WORKERS"):
    importlib.import_module("numpy")  # for the workers, too
    raise_own_workers()  # before synk is imported, which a worker does in another way

import synk
from support.talking import check_on_one_rank, talks
from synk._wire.apart import Around

OTHER_OPTIONS = ("output_subset",)
FINE = {"equal", "per rank", "one per rank"}

built: list[synk.Function] = []
verified: list[synk.Function] = []


def verifying(method: Callable[..., Any], num_before: int = 0) -> Callable[..., Any]:
    """Return a way to call a function that verifies it first, once, where the call can also be made serially.

    ``num_before``: how many arguments of the method come before those of the function.
    """

    @functools.wraps(method)
    def call(self: synk.Function, /, *args: Any, **kwargs: Any) -> Any:
        if is_users(self) and not any(self is each for each in verified):
            verified.append(self)
            known = {key: value for key, value in kwargs.items() if key not in OTHER_OPTIONS}
            report = self.verify(*args[num_before:], **known)
            assert report or talks(self) or {output.verdict for output in report.outputs} <= FINE, report
            if talks(self) and not num_before:
                return check_on_one_rank(self, method, args, kwargs)
        return method(self, *args, **kwargs)

    return call


def build(self: synk.Function, fn: Any, *args: Any, **options: Any) -> None:
    plain_build(self, fn, *args, **options)
    if is_users(self):
        built.append(self)


def is_users(function: synk.Function) -> bool:
    """Whether a function is the program's, and none of synk's own, which rely on what the ranks keep between calls."""
    is_own = str(getattr(function, "__module__", "")).startswith("synk.")
    return not is_own and not isinstance(function._callee.fn, Around)


plain_build = synk.Function.__init__


@contextlib.contextmanager
def all_verified() -> Iterator[None]:
    """Verify each function that the body builds at its first call, and assert that each was."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(synk.Function, "__init__", build)
        patch.setattr(synk.Function, "__call__", verifying(synk.Function.__call__))
        patch.setattr(synk.Function, "submit", verifying(synk.Function.submit))
        patch.setattr(synk.Function, "repeat", verifying(synk.Function.repeat, 1))
        yield
    missed = [function.__name__ for function in built if not any(function is each for each in verified)]
    assert not missed, f"never verified: {missed}"


if __name__ == "__main__":
    del sys.argv[0]
    sys.path.insert(0, os.path.dirname(os.path.abspath(sys.argv[0])))
    with all_verified():
        runpy.run_path(sys.argv[0], run_name="__main__")
