"""The options of functions and of calls, and their checks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, TypedDict

import numpy as np

from synk._engine.resident import Resident
from synk._engine.rows import CallOptions
from synk._engine.shared import Shared
from synk._pure.limits import check_timeout
from synk._pure.ops import REDUCE_OPS
from synk._pure.output_ops import DEFAULT_OP, each_op
from synk._pure.words import argument_hint

FRAMEWORKS = (None, "torch", "jax")


class KeptOptions(TypedDict, total=False):
    """The options of :func:`synk.function` with which a call's result has the type of the plain function's result."""

    bcast_inputs: str | Sequence[str]
    outputs: str | Sequence[str] | Mapping[str, str]
    updates: Resident | Sequence[Resident]
    framework: Literal["torch"]
    retry: int
    per_rank: bool


def is_integer(value: Any, least: int) -> bool:
    """Whether a value is an integer of Python or NumPy, not a bool, and at least ``least``."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and bool(value >= least)


EXCLUDES = {
    ("reproducible", "updates"): "a function without: it is called for each block of rows",
    ("reproducible", "per_rank"): "a function without: it is called for each block of rows",
    ("reproducible", "on_oom"): "a function without: it is called for each block of rows",
    ("on_oom", "updates"): "a function that changes nothing. Pass num_slices= to the call, or fewer rows",
    ("retry", "updates"): "a function that changes nothing",
}
"""Options that cannot be given together, and what is expected instead."""


@dataclass(frozen=True)
class Options:
    """The options of a function, as :func:`synk.function` describes them, each checked by itself and with the others.

    What the engine checks for itself is not looked at here: ops, and names of parameters.

    Attributes
    ----------
    name : str
        The function's, for errors. It is no option.
    updates : tuple
        Pairs of a shared variable and an op, and resident objects.
    """

    name: str
    bcast_inputs: str | Sequence[str] = ()
    outputs: Any = DEFAULT_OP
    updates: Any = ()
    framework: str | None = None
    per_rank: bool = False
    reproducible: bool | int = False
    retry: int = 0
    on_oom: str = "raise"

    @classmethod
    def of(cls, fn: Any, **options: Any) -> Options:
        """Return the options of a function, after a look at the function itself."""
        check_function(fn)
        return cls(name_of(fn), **options)

    def __post_init__(self) -> None:
        listed = self.updates if isinstance(self.updates, (tuple, list)) else (self.updates,)
        object.__setattr__(self, "updates", tuple(map(_paired, listed)))
        for variable, op in self.variables:
            if not isinstance(variable, Shared):
                expected = "what synk.shared or synk.resident made, or (variable, op) pairs"
                raise self._error(f"{type(variable).__name__} in updates", expected, TypeError)
            if op not in REDUCE_OPS and not (op is None and variable.is_sharded):
                raise self._error(f"op {op!r} in updates", f"one of {REDUCE_OPS}")
        is_blocks = isinstance(self.reproducible, bool) or is_integer(self.reproducible, 1)
        for name, is_right, expected in (
            ("framework", self.framework in FRAMEWORKS, f"one of {FRAMEWORKS}"),
            ("reproducible", is_blocks, "True, or the rows of a block"),
            ("retry", is_integer(self.retry, 0), "an integer of 0 or more"),
            ("on_oom", self.on_oom in ("raise", "slices"), "'raise' or 'slices'"),
        ):
            if not is_right:
                raise self._error(f"{name}={getattr(self, name)!r}", expected)
        if not isinstance(self.per_rank, bool):
            raise self._error(f"per_rank={self.per_rank!r}", "True or False", TypeError)
        given = self.given()
        for name in ("reproducible", "on_oom"):
            if name in given and any(op is None for op in each_op(self.outputs)):
                expected = f"an op for each output. Leave out {name}=: under op None nothing is combined"
                raise self._error(f"{name}={given[name]!r} with op None", expected)
        for (one, other), expected in EXCLUDES.items():
            if one in given and other in given:
                raise self._error(f"{one}={given[one]!r} with {other}=", expected)

    def _error(self, got: str, expected: str, kind: type[Exception] = ValueError) -> Exception:
        return kind(f"cannot build {self.name!r}: got {got}, expected {expected}.")

    @property
    def variables(self) -> tuple[Any, ...]:
        """The pairs in ``updates``."""
        return tuple(each for each in self.updates if not isinstance(each, Resident))

    @property
    def residents(self) -> tuple[Resident, ...]:
        return tuple(each for each in self.updates if isinstance(each, Resident))

    @property
    def of_calls(self) -> dict[str, Any]:
        """Those that are given of the options by which a call is made of several."""
        return {name: value for name, value in self.given().items() if name in ("reproducible", "retry", "on_oom")}

    def given(self) -> dict[str, Any]:
        """Return the options that are not at their defaults."""
        values = ((each, getattr(self, each.name)) for each in OPTIONS)
        return {each.name: value for each, value in values if value != each.default}


