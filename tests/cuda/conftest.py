"""The stub of NCCL, one for each test process, and both bindings over it."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from nccl_fakes import Stub, build_stub, make_binding

from synk.cuda._nccl_bindings import BINDINGS, Binding


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    return Stub(build_stub(tmp_path_factory.mktemp("nccl")))


@pytest.fixture
def stub(stub_library: Stub) -> Iterator[Stub]:
    stub_library.reset()
    yield stub_library
    stub_library.reset()
    for thread in threading.enumerate():
        if thread.name == "synk-nccl":
            thread.join()


@pytest.fixture(params=BINDINGS)
def binding(request: pytest.FixtureRequest, stub: Stub, monkeypatch: pytest.MonkeyPatch) -> Binding:
    return make_binding(request.param, stub, monkeypatch)
