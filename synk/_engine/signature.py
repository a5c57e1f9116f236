"""The parameters of a user's function: which argument belongs to which, and which of them are broadcast."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

OPTION_NAMES = frozenset({"batch", "num_slices", "output_subset", "timeout"})
"""Keywords that belong to a call. They never reach the function, so no parameter of it may have such a name."""


class Signature:
    """The parameters of a user's function, and which of them are broadcast.

    Parameters
    ----------
    fn, bcast_inputs, name
        As for :func:`synk.function`.
    reserved : frozenset of str
        Names that no argument by keyword can have.

    Attributes
    ----------
    names : tuple of str
        The names of all parameters in order; empty if Python does not know them.
    broadcast : frozenset of str
    first_scattered : int
        The position of the first argument that is not broadcast.

    Raises
    ------
    ValueError
        If ``bcast_inputs`` names a parameter that does not exist, or a parameter has a reserved name.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        bcast_inputs: str | Sequence[str],
        name: str,
        reserved: frozenset[str] = frozenset(),
    ) -> None:
        self.name = name
        if not isinstance(bcast_inputs, Iterable):
            raise TypeError(
                f"cannot build function {name!r}: got bcast_inputs={bcast_inputs!r}, expected the name of a parameter, "
                "or several."
            )
        self.broadcast = frozenset([bcast_inputs] if isinstance(bcast_inputs, str) else bcast_inputs)
        try:
            self._signature: inspect.Signature | None = inspect.signature(fn)
        except (TypeError, ValueError):  # Some builtins have no signature: their arguments by position are scattered.
            self._signature = None
        parameters = list(self._signature.parameters.values()) if self._signature else []
        positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        self._positional = [p.name for p in positional]
        self._required = sum(p.default is p.empty for p in positional)
        self._has_only_positional = self._signature is not None and len(positional) == len(parameters)
        self._var_positional = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "argument")
        self._var_keyword = next((p.name for p in parameters if p.kind is p.VAR_KEYWORD), "")
        self.names = tuple(p.name for p in parameters)
        scattered = [k for k, each in enumerate(self._positional) if each not in self.broadcast]
        self.first_scattered = scattered[0] if scattered else len(self._positional)
        names = set(self.names)
        unknown = sorted(self.broadcast - names)
        if unknown and self._signature is not None and not self._var_keyword:
            raise ValueError(
                f"cannot build function {name!r}: got bcast_inputs {unknown}, expected names of its parameters "
                f"{[p.name for p in parameters]}."
            )
        # One by position only cannot be given by keyword, in Python either.
        named = (each.name for each in parameters if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY))
        for taken in reserved.intersection(named):
            raise ValueError(
                f"cannot build function {name!r}: got a parameter {taken!r}, expected another name: {taken}= is an "
                f"option of every call and would not reach the function. Rename it, or fix its value: lambda x: "
                f"{name}(x, {taken}=...)."
            )

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[tuple[str, str, bool, Any]]:
        """Return ``(label, keyword, is_broadcast, value)`` of each argument.

        Raises
        ------
        TypeError
            As for a Python call of the function.
        """
        broadcast = self.broadcast
        if not kwargs and self._has_only_positional and self._required <= len(args) <= len(self._positional):
            return [(label, "", label in broadcast, value) for label, value in zip(self._positional, args)]
        if self._signature is None:
            return [(f"argument {k}", "", False, value) for k, value in enumerate(args)] + [
                (key, key, key in broadcast, value) for key, value in kwargs.items()
            ]
        try:
            self._signature.bind(*args, **kwargs)
        except TypeError as error:
            names = self._signature.parameters
            unknown = [key for key in kwargs if key not in names]
            if unknown:  # say this first, and not that the argument it was meant for is missing
                raise TypeError(
                    f"{self.name}() got an unexpected keyword argument {unknown[0]!r}, expected one of {list(names)}"
                ) from None
            raise TypeError(f"{self.name}() {error}") from None
        bound = []
        for position, value in enumerate(args):
            is_named = position < len(self._positional)
            parameter = self._positional[position] if is_named else self._var_positional
            label = parameter if is_named else f"{parameter}[{position - len(self._positional)}]"
            bound.append((label, "", parameter in broadcast, value))
        for key, value in kwargs.items():
            parameter = key if key in self._signature.parameters else self._var_keyword
            bound.append((key, key, key in broadcast or parameter in broadcast, value))
        return bound
