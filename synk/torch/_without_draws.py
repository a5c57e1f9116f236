"""Modules that are kept in ``eval()``, so that neither draws nor a batch's statistics decide what they return."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from synk.torch import _state as states


@contextlib.contextmanager
def in_eval(objects: Sequence[Any], *, has_norms: bool) -> Iterator[None]:
    """Keep modules, batch norms only with ``has_norms``, in ``eval()``, also if the function calls ``train()``."""
    parts = [part for part in states.parts_of(objects) if has_norms or not isinstance(part, _BatchNorm)]
    with modes_kept(objects):
        for part in parts:
            part.training = False
            part.__dict__["train"] = functools.partial(_stay, part)
        try:
            yield
        finally:
            for part in parts:
                del part.__dict__["train"]


@contextlib.contextmanager
def modes_kept(objects: Sequence[Any]) -> Iterator[None]:
    """Put the modules back into ``train()`` or ``eval()``, as they were, at the end."""
    flags = [(part, part.training) for part in states.parts_of(objects)]
    try:
        yield
    finally:
        for part, flag in flags:
            part.training = flag


def _stay(module: torch.nn.Module, mode: bool = True) -> torch.nn.Module:
    """Take the place of ``module.train``."""
    return module


class SeenFromOutside:
    """How a step runs that is compared with another one: without draws, or with a look at its gradients."""

    objects: Sequence[Any]
    run: Callable[..., Any]
    _run: Callable[..., Any]

    def run_without_draws(self, fn: Callable[..., Any], *call: Any) -> Any:
        """Run with all modules except batch norms in ``eval()``, whatever the function does."""
        with in_eval(self.objects, has_norms=False):
            return self.run(fn, *call)

    def run_shown(self, fn: Callable[..., Any], *call: Any) -> Any:
        """Run with the process's random numbers as they are. Return the result and the gradients.

        If the step leaves none: how far it has moved the parameters.
        """
        parameters = states.parameters_of(self.objects)
        before = [each.detach().clone() for each in parameters]
        result = self._run(fn, *call)
        moves = [each.grad for each in parameters if each.grad is not None]
        moves = moves or [now.detach() - old for now, old in zip(parameters, before)]
        flat = [each.to("cpu", torch.float64).reshape(-1) for each in moves]
        return result, torch.cat([*flat, torch.zeros(0, dtype=torch.float64)]).numpy()

    def run_shown_in_eval(self, fn: Callable[..., Any], *call: Any) -> Any:
        """Do the same with all modules in ``eval()``, whatever the function does."""
        with in_eval(self.objects, has_norms=True):
            return self.run_shown(fn, *call)
