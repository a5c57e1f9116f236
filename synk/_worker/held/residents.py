"""The resident objects of one rank: kept between calls, and brought into another rank's state when necessary.

A call that changes a resident object is not a full transaction, because nobody can undo in general what it did to a
user's object. So the object counts as torn from the first line of such a call to the last, and carries the number of
the last call that completed. These two tell the master which rank has got furthest. The objects that
``synk.torch.replicate`` makes have a method ``__synk_keep__``, by which they undo the changes of a failed call as far
as possible.
"""

from __future__ import annotations

import itertools
import operator
import pickle
import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from synk._wire.cell import cell
from synk._wire.control import Down
from synk._wire.residents import Adopt, Dump, ReportStates, Restore
from synk._worker.held.pickling import dumps


class RankResident:
    """A resident object on one rank: what a ``Resident`` is inside a function.

    Attributes
    ----------
    name : str
    value : object
        This rank's own.
    first : int
        The version with which it was set.
    version : int
        Number of the last call that has changed it and completed.
    is_torn : bool
        Whether a call that changes it has begun and not completed.
    mark : bytes
        Set when the object has undone a call's changes. Ranks whose marks differ are brought into one state again.
    """

    def __init__(self, name: str, made: tuple[Any, Any, Any], first: int, version: int) -> None:
        self.name, self.first = name, first
        self.value, self._dump, self._load = made
        self.version = version
        self.is_torn = False
        self.mark = b""
        self._put_back: Callable[[], bytes | None] | None = None

    def begin(self) -> None:
        """Note the beginning of a call that changes the object."""
        keep = getattr(type(self.value), "__synk_keep__", None)
        self.mark, self._put_back = b"", None if keep is None else keep(self.value)
        self.is_torn = True  # last: what goes back must be kept before the first change can happen

    def report(self) -> tuple[int, bool, bytes]:
        """Return ``(version, is_torn, mark)``, after undoing what a failed call has left, if that is possible.

        Called only while no call is in flight.
        """
        # Taken out first: if it fails in the middle, the object stays torn, and nothing is put back a second time.
        put_back, self._put_back = self._put_back, None
        if self.is_torn and put_back is not None and (mark := put_back()) is not None:
            self.is_torn, self.mark = False, mark
        return self.version, self.is_torn, self.mark

    def state(self) -> bytes:
        """Return a pickle from which another rank can bring its object into this one's state."""
        return dumps(self.value if self._dump is None else self._dump(self.value))

    def restore(self, state: bytes, version: int | None = None) -> None:
        """Take over the state of another rank."""
        # Until the state is complete. If this rank dies or fails in between, no other rank takes its object for whole.
        self.is_torn = True
        loaded = pickle.loads(state)
        if self._load is None:
            self.value = loaded
        else:
            self._load(self.value, loaded)
        self.version, self.is_torn, self.mark = self.version if version is None else version, False, b""


class RankResidents:
    """All resident objects of one rank, by number."""

    def __init__(self) -> None:
        self._objects: dict[int, RankResident] = {}

    def get(self, resident_id: int) -> RankResident:
        return self._objects[resident_id]

    def forget(self, resident_ids: Iterable[int]) -> None:
        """Drop objects. A function that still refers to one keeps it alive."""
        for resident_id in resident_ids:
            self._objects.pop(resident_id, None)

    def act(self, order: Any) -> dict[str, Any]:
        """Do what a message says and return the body of the reply."""
        if isinstance(order, Adopt):
            sys.path[:] = order.sys_path
            made = pickle.loads(order.pickle)
            old = self._objects.get(order.resident_id)
            if old is None:
                self._objects[order.resident_id] = RankResident(order.name, made, order.first, order.version)
            else:  # functions refer to it
                old.__init__(order.name, made, order.first, order.version)  # type: ignore[misc]
        elif isinstance(order, ReportStates):
            with cell.worker.uninterrupted():
                return {"states": [self._state(*each) for each in order.objects]}
        elif isinstance(order, Dump):
            resident = self._objects[order.resident_id]
            return {"state": dumps(resident.value) if order.is_whole else resident.state()}
        elif isinstance(order, Restore):
            self._objects[order.resident_id].restore(order.state, order.version)
        return {}

    def _state(self, resident_id: int, first: int) -> tuple[int, bool, bytes] | None:
        resident = self._objects.get(resident_id)
        return None if resident is None or resident.first != first else resident.report()


