"""Checks on captured objects: whether they can be sent, and which variables are in them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from synk._code.culprits import culprit_in, named_by, place_of
from synk._code.handles import HandlePickler
from synk._processes.output import warn_at_users_line
from synk._pure.interrupts import raise_if_of_handler
from synk._pure.texts import text_of
from synk.errors import SerializationError


class Restless:
    """The objects of a function whose pickle is another one each time: they are sent with each call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._places: set[str] = set()
        self._has_told = False

    def note(self, fn: Any, objects: Iterable[Any]) -> None:
        """Note such objects. Tell the user once, when one is sent again."""
        places = {place_of(fn, obj) for obj in objects}
        told = self._places & places
        if told and not self._has_told:
            self._has_told = True
            warn_at_users_line(
                f"{self._name!r} captured {min(told)}, whose pickle is another one each time: it is sent with each "
                "call, and what a rank has changed in it is lost. Pass it as an argument, or make it in the function.",
                UserWarning,
            )
        self._places |= places


class _Nowhere:
    """A file that keeps nothing."""

    def write(self, data: Any) -> int:
        return memoryview(data).nbytes


class Referred(NamedTuple):
    """The variables and resident objects to which a function refers."""

    variables: set[Any]
    residents: set[Any]


class Captured(NamedTuple):
    """Everything to which a function refers: things on the workers, and those of torch, which are copied there."""

    referred: Referred
    modules: tuple[Any, ...]
    optimizers: tuple[Any, ...]
    tensors: tuple[Any, ...]

    @property
    def classes(self) -> list[type]:
        """The classes that resident objects name."""
        residents = sorted(self.referred.residents, key=lambda resident: resident.number)
        return [cls for resident in residents for cls in resident.classes]


def captured_in(value: Any) -> Captured:
    """Return what ``value`` refers to. Raises whatever pickling it raises."""
    pickler = HandlePickler(_Nowhere(), buffer_callback=lambda buffer: None)
    pickler.dump(value)
    parts = {id(part) for module in pickler.modules for part in list(module.modules())[1:]}
    return Captured(
        referred_in(pickler.handles),
        tuple(module for module in pickler.modules if id(module) not in parts),
        tuple(pickler.optimizers),
        tuple(pickler.tensors),
    )


def check_captured(name: str, options: dict[str, Any]) -> Captured:
    """Return what a function refers to.

    Raises
    ------
    SerializationError
        If the function cannot be sent.
    TypeError
        If it would train: each worker would change a copy of its own, and no model would learn.
    """
    try:
        captured = captured_in(options)
    except Exception as error:
        raise unsendable(repr(name), options["fn"], error) from error
    check_optimizers(name, captured.optimizers)
    return captured


def unsendable(names: str, fn: Any, error: Exception) -> SerializationError:
    """Return the error for a function that cannot be pickled. What a handler of a signal has raised is raised here."""
    raise_if_of_handler(error)
    return SerializationError(
        f"cannot send {names} to the workers: {_culprit_of(fn)}{text_of(error).rstrip('.')}. "
        "Make such an object inside the function, or pass what it needs as an argument."
    )


def check_optimizers(name: str, optimizers: Sequence[Any]) -> None:
    if optimizers:
        raise TypeError(
            f"cannot build {name!r}: it refers to a torch optimizer ({type(optimizers[0]).__name__}), whose steps "
            "would change a copy on each worker and not the model here. Use synk.torch.replicate(model, optimizer), "
            "and as the body a function outside of any class that holds them; or keep both on the workers by "
            "synk.resident((model, optimizer))."
        )


def _culprit_of(fn: Any) -> str:
    """Return a sentence that names the first part of a function that cannot be pickled."""
    for name, value in named_by(fn):
        try:
            captured_in(value)
        except Exception as error:
            raise_if_of_handler(error)
            place, part = culprit_in(name, value, captured_in)
            return f"its variable {place!r} ({type(part).__name__}) cannot be pickled. "
    return ""


def referred_in(handles: Sequence[Any]) -> Referred:
    """Return the variables and resident objects behind the handles that a function captured."""
    referents = [handle._referent for handle in handles]
    return Referred(
        {each for each in referents if getattr(each, "kind", "") == "variable"},
        {each for each in referents if getattr(each, "kind", "") == "resident"},
    )
