"""What a call needs of the function that is called, and how functions come to the workers.

Made with the user's function, before there is a runtime, and sent with others when a call or ``distribute`` needs it.
"""

from __future__ import annotations

import sys
import threading
import types
import weakref
from collections.abc import Sequence
from typing import Any

from synk._master.captured import Changes, Referred, check_captured, referred_by
from synk._master.plans import PlanCache
from synk._master.repeated_copies import RepeatedCopies
from synk._master.resident import ResidentHandle
from synk._master.resident import check_owner as check_owner_of_resident
from synk._master.row_shapes import RowShapes
from synk._master.session import Session
from synk._master.signature import Signature
from synk._master.variable import check_owner
from synk._master.watch import Watch, is_users_module, watch
from synk._pure.interrupts import deferred

_waiting: weakref.WeakKeyDictionary[Callee, None] = weakref.WeakKeyDictionary()  # in the order they were made
_waiting_lock = threading.Lock()


class FunctionHandle:
    """The base of :class:`synk.Function`. A module holds one under the function's name."""

    _callee: Callee


class Callee:
    """A function, as calls know it. The workers forget it when nobody holds it any more.

    Parameters
    ----------
    fn, bcast_inputs, outputs, updates, framework, name, per_rank
        As for :func:`synk.function`, checked.
    changes : sequence of ResidentHandle
    session : Session or None
        The only one that may call it; None: any. Afterwards ``fixed_session``.

    Attributes
    ----------
    changes : tuple of ResidentObject
    session : Session or None
        That whose workers have it.
    id : int
        Given by that session.
    watch : Watch or None
        Over what they have been told of it.
    is_stale : bool
        Whether it has to be sent again.
    variables, residents : set of Variable, set of ResidentObject
        What it refers to.
    row_shapes : RowShapes
    plans : PlanCache
    large_changes : Changes
    repeated_copies : RepeatedCopies

    Raises
    ------
    SerializationError, TypeError, ValueError
        If it cannot be sent, or does not fit its options.
    """

    def __init__(
        self,
        fn: Any,
        name: str,
        *,
        bcast_inputs: str | Sequence[str] = (),
        outputs: Any = "avg",
        updates: tuple[Any, ...] = (),
        changes: Sequence[ResidentHandle] = (),
        framework: str | None = None,
        per_rank: bool = False,
        session: Session | None = None,
    ) -> None:
        self.fn = fn
        self.name = name
        self._bcast_inputs = bcast_inputs
        self.signature = Signature(fn, bcast_inputs, name)
        self.outputs = outputs
        self._updates = updates
        self._changed = tuple(changes)
        self.changes = tuple(handle._resident for handle in changes)
        self.framework = framework
        self.per_rank = per_rank
        self.fixed_session = session
        self.session: Session | None = None
        self.id = -1
        self.row_shapes = RowShapes(name)
        self.plans = PlanCache()
        self.is_stale = False
        self.watch: Watch | None = None
        self._code = getattr(fn, "__code__", None)
        self._home: tuple[dict[str, Any], str] | None = None  # the user's module that holds it, and its name there
        self.large_changes = Changes(name)
        self.repeated_copies = RepeatedCopies(name)
        self._modules: tuple[Any, ...] = ()
        captured = check_captured(name, self.options)
        (self.variables, self.residents), self._modules = captured.referred, captured.modules
        _waiting[self] = None

    @property
    def options(self) -> dict[str, Any]:
        """What a worker needs to run the function."""
        return {
            "fn": self.fn,
            "name": self.name,
            "outputs": self.outputs,
            "framework": self.framework,
            "updates": self._updates,
            "changes": self._changed,
            "modules": self._modules,
        }

    # -- what its code names ------------------------------------------------------------------------------------------

    def renew(self) -> FunctionHandle | None:
        """Go on with what the function's code names now; return what its module holds in its place, if it does.

        A module that is reloaded makes its functions anew, and its name in the module tells which one is meant.
        """
        if self.watch is None or self.watch.is_current():
            return None
        successor = self._home[0].get(self._home[1]) if self._home is not None else None
        if isinstance(successor, FunctionHandle) and successor._callee is not self:
            return successor
        fn = successor if isinstance(successor, types.FunctionType) else self.fn
        code = getattr(fn, "__code__", None)
        if fn is not self.fn or code is not self._code:
            self.signature = Signature(fn, self._bcast_inputs, self.name)
            self.plans.forget_quiet()
            self.fn, self._code = fn, code
        self.is_stale = True
        return None

    def look(self) -> Watch:
        """Return a watch over what the function names now."""
        if self._home is None:
            self._home = self._find_home()
        home = self._home
        return watch(self.fn, [] if home is None else [(home[0].get, home[1], home[0].get(home[1]))])

    def _find_home(self) -> tuple[dict[str, Any], str] | None:
        """Return the namespace and the name under which a module of the user's holds the function, decorated or not."""
        module, name = getattr(self.fn, "__module__", None), getattr(self.fn, "__qualname__", "")
        if not isinstance(module, str) or not is_users_module(module):
            return None
        table = vars(sys.modules[module])
        held = table.get(name)
        is_own = held is self.fn or (isinstance(held, FunctionHandle) and held._callee is self)
        return (table, name) if is_own else None

    def is_changed_inside(self) -> bool:
        """Whether an object that the function captures was changed in place since the workers were told of it.

        Compares the elements of arrays, lists and sets, keys of dicts and attributes, at any depth. What a new
        definition of the function, or ``Runtime.restart``, would send.
        """
        return self.session is not None and self.session.functions.book.is_changed_inside(self.id)

    # -- on the workers -----------------------------------------------------------------------------------------------

    def load(self, session: Session, deadline: float | None) -> None:
        """See that the workers have it."""
        if self.session is not session or self.is_stale:
            distribute(session, [self], deadline=deadline)
        else:
            session.functions.ensure_loaded(deadline)

    def note_loaded(self, session: Session, watched: Watch, referred: Referred) -> None:
        """The workers have it, with what ``watched`` says that it names."""
        is_new = self.session is not session
        if self.session is not None and is_new:
            self.plans = PlanCache()
        self.session = session
        self.watch, self.is_stale = watched, False
        self.variables, self.residents = referred
        session.functions.bound.add(self)
        _waiting.pop(self, None)
        if is_new:
            dropped = weakref.finalize(self, session.functions.dropped.append, (self.id, self.plans))
            dropped.atexit = False  # the user's own exit handlers may still call it

    def forget_sent(self) -> None:
        """The runtime is closed: let go of what was compared with what its workers had."""
        self.plans.forget()
        self.watch = None