class Changing:
    """Wraps a function that was made with residents in ``updates=``: each call of it changes some resident objects.

    It marks these objects as torn before the function runs, and gives all of them the number of the call, in one step,
    when the function has returned. If the function raises, or its rank dies, they stay torn, and the master brings them
    into one state before the next call that uses them.

    Parameters
    ----------
    fn : callable
    residents : sequence of RankResident
        The objects that the function changes.
    """

    def __init__(self, fn: Callable[..., Any], residents: Sequence[RankResident]) -> None:
        self._fn = fn
        self._residents = residents

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for resident in self._residents:
            resident.begin()
        worker = cell.worker
        try:
            result = self._fn(*args, **kwargs)
            # All of them, or none: an interrupt waits until the last one has its number.
            with worker.uninterrupted():
                number = int(worker.lane.first_down[Down.CALL])
                for resident in self._residents:
                    resident.version, resident.is_torn = number, False
            worker.hold_back(False)
        except BaseException:
            worker.is_held = worker.is_due = False  # the next call must not begin with an interrupt held back
            raise
        return result


class Reading:
    """Wraps a function that captured torch modules without ``updates=``: it may read them, but not change them.

    A change, such as the running averages of a batch norm, would stay on this rank: neither the other ranks nor the
    master would have it. So the wrapper compares the versions and addresses of all parameters and buffers before and
    after each call, and raises a TypeError if any has changed. From then on every call raises it, because the modules
    of this rank are no longer those of the program.
    """

    def __init__(self, fn: Callable[..., Any], modules: Sequence[Any], name: str) -> None:
        self._fn = fn
        self._modules = modules
        self._name = name
        self._has_changed = ""
        self._message = 0  # the number of the message with the last call, if that has changed nothing
        self._tables: list[Any] = []  # views of the parameters and of the buffers of modules that have some
        self._empty: list[dict[str, Any]] = []
        self._values: list[Any] = []  # what the tables held, in order; None for a parameter or buffer without tensor
        self._tensors: list[Any] = []
        self._before: tuple[list[int], list[int]] = [], []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._check()
        message = cell.worker.num_messages
        # Other functions, and what the master sends, may change the tensors. If the rank's last message was a call of
        # this function, nothing else was here since it found the tensors unchanged.
        if message not in (self._message, self._message + 1) or not self._message:
            if not (self._tables and self._is_as_before()):
                self._find_tensors()
            self._before = _marks(self._tensors)
        self._message = 0  # the function may raise
        result = self._fn(*args, **kwargs)
        if not self._is_as_before() or _marks(self._tensors) != self._before:
            self._has_changed = self._name_of_changed()
            self._check()
        self._message = message
        return result

    def _find_tensors(self) -> None:
        tables = [t for m in self._modules for each in m.modules() for t in (each._parameters, each._buffers)]
        self._tables, self._empty = [t.values() for t in tables if t], [t for t in tables if not t]
        self._values = list(itertools.chain.from_iterable(self._tables))
        self._tensors = [each for each in self._values if each is not None]

    def _is_as_before(self) -> bool:
        """Whether the modules still have the same tensors. A tensor in a submodule added since is not noticed."""
        now = list(itertools.chain.from_iterable(self._tables))
        return len(now) == len(self._values) and all(map(operator.is_, now, self._values)) and not any(self._empty)

    def _name_of_changed(self) -> str:
        known = dict(zip(map(id, self._tensors), zip(*self._before)))
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
                "by synk.resident(module) and updates=[...]."
            )


def _marks(tensors: Sequence[Any]) -> tuple[list[int], list[int]]:
    """Return versions and addresses of tensors. A change of a parameter or buffer alters one of them."""
    torch: Any = sys.modules["torch"]
    return list(map(operator.attrgetter("_version"), tensors)), list(map(torch.Tensor.data_ptr, tensors))
