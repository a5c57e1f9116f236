"""Check an installed wheel: it is complete, it computes, it leaves nothing behind. Runs outside the source tree."""

from __future__ import annotations

import importlib.metadata
import importlib.resources
from pathlib import Path

import numpy as np

import synk

if "site-packages" not in Path(synk.__file__).parts:
    raise SystemExit(f"not the installed package: {synk.__file__}")
if not importlib.resources.files("synk").joinpath("py.typed").is_file():
    raise SystemExit("py.typed is missing from the wheel")
version = importlib.metadata.version("synkhronos")
if version != synk.__version__:
    raise SystemExit(f"version: the wheel says {version}, the package {synk.__version__}")

x = np.arange(15.0).reshape(5, 3)
with synk.fork(2):
    mean = synk.function(lambda x, w: (x @ w).mean(axis=0), bcast_inputs="w")
    np.testing.assert_allclose(mean(x, np.eye(3)), x.mean(axis=0))
    np.testing.assert_allclose(mean(synk.data(x), np.eye(3), batch=[4, 0]), x[[4, 0]].mean(axis=0))
print("the installed wheel works")
