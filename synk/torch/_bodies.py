"""The functions that the workers run for a user's body over replicated objects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from synk._api.options import name_of
from synk.torch._state import names_of


def body_of(
    fn: Callable[..., Any], resident: Any, objects: Sequence[Any], trains: bool, *, method: str = "run"
) -> Callable[..., Any]:
    """Return the function that the workers run: a method of the replica, which calls ``fn`` on their own objects.

    Raises
    ------
    TypeError
        If ``fn`` has fewer parameters than there are objects.
    """

    def body(*args: Any, **kwargs: Any) -> Any:
        return getattr(resident.value, method)(fn, trains, args, kwargs)

    body.__name__ = name_of(fn)
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return body
    parameters = list(signature.parameters.values())
    own = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if len(own) < len(objects) and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
        raise TypeError(
            f"cannot build {body.__name__!r}: it has {len(own)} parameters, expected one for each of the "
            f"{len(objects)} replicated objects first ({names_of(objects)})."
        )
    body.__signature__ = signature.replace(parameters=parameters[min(len(objects), len(own)) :])  # type: ignore[attr-defined]
    return body
