"""Reading the memory of another process, and what it refuses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

from synk._pure.arrays import address_of
from synk._wire.process_memory import let_siblings_read, read_memory

CHILD = """
import sys, numpy as np
from synk._pure.arrays import address_of
array = np.arange(3_000_000)
print(address_of(array), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other() -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Return a process, and the address of three million numbers in it."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", CHILD]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment, text=True
    ) as process:
        assert process.stdout is not None
        yield process, int(process.stdout.readline())
        process.kill()


def test_the_memory_of_another_process(other: tuple[subprocess.Popen[str], int]) -> None:
    """Wherever the target lies in its page: a little ahead of the source it is filled piece by piece."""
    process, address = other
    for ahead in (0, 1, 16, 63, 64, 2048, 4095):
        memory = np.zeros(2_000_003 + 4096, np.uint8)
        start = (address + 8 + ahead - address_of(memory)) % 4096
        found = memory[start : start + 2_000_003]
        assert read_memory(process.pid, address + 8, found)
        np.testing.assert_array_equal(found, np.arange(1, 250_003).view(np.uint8)[: found.size])
        assert not memory[:start].any() and not memory[start + found.size :].any()
    process.kill()
    process.wait()
    assert not read_memory(process.pid, address, np.empty(8, np.uint8))


def test_this_process_and_an_address_where_nothing_is() -> None:
    for _ in range(2):  # the second time changes nothing
        let_siblings_read()
    source, found = np.arange(100), np.zeros(100, np.int64)
    assert read_memory(os.getpid(), address_of(source), found.view(np.uint8))
    np.testing.assert_array_equal(found, source)
    assert read_memory(os.getpid(), 0, np.empty(0, np.uint8))
    assert not read_memory(os.getpid(), 4096, np.empty(8, np.uint8))
