"""``wrap``: makes one function of an existing program parallel, without any other change."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, overload

from synk._api.build import Decorator, KeepingDecorator, build_function, with_options
from synk._api.current import fork
from synk._api.function import Function, P, R
from synk._api.options import FunctionOptions, KeptOptions
from synk._master.session import Session
from synk._pure.tracebacks import verb
from synk._wire.cell import cell, refuse_inside_worker

if TYPE_CHECKING:
    from typing_extensions import Unpack


@overload
def wrap(fn: Callable[P, R], **options: Unpack[KeptOptions]) -> Function[P, R]: ...


@overload
def wrap(fn: Callable[P, Any], **options: Unpack[FunctionOptions]) -> Function[P, Any]: ...


@overload
def wrap(fn: None = None, **options: Unpack[KeptOptions]) -> KeepingDecorator: ...


@overload
def wrap(fn: None = None, **options: Unpack[FunctionOptions]) -> Decorator: ...


@with_options
@verb
def wrap(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Make one function of an existing program parallel, without any other change.

    This is :func:`function`, but the first call forks if there is no runtime. The workers end with the program.

    Parameters
    ----------
    fn, **options
        As for :func:`function`, which also lists the errors.

    Returns
    -------
    Function

    Examples
    --------
    >>> import numpy as np, synk
    >>> mean_square = synk.wrap(lambda x: (x**2).mean())
    >>> mean_square(np.array([1.0, 3.0]))
    np.float64(5.0)
    >>> synk.close()
    """
    return build_function(fn, options, None, WrappedFunction)


class WrappedFunction(Function[P, R]):
    """A function that forks a runtime if there is none; made by :func:`synk.wrap`."""

    def _bound_session(self) -> Session:
        refuse_inside_worker(self._verb)
        session = self._callee.session
        if cell.runtime is None and (session is None or session.is_closed):
            fork()
        return super()._bound_session()
