"""The options of functions and of calls, and their checks."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, TypedDict

import numpy as np

from synk._master.objects.resident import Resident
from synk._master.objects.shared import Shared
from synk._pure.ops import REDUCE_OPS
from synk._pure.words import argument_hint

FRAMEWORKS = (None, "torch", "jax")

_BLOCK_ROWS = 1024
"""The rows of a block under ``reproducible=True``."""


class FunctionOptions(TypedDict, total=False):
    """The options of :func:`synk.function`, for type checkers. :class:`synk.Function` has their defaults."""

    bcast_inputs: str | Sequence[str]
    outputs: Any
    updates: Any
    framework: str | None
    per_rank: bool
    reproducible: bool | int
    retry: int
    on_oom: str


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


def check_names(options: dict[str, Any]) -> None:
    """Raise TypeError for an option that functions do not have."""
    names = FunctionOptions.__annotations__
    for option in options.keys() - names.keys():
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


def check_blocks(reproducible: Any, options: dict[str, Any], name: str) -> int:
    """Return the number of rows in a block of a reproducible function; 0 for other functions."""
    if reproducible is False:
        return 0
    if reproducible is not True and not is_integer(reproducible, 1):
        raise ValueError(
            f"cannot build {name!r}: got reproducible={reproducible!r}, expected True, or the rows of a block."
        )
    given = [option for option, value in options.items() if value]
    if given:
        raise ValueError(
            f"cannot build {name!r}: got reproducible={reproducible} with {given[0]}, expected a function without: it "
            "is called for each block of rows."
        )
    return _BLOCK_ROWS if reproducible is True else int(reproducible)


def check_on_oom(on_oom: Any, changes: bool, name: str) -> bool:
    """Return whether calls that run out of memory are made again in slices."""
    if on_oom not in ("raise", "slices"):
        raise ValueError(f"cannot build {name!r}: got on_oom={on_oom!r}, expected 'raise' or 'slices'.")
    if on_oom == "slices" and changes:
        raise ValueError(
            f"cannot build {name!r}: got on_oom='slices' with updates=, expected a function that changes nothing."
            " Pass num_slices= to the call, or fewer rows."
        )
    return bool(on_oom == "slices")


def check_retry(retry: Any, changes: bool, name: str) -> int:
    if not is_integer(retry, 0):
        raise ValueError(f"cannot build {name!r}: got retry={retry!r}, expected an integer of 0 or more.")
    if retry and changes:
        raise ValueError(
            f"cannot build {name!r}: got retry={retry} with updates=, expected a function that changes nothing."
        )
    return int(retry)


def split_updates(updates: Any, name: str) -> tuple[tuple[Any, ...], tuple[Resident, ...]]:
    """Return the shared variables in ``updates``, or pairs of a variable and an op, and the resident objects."""
    listed = tuple(updates) if isinstance(updates, (tuple, list)) else (updates,)
    residents = tuple(each for each in listed if isinstance(each, Resident))
    variables = tuple(each for each in listed if not isinstance(each, Resident))
    for update in variables:
        variable, op = update if isinstance(update, tuple) and len(update) == 2 else (update, "avg")
        if not isinstance(variable, Shared):
            raise TypeError(
                f"cannot build {name!r}: got {type(variable).__name__} in updates, expected what synk.shared or "
                "synk.resident made, or (variable, op) pairs."
            )
        if op not in REDUCE_OPS:
            raise ValueError(f"cannot build {name!r}: got op {op!r} in updates, expected one of {REDUCE_OPS}.")
    return variables, residents


def name_of(fn: Any) -> str:
    """Return the name of a function, of the one that a partial or a wrapper calls, or of the class of an object."""
    inner = getattr(fn, "func", None) or getattr(fn, "__wrapped__", None)
    name = getattr(fn, "__name__", None) or (name_of(inner) if callable(inner) else type(fn).__name__)
    return str(name)


def check_slices(num_slices: Any) -> int:
    if not is_integer(num_slices, 1):
        raise ValueError(f"cannot slice a call: got num_slices={num_slices!r}, expected an integer of 1 or more.")
    return int(num_slices)


def check_repeats(num_repeats: Any, name: str) -> int:
    if not is_integer(num_repeats, 1):
        raise ValueError(
            f"cannot repeat {name!r}: got {num_repeats!r} as the number of repetitions, expected an integer of 1 or "
            "more. It comes first: f.repeat(100, x)."
        )
    return int(num_repeats)


def check_subset(output_subset: Any) -> tuple[Any, ...] | None:
    if output_subset is None:
        return None
    keys = [output_subset] if isinstance(output_subset, (str, int, np.integer)) else output_subset
    if not isinstance(keys, Iterable):
        raise TypeError(f"cannot select outputs: got output_subset={output_subset!r}, expected positions or keys.")
    return tuple(int(key) if isinstance(key, np.integer) else key for key in keys)


def can_try_again(error: BaseException) -> bool:
    """Whether a call that failed is run once more: memory ran out on a device, and the call has left nothing behind.

    The libraries on the device have given back by then what they held and did not use; see ``Backend.recover``.
    """
    return bool(getattr(error, "is_of_device", False) and getattr(error, "_is_put_back", True))
