"""A function as calls know it, and how functions get to the workers.

A callee is made with the user's function, before there is a runtime. It is sent, together with others, when a call or
``distribute`` needs it.
"""

from __future__ import annotations

import itertools
import sys
import time
import types
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from synk._code.book import Book
from synk._code.capture import Capture, Watch
from synk._code.captured import Referred, Restless, captured_in, check_captured, check_optimizers, dearest, referred_in
from synk._code.modules import is_of_program, is_users_module
from synk._code.parcels import FunctionHandle
from synk._engine.argument import Signature
from synk._engine.ledger import Record, Repeated
from synk._engine.resident import Resident
from synk._engine.things import check_owner
from synk._processes.output import warn_at_users_line
from synk._pure.output_ops import ops_of

waiting: weakref.WeakKeyDictionary[Callee, None] = weakref.WeakKeyDictionary()  # in the order in which they were made
_NUM_CLASSES = 256
_LARGE_NBYTES = 1 << 18


class Callee:
    """A function as calls know it. The workers forget it when the last reference to it is gone.

    It has many attributes, because a call starts with nothing else. They are of four kinds: how the user built it; what
    it captured, and whether the workers have that as it is now; its plans; and what its calls have cost.

    Parameters
    ----------
    fn, bcast_inputs, outputs, updates, framework, name, per_rank
        As for :func:`synk.function`; all but ``outputs`` are checked already.
    changes : sequence of Resident
    reserved : frozenset of str
        Names that its parameters may not have.
    session : Session or None
        The only session that may call it; None for any. Kept as ``fixed_session``.

    Attributes
    ----------
    changes : tuple of ResidentObject
    session : Session or None
        The session whose workers have it.
    id : int
        Its number in that session.
    capture : Capture or None
        What the workers were told about what it captures. None: it, or something that it captured, must be sent.
    classes : list of type
        Of resident objects, arguments and items; they count as captured, because their methods may run in a call.
    variables, residents : set of Variable, set of ResidentObject
        What it refers to on the workers.
    ops : Op or nesting of them
        What ``outputs`` means.
    plans_by_key : dict
        By look, in the order in which they were made.
    object_room : int
        How much room its calls need for pickled objects.
    record : Record
        What its calls have cost in this session.
    restless : Restless
    repeated : Repeated

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
        changes: Sequence[Resident] = (),
        framework: str | None = None,
        per_rank: bool = False,
        reserved: frozenset[str] = frozenset(),
        session: Any = None,
    ) -> None:
        self.ops = ops_of(outputs, repr(name))
        self.fn = fn
        self.name = name
        self.bcast_inputs = bcast_inputs
        self._reserved = reserved
        self.signature = Signature(fn, bcast_inputs, name, reserved)
        self.outputs = outputs
        self.updates = updates
        self._changed = tuple(changes)
        self.changes = tuple(handle._referent for handle in changes)
        self.framework = framework
        self.per_rank = per_rank
        self.fixed_session = session
        self.session: Any = None
        self.id = -1
        self.plans_by_key: dict[Any, Any] = {}
        self.object_room = 1 << 10
        self.capture: Capture | None = None
        self._code = getattr(fn, "__code__", None)
        # Where the program itself looks the function up: the namespace of the user's module that defines it, and its
        # name there. A reload puts a new function under that name, and ``renew`` follows it. None for a function that
        # no module holds under its name, such as a lambda or an inner function.
        self._home: tuple[dict[str, Any], str] | None = None
        self.record = Record(name)
        mine = weakref.ref(self)
        self._watch = Watch(lambda: 0 if (me := mine()) is None else me.record.wall_ns, lambda ns: _warn(mine(), ns))
        self.restless = Restless(name)
        self.repeated = Repeated(name)
        self._modules, self.classes = (), list[type]()
        self._met: weakref.WeakSet[type] = weakref.WeakSet()
        captured = check_captured(name, self.options)
        (self.variables, self.residents), self._modules = captured.referred, captured.modules
        self.meet_classes(captured.classes)
        waiting[self] = None

    @property
    def options(self) -> dict[str, Any]:
        """The options with which a worker makes the function."""
        return {
            "fn": self.fn,
            "name": self.name,
            "outputs": self.outputs,
            "framework": self.framework,
            "updates": self.updates,
            "changes": self._changed,
            "modules": self._modules,
            "classes": self.classes,
        }

    # -- what it captured ---------------------------------------------------------------------------------------------

    def lacks(self, cls: type) -> bool:
        """Whether a class is one of the program's that does not count as captured yet."""
        if cls not in self._met and not is_of_program(cls):
            self._met.add(cls)
        return cls not in self._met

    def meet_classes(self, classes: Iterable[type]) -> None:
        """Let the program's classes among these count as captured."""
        new = [cls for cls in classes if cls not in self._met]
        self._met.update(new)
        if own := [cls for cls in new if is_of_program(cls)]:
            self.classes += own
            if len(self.classes) > _NUM_CLASSES:  # a class that is defined again and again is a new one each time
                self.classes, self._met = own, weakref.WeakSet(own)
            self.capture = None

    def renew(self) -> FunctionHandle | None:
        """Prepare for what the function captured as it is now. Return the function that replaces it in its module, if
        any.

        Reloading a module makes its functions again. The function with the same name in the module is the one that is
        meant.
        """
        if self.capture is None:  # the workers need not have it: other functions may be made of it
            self._home = self._home or self._find_home()
        elif self.capture.is_current():
            return None
        successor = self._home[0].get(self._home[1]) if self._home is not None else None
        if isinstance(successor, FunctionHandle) and successor._callee is not self:
            return successor
        fn = successor if isinstance(successor, types.FunctionType) else self.fn
        code = getattr(fn, "__code__", None)
        if fn is not self.fn or code is not self._code:
            self.signature = Signature(fn, self.bcast_inputs, self.name, self._reserved)
            self.fn, self._code = fn, code
            self.plans_by_key.clear()
        self.capture = None
        return None

    def _find_home(self) -> tuple[dict[str, Any], str] | None:
        """Return the namespace and the name under which a user's module holds the function; see ``_home``.

        The module may hold the plain function, or the :class:`FunctionHandle` that a decorator has put in its place.
        """
        module, name = getattr(self.fn, "__module__", None), getattr(self.fn, "__qualname__", "")
        if not isinstance(module, str) or not is_users_module(module):
            return None
        table = vars(sys.modules[module])
        held = table.get(name)
        is_own = held is self.fn or (isinstance(held, FunctionHandle) and held._callee is self)
        return (table, name) if is_own else None

    # -- on the ranks -------------------------------------------------------------------------------------------------

    def load(self, session: Any) -> None:
        """See that the next message brings the ranks the function as it is now."""
        if self.session is not session or self.capture is None:
            distribute(session, [self])

    def note_sent(self, session: Any, found: Referred) -> None:
        """Note that the ranks have the function and what it captured, or get it with the next message."""
        is_new = self.session is not session
        self.session = session
        if self._home is None:
            self._home = self._find_home()
        home = [] if self._home is None else [(self._home[0].get, self._home[1], self._home[0].get(self._home[1]))]
        self.record = session.profile.record(self.fn, self.name)
        self.capture = Capture(session.functions.book, self.id, home, self._watch)
        if is_new or found != (self.variables, self.residents):
            self.plans_by_key.clear()
        self.variables, self.residents = found
        session.functions.bound.add(self)
        waiting.pop(self, None)
        if is_new:
            is_large = session.functions.book.nbytes_of(self.id) >= _LARGE_NBYTES
            reclaimed = weakref.ref(session) if is_large else None
            dropped = weakref.finalize(self, _drop, session.functions.dropped, self.id, reclaimed)
            dropped.atexit = False  # the user's own exit handlers may still call it

    def note_unsent(self) -> None:
        """Note that the ranks may not have what the last message was to bring."""
        self.capture = None
        self.plans_by_key.clear()


