"""The stub of NCCL, one for each test process, and what stands for CuPy's module over it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from nccl_fakes import Stub, build_stub
from support import fake_gpus

from synk.cuda import _group, _pynccl


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


@pytest.fixture(params=["over_stub", "cupy"])
def nccl(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The stub, and the stand-in for CuPy's module."""
    if request.param != "cupy":
        return request.getfixturevalue(request.param)
    fake_gpus.install(monkeypatch, 2, has_nccl=True)
    monkeypatch.setattr(_group, "PROOF_TIMEOUT_S", _group.PROOF_TIMEOUT_S)
    for name in [name for name in sys.modules if name.partition(".")[0] == "cupy"]:
        monkeypatch.delitem(sys.modules, name)
    before = set(sys.modules)
    found = importlib.import_module("cupy.cuda.nccl")
    request.addfinalizer(
        lambda: [sys.modules.pop(name) for name in set(sys.modules) - before if name.startswith("cupy")]
    )
    return found
