"""Functions over replicated objects: the user's body on the objects of each rank, and the calls in the program.

Before the first step it is found out, on a copy of the objects, whether the loss is a mean over rows: ``backward()``
averages gradients over rows, so a loss that is a sum, or a mean over something else, trains another model than on one
worker. The copy takes a step on a few rows, on all ranks and on one worker alone. Outputs, gradients and what the step
changed must be the same, at least with all modules in ``eval()``. These are ordinary calls, after each of which the
copy is put back.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from synk._api.comparison import Runs, are_same
from synk._api.function import Function
from synk._api.op_check import (
    MAX_NBYTES,
    MAX_S,
    Few,
    OpCheck,
    Unknown,
    few_rows,
    limit_of,
    outputs_with_ops,
    settle,
    tried,
)
from synk._api.options import Options, name_of
from synk._api.plain import PlainCopy, copied
from synk._code.captured import captured_in
from synk._pure.output_ops import DEFAULT_OP, DefaultOp
from synk._pure.tracebacks import verb
from synk._wire.apart import Part
from synk.torch import _rank
from synk.torch import _state as states
from synk.torch._state import names_of

_RTOL = 0.02
"""Relative to the norm. Gradients are sums of rounded numbers, perhaps of 16 bits; a wrong loss is further off."""


def check_step(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], options: Any) -> None:
    """Compare a step on a few rows with the same step on one worker, unless that is known or costs too much.

    Raises
    ------
    OpMismatch
        If they differ.
    """
    few = few_rows(function, args, kwargs, options)
    if few is not None:
        settle(function, few, lambda: _compare(function, few))


def _compare(function: Any, few: Few) -> str | None:
    replicated = function._replicated
    with replicated._guard.lifted():
        parameters = states.parameters_of(replicated._objects)
        if sum(each.numel() * each.element_size() for each in parameters) > MAX_NBYTES:
            raise Unknown
        copy = replicated._runtime.resident(
            _rank.RankReplica(replicated._objects, replicated._options), dump=_rank.dump, load=_rank.load
        )
    misfit = _misfit(function, few, copy, "run_shown")
    # Draws and batch norms may be the reason: they are each rank's own.
    return misfit if misfit == "" else _misfit(function, few, copy, "run_shown_in_eval")


def _misfit(function: Any, few: Few, copy: Any, method: str) -> str | None:
    """Return what to tell the user about a step of the copy; an empty text if all is well, None if it is random."""
    fn = tried(copied, function._fn, max_nbytes=MAX_NBYTES).fn
    body = PlainCopy(function.body(fn, copy, method))
    runs = Runs(function, body, few.args, few.kwargs, limit_of(function), [copy])
    apart = tried(runs.apart, few.rows)
    if runs.seconds * len(apart) > MAX_S:
        raise Unknown
    parts, gradients = zip(*map(_told_apart, apart))
    whole, of_whole = _told_apart(tried(runs.alone, few.rows))
    misfits = [each for each in outputs_with_ops(few, whole, parts) if DEFAULT_OP not in each.ops]
    of_gradients = _is_off(gradients[0], of_whole)
    if not misfits and not of_gradients:
        return ""
    again, of_again = _told_apart(tried(runs.alone, few.rows))
    if _is_off(of_again, of_whole) or not are_same(again.value, whole.value):
        return None
    where = "its gradients" if of_gradients else ", ".join(f"output{misfit.path}" for misfit in misfits)
    return (
        f"cannot take the step {function.__name__!r} on several workers: on {few.described()} it differs from that on "
        f"one worker, in {where}, so its loss is no mean over rows. backward() averages gradients over rows: pass a "
        "loss that is a sum over rows through synk.torch.total(loss), and one that is a mean over other things (class "
        'weights, labels of -100, tokens) through synk.torch.mean(sum, count). outputs="avg" ends this check.'
    )


def _told_apart(part: Part) -> tuple[Part, np.ndarray]:
    value, gradients = part.value
    return part._replace(value=value), gradients


def _is_off(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether gradients differ by far more than rounding."""
    if one.shape != other.shape:
        return True
    size = max(np.linalg.norm(one), np.linalg.norm(other))
    return bool(np.isfinite(other).all() and not np.linalg.norm(one - other) <= _RTOL * size)


