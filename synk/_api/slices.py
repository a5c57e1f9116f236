"""``on_oom="slices"``: remembers how many slices a function needs for arguments of which shapes."""

from __future__ import annotations

from typing import Any

from synk._master.processes.output import report
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
    """Return the shapes of the arguments that have one, by position and name."""
    return tuple((key, getattr(value, "shape", None)) for key, value in (*enumerate(args), *kwargs.items()))