def _paired(update: Any) -> Any:
    """Return a resident object, or a pair of a variable and its op: None for a shard, whose rows no default fits."""
    is_pair = isinstance(update, tuple) and len(update) == 2
    if is_pair or isinstance(update, Resident):
        return update
    return update, None if isinstance(update, Shared) and update.is_sharded else "avg"


OPTIONS = fields(Options)[1:]
"""The options, with their defaults."""


def check_names(options: Iterable[str]) -> None:
    """Raise TypeError for an option that functions do not have."""
    names = [each.name for each in OPTIONS]
    for option in options:
        if option not in names:
            hint = argument_hint("function", option, names)
            raise TypeError(f"cannot build a function: got option {option!r}, expected {', '.join(names)}.{hint}")


def entropy_of(seed: Any) -> int:
    """Return the number that seeds the generators of all ranks: ``seed``, or one from the system if it is None."""
    if seed is not None and not is_integer(seed, 0):
        raise ValueError(f"cannot fork: got seed={seed!r}, expected an integer of 0 or more, or None.")
    return int.from_bytes(os.urandom(16), "little") if seed is None else int(seed)


def check_on_restart(fn: Any) -> None:
    if fn is None:
        return
    if not callable(fn):
        raise TypeError(f"cannot fork: got on_restart of type {type(fn).__name__}, expected a callable.")
    try:
        inspect.signature(fn).bind()
    except TypeError as error:
        raise TypeError(
            f"cannot fork: got an on_restart that needs arguments ({error}), expected one without."
        ) from None
    except ValueError:  # a built-in function without a signature
        pass


def check_function(fn: Any) -> None:
    if not callable(fn):
        raise TypeError(f"cannot build a function: got {type(fn).__name__}, expected a callable.")
    kinds = {"a coroutine function": inspect.iscoroutinefunction, "a generator function": inspect.isgeneratorfunction}
    for kind, is_kind in kinds.items():
        if is_kind(fn):
            raise TypeError(
                f"cannot build {getattr(fn, '__name__', 'a function')!r}: got {kind}, expected one that returns its "
                "outputs."
            )


def name_of(fn: Any) -> str:
    """Return the name of a function, of the one that a partial or a wrapper calls, or of the class of an object."""
    inner = getattr(fn, "func", None) or getattr(fn, "__wrapped__", None)
    name = getattr(fn, "__name__", None) or (name_of(inner) if callable(inner) else type(fn).__name__)
    return str(name)


def call_options(
    batch: Any = None, num_slices: Any = 1, output_subset: Any = None, timeout: Any = None, **how: Any
) -> CallOptions:
    """Return the options of a call, checked."""
    return CallOptions(batch, check_slices(num_slices), check_subset(output_subset), check_timeout(timeout), **how)


def check_slices(num_slices: Any) -> int:
    if not is_integer(num_slices, 1):
        raise ValueError(f"cannot slice a call: got num_slices={num_slices!r}, expected an integer of 1 or more.")
    return int(num_slices)


def check_subset(output_subset: Any) -> tuple[Any, ...] | None:
    if output_subset is None:
        return None
    keys = [output_subset] if isinstance(output_subset, (str, int, np.integer)) else output_subset
    if not isinstance(keys, Iterable):
        raise TypeError(f"cannot select outputs: got output_subset={output_subset!r}, expected positions or keys.")
    return tuple(int(key) if isinstance(key, np.integer) else key for key in keys)
