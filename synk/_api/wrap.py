"""``wrap``: one function of an existing program made parallel, without any other change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, overload

from synk._api.build import Decorator
from synk._api.current import fork
from synk._api.function import Function, P
from synk._master.session import Session
from synk._pure.output_ops import DEFAULT_OP
from synk._wire.cell import cell, refuse_inside_worker


@overload
def wrap(
    fn: Callable[P, Any],
    *,
    bcast_inputs: str | Sequence[str] = (),
    outputs: Any = DEFAULT_OP,
    updates: Any = (),
    changes: Any = (),
    framework: str | None = None,
    name: str | None = None,
    retry: int = 0,
    per_rank: bool = False,
) -> Function[P]: ...


@overload
def wrap(
    fn: None = None,
    *,
    bcast_inputs: str | Sequence[str] = (),
    outputs: Any = DEFAULT_OP,
    updates: Any = (),
    changes: Any = (),
    framework: str | None = None,
    name: str | None = None,
    retry: int = 0,
    per_rank: bool = False,
) -> Decorator: ...


def wrap(
    fn: Callable[..., Any] | None = None,
    *,
    bcast_inputs: str | Sequence[str] = (),
    outputs: Any = DEFAULT_OP,
    updates: Any = (),
    changes: Any = (),
    framework: str | None = None,
    name: str | None = None,
    retry: int = 0,
    per_rank: bool = False,
) -> Any:
    """Make one function of an existing program parallel, without any other change.

    As :func:`function`, but forks at the first call where no runtime is there. The workers end with the program.

    Examples
    --------
    >>> import numpy as np, synk
    >>> mean_square = synk.wrap(lambda x: (x**2).mean())
    >>> mean_square(np.array([1.0, 3.0]))
    np.float64(5.0)
    >>> synk.close()
    """
    options = {
        "bcast_inputs": bcast_inputs,
        "outputs": outputs,
        "updates": updates,
        "changes": changes,
        "framework": framework,
        "name": name,
        "retry": retry,
        "per_rank": per_rank,
    }
    if fn is None:
        return lambda target: WrappedFunction(target, **options)
    return WrappedFunction(fn, **options)


class WrappedFunction(Function[P]):
    """A function that brings its own runtime where there is none; made by :func:`synk.wrap`."""

    def _bound_session(self) -> Session:
        refuse_inside_worker(self._verb)
        session = self._callee.session
        if cell.runtime is None and (session is None or session.is_closed):
            fork()
        return super()._bound_session()
