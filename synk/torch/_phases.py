"""The phases of a training step on a rank: the time that it spends on each, without the waits for other ranks.

On a device this is the time in which the host queues the work, and waits for it where the step waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from synk._wire.cell import cell
from synk._wire.control import PHASES, TRACED, Down
from synk._wire.spans import Span, nvtx, spans

_TIMED = int(Down.TIMED)  # members of an enumeration are slow to look up


class Phases:
    """Follows one rank's steps. Time that belongs to no other phase counts as the forward pass."""

    def __init__(self) -> None:
        self._phase = ""
        self._began = self._waited = 0

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Count the body as a step, and the backward passes in it as their own phase."""
        backward = torch.autograd.backward

        def noticed(*args: Any, **kwargs: Any) -> Any:
            with self.part("backward"):
                return backward(*args, **kwargs)

        # Every backward pass goes through this function, Tensor.backward's too; no hook tells when one begins.
        _replace_backward(noticed)
        try:
            with self.part("forward"):
                yield
        finally:
            _replace_backward(backward)

    @contextlib.contextmanager
    def part(self, phase: str) -> Iterator[None]:
        """Count the body as a phase. The phase around it goes on afterwards."""
        before = self._phase
        self._turn_to(phase)
        try:
            yield
        finally:
            self._turn_to(before)

    def _turn_to(self, phase: str) -> None:
        lane, package, before = cell.worker.lane, nvtx(), self._phase
        now = time.monotonic_ns()
        waited = 0 if lane.communicator is None else lane.communicator.patience.waited_ns
        if before:
            lane.own_up[PHASES[before]] += max(now - self._began - (waited - self._waited), 0)
            if lane.first_down[_TIMED] == TRACED:
                spans.append(Span(before, threading.current_thread().name, self._began, now))
            if package is not None:
                package.pop_range()
        if phase and package is not None:
            package.push_range(phase)
        self._phase, self._began, self._waited = phase, now, waited


def _replace_backward(function: Callable[..., Any]) -> None:
    torch.autograd.backward = function
