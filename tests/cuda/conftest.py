"""The stub of NCCL, one for each test process, and runtimes on GPUs that do not exist."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from nccl_fakes import Stub, build_stub
from support.fake_gpus import Gpus

from synk.cuda import _pynccl


@pytest.fixture(scope="session")
def stub_library(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    return Stub(build_stub(tmp_path_factory.mktemp("nccl")))


@pytest.fixture
def stub(stub_library: Stub) -> Iterator[Stub]:
    stub_library.reset()
    yield stub_library
    stub_library.reset()


@pytest.fixture
def over_stub(stub: Stub) -> _pynccl.Nccl:
    """The stub by the calls that go to pynccl's library."""
    return _pynccl.Nccl(stub.dll)


@pytest.fixture(params=["nccl", "host"])
def gpus(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, reuse: Any) -> Iterator[Gpus]:
    made = Gpus(monkeypatch, request.param == "nccl", reuse)
    yield made
    made.close()


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, reuse: Any) -> Iterator[Gpus]:
    """Return a maker of runtimes where it does not matter how the ranks communicate."""
    made = Gpus(monkeypatch, True, reuse)
    yield made
    made.close()


@pytest.fixture
def rt(gpu: Any) -> Any:
    return gpu.reused(2)