def _drop(dropped: deque[int], function_id: int, session_ref: weakref.ref[Any] | None) -> None:
    """Note that a function no longer exists. What it captured is freed by the next operation or, if it is much, now.

    Only if it is much: an interrupt that comes just now, in a finalizer, is reported and lost.
    """
    dropped.append(function_id)
    session = None if session_ref is None else session_ref()
    if session is not None:
        session.reclaim()


def _warn(function: Callee | None, mean_ns: float) -> None:
    """Tell of captured objects that take long to compare."""
    if function is None or function.session is None:
        return
    costs: dict[int, float] = {}
    for node in function.session.functions.book.nodes_of(function.id):
        began = time.perf_counter_ns()
        for facet in node.facets:
            facet.is_current()
        costs[id(node.obj)] = time.perf_counter_ns() - began
    warn_at_users_line(
        f"{function.name!r} captured {dearest(function.fn, costs)}, and to compare what it captured takes "
        f"{mean_ns / 1e6:.1f} ms a call. Pass it as an argument (an array as synk.data), keep it on the workers "
        "(synk.shared, synk.resident), or use memory that cannot change: np.frombuffer(a.tobytes(), a.dtype).",
        UserWarning,
    )


def distribute(session: Any, only: Sequence[Callee] | None = None) -> None:
    """Pack the functions that the ranks lack, together, for the next message to each rank."""
    candidates = [made for ref in waiting.keyrefs() if (made := ref()) is not None] if only is None else only
    functions: Sequence[Any] = [
        f for f in candidates
        if f.fixed_session in (None, session) and (f.session is not session or f.capture is None)
    ]  # fmt: skip
    if not functions:
        return
    # Calls in flight end first: what has changed in a large array is written to where their ranks read it.
    session.settle_all()
    session.settle_unsettled()
    names = ", ".join(repr(function.name) for function in functions)
    for function in functions:
        if function.session is not session:
            function.id = next(session.functions.ids)
    by_id = {function.id: function for function in functions}
    book = session.functions.book
    nbytes = {0: book.packed_nbytes}

    def check(function_id: int) -> None:
        nbytes[function_id] = book.packed_nbytes
        check_referred(session, by_id[function_id])

    session.functions.bring([(f.id, f.fn, f.options) for f in functions], names, check)
    nbytes_of = {number: after - before for (_, before), (number, after) in itertools.pairwise(nbytes.items())}
    for function in functions:
        if function.id in book.sent_anew:
            book.sent_anew.discard(function.id)
            function.plans_by_key.clear()
        function.note_sent(session, referred(function, book))
        function.record.add_moved("code and captured objects", "captured", 1, nbytes_of[function.id])
    session.functions.unsettled = functions
    if len(functions) == 1:
        functions[0].restless.note(functions[0].fn, book.restless.values())


def referred(function: Callee, book: Book) -> Referred:
    """Return what a function refers to that lives on the workers."""
    own, of_modules = book.handles_of(function.id)
    if not own:
        return referred_in(of_modules)
    # The book may also list handles of functions that share objects with this one, so its own are looked up here.
    variables, residents = captured_in(function.options).referred
    found = referred_in(of_modules)
    return Referred(variables | found.variables, residents | found.residents)


def check_referred(session: Any, function: Callee) -> None:
    """Raise if a function refers to what must not be sent: optimizers, and state of another runtime or out of date."""
    book = session.functions.book
    check_optimizers(function.name, book.optimizers_of(function.id))
    variables, residents = referred(function, book)
    for guest in [*session.guests]:
        guest._check_sent(function, residents, book.tensors_of(function.id))
    for variable in variables:
        check_owner(variable.owner, session.variables, variable.label, repr(function.name))
    for resident in residents:
        check_owner(resident.owner, session.residents, resident.label, repr(function.name))
