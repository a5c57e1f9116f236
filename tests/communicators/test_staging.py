"""The staging communicator: the conformance suite, over shared memory, with memory that only copies reach."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import cloudpickle
import conformance
import numpy as np
import pytest
from conformance import CommunicatorConformance
from shm_group import ShmEndpoint, ShmGroup, shm_group

from synk.communicators import Buffer
from synk.communicators._staging import StagingCommunicator

cloudpickle.register_pickle_by_value(conformance)
cloudpickle.register_pickle_by_value(sys.modules[__name__])

STREAM = 7


def copy(destination: int, source: int, nbytes: int, stream: int) -> None:
    assert stream == STREAM
    ctypes.memmove(destination, source, nbytes)


@dataclass
class StagingEndpoint:
    """A rank with a communicator whose device is a copy away."""

    host: ShmEndpoint
    stream: int = STREAM

    def __post_init__(self) -> None:
        self.synchronized: list[int] = []
        self.comm = StagingCommunicator(self.host.comm, copy, self.synchronized.append)

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.host.ranks

    def put(self, array: np.ndarray) -> np.ndarray:
        return self.host.put(array)

    def get(self, held: np.ndarray) -> np.ndarray:
        return self.host.get(held)

    def buffer(self, held: np.ndarray, start: int, count: int, dtype: str) -> Buffer:
        return self.host.buffer(held, start, count, dtype)


def staged(endpoint: ShmEndpoint, function: Callable[..., Any], *args: Any) -> Any:
    return function(StagingEndpoint(endpoint), *args)


class StagingGroup:
    """Workers of shared memory, seen through staging."""

    def __init__(self, host: ShmGroup) -> None:
        self._host = host
        self.world_size = host.world_size
        self.capabilities = self.run(lambda endpoint: endpoint.comm.capabilities())[0]

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self._host.run(staged, function, *args)

    def outcomes(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        return self._host.outcomes(staged, function, *args)


@pytest.fixture(scope="module", params=(1, 3), ids="{}-ranks".format)
def group(request: pytest.FixtureRequest) -> Iterator[StagingGroup]:
    with shm_group(request.param, 1 << 14) as host:
        yield StagingGroup(host)


class TestConformance(CommunicatorConformance):
    pass


def test_it_says_its_name(group: StagingGroup) -> None:
    assert group.capabilities.name == "staging"
