"""The resident objects of one rank: kept between calls, and brought into the state of another rank where they must be.

A call that changes one is a transaction only in part: nobody can undo what it did to the user's object. So the object
counts as torn from the first line of such a call to its last, and tells the number of the last call that it came
through; from both the master sees which rank is furthest. Objects that know how (``__synk_keep__``: those of
``synk.torch.replicate``) put back what a call that did not end well has changed, as far as they can.
"""

from __future__ import annotations

import itertools
import operator
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from synk._wire.cell import cell
from synk._wire.control import Down
from synk._wire.residents import Adopt, Dump, Report, Restore
from synk._worker.held.pickling import dumps
from synk.errors import SerializationError


class RankResident:
    """One object of one rank; what a ``Resident`` is inside a function.

    Attributes
    ----------
    name : str
    value : object
        This rank's own.
    version : int
        Number of the last call that has changed it and came to its end.
    is_torn : bool
        Whether a call that changes it has begun and did not come to its end.
    mark : bytes
        Of an object that was put back: ranks on which it differs are to have the same state again.
    """

    def __init__(self, name: str, made: tuple[Any, Any, Any], version: int) -> None:
        self.name = name
        self.value, self._dump, self._load = made
        self.version = version
        self.is_torn = False
        self.mark = b""
        self._put_back: Callable[[], bytes | None] | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_put_back": None}  # a copy, on trial, goes back to nothing

    def begin(self) -> None:
        """A call that changes it begins."""
        keep = getattr(type(self.value), "__synk_keep__", None)
        self.mark, self._put_back = b"", None if keep is None else keep(self.value)
        self.is_torn = True

    def report(self) -> tuple[int, bool, bytes]:
        """Return how far it is, when calls are over: what one has left that did not end well is put back first."""
        put_back, self._put_back = self._put_back, None
        if self.is_torn and put_back is not None and (mark := put_back()) is not None:
            self.is_torn, self.mark = False, mark
        return self.version, self.is_torn, self.mark

    def state(self) -> bytes:
        """Return what another rank needs to bring its object into the state of this one."""
        return dumps(self.value if self._dump is None else self._dump(self.value))

    def restore(self, state: bytes, version: int) -> None:
        """Take over the state of another rank."""
        self.is_torn = True  # until it is whole
        loaded = pickle.loads(state)
        if self._load is None:
            self.value = loaded
        else:
            self._load(self.value, loaded)
        self.version, self.is_torn, self.mark = version, False, b""


class Residents:
    """All resident objects of one rank, by number."""

    def __init__(self) -> None:
        self._objects: dict[int, RankResident] = {}

    def get(self, resident_id: int) -> RankResident:
        return self._objects[resident_id]

    def forget(self, resident_ids: Iterable[int]) -> None:
        """Drop objects; functions that still refer to one keep it."""
        for resident_id in resident_ids:
            self._objects.pop(resident_id, None)

    def act(self, order: Any) -> dict[str, Any]:
        """Do what a message says and return the body of the reply."""
        if isinstance(order, Adopt):
            sys.path[:] = order.sys_path
            made = pickle.loads(order.pickle)
            old = self._objects.get(order.resident_id)
            if old is None:
                self._objects[order.resident_id] = RankResident(order.name, made, order.version)
            else:  # functions refer to it
                old.__init__(order.name, made, order.version)  # type: ignore[misc]
        elif isinstance(order, Report):
            known = [self._objects[resident_id] for resident_id in order.resident_ids]
            with cell.worker.uninterrupted():
                return {"states": [resident.report() for resident in known]}
        elif isinstance(order, Dump):
            resident = self._objects[order.resident_id]
            return {"state": dumps(resident.value) if order.is_whole else resident.state()}
        elif isinstance(order, Restore):
            self._objects[order.resident_id].restore(order.state, order.version)
        return {}


def resident_argument(resident_id: int, *, is_trial: bool) -> Any:
    """Return this rank's object as a function gets it that it is passed to: itself, and a copy on trial.

    Raises
    ------
    SerializationError
        If it cannot be copied.
    """
    resident = cell.worker.residents.get(resident_id)
    if not is_trial:
        return resident.value
    try:
        return pickle.loads(dumps(resident.value))
    except Exception as error:
        raise SerializationError(
            f"cannot try a function: its argument, resident object {resident.name!r}, cannot be copied on its rank "
            f"({type(error).__name__}: {error}), expected one that can be pickled."
        ) from error


class Changing:
    """A function, at whose end ``residents`` have come through one more call that changes them."""

    def __init__(self, fn: Callable[..., Any], residents: Sequence[RankResident]) -> None:
        self._fn = fn
        self._residents = residents

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for resident in self._residents:
            resident.begin()
        worker = cell.worker
        try:
            result = self._fn(*args, **kwargs)
            with worker.uninterrupted():  # all of them, or none
                number = int(worker.lane.first_down[Down.CALL])
                for resident in self._residents:
                    resident.version, resident.is_torn = number, False
            worker.hold_back(False)
        except BaseException:
            worker.is_held, worker.num_held = False, 0  # the next call begins without
            raise
        return result


class Reading:
    """A function that captured modules of torch and may only read them.

    What it changed in them would be this rank's own: no other rank, and not the master, would have it.
    """

    def __init__(self, fn: Callable[..., Any], modules: Sequence[Any], name: str) -> None:
        self._fn = fn
        self._modules = modules
        self._name = name
        self._has_changed = ""
        self._tables: list[dict[str, Any]] | None = None
        self._tensors: list[Any] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        if not self._is_as_before():
            self._tables = [t for m in self._modules for each in m.modules() for t in (each._parameters, each._buffers)]
            self._tensors = list(_values(self._tables))
        before = _marks(self._tensors)
        result = self._fn(*args, **kwargs)
        if not self._is_as_before() or _marks(self._tensors) != before:
            self._has_changed = self._name_of_changed(before)
            self._check()
        return result

    def _is_as_before(self) -> bool:
        """Whether the modules have the tensors that they had. One that a function adds to a new part is not seen."""
        if self._tables is None:
            return False
        now = list(_values(self._tables))
        return len(now) == len(self._tensors) and all(map(operator.is_, now, self._tensors))

    def _name_of_changed(self, before: Sequence[tuple[int, int]]) -> str:
        known = dict(zip(map(id, self._tensors), before))
        for module in self._modules:
            for name, tensor in (*module.named_parameters(), *module.named_buffers()):
                if known.get(id(tensor)) != (tensor._version, tensor.data_ptr()):
                    return str(name)
        return "a tensor"

    def _check(self) -> None:
        if self._has_changed:
            raise TypeError(
                f"cannot use the result of {self._name!r}: it has changed {self._has_changed!r} of a torch module that "
                "it captured, on this worker's copy alone, expected a function that only reads it (batch norms: "
                "module.eval()). Train with synk.torch.replicate(model, optimizer), or keep the module on the workers "
                "by synk.resident(module) and changes=[...]."
            )


def _values(tables: Sequence[dict[str, Any]]) -> Iterator[Any]:
    """Return the tensors of modules, in their order."""
    return filter(_is_there, itertools.chain.from_iterable(map(dict.values, tables)))


def _is_there(tensor: Any) -> bool:
    return tensor is not None


def _marks(tensors: Sequence[Any]) -> list[tuple[int, int]]:
    """Return what shows that a parameter or buffer was changed."""
    return [(tensor._version, tensor.data_ptr()) for tensor in tensors]
