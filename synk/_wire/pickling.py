"""The pickler that all others here are made from: cloudpickle's, and what it would refer to by a name nobody has."""

from __future__ import annotations

import functools
from collections import ChainMap
from collections.abc import Callable
from typing import Any, ClassVar

import cloudpickle
from cloudpickle.cloudpickle import _is_registered_pickle_by_value, _lookup_module_and_qualname

CACHED = type(functools.lru_cache(abs))
"""What ``functools.lru_cache`` and ``functools.cache`` make of a function."""


def is_by_reference(obj: Any) -> bool:
    """Whether a function, a class or a function with a cache is pickled as the name of a module's."""
    found = _lookup_module_and_qualname(obj)
    return found is not None and not _is_registered_pickle_by_value(found[0])


def _reduce_cached(cached: Any) -> Any:
    if is_by_reference(cached):
        return cached.__reduce__()
    return make_cached, (cached.__wrapped__, cached.cache_parameters())


def make_cached(fn: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    """Return ``fn`` with a cache in which nothing is."""
    return functools.lru_cache(**parameters)(fn)


class Pickler(cloudpickle.Pickler):
    """Pickles by cloudpickle's rules, and functions with a cache as it does functions."""

    dispatch_table: ClassVar[Any] = ChainMap({CACHED: _reduce_cached}, cloudpickle.Pickler.dispatch_table)


def reduced(obj: Any) -> Any:
    """Return the recipe by which an object is pickled, made anew: a name, or what ``__reduce_ex__`` returns."""
    rule = Pickler.dispatch_table.get(type(obj))
    return obj.__reduce_ex__(5) if rule is None else rule(obj)
