"""The options of functions and of calls, checked."""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any, TypedDict

import numpy as np

from synk._master.objects.resident import Resident
from synk._master.objects.shared import Shared
from synk._pure.ops import REDUCE_OPS

FRAMEWORKS = (None, "torch", "jax")


class FunctionOptions(TypedDict, total=False):
    """The options of :func:`synk.function`, for type checkers; their defaults stand at :class:`synk.Function`."""

    bcast_inputs: str | Sequence[str]
    outputs: Any
    updates: Any
    changes: Any
    framework: str | None
    name: str | None
    retry: int
    per_rank: bool


def check_names(options: dict[str, Any]) -> None:
    """Raise for an option that functions do not have."""
    names = FunctionOptions.__annotations__
    for option in options.keys() - names.keys():
        close = get_close_matches(option, names, 1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise TypeError(f"cannot build a function: got option {option!r}, expected {', '.join(names)}.{hint}")


def entropy_of(seed: Any) -> int:
    """Return from what the generators of all ranks are made: ``seed``, or what the system gives where it is None."""
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or seed < 0):
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
    except ValueError:  # a built-in function that does not tell
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


def check_retry(retry: Any, updates: Any, changes: Any, name: str) -> int:
    if isinstance(retry, bool) or not isinstance(retry, (int, np.integer)) or retry < 0:
        raise ValueError(f"cannot build {name!r}: got retry={retry!r}, expected an integer of 0 or more.")
    if retry and (updates or changes):
        raise ValueError(
            f"cannot build {name!r}: got retry={retry} with updates= or changes=, expected a function that changes "
            "nothing."
        )
    return int(retry)


def check_changes(changes: Any, name: str) -> tuple[Resident, ...]:
    """Return the resident objects that a function says it changes."""
    listed = tuple(changes) if isinstance(changes, (tuple, list, set)) else (changes,)
    for resident in listed:
        if not isinstance(resident, Resident):
            raise TypeError(
                f"cannot build {name!r}: got {type(resident).__name__} in changes, expected objects made by "
                "synk.resident."
            )
    return listed


def check_updates(updates: Any, name: str) -> None:
    """Raise unless ``updates`` holds shared variables, or pairs of one and an op."""
    for update in updates if isinstance(updates, (tuple, list)) else (updates,):
        variable, op = update if isinstance(update, tuple) and len(update) == 2 else (update, "avg")
        if not isinstance(variable, Shared):
            raise TypeError(
                f"cannot build {name!r}: got {type(variable).__name__} in updates, expected Shared variables or "
                "(variable, op) pairs."
            )
        if op not in REDUCE_OPS:
            raise ValueError(f"cannot build {name!r}: got op {op!r} in updates, expected one of {REDUCE_OPS}.")


def partial_name(fn: Any) -> str | None:
    return getattr(getattr(fn, "func", None), "__name__", None)


def check_slices(num_slices: Any) -> int:
    if isinstance(num_slices, bool) or not isinstance(num_slices, (int, np.integer)) or num_slices < 1:
        raise ValueError(f"cannot slice a call: got num_slices={num_slices!r}, expected an integer of 1 or more.")
    return int(num_slices)


def check_subset(output_subset: Any) -> tuple[Any, ...] | None:
    if output_subset is None:
        return None
    keys = [output_subset] if isinstance(output_subset, (str, int, np.integer)) else output_subset
    if not isinstance(keys, Iterable):
        raise TypeError(f"cannot select outputs: got output_subset={output_subset!r}, expected positions or keys.")
    return tuple(int(key) if isinstance(key, np.integer) else key for key in keys)


def one_per_input(options: dict[str, Any], num_inputs: int, name: str) -> list[dict[str, Any]]:
    """Return the options of each input: one value for all of them, or a list or tuple with one for each."""
    for option, value in options.items():
        if isinstance(value, (list, tuple)) and len(value) != num_inputs:
            raise ValueError(
                f"cannot build the inputs of {name!r}: got {option} for {len(value)} inputs and {num_inputs} arrays, "
                "expected one for each array, or one for all."
            )
    return [
        {option: value[k] if isinstance(value, (list, tuple)) else value for option, value in options.items()}
        for k in range(num_inputs)
    ]
