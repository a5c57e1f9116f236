"""``wrap``: one function of an existing program made parallel, without any other change."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from synk._api.build import Decorator, build_function, with_options
from synk._api.current import fork
from synk._api.function import Function, P
from synk._api.options import FunctionOptions
from synk._master.session import Session
from synk._wire.cell import cell, refuse_inside_worker

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def wrap(fn: Callable[P, Any], **options: Unpack[FunctionOptions]) -> Function[P]: ...


@overload
def wrap(fn: None = None, **options: Unpack[FunctionOptions]) -> Decorator: ...


@with_options
def wrap(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
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
    return build_function(fn, options, None, WrappedFunction)


class WrappedFunction(Function[P]):
    """A function that brings its own runtime where there is none; made by :func:`synk.wrap`."""

    def _bound_session(self) -> Session:
        refuse_inside_worker(self._verb)
        session = self._callee.session
        if cell.runtime is None and (session is None or session.is_closed):
            fork()
        return super()._bound_session()
