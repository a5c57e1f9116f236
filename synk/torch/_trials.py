"""Training steps on trial, on a rank's copy of the replica, to see whether a model depends on draws or other rows."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch.nn.modules.batchnorm import _BatchNorm

from synk._pure.comparison import Tolerance, fitting_ops
from synk.torch import _state as states
from synk.torch._nesting import take


def _parts_of(objects: Sequence[Any]) -> list[torch.nn.Module]:
    return [part for obj in objects if states.is_module(obj) for part in torch.nn.Module.modules(obj)]


def _draws() -> list[Any]:
    """Return the states of torch's generators, which determine the next draws."""
    devices = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    return [torch.get_rng_state().numpy().tobytes(), *(torch.cuda.get_rng_state(k).numpy().tobytes() for k in devices)]


@contextlib.contextmanager
def checked(check: Any, objects: Sequence[Any]) -> Iterator[None]:
    """Tell the check of the halves whether a run depends on more than each single row."""
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
    """Put modules into ``eval()``, batch norms only with ``has_norms``. From then on ``train()`` calls ``train``."""
    for part in _parts_of(objects):
        if has_norms or not isinstance(part, _BatchNorm):
            part.training = False
            part.__dict__["train"] = functools.partial(_train, part, train)


def _train(module: torch.nn.Module, act: Callable[[Any], Any], mode: bool = True) -> torch.nn.Module:
    """Take the place of ``module.train`` in a module that was put into ``eval()``."""
    if mode:
        act(module)
    return module


def stay_off(module: Any) -> None:
    """Leave a module in ``eval()`` although the function calls ``train()``."""


def refuse(module: Any) -> None:
    """Raise ValueError because the function calls ``train()``."""
    raise ValueError("cannot train on trial: the function decides itself in which mode its modules are.")


def misfit_of(
    modules: Sequence[torch.nn.Module], run: Callable[[Sequence[torch.Tensor]], Any], rows: Sequence[torch.Tensor]
) -> str | None:
    """Return the ops that fit the first single number that is not a mean over rows, in words; None if all are means.

    ``run(rows)`` is a forward pass. It runs on all of the rows and on two parts, with the modules in ``eval()``.
    """
    middle = len(rows[0]) // 2 + 1  # parts of different lengths
    flags = [module.training for module in modules]
    found = []
    with torch.no_grad(), torch.random.fork_rng(devices=()):
        for module in modules:
            module.training = False
        try:
            for part in (slice(None), slice(middle), slice(middle, None)):
                outputs: list[torch.Tensor] = []
                take(run([row[part] for row in rows]), outputs)
                found.append([output for output in outputs if output.ndim == 0])
        finally:
            for module, flag in zip(modules, flags):
                module.training = flag
    for values in zip(*found):
        whole, *halves = (np.asarray(value.double()) for value in values)
        rtol = torch.finfo(values[0].dtype).eps ** 0.5
        ops = fitting_ops(halves, [middle, len(rows[0]) - middle], whole, Tolerance(rtol, rtol * float(abs(whole))))
        if "avg" not in ops:
            return " or ".join(map(repr, ops)) or "no op"
    return None
