"""The parameters of a user's function: which argument belongs to which, and which of them are broadcast."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from synk._pure.words import argument_hint

OPTION_NAMES = frozenset({"batch", "num_slices", "output_subset", "timeout"})
"""Keywords that belong to a call. They never reach the function, so no parameter of it may have such a name."""

Form = tuple[tuple[str, str, bool], ...]
"""Of each argument of a call ``(label, keyword, is_broadcast)``: its name in errors, the name under which the function
gets it, empty if by position, and whether it goes whole to every rank."""

_MAX_FORMS = 64


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
    forms : dict of (int, tuple of str) to Form
        Those that :meth:`form` has returned.

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
        self._reserved = reserved
        self.forms: dict[tuple[int, tuple[str, ...]], Form] = {}
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
        form = self.form(len(args), tuple(kwargs))
        return [(*each, value) for each, value in zip(form, (*args, *kwargs.values()))]

    def form(self, num_args: int, names: tuple[str, ...]) -> Form:
        """Return the form of calls with so many arguments by position, and those names of arguments by keyword.

        Raises
        ------
        TypeError
            As for a Python call of the function.
        """
        found = self.forms.get((num_args, names))
        if found is None:
            if len(self.forms) >= _MAX_FORMS:
                self.forms.clear()
            found = self.forms[num_args, names] = tuple(self._new_form(num_args, names))
        return found

    def _new_form(self, num_args: int, names: tuple[str, ...]) -> Iterator[tuple[str, str, bool]]:
        if self._signature is not None:
            self._check(num_args, names)
        for position in range(num_args):
            is_named = position < len(self._positional)
            parameter = self._positional[position] if is_named else self._var_positional
            label = parameter if is_named else f"{parameter}[{position - len(self._positional)}]"
            if self._signature is None:
                label = f"argument {position}"
            yield label, "", parameter in self.broadcast
        for key in names:
            parameter = key if key in self.names else self._var_keyword
            yield key, key, key in self.broadcast or parameter in self.broadcast

    def _check(self, num_args: int, names: tuple[str, ...]) -> None:
        assert self._signature is not None
        try:
            self._signature.bind(*range(num_args), **dict.fromkeys(names))
        except TypeError as error:
            unknown = [key for key in names if key not in self.names]
            if unknown:  # say this first, and not that the argument it was meant for is missing
                options = sorted(self._reserved)
                also = f" or an option of the call, {options}" if options else ""
                told = argument_hint("call", unknown[0], [*self.names, *options])
                raise TypeError(
                    f"{self.name}() got an unexpected keyword argument {unknown[0]!r}, expected one of "
                    f"{list(self.names)}{also}.{told}"
                ) from None
            raise TypeError(f"{self.name}() {error}") from None
