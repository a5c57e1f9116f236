"""Steps of training on trial, on a rank's copy of the replica: what in a model depends on draws or on other rows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from synk.torch import _state as states


def _parts_of(objects: Sequence[Any]) -> list[torch.nn.Module]:
    return [part for obj in objects if states.is_module(obj) for part in torch.nn.Module.modules(obj)]


def _draws() -> list[Any]:
    """Return what torch's generators will draw next."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return [torch.get_rng_state().numpy().tobytes(), *(torch.cuda.get_rng_state(k).numpy().tobytes() for k in devices)]


@contextlib.contextmanager
def checked(check: Any, objects: Sequence[Any]) -> Iterator[None]:
    """Have the check of the halves know whether a run depends on more than each of its rows."""
    if check.is_quiet:
        switch_off(objects, refuse, has_norms=True)
    norms = [part for part in _parts_of(objects) if isinstance(part, _BatchNorm)]
    before = _draws()
    try:
        yield
    finally:
        if not check.is_quiet:
            check.is_unsure |= before != _draws() or any(norm.training for norm in norms)


def switch_off(objects: Sequence[Any], train: Callable[[Any], Any], *, has_norms: bool) -> None:
    """Bring modules into ``eval()``, batch norms only with ``has_norms``; ``train()`` calls ``train`` from now on."""
    for part in _parts_of(objects):
        if has_norms or not isinstance(part, _BatchNorm):
            part.training = False
            part.__dict__["train"] = _Train(part, train)


class _Train:
    """What ``module.train`` is of a module that has been brought into ``eval()``."""

    def __init__(self, module: torch.nn.Module, act: Callable[[Any], Any]) -> None:
        self._module = module
        self._act = act

    def __call__(self, mode: bool = True) -> torch.nn.Module:
        if mode:
            self._act(self._module)
        return self._module


def stay_off(module: Any) -> None:
    """Ignore that a module is to train."""


def refuse(module: Any) -> None:
    raise ValueError("cannot train on trial: the function decides itself in which mode its modules are.")
