"""The code for parcels that both halves need: the pickler of the program, and the functions that a pickle calls."""

from __future__ import annotations

import functools
import importlib
import io
import math
import mmap
import types
from collections import ChainMap
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import cloudpickle
import numpy as np
from cloudpickle.cloudpickle import (
    _dynamic_class_reduce,
    _is_registered_pickle_by_value,
    _lookup_module_and_qualname,
)

from synk._wire.classes import REDUCERS, by_word, completed, readable


class Mapped(NamedTuple):
    """Where the bytes of a large array lie: ``nbytes`` from ``offset`` on in a segment."""

    segment: int
    offset: int
    nbytes: int


class Absent:
    """Stands in a parcel for the value of a name that no longer exists."""


class Missing(types.SimpleNamespace):
    """Stands for an object of a module that a worker could not find there. It takes changes, and raises when called."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self._error = error

    def check(self) -> None:
        """Raise the error of the worker's own import."""
        raise self._error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.check()


def locate(module: str, steps: tuple[tuple[str, Any], ...], defaults: dict[str, Any]) -> Any:
    """Return an object of a module that a worker imports itself, or a stand-in if there is none.

    If it is a function, it gets the defaults that the program's has.
    """
    try:
        found: Any = importlib.import_module(module)
        for kind, key in steps:
            if kind == "table":
                found = vars(found)
            elif kind == "member":  # past descriptors
                found = vars(found)[key]
            else:
                found = found.__closure__[key] if kind == "closure" else getattr(found, key)
    except Exception as error:  # raised where a function needs it
        return {} if steps and steps[-1][0] == "table" else Missing(error)
    for name, value in defaults.items() if isinstance(found, types.FunctionType) else ():
        setattr(found, name, value)
    return found


def make_cell() -> types.CellType:
    """Return an empty cell."""
    return types.CellType()


def fill_function(function: types.FunctionType, state: tuple[Any, Any, Any]) -> None:
    """Set the cells that came with a function; cloudpickle's own ``setter`` sets the rest."""
    filled, setter, rest = state
    for cell, value in filled:
        cell.cell_contents = value
    setter(function, rest)


def make_read_only(raw: bytes, dtype: np.dtype, shape: tuple[int, ...], order: Any) -> np.ndarray:
    """Return a read-only array with the elements in ``raw``, in memory to which changes can be written."""
    array: np.ndarray = np.ndarray(shape, dtype, bytearray(raw), order=order)
    array.flags.writeable = False
    return array


def make_array(raw: np.ndarray, dtype: np.dtype, shape: tuple[int, ...], order: str) -> np.ndarray:
    """Return the array whose bytes lie in shared memory. The mapping is private: writing to it copies pages."""
    return np.frombuffer(raw, dtype, math.prod(shape)).reshape(shape, order=order)  # type: ignore[call-overload]


def make_tensor(raw: Any, dtype: Any, shape: tuple[int, ...], requires_grad: bool, is_parameter: bool) -> Any:
    """Return a torch tensor with the elements in ``raw``: bytes, or an array in shared memory."""
    import torch

    if math.prod(shape):
        memory = (
            torch.frombuffer(bytearray(raw), dtype=dtype)
            if isinstance(raw, bytes)
            else torch.from_numpy(raw).view(dtype)
        )
        tensor = memory.reshape(shape)
    else:
        tensor = torch.empty(shape, dtype=dtype)
    return torch.nn.Parameter(tensor, requires_grad) if is_parameter else tensor.requires_grad_(requires_grad)


CACHED = type(functools.lru_cache(abs))
"""The type of functions with a cache (``functools.lru_cache``, ``functools.cache``)."""


BY_VALUE: set[str] = set()
"""The user's modules that were reloaded: their functions and classes travel with their contents from then on."""


def is_by_reference(obj: Any) -> bool:
    """Whether a function, a class or a function with a cache is pickled as its name in a module."""
    found = _lookup_module_and_qualname(obj)
    return found is not None and not _is_registered_pickle_by_value(found[0]) and found[0].__name__ not in BY_VALUE


def _reduce_cached(cached: Any) -> Any:
    if is_by_reference(cached):
        return cached.__reduce__()
    return cached_recipe(cached)


def cached_recipe(cached: Any) -> Any:
    """Return how a function with a cache travels with its contents, though without what is in the cache."""
    return make_cached, (cached.__wrapped__, cached.cache_parameters())


def make_cached(fn: Callable[..., Any], parameters: dict[str, Any]) -> Callable[..., Any]:
    """Return ``fn`` with an empty cache."""
    return functools.lru_cache(**parameters)(fn)


def _reduce_cached_property(prop: functools.cached_property[Any]) -> Any:
    """Return the recipe of a ``functools.cached_property``, whose lock cannot be pickled before Python 3.12."""
    return make_cached_property, (prop.func, prop.attrname)


def make_cached_property(func: Callable[[Any], Any], name: str | None) -> functools.cached_property[Any]:
    """Return the property with its name set: a class that exists already would not do that any more."""
    prop = functools.cached_property(func)
    prop.attrname = name
    return prop


def _reduce_code(code: types.CodeType) -> Any:
    """Return cloudpickle's recipe of a code object, and the file, which newer releases replace by a text."""
    make, args = cloudpickle.Pickler.dispatch_table[types.CodeType](code)
    return make_code, (make, args, code.co_filename)


