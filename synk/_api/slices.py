"""``on_oom="slices"``: remembers how many slices a function needs for arguments of which shapes."""

from __future__ import annotations

from typing import Any

from synk._master.objects.shared import Shared
from synk._master.processes.output import report
from synk._pure.nested import take_apart
from synk.errors import RemoteError, add_note


class Slices:
    """The numbers of slices of one function.

    Parameters
    ----------
    name : str
        Name of the function.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._known: dict[Any, int] = {}

    def of(self, args: tuple[Any, ...], kwargs: dict[str, Any], num_slices: Any) -> Any:
        """Return the number of slices for a call: the remembered number, or ``num_slices`` if that is larger."""
        if not self._known:
            return num_slices
        return max(num_slices, self._known.get(_shapes(args, kwargs), 1))

    def help_against(
        self, error: BaseException, args: tuple[Any, ...], kwargs: dict[str, Any], num_slices: int
    ) -> bool:
        """Return whether more than ``num_slices`` slices can help after an error.

        If they can, the next call with such shapes uses twice as many.
        """
        cause = error.__cause__
        if not isinstance(error, MemoryError) or not isinstance(cause, RemoteError):
            return False
        if not getattr(error, "_is_put_back", True):  # some resident objects are not as they were before the call
            return False
        shapes = _shapes(args, kwargs)
        num_rows = max((shape[0] for _, shape in shapes if shape), default=0)
        if num_slices >= num_rows:
            add_note(error, f"{self._name!r} runs out of memory with a single row in each of {num_slices} slices.")
            return False
        is_first = shapes not in self._known
        self._known[shapes] = 2 * num_slices
        if is_first:
            report(
                "%r ran out of memory on a rank%s. Calls with such arguments are run in slices from now on, twice "
                "as many until they fit.",
                self._name,
                f" ({text})" if (text := str(error).partition("\n")[0]) else "",
            )
        return True


def _shapes(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, Any], ...]:
    """Return the shapes of the arguments, and of the leaves of nested ones, by position and name."""
    given = (*enumerate(args), *kwargs.items())
    return tuple((key, _shape_of(leaf)) for key, value in given for leaf in _leaves(value))


def _leaves(value: Any) -> list[Any]:
    try:
        return take_apart(value)[0]
    except (TypeError, RecursionError):  # an object that goes whole to every rank may have any structure
        return [None]


def _shape_of(leaf: Any) -> Any:
    """Return the shape of an argument, of which only the first length counts; None if it has no rows."""
    if isinstance(leaf, Shared):
        return (sum(leaf._referent.lengths),) if leaf.is_sharded else None
    return (len(leaf),) if isinstance(leaf, (list, tuple)) else getattr(leaf, "shape", None)