def distribute(session: Session, only: Sequence[Callee] | None = None, *, deadline: float | None) -> None:
    """Pickle the functions that the workers do not have yet, together, and load them on all workers."""
    with _waiting_lock:
        candidates = list(_waiting if only is None else only)
    functions = [
        f for f in candidates if f.fixed_session in (None, session) and (f.session is not session or f.is_stale)
    ]
    session.functions.ensure_loaded(deadline)
    if not functions:
        return
    names = ", ".join(repr(function.name) for function in functions)
    watches = [function.look() for function in functions]
    referred = [referred_by(function.name, function.options, watched) for function, watched in zip(functions, watches)]
    for variables, residents in referred:
        for variable in variables:
            check_owner(variable, session.variables, names)
        for resident in residents:
            check_owner_of_resident(resident, session.residents, names)
    for function in functions:
        if function.session is not session:
            function.id = next(session.functions.ids)
    orders = [(f.id, f.fn, f.options, watched) for f, watched in zip(functions, watches)]
    for function in functions:
        if function.session is session and not session.functions.book.has(function.id, function.fn):
            function.plans.drop_all(session.workers)  # workers plan with the function that they have
    sent = session.functions.bring(orders, names, deadline)
    for function, watched, own in zip(functions, watches, referred):
        with deferred():  # what is on the workers must be dropped there some day
            function.note_loaded(session, watched, own)
    if len(functions) == 1:
        functions[0].large_changes.note(sent, session.counters["calls"])