def make_code(make: Callable[..., types.CodeType], args: tuple[Any, ...], file: str) -> types.CodeType:
    """Return the code object with the file that its lines are in, which tracebacks name."""
    return make(*args).replace(co_filename=file)


def _reduce_partialmethod(method: functools.partialmethod[Any]) -> Any:
    """Return the recipe of a ``functools.partialmethod``, which Python 3.14 cannot make without its function."""
    return object.__new__, (functools.partialmethod,), vars(method)


def _reduce_view(view: memoryview) -> Any:
    try:
        dtype = None if view.format == "c" else np.asarray(view).dtype  # NumPy would make it a text of one byte
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"cannot pickle a memoryview of format {view.format!r}: expected elements that NumPy can hold. Use its "
            "tobytes()."
        ) from error
    return make_view, (view.tobytes(), dtype, view.shape, view.readonly)


def make_view(raw: bytes, dtype: np.dtype | None, shape: tuple[int, ...], is_readonly: bool) -> Any:
    """Return a memoryview of the elements in ``raw``, in C order; without a dtype, of single bytes."""
    memory = raw if is_readonly else bytearray(raw)
    return memoryview(memory).cast("c", shape) if dtype is None else np.ndarray(shape, dtype, memory).data


def _reduce_array(array: np.ndarray) -> Any:
    """Return the recipe of an array with attributes, which NumPy leaves out."""
    cls, rules = type(array), np.ndarray
    is_plain = all(
        getattr(cls, name) is getattr(rules, name) for name in ("__reduce__", "__reduce_ex__", "__setstate__")
    )
    table = {key: value for key, value in getattr(array, "__dict__", {}).items() if type(value) is not mmap.mmap}
    if not table or not is_plain or array.dtype.hasobject:
        return NotImplemented
    recipe: Any = array.__reduce_ex__(5)
    make, args, state, *_ = recipe
    return make, args, (state, table), None, None, fill_array


def fill_array(array: np.ndarray, state: tuple[Any, dict[str, Any]]) -> None:
    """Set the elements of an array, and the attributes, in place of those that its class has given it."""
    elements, table = state
    array.__setstate__(elements)
    vars(array).update(table)


class Pickler(cloudpickle.Pickler):
    """Pickles by cloudpickle's rules.

    In addition, code keeps the name of its file, functions with a cache travel like functions, memoryviews stay
    memoryviews, and arrays keep their attributes.
    """

    dispatch_table: ClassVar[Any] = ChainMap(
        {
            types.CodeType: _reduce_code,
            CACHED: _reduce_cached,
            functools.cached_property: _reduce_cached_property,
            functools.partialmethod: _reduce_partialmethod,
            memoryview: _reduce_view,
            **REDUCERS,
        },
        cloudpickle.Pickler.dispatch_table,
    )

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.ndarray) and type(obj) is not np.ndarray:
            return _reduce_array(obj)
        if isinstance(obj, (types.FunctionType, type)) and obj.__module__ in BY_VALUE:
            return _dynamic_class_reduce(obj) if isinstance(obj, type) else self._dynamic_function_reduce(obj)
        return super().reducer_override(obj)

    def _dynamic_function_reduce(self, function: types.FunctionType) -> Any:
        """Return cloudpickle's recipe for a function, completed by what cloudpickle leaves out."""
        make, args, (table, slots), *rest = super()._dynamic_function_reduce(readable(function))
        parameters = getattr(function, "__type_params__", ())
        if parameters:
            slots["__type_params__"] = parameters
        return make, args, (table, slots), *rest


class TravelPickler(Pickler):
    """Pickles what goes to another process.

    Attributes
    ----------
    has_word : bool
        Whether this process decides what its own classes hold: they are then filled even where they are known already.
    named : list of type
        The classes it has met.
    """

    has_word = False

    def __init__(self, file: Any, **options: Any) -> None:
        super().__init__(file, **options)
        self.named: list[type] = []

    def reducer_override(self, obj: Any) -> Any:
        recipe = super().reducer_override(obj)
        if isinstance(obj, type):
            self.named.append(obj)
            if isinstance(recipe, tuple) and len(recipe) == 6:  # it travels with its contents
                return self.class_recipe(obj, completed(obj, recipe))
        return recipe

    def class_recipe(self, cls: type, recipe: Any) -> Any:
        """Return how a class travels with its contents."""
        return by_word(cls, recipe, self.has_word)


def dumps(
    obj: Any, *, protocol: int = 5, buffer_callback: Callable[[Any], Any] | None = None, has_word: bool = False
) -> bytes:
    """Return ``obj`` pickled for another process, or for a file.

    A class that is known where it is loaded stays as it is there. With ``has_word`` it becomes what it is here, if this
    process has made it.
    """
    file = io.BytesIO()
    pickler = TravelPickler(file, protocol=protocol, buffer_callback=buffer_callback)
    pickler.has_word = has_word
    pickler.dump(obj)
    return file.getvalue()


def reduced(obj: Any) -> Any:
    """Return the recipe by which an object is pickled: a name, or what ``__reduce_ex__`` returns now."""
    rule = Pickler.dispatch_table.get(type(obj))
    return obj.__reduce_ex__(5) if rule is None else rule(obj)
