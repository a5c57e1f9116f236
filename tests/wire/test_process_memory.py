"""Reading the memory of another process, and what it refuses."""

from __future__ import annotations

import os

import numpy as np
from support.harness import Child

from synk._pure.arrays import address_of
from synk._wire.process_memory import let_siblings_read, read_memory


def test_the_memory_of_another_process() -> None:
    """Wherever the target lies in its page: a little ahead of the source it is filled piece by piece."""
    numbers = np.arange(3_000_000)
    address, expected = address_of(numbers) + 8, numbers[1:250_002].view(np.uint8)[:2_000_003].copy()
    with Child(lambda: None) as child:
        numbers[:] = 0  # in this process alone
        for ahead in (0, 1, 16, 63, 64, 2048, 4095):
            memory = np.zeros(len(expected) + 4096, np.uint8)
            start = (address + ahead - address_of(memory)) % 4096
            found = memory[start : start + len(expected)]
            assert read_memory(child.pid, address, found)
            np.testing.assert_array_equal(found, expected)
            assert not memory[:start].any() and not memory[start + len(found) :].any()
    assert not read_memory(child.pid, address, np.empty(8, np.uint8)), "it has ended"


def test_this_process_and_an_address_where_nothing_is() -> None:
    for _ in range(2):  # the second time changes nothing
        let_siblings_read()
    source, found = np.arange(100), np.zeros(100, np.int64)
    assert read_memory(os.getpid(), address_of(source), found.view(np.uint8))
    np.testing.assert_array_equal(found, source)
    assert read_memory(os.getpid(), 0, np.empty(0, np.uint8))
    assert not read_memory(os.getpid(), 4096, np.empty(8, np.uint8))