class StepFunction(Function[..., Any]):
    """A :class:`synk.Function` over replicated objects. Made by :meth:`Replicated.function`."""

    def __init__(self, replicated: Any, fn: Callable[..., Any], *, trains: bool, **options: Any) -> None:
        self._replicated, self._fn, self._trains = replicated, fn, trains
        body = self.body(fn, replicated._resident)
        updates = [replicated._resident] if trains else []
        super().__init__(
            body, Options.of(body, framework="torch", updates=updates, **options), replicated._runtime._session
        )
        captured = captured_in(self._callee.options)
        replicated._check_sent(self._callee, captured.referred.residents, captured.tensors)
        is_default, first = isinstance(options["outputs"], DefaultOp), self._callee.signature.first_scattered
        self._op_check = OpCheck(first) if is_default else None

    def body(self, fn: Callable[..., Any], resident: Any, method: str = "run") -> Callable[..., Any]:
        """Return the function that the workers run: a method of the replica, which calls ``fn`` on their own objects.

        Raises
        ------
        TypeError
            If ``fn`` has fewer parameters than there are objects.
        """
        objects, trains = self._replicated._objects, self._trains

        def body(*args: Any, **kwargs: Any) -> Any:
            return getattr(resident.value, method)(fn, trains, args, kwargs)

        body.__name__ = name_of(fn)
        signature = inspect.signature(fn)
        parameters = list(signature.parameters.values())
        own = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
        if len(own) < len(objects) and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
            raise TypeError(
                f"cannot build {body.__name__!r}: it has {len(own)} parameters, expected one for each of the "
                f"{len(objects)} replicated objects first ({names_of(objects)})."
            )
        others = parameters[min(len(objects), len(own)) :]
        body.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return body

    @verb
    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        with self._counted():
            return super().__call__(*args, **kwargs)

    @verb
    def serial(self, /, *args: Any, **kwargs: Any) -> Any:
        """Take the step on one worker, with all rows. The other workers take over the state of its objects."""
        with self._counted():
            return super().serial(*args, **kwargs)

    @verb
    def repeat(self, num_repeats: int, /, *args: Any, **kwargs: Any) -> Any:
        """Refuse it: a step that fails is undone by itself, and not with those before it."""
        raise ValueError(
            f"cannot repeat {self.__name__!r}: got a function over replicated objects, expected one without: each step "
            "is a separate call, which can be undone. Call it in a loop."
        )

    @verb
    def submit(self, /, *args: Any, **kwargs: Any) -> Any:
        """Submit the step without waiting for it; see :meth:`synk.Function.submit`."""
        with self._counted(0):
            pending = super().submit(*args, **kwargs)
        if self._trains:
            pending.add_done_callback(lambda call: self._replicated._count(1 if call._error is None else None))
        return pending

    @verb
    def verify(self, /, *args: Any, **kwargs: Any) -> Any:
        """Compare the step with the serial one. The objects stay as they are, but for what is each worker's own.

        A step that draws random numbers, as dropout does, cannot be compared: the report says so.
        """
        self._replicated._before_call(trains=False)
        return self._as_is().verify(*args, **kwargs)

    @contextlib.contextmanager
    def _counted(self, num_steps: int = 1) -> Iterator[None]:
        """Count the steps of a call. What became of a step that has failed, the ranks know."""
        replicated, guard = self._replicated, self._replicated._guard
        was_behind, counted = guard.is_behind, None
        replicated._before_call(trains=self._trains)
        try:
            yield
            counted = num_steps
        except Exception as error:
            if "step_counted" not in vars(error):  # nothing was sent
                guard.set_behind(was_behind)
                counted = 0
            raise
        finally:
            if self._trains:
                replicated._count(counted)

    def _alike(self, fn: Callable[..., Any], **options: Any) -> Function[..., Any]:
        return self._as_is()._alike(fn, **options)

    def _as_is(self) -> Function[..., Any]:
        """Return an ordinary function that takes the step without seeds of its own, so that draws can be seen."""
        resident, session = self._replicated._resident, self._replicated._runtime._session
        return Function(self.body(self._fn, resident, "run_as_is"), self._options, session)

    def _hold_back(self, args: tuple[Any, ...], kwargs: dict[str, Any], options: Any) -> Callable[[Any], None] | None:
        if not self._trains:
            return super()._hold_back(args, kwargs, options)
        check_step(self, args, kwargs, options)  # before the step, which cannot be taken back
        return None
