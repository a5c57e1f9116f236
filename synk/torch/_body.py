"""What the workers run of a replicated function: the user's body, on the rank's own objects."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from synk._wire.residents import resolve_resident


class OnRank:
    """What a ``Replicated`` becomes inside the body."""

    def __init__(self, resident: Any) -> None:
        self._resident = resident

    def no_sync(self) -> Any:
        return self._resident.value.no_sync()

    @property
    def num_steps(self) -> int:
        return int(self._resident.value.num_steps)


def on_rank(resident_id: int) -> OnRank:
    """Return the object that a pickled ``Replicated`` becomes on a worker."""
    return OnRank(resolve_resident(resident_id))


def own_functions(resident: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return what the ranks run to report their own state, and to take it over; see ``RankReplica``."""

    def save(keys: Any) -> Any:
        return resident.value.own(keys)

    def load(ranks: Any) -> None:
        resident.value.take_own(ranks)

    return save, load


def body_of(
    fn: Callable[..., Any], resident: Any, objects: Sequence[Any], trains: bool, *, draws: bool = True
) -> Callable[..., Any]:
    """Return what the workers run: ``fn`` on their own objects. Without ``draws``, on trial only, dropout is off.

    Raises
    ------
    TypeError
        If ``fn`` has fewer parameters than there are objects.
    """

    def body(*args: Any, **kwargs: Any) -> Any:
        replica = resident.value
        return (replica.run if draws else replica.run_without_draws)(fn, trains, args, kwargs)

    body.__name__ = getattr(fn, "__name__", type(fn).__name__)
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):
        return body
    parameters = list(signature.parameters.values())
    own = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if len(own) < len(objects) and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
        raise TypeError(
            f"cannot build {body.__name__!r}: it has {len(own)} parameters, expected one for each of the "
            f"{len(objects)} replicated objects first ({', '.join(type(obj).__name__ for obj in objects)})."
        )
    body.__signature__ = signature.replace(parameters=parameters[min(len(objects), len(own)) :])  # type: ignore[attr-defined]
    return body
