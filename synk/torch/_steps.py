"""Functions over replicated objects: the user's body on the objects of each rank, and the calls in the program."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from synk._api.function import Function
from synk._api.op_check import OpCheck
from synk._api.options import Options, name_of
from synk._code.captured import captured_in
from synk._pure.output_ops import DefaultOp
from synk._pure.tracebacks import verb
from synk.torch._state import names_of
from synk.torch._step_check import check_step


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
